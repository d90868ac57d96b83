"""The zoo: mistakes that people make in a turnstile, each planted into the real kernel or a shipped policy.

Each is one line of change. Where the kernel has its own check of just that mistake, a second entry takes the check out
as well, so that the checker must see it by itself. A rule that the kernel enforces before anything can hang makes the
class `rule`; what stands still is a cycle, or a missing rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kernel.sched.fine import Fine
from kernel.topology import World
from tests.planted import Change, rank_of
from verify.blame import Certainty, Class

if TYPE_CHECKING:
    from kernel.sched.policy import Gate
    from verify.trial.monitor import Bound

PAIR: Final = World(2, adp=2, route="paper")
"""Two replicas of one rank: all of P is routed, as in the paper's conflicting pair."""

PEERS: Final = World(2, route="paper")
"""One replica of two ranks, which must hold the same state."""

MEET: Final = "P meets D after 0"
TURN: Final = "kernel.sched.fine:Fine.turn"
PRE_D: Final = '        await gate.rendezvous("pre-d")'
POST_D: Final = '        await gate.rendezvous("post-d")'
RELEASE: Final = "        gate.release(gate.plan.span)"
LAUNCH: Final = "        gate.launch_decode()"
REACHED: Final = "        await gate.reached()"
PLAN: Final = "            planned = policy.plan(self._views, self._memory)"
P_TASK: Final = Change(
    "kernel.rank:Rank.release",
    "        epoch.submit(start, end, self._plan.round)",
    'self._spawn(later(list(self._flights)[-1:], epoch.submit, start, end, self._plan.round), "P host")',
)
"""P's host enqueue becomes a task of its own, as the paper tells it, which lets the device finish a D first.
The kernel's `release` enqueues at once."""


