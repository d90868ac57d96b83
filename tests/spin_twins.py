"""Each variant of the Promela model, done to the real kernel on a simulated world.

The kernel checks more than the paper's protocol does: it compares plans and orders in its rendezvous, which it matches
by number, and refuses what breaks its order of keys. Where the model says that only a hang counts, all of that is
taken out (`BARE`); and since plans travel on the rendezvous, what is not shared comes from scripts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kernel.driver import Driver
from kernel.request import Phase
from tests.mutants import LAUNCH, MEET, P_TASK, PLAN, POST_D, PRE_D, REACHED, RELEASE, TURN
from tests.planted import Change
from tests.scripts import activating_late, decoding_late, recorded

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.rank import Rank
    from tests.scripts import Script
    from verify.trial.scenario import Scenario

NAMED: Final = Change(
    "verify.sim.rendezvous:SimRendezvous.exchange",
    "        number, self._count, self._pending = self._count, self._count + 1, tag",
    "number, self._pending = nth(self, tag), tag",
)
"""Rendezvous match by name, as in the model, not by number."""

ALONE: Final = replace(NAMED, becomes="return [bytes(payload)] * self._hall.size")
"""A rendezvous that waits for nobody and tells a rank only what it said itself."""

NO_DIGEST: Final = (
    Change("kernel.rank:Rank._agree", "        if any(plan != plans[0] for plan in plans):", "if False:"),
    Change("kernel.rank:Rank._agree", '        control.check_equal(orders, round_, "order")', "pass"),
)
NO_ORDER: Final = Change(
    "kernel.rank:Rank._adopt", "        self._ordered = policy.guarantees.deadlock_free", "self._ordered = False"
)
NO_RULES: Final = (
    Change("verify.sim.collectives:Communicator.kernel", "        elif instance.shape != shape:", "elif False:"),
    Change("verify.trial.monitor:RankMonitor.planned", "        self._sane(views, before, plan, after)", "pass"),
    Change("verify.trial.enact:_Actor.__init__", "        monitor.attend(self.rank)", "pass"),
    Change("kernel.turnstile:Turnstile.enqueued", "        if self._permit < self._boundaries:", "if False:"),
)
BARE: Final = (*NO_DIGEST, NO_ORDER, *NO_RULES)

EARLY: Final = (
    Change(TURN, LAUNCH, "gate.release(gate.plan.span); gate.launch_decode()"),
    Change(TURN, RELEASE, "pass"),
)
SLOW_P: Final = replace(P_TASK, rank=1)
AGAIN: Final = replace(P_TASK, becomes="again(self, start, end); epoch.submit(start, end, self._plan.round)", rank=1)


def nth(rendezvous: Any, tag: str) -> str:
    """Names the next exchange of this tag."""
    counts = rendezvous.__dict__.setdefault("_of_tag", {})
    counts[tag] = counts.get(tag, 0) + 1
    return f"{tag} {counts[tag]}"


def again(rank: Rank, start: int, end: int, *, stale: bool = False) -> None:
    """An activation that has reached this rank a second time is accepted: P of that epoch starts over. Once."""
    epoch, notes = rank._epoch, rank.turnstile.__dict__
    assert epoch is not None
    if "again" in notes or (epoch.number != 1 if stale else not start):
        return
    notes["again"] = True
    boundaries = rank._p.program.boundaries if stale else start
    step = rank._step(rank._p, epoch.sizes, 0)
    driver: Driver[Any] = Driver(rank.ports.model.forward(step, []), step, lambda: rank.ports.device.scope(Phase.P))
    assert rank._p.route is not None
    rank._p.route.reserve(rank._p.program.segment(0, boundaries).shared)
    event = rank._p.stream.submit(lambda: driver.advance(boundaries), "P again")
    rank._spawn(event.wait(), "P again")


def again_stale(rank: Rank, start: int, end: int) -> None:
    """The same with the epoch before."""
    again(rank, start, end, stale=True)


def own_complete(rank: Rank) -> bool:
    """Whether P is complete, as this rank's device says now."""
    return rank._epoch is None or rank._epoch.poll()


HELPERS: Final = {"nth": nth, "again": again, "again_stale": again_stale, "own_complete": own_complete}


@dataclass(frozen=True, slots=True)
class Twin:
    """The same variant here. only: it shows with this member of the family. scripts: of each rank, for a scenario."""

    changes: tuple[Change, ...] = ()
    policy: str = "fine"
    route: str = "paper"
    capacity: int = 1
    segments: int = 2
    rounds: int = 3
    depth: int | None = None
    only: str = MEET
    scripts: Callable[[Scenario], list[Script]] | None = None


def shared(scenario: Scenario) -> list[Script]:
    """One script for all ranks."""
    return [recorded(scenario)] * scenario.world.size


