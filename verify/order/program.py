"""The device order that a turnstile makes, before any run: from the collective program and a skeleton of a plan."""

from __future__ import annotations

from array import array
from itertools import accumulate, repeat
from operator import add
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from kernel.journal import group_name
from kernel.program import Program
from kernel.request import Phase
from verify.events import Communicator
from verify.order.queues import Edge, Orders, Queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.program import Call
    from kernel.topology import Role, World

Step = tuple[int, int] | None
"""A P segment [start, end) of safe boundaries, or None for a D iteration."""


def turnstile_steps(boundaries: int, span: int = 1, iterations: int | None = None, epochs: int = 1) -> list[Step]:
    """What every rank enqueues under the turnstile of `span` boundaries: D and P in turn, D first (paper section 4).

    iterations: D iterations in all; those left over when P has ended follow it, and where they end first P goes on
    alone. By default one before each segment and one after the last. Raises UsageError for a span below 1.
    """
    if min(boundaries, span, epochs) < 1:
        raise UsageError(f"boundaries {boundaries}, span {span}, epochs {epochs}: each is at least 1")
    starts = range(0, boundaries, span)
    segments: list[Step] = [(at, min(at + span, boundaries)) for _ in range(epochs) for at in starts]
    decodes = len(segments) + 1 if iterations is None else iterations
    steps: list[Step] = []
    for number in range(max(decodes, len(segments))):
        steps += [None] * (number < decodes) + segments[number : number + 1]
    return steps


def from_program(
    world: World,
    layers: int,
    *,
    steps: Sequence[Step] | None = None,
    span: int = 1,
    lag: int = 1,
    weights: tuple[int, int] = (1, 1),
) -> Orders:
    """The queues of all ranks when each enqueues `steps` (default: `turnstile_steps`, over all boundaries).

    D's collectives stand in its launch stream, P's in P's, and routed ones in both, since event edges tie them to P's
    stream. lag: before D iteration n + 1 enters, the host has seen iteration n - lag finished (0: the one before). A P
    stream of which everything is routed is no queue of its own. weights: room of a D and of a P kernel on a device.
    Raises UsageError for layers that cannot be.
    """
    world = world.under(None)
    steps = turnstile_steps(world.boundaries(layers), span) if steps is None else steps
    programs = {phase: Program(world, phase, layers) for phase in Phase}
    orders = Orders()
    groups = _communicators(orders, programs, weights)
    index = {role: _index(parts, world.size) for role, parts in world.groups.items()}
    calls: list[tuple[Phase, Call]] = []
    ends: list[int] = []
    """Number of calls after each D iteration."""
    harvests: list[tuple[int, int]] = []
    """(calls so far, D iteration that the host has seen finished by then)"""
    for step in steps:
        if step is None:
            if len(ends) > lag:
                harvests.append((len(calls), len(ends) - lag - 1))
            calls += [(Phase.D, call) for call in programs[Phase.D].calls]
            ends.append(len(calls))
        else:
            calls += [(Phase.P, call) for call in programs[Phase.P].segment(*step)]
    sizes = [len(world.groups[call.role]) for _, call in calls]
    starts = [0, *accumulate(sizes)]
    own = {phase: any(p is phase and not (p is Phase.P and call.routed) for p, call in calls) for phase in Phase}
    _instances(orders, calls, sizes, groups, own, world)
    _queues(orders, calls, starts, index, own, world)
    if own[Phase.P]:
        _harvests(orders, calls, starts, index, harvests, ends, world)
    decodes, segments = len(ends), len(steps) - len(ends)
    orders.scope = (
        f"{world}, {layers} layers, every rank enqueues {decodes} D iterations and"
        f" {segments} P segments in the turnstile's order: {len(orders.comm)} collectives, {orders.kernels} kernels"
    )
    return orders


def _index(parts: tuple[tuple[int, ...], ...], size: int) -> list[int]:
    """Rank -> the part that it is in."""
    found = [0] * size
    for number, part in enumerate(parts):
        for rank in part:
            found[rank] = number
    return found