class Fences(Fine):
    """Rank 0 waits on its device for a D that the other ranks launch only after the rendezvous it is late for."""

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active:
            gate.launch_decode()
            return
        first = rank_of(gate) == 0
        if first:
            gate.launch_decode()
            await gate.drained()
        await gate.rendezvous("pre-d")
        if not first:
            gate.launch_decode()
        await gate.rendezvous("post-d")
        gate.release(gate.plan.span)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake.

    what: in a line. changes: that plant it. classes: of which the checker may find it. rule: that it says was broken.
    executions: that it took. member: of `verify.trial.family` that shows it. policy: a name, or the class that is
    the mistake. or_rule: that it says instead where another rank is first. spin: the variant of tests/spin_variants.py
    that is the same mistake, in a protocol without these checks.
    """

    name: str
    what: str
    classes: tuple[Class, ...]
    rule: str
    changes: tuple[Change, ...] = ()
    executions: int = 1
    member: str = MEET
    world: World = PAIR
    capacity: int = 2
    segments: int = 2
    rounds: int = 3
    bound: Bound | None = None
    policy: str | type[Fine] = "fine"
    certainty: Certainty = Certainty.CERTAIN
    spin: str = ""
    or_rule: str = ""


RULE, INVARIANT, STARVATION, CYCLE = (Class.RULE,), (Class.INVARIANT,), (Class.STARVATION,), (Class.CYCLE,)

CONTROL: Final = (
    Mutant(
        "pre-d skipped", "one rank leaves pre-d out", RULE, "shared plan",
        (Change(TURN, PRE_D, "pass", 1),), spin="pre-d skipped by one rank",
    ),
    Mutant(
        "post-d skipped", "one rank leaves post-d out", RULE, "shared plan",
        (Change(TURN, POST_D, "pass", 1),), spin="post-d skipped by one rank",
    ),
    Mutant(
        "rendezvous swapped", "one rank comes to post-d where the others come to pre-d", RULE, "shared plan",
        (Change(TURN, PRE_D, 'await gate.rendezvous("post-d")', 1),), spin="pre-d and post-d swapped on one rank",
    ),
    Mutant(
        "idle rank skips rendezvous", "a rank without rows comes to no rendezvous", RULE, "shared plan",
        (Change("kernel.gate:RankGate.rendezvous", "        await self._meet(tag)",
                "await self._meet(tag) if self._rank._rows else None"),),
        member="P beside D of another replica", spin="idle rank skips both rendezvous",
    ),
    Mutant(
        "idle rank skips its launch", "a rank without rows leaves the no-work D iteration out", RULE, "shared plan",
        (Change("kernel.gate:RankGate.launch_decode", "        self._rank.launch()",
                "self._rank.launch() if self._rank._rows else None"),),
        member="idle replicas", spin="idle rank skips the turn",
    ),
    Mutant(
        "idle rank skips the exchange", "a rank without rows does not end the round with the others", RULE,
        "shared plan",
        (Change("kernel.rank:Rank._round", "        if not self._ended:",
                "if not self._ended and (self._rows or not plan.bucket):"),),
        member="idle replicas",
    ),
    Mutant(
        "rank that never comes", "one rank waits for what nobody sets", (Class.MISSING,), "deadlock_free",
        (Change(TURN, POST_D, "await asyncio.Event().wait()", 1),),
    ),
    Mutant(
        "host waits for D before pre-d", "one rank waits on its device for a D that others launch after pre-d", CYCLE,
        "deadlock_free", policy=Fences,
    ),
)  # fmt: skip

ORDER: Final = (
    Mutant(
        "permit before launch", "all ranks let P go on, wait, and launch D then", RULE, "order",
        (Change(TURN, LAUNCH, "gate.release(gate.plan.span); await asyncio.sleep(0); gate.launch_decode()"),
         Change(TURN, RELEASE, "pass")),
        spin="permit before launch, await between",
    ),
    Mutant(
        "D late on one rank", "one rank launches D after its permit", RULE, "shared plan",
        (Change(TURN, LAUNCH, "gate.release(gate.plan.span); gate.launch_decode()", 1),
         Change(TURN, RELEASE, "pass", 1)),
        spin="permit before launch, await between: order",
    ),
    Mutant(
        "D late on one rank, unguarded", "the same with no order claimed, so that nothing stops it", CYCLE,
        "deadlock_free",
        (Change(TURN, LAUNCH, "gate.release(gate.plan.span); gate.launch_decode()", 1),
         Change(TURN, RELEASE, "pass", 1),
         Change("kernel.rank:Rank._adopt", "        self._ordered = policy.guarantees.deadlock_free",
                "self._ordered = False")),
        spin="permit before launch, await between",
    ),
    Mutant(
        "launch before reached", "one rank launches D while its P, which is slow there, is still enqueueing", CYCLE,
        "deadlock_free", (replace(P_TASK, rank=1), Change(TURN, REACHED, "pass", 1)),
        spin="launch before the endpoint is reached",
    ),
    Mutant(
        "no route", "P's all-reduce stays on P's stream", CYCLE, "deadlock_free", world=World(2, adp=2, route="none"),
        capacity=1, executions=2, certainty=Certainty.CONDITIONAL, spin="no route, 1 slot",
    ),
    Mutant(
        "route on one rank", "one rank leaves P's all-reduce on P's stream", (Class.MISMATCH,), "order",
        (Change("kernel.rank:Rank._adopt",
                "        self._p = own(self.ports.device, world, self.ports.model.layers, Phase.P)",
                'self._p = own(self.ports.device, replace(world, route="none"), self.ports.model.layers, Phase.P)', 1),
         ),
        capacity=1, spin="route on one rank only, 1 slot",
    ),
    Mutant(
        "less padding", "one rank pads D to its own rows", (Class.MISMATCH, Class.RULE), "order",
        (Change("kernel.rank:Rank.launch", "        sizes = (plan.bucket,) * self.world.adp",
                "sizes = (len(rows),) * self.world.adp", 1),),
        member="idle replicas", executions=2, or_rule="shared plan",
    ),
    Mutant(
        "one layer more", "one rank's model has a boundary more", RULE, "shared plan",
        (Change("verify.sim.model:SimModel.__init__",
                "        self.world, self.layers, self.vocab = world, layers, vocab",
                "self.world, self.layers, self.vocab = world, layers + (device.rank == 1), vocab"),),
        spin="one boundary more on one rank",
    ),
)  # fmt: skip

SHARED_PLAN: Final = (
    Mutant(
        "plan from local state", "a rank plans from its own view in place of all", RULE, "shared plan",
        (Change("kernel.rank:Rank._round", PLAN,
                "planned = policy.plan(tuple(replace(self._view(), rank=v.rank) for v in self._views),"
                " self._memory)"),),
        member="idle replicas", spin="plan from local state",
    ),
    Mutant(
        "epoch activated locally", "a rank goes by its own inbox, which is longer than another's", RULE, "shared plan",
        (Change("kernel.rank:Rank._round", PLAN,
                "planned = policy.plan(tuple(replace(v, inbox=self.ports.inbox.length) for v in self._views),"
                " self._memory)"),),
        member="a rank sees arrivals late", spin="epoch activated locally",
    ),
    Mutant(
        "inbox ahead of the slowest", "entries take effect before every rank has them", RULE, "inbox",
        (Change("kernel.sched.planner:Planner.plan", "        inbox = min(view.inbox for view in views)",
                "inbox = max(view.inbox for view in views)"),),
        member="a rank sees arrivals late",
    ),
    Mutant(
        "completion read again", "a rank looks again, after the permit, whether P is complete", RULE, "shared plan",
        (Change("kernel.rank:Rank._round", PLAN,
                "planned = policy.plan(tuple(replace(v, complete=self._epoch is None or self._epoch.poll())"
                " for v in self._views), self._memory)"),),
        executions=5, spin="completion read again after the permit",
    ),
    Mutant(
        "complete once enqueued", "a rank takes it for granted that its device has finished P", INVARIANT, "promotion",
        (Change("kernel.rank:Rank._settle", "                await self.p_drained()", "epoch.settled = True"),),
        rounds=6,
    ),
    Mutant(
        "complete on any rank", "an epoch is promoted before all ranks have finished it", RULE, "promotion",
        (Change(
            "kernel.sched.planner:Planner.plan",
            "        complete = memory.open and all(view.epoch == memory.epoch and view.complete for view in views)",
            "complete = memory.open and any(view.reached >= 0 for view in views)",
        ),),
    ),
    Mutant(
        "span differs", "one rank lets P run a boundary further", RULE, "shared plan",
        (Change(TURN, RELEASE, "gate.release(gate.plan.span + 1)", 1),), segments=3,
        spin="larger span on one rank",
    ),
)  # fmt: skip

EPOCHS: Final = (
    Mutant(
        "epoch number used twice", "the plan does not count epochs", RULE, "turnstile",
        (Change("kernel.sched.planner:Planner.plan", "        epoch = memory.epoch + activating", "epoch = 0"),),
        spin="duplicate epoch refused",
    ),
    Mutant(
        "duplicate epoch accepted", "the same, and the turnstile takes it", INVARIANT, "permit",
        (Change("kernel.sched.planner:Planner.plan", "        epoch = memory.epoch + activating", "epoch = 0"),
         Change("kernel.turnstile:Turnstile.activate", "        if epoch == self._epoch or self.open:", "if False:")),
        spin="duplicate epoch accepted",
    ),
    Mutant(
        "stale epoch", "the plan counts epochs down", RULE, "turnstile",
        (Change("kernel.sched.planner:Planner.plan", "        epoch = memory.epoch + activating",
                "epoch = memory.epoch + activating * (-1 if memory.epoch >= 0 else 9)"),),
        spin="stale epoch refused",
    ),
    Mutant(
        "stale epoch accepted", "the same, and the turnstile takes it", INVARIANT, "permit",
        (Change("kernel.sched.planner:Planner.plan", "        epoch = memory.epoch + activating",
                "epoch = memory.epoch + activating * (-1 if memory.epoch >= 0 else 9)"),
         Change("kernel.turnstile:Turnstile.activate", "        if epoch < self._epoch:", "if False:")),
        spin="stale epoch accepted",
    ),
    Mutant(
        "endpoint beyond the permit", "P runs a boundary further than it may", RULE, "turnstile",
        (Change("kernel.rank:Rank.release", "        epoch.submit(start, end, self._plan.round)",
                "epoch.submit(start, end + 1, self._plan.round)"),),
        segments=3, spin="P passes its permit: rule",
    ),
    Mutant(
        "endpoint beyond the permit, accepted", "the same, and the turnstile takes it", INVARIANT, "permit",
        (Change("kernel.rank:Rank.release", "        epoch.submit(start, end, self._plan.round)",
                "epoch.submit(start, end + 1, self._plan.round)"),
         Change("kernel.turnstile:Turnstile.publish", "        if boundary > self._permit:", "if False:")),
        segments=3, spin="P passes its permit everywhere",
    ),
)  # fmt: skip

MEMORY: Final = (
    Mutant(
        "tokens committed early", "one rank commits the tokens of a round in that round", RULE, "shared plan",
        (Change("kernel.rank:Rank._exchange", "        await self._harvest(self._plan.round - 1)",
                "await self._harvest(self._plan.round)", 1),), world=PEERS,
    ),
    Mutant(
        "tokens committed late", "all ranks commit the tokens of a round two rounds later", INVARIANT, "lag",
        (Change("kernel.rank:Rank._exchange", "        await self._harvest(self._plan.round - 1)",
                "await self._harvest(self._plan.round - 2)"),),
    ),
    Mutant(
        "blocks reused before drain", "an ended turn gives its blocks back with an iteration in flight", INVARIANT,
        "lease",
        (Change("kernel.replica:Replica._retire", "        if turn.flying:", "if turn.flying > 1:"),),
        member="abort of a decoding turn",
    ),
    Mutant(
        "blocks reused before P has drained", "an abort gives the blocks of a running prefill back", INVARIANT, "lease",
        (Change("kernel.replica:Replica.abort",
                '        self._emit(Output(request, finish="abort", cached=turn.cached))',
                "self.cache.release(request, ()) if turn.state is State.PREFILL else None"),),
        member="abort of a prefill",
    ),
    Mutant(
        "promotion without lease check", "leases expire, and results are taken all the same", INVARIANT, "lease",
        (Change("kernel.replica:Replica.begin", "            self._prefill.append(turn)",
                "self._prefill.append(turn); chunk.last and self.cache.release(turn.request.id, ())"),
         Change("kernel.replica:Replica.promote", "            self.cache.lease(turn.request.id)", "pass")),
    ),
    Mutant(
        "cancelled prefill promoted", "promotion does not ask whether the turn is still wanted", INVARIANT, "lag",
        (Change("kernel.replica:Replica.promote", "            if turn.state is not State.PREFILL:",
                "if turn.state is State.FINISHED:"),),
        member="abort of a prefill",
    ),
)  # fmt: skip

PROGRESS: Final = (
    Mutant(
        "strict P priority", "D waits as long as there is P", STARVATION, "decode_bound",
        (Change("kernel.sched.planner:Planner.decode_now", "        return True", "return not now.p_active"),),
        member="endless arrivals", spin="strict P priority",
    ),
    Mutant(
        "normal, asked for a bound", "the shipped policy of that kind, asked for more than it claims", STARVATION,
        "decode_bound", policy="normal", bound=2, member="endless arrivals", spin="strict P priority",
    ),
    Mutant(
        "permit forgotten", "no permit in a round without D", STARVATION, "epochs_complete",
        (Change(TURN, RELEASE, "gate.release(gate.plan.span) if gate.d_ready else None"),),
        spin="permit forgotten in a round without D",
    ),
    Mutant(
        "permit too wide", "all ranks let P run a boundary further than claimed", STARVATION, "decode_bound",
        (Change(TURN, RELEASE, "gate.release(gate.plan.span + 1)"),), segments=3,
    ),
    Mutant(
        "D kept back", "ready rows decode only in every other round of P", STARVATION, "decode_bound",
        (Change("kernel.sched.planner:Planner.decode_now", "        return True",
                "return not now.open or now.memory.round % 2 == 0"),), segments=4, rounds=6,
    ),
)  # fmt: skip

MUTANTS: Final = (*CONTROL, *ORDER, *SHARED_PLAN, *EPOCHS, *MEMORY, *PROGRESS)
