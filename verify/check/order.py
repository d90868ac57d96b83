"""The order certificate of a policy: what it enters on two ranks, made by all ranks of a larger world.

It rests on what a run without a race shows for all schedules: whether each rank enters D and P in an order that causes
fix. That order comes from the shared plan, so that it is the same on every rank, however many there are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kernel.inbox import Submit
from kernel.request import Request, SamplingParams
from kernel.topology import World
from verify.check.answer import Answer, conclusion, told, wrapped
from verify.explore.execution import execute
from verify.order import certify, from_program
from verify.sim.world import SimWorld
from verify.trial.enact import attempt, run
from verify.trial.family import START
from verify.trial.scenario import Scenario

if TYPE_CHECKING:
    from verify.check.args import Options
    from verify.order.program import Step
    from verify.trial.enact import MakePolicy
    from verify.trial.guard import Guard

THEOREM = (
    "the plan is shared, and no schedule changes the order in which a rank enters D and P (causes fix it, in a run"
    " without a race), so all ranks enqueue this order; it has no cycle, so the first unfinished collective of it can"
    " always run: no schedule deadlocks (determinacy, as in Kahn's networks, 1974)"
)

FEW = 3
"""Layers of the run whose causes are looked at."""

_LABEL = re.compile(r"D \d+|P e\d+ \[(\d+),(\d+)\)")


def certified(options: Options, make_policy: MakePolicy, guard: Guard) -> Answer | None:
    """The certificate for `options.certified`; None where the ranks' order of D and P depends on the schedule."""
    assert options.layers is not None
    route = getattr(make_policy(options.target, _scenario(options, World(2)).limits), "route", None)
    world = options.certified.under(route)
    small = replace(world, size=2, adp=min(2, world.adp), ep=2 if world.splits else 1)
    if not _fixed(_scenario(replace(options, layers=min(options.layers, FEW)), small), make_policy, guard):
        return None
    steps = _entered(_scenario(options, small), make_policy, guard)
    if steps is None:
        return None
    orders = from_program(world, options.layers, steps=steps)
    result = certify(orders, options.capacity)
    decodes = sum(step is None for step in steps)
    scope = (
        f"{options.target} on {world}, {options.layers} layers, {decodes} D iterations, {len(steps) - decodes} P"
        f" segments: {len(orders.comm):,} collectives, {orders.kernels:,} kernels"
    )
    verdict = result.verdict
    room = result.residency.say if result.residency is not None else ""
    text = f"{'order':16} {conclusion(verdict)!s:21} {scope}"
    why = verdict.say if not result.proved else f"{room} Why: {THEOREM}."
    more: dict[str, Any] = {
        "ranks": world.size, "layers": options.layers, "decodes": decodes, "segments": len(steps) - decodes,
        "collectives": len(orders.comm), "kernels": orders.kernels, "room": room, "theorem": THEOREM,
    }  # fmt: skip
    return Answer(
        conclusion(verdict), verdict.cls, verdict.certainty, scope, 1,
        counterexample=None if result.proved else told(verdict), more=more,
        body=(*wrapped(text, 39), *wrapped(" " * 17 + why, 17)),
    )  # fmt: skip


def _scenario(options: Options, world: World) -> Scenario:
    """Two turns that decode, then a prompt whose P meets their D in each layer."""
    assert options.layers is not None
    replicas = range(world.adp)
    out = world.boundaries(options.layers) + 2  # the first token is drawn by P
    entries = [(0, _submit(replica, replica, out)) for replica in replicas]
    entries.append((START, _submit(world.adp, 0, 1)))
    blocks = -(-(out + 4) // 4) * 2 + 2
    return Scenario(world, options.target, options.layers, tuple(entries), blocks=blocks, name="certificate")


def _submit(number: int, replica: int, out: int) -> Submit:
    prompt = tuple(range(100 * number, 100 * number + 3))
    return Submit(Request(number, number, replica, prompt, SamplingParams(max_tokens=out, ignore_eos=True)))


def _fixed(scenario: Scenario, make_policy: MakePolicy, guard: Guard) -> bool:
    """Whether causes order all that a rank submits, in a run without a race."""
    trace = execute(partial(run, scenario, make_policy, guard=guard), notes=True).trace
    last: dict[int, int] = {}
    for note in trace.notes:
        if note.what == "enqueue" and _LABEL.fullmatch(note.which):
            before = last.get(note.rank, note.step)
            if before != note.step and not trace.ordered(before, note.step):
                return False
            last[note.rank] = note.step
    return bool(last) and not trace.races


def _entered(scenario: Scenario, make_policy: MakePolicy, guard: Guard) -> list[Step] | None:
    """The order in which ranks enter D and P; None where the run fails or ranks differ."""
    made: list[SimWorld] = []

    def world(*args: Any, **options: Any) -> SimWorld:
        made.append(SimWorld(*args, **options))
        return made[0]

    if not attempt(scenario, make_policy, world, guard=guard, log=True).clean:
        return None
    orders: list[list[Step]] = []
    for rank in made[0].ranks:
        found = [_LABEL.fullmatch(which) for _, what, _, which in rank.log if what == "enqueue"]
        orders.append([(int(each[1]), int(each[2])) if each[1] else None for each in found if each])
    return orders[0] if all(each == orders[0] for each in orders) else None