def _communicators(
    orders: Orders, programs: dict[Phase, Program], weights: tuple[int, int]
) -> dict[tuple[Phase, Role], int]:
    """Every group of every role that a phase uses; the number of the first of each."""
    first: dict[tuple[Phase, Role], int] = {}
    for phase, program in programs.items():
        for role in dict.fromkeys(call.role for call in program.calls):
            first[phase, role] = len(orders.communicators)
            orders.communicators += [
                Communicator(members, group_name(phase, role)) for members in program.world.groups[role]
            ]
    orders.weights = [weights[list(Phase).index(Phase(each.name[0]))] for each in orders.communicators]
    return first


def _streams(phase: Phase, call: Call, own: dict[Phase, bool]) -> tuple[Phase, ...]:
    if phase is Phase.D or not call.routed:
        return (phase,)
    return (Phase.D, Phase.P) if own[Phase.P] else (Phase.D,)


def _instances(
    orders: Orders,
    calls: Sequence[tuple[Phase, Call]],
    sizes: Sequence[int],
    groups: dict[tuple[Phase, Role], int],
    own: dict[Phase, bool],
    world: World,
) -> None:
    """One for each call and group, a call's groups side by side."""
    place = {phase: number for number, phase in enumerate(Phase)}
    counts: dict[tuple[Phase, Role], int] = {}
    shapes: dict[tuple[tuple[Phase, ...], Role], int] = {}
    for (phase, call), size in zip(calls, sizes, strict=True):
        key = (phase, call.role)
        counts[key] = counts.get(key, 0) + 1
        orders.comm.extend(range(groups[key], groups[key] + size))
        orders.seq.extend(repeat(counts[key], size))
        orders.label.extend(repeat(str(call.op), size))
        streams = _streams(phase, call, own)
        if (streams, call.role) not in shapes:
            shapes[streams, call.role] = len(orders.shapes)
            orders.shapes += [
                tuple(rank * len(place) + place[stream] for rank in members for stream in streams)
                for members in world.groups[call.role]
            ]
        base = shapes[streams, call.role]
        orders.shape.extend(range(base, base + size))


def _queues(
    orders: Orders,
    calls: Sequence[tuple[Phase, Call]],
    starts: Sequence[int],
    index: dict[Role, list[int]],
    own: dict[Phase, bool],
    world: World,
) -> None:
    roles = list(dict.fromkeys(call.role for _, call in calls))
    number = {role: n for n, role in enumerate(roles)}
    which = {
        stream: [n for n, (phase, call) in enumerate(calls) if stream in _streams(phase, call, own)] for stream in Phase
    }
    everything = list(range(len(calls)))
    tables = {
        stream: ([starts[n] for n in mine], [number[calls[n][1].role] for n in mine]) for stream, mine in which.items()
    }
    offsets, kinds = starts[: len(calls)], [number[call.role] for _, call in calls]
    for rank in range(world.size):
        group = [index[role][rank] for role in roles].__getitem__
        issued = orders.issued[rank] = array("i", map(add, offsets, map(group, kinds)))
        for stream in Phase:
            at, kind = tables[stream]
            whole = which[stream] == everything
            orders.queues.append(
                Queue(rank, str(stream), issued if whole else array("i", map(add, at, map(group, kind))))
            )


def _harvests(
    orders: Orders,
    calls: Sequence[tuple[Phase, Call]],
    starts: Sequence[int],
    index: dict[Role, list[int]],
    harvests: Sequence[tuple[int, int]],
    ends: Sequence[int],
    world: World,
) -> None:
    """The host has seen an earlier D iteration before it lets P go on. (In D's own queue this says nothing new.)"""
    for at, seen in harvests:
        following = next((n for n in range(at, len(calls)) if calls[n][0] is Phase.P), None)
        last = ends[seen] - 1
        if following is None or calls[last][0] is not Phase.D:
            continue
        why = f"host wait for D iteration {seen}"
        for rank in range(world.size):
            before = starts[last] + index[calls[last][1].role][rank]
            after = starts[following] + index[calls[following][1].role][rank]
            orders.edges.append(Edge(before, after, rank, why))