def own_decode(scenario: Scenario) -> list[Script]:
    """The last rank notices ready D a round later than the others."""
    script = recorded(scenario)
    return [*[script] * (scenario.world.size - 1), decoding_late(script)]


def own_epoch(scenario: Scenario) -> list[Script]:
    """The last rank notices the new epoch a round later than the others."""
    script = recorded(scenario)
    return [*[script] * (scenario.world.size - 1), activating_late(script)]


def _plan(views: str) -> Change:
    return Change(
        "kernel.rank:Rank._round",
        PLAN,
        f"planned = self.policy.plan(tuple({views} for v in self._views), self._memory)",
    )


_SKIP_PRE = Change(TURN, PRE_D, "pass", 1)
_SKIP_POST = Change(TURN, POST_D, "pass", 1)
_SWAP = (
    Change(TURN, PRE_D, 'await gate.rendezvous("post-d")', 1),
    Change(TURN, POST_D, 'await gate.rendezvous("pre-d")', 1),
)
_ONE_ROUTE = Change(
    "kernel.rank:Rank._adopt", "        self._p = own(self.ports.device, world, self.ports.model.layers, Phase.P)",
    'self._p = own(self.ports.device, replace(world, route="none"), self.ports.model.layers, Phase.P)', 1,
)  # fmt: skip
_WIDER = Change(TURN, RELEASE, "gate.release(gate.plan.span + 1)", 1)
_IDLE_MEETS_NOBODY = Change(
    "kernel.gate:RankGate.rendezvous", "        await self._meet(tag)",
    "await self._meet(tag) if self._rank._rows else None", 1,
)  # fmt: skip
_IDLE_SKIPS = Change(
    "kernel.rank:Rank._round", "                await self.policy.turn(gate)",
    'await self.policy.turn(gate) if self._rows else setattr(gate, "launched", True)', 1,
)  # fmt: skip
_POLLED = Change("kernel.rank:Rank._settle", "            if self._p.program.routes or self.world.splits:", "if False:")
_TWICE = Change("kernel.sched.planner:Planner.plan", "        epoch = memory.epoch + activating", "epoch = 0")
_BACK = replace(_TWICE, becomes="epoch = memory.epoch + activating * (-1 if memory.epoch >= 0 else 9)")


def _layers(by: int) -> tuple[Change, ...]:
    return (
        Change("verify.sim.model:SimModel._forward", "        for layer in range(self.layers):",
               f"for layer in range(self.layers + ({by} if phase is Phase.P and device.rank == 1 else 0)):"),
        Change("kernel.rank:Rank._adopt",
               "        self._p = own(self.ports.device, world, self.ports.model.layers, Phase.P)",
               f"self._p = own(self.ports.device, world, self.ports.model.layers + ({by}), Phase.P)", 1),
    )  # fmt: skip


TWINS: Final[dict[str, Twin]] = {
    "correct": Twin(),
    "correct, S=3 K=2, launch queue of 1": Twin(policy="fine:span=2", segments=3, depth=1),
    "correct, two epochs": Twin(only="a second epoch during the first"),
    "no turnstile, 2 streams, 2 slots": Twin(policy="unordered", route="none", capacity=2),
    "no route, 2 slots": Twin(route="none", capacity=2),
    "route on one rank only, 2 slots": Twin((_ONE_ROUTE, *BARE), capacity=2),
    "no rendezvous, plan shared": Twin((ALONE,), scripts=shared),
    "permit before post-d": Twin(
        (Change(TURN, POST_D, "gate.release(gate.plan.span)"), Change(TURN, RELEASE, 'await gate.rendezvous("post-d")'))
    ),
    "permit before launch, no await between": Twin((*EARLY, NO_ORDER)),
    "endpoint awaited after pre-d": Twin(
        (Change(TURN, REACHED, "pass"), Change(TURN, PRE_D, 'await gate.rendezvous("pre-d"); await gate.reached()'))
    ),
    "lean: one exchange a round, no pre-d": Twin(policy="lean"),
    "completion of the device, agreed in post-d": Twin((_POLLED,)),
    "lean, completion of the device agreed": Twin((_POLLED,), policy="lean"),
    "duplicate epoch refused": Twin((_TWICE,)),
    "stale epoch refused": Twin((_BACK,)),
    "no turnstile, 2 streams, 1 slot": Twin(policy="unordered", route="none"),
    "no turnstile, shared stream": Twin(policy="unordered", capacity=2),
    "rank-local turnstile, no rendezvous": Twin((ALONE, *BARE), capacity=2, scripts=own_decode),
    "plan from local state": Twin((NAMED, *BARE), scripts=own_decode),
    "no route, 1 slot": Twin(route="none"),
    "route on one rank only, 1 slot": Twin((_ONE_ROUTE, *BARE)),
    "pre-d skipped by one rank": Twin((NAMED, _SKIP_PRE, *BARE)),
    "post-d skipped by one rank": Twin((NAMED, _SKIP_POST, *BARE)),
    "pre-d and post-d swapped on one rank": Twin((NAMED, *_SWAP, *BARE)),
    "idle rank skips both rendezvous": Twin((NAMED, _IDLE_MEETS_NOBODY, *BARE)),
    "idle rank skips the turn": Twin((NAMED, _IDLE_SKIPS, *BARE)),
    "permit before launch, await between": Twin(
        (SLOW_P, Change(TURN, LAUNCH, "gate.release(gate.plan.span); await asyncio.sleep(0); gate.launch_decode()"),
         Change(TURN, RELEASE, "pass"), *BARE)
    ),
    "launch before the endpoint is reached": Twin((SLOW_P, Change(TURN, REACHED, "pass", 1), *BARE)),
    "epoch activated locally": Twin((NAMED, *BARE), scripts=own_epoch),
    "completion read again after the permit": Twin((NAMED, _plan("replace(v, complete=own_complete(self))"), *BARE)),
    "completion of the device, not agreed": Twin(
        (NAMED, _POLLED, _plan("replace(v, complete=self._views[self.rank].complete)"), *BARE), rounds=6
    ),
    "duplicate epoch accepted": Twin((AGAIN, *BARE)),
    "stale epoch accepted": Twin((replace(AGAIN, becomes=AGAIN.becomes.replace("again", "again_stale")), *BARE)),
    "P passes its permit on one rank": Twin(
        (replace(P_TASK, becomes="epoch.submit(start, self._p.program.boundaries, self._plan.round)", rank=1), *BARE)
    ),
    "one boundary more on one rank": Twin((*_layers(1), *BARE)),
    "one boundary less on one rank": Twin((*_layers(-1), *BARE)),
    "larger span on one rank": Twin((_WIDER, *BARE), segments=3),
    "permit before launch, await between: order": Twin(
        (Change(TURN, LAUNCH, "gate.release(gate.plan.span); await asyncio.sleep(0); gate.launch_decode()"),
         Change(TURN, RELEASE, "pass"))
    ),
    "P passes its permit: rule": Twin(
        (replace(P_TASK, becomes="epoch.submit(start, self._p.program.boundaries, self._plan.round)", rank=1),)
    ),
    "local plan, digest in every round: found": Twin(scripts=own_decode),
    "local plan, digest in every round: no hang": Twin(scripts=own_decode),
    "local plan, lean: no hang": Twin(policy="lean", scripts=own_decode),
    "local activation, digest: no hang": Twin(scripts=own_epoch),
    "local activation, digest, matched by name": Twin((NAMED, NO_ORDER, *NO_RULES), scripts=own_epoch),
    "swapped rendezvous, matched by order: no hang": Twin(_SWAP),
    "larger span on one rank, digest: no hang": Twin((_WIDER,), segments=3),
    "pre-d skipped by one rank, matched by order: no hang": Twin((_SKIP_PRE,)),
    "decodes for ever": Twin(only="endless arrivals"),
    "every epoch closes": Twin(only="endless arrivals"),
    "lean decodes for ever": Twin(policy="lean", only="endless arrivals"),
    "strict P priority": Twin(
        (Change("kernel.sched.planner:Planner.decode_now", "        return True", "return not now.p_active"),),
        only="endless arrivals",
    ),
    "permit forgotten in a round without D": Twin(
        (Change(TURN, RELEASE, "gate.release(gate.plan.span) if gate.d_ready else None"),)
    ),
}  # fmt: skip

NOT_HERE: Final[dict[str, str]] = {
    "correct, pre-emptive": "a task of asyncio is not pre-empted",
    "correct, pre-emptive, two decode rounds": "a task of asyncio is not pre-empted",
    "correct, two epochs, pre-emptive": "a task of asyncio is not pre-empted",
    "no rendezvous, plan shared, pre-emptive": "a task of asyncio is not pre-empted",
    "permit before post-d, pre-emptive": "a task of asyncio is not pre-empted",
    "permit before launch, pre-emptive": "a task of asyncio is not pre-empted",
    "decodes for ever, pre-emptive": "a task of asyncio is not pre-empted",
    "every epoch closes, pre-emptive": "a task of asyncio is not pre-empted",
    "P passes its permit everywhere": "release enqueues at once, so that P is ahead of D by as much on every rank",
    "duplicate epoch accepted: calls": "collectives that meet are compared by operation, size and stream, not by epoch",
    "rank-local turnstile, no rendezvous: order": "the order of ranks is compared on the rendezvous that it drops",
    "launch before the endpoint is reached: order": "keys are noted by release, at once; only the device tells",
}
"""Variants that this kernel cannot be given, and why."""
