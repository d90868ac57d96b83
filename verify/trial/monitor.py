"""Follows one rank through a run, and judges what its policy claims.

From what that rank sees and does only, so that watching orders nothing between ranks. What ends a run is raised as
`Found`; a broken bound is noted, and the run goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel import views as control
from kernel.journal import Journal
from kernel.record import NullRecorder
from kernel.request import Phase
from kernel.sched.policy import ALL, Plan
from verify.blame import Class
from verify.trial.findings import Finding, Found
from verify.trial.invariants import Invariants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.ports import Rendezvous
    from kernel.program import Call
    from kernel.rank import Rank
    from kernel.sched.policy import Memory, Policy, RankView

Bound = int | str
"""Of a ready D: a number of boundaries that may be granted before it launches, `span`, `epoch` or `backlog`."""

PATIENCE = 16
"""Rounds in a row in which nothing moves that count as starvation."""


def declared(policy: Policy) -> Bound:
    """The decode bound that a policy claims: `span` as a number where its config says one."""
    bound = policy.guarantees.decode_bound
    if bound == "span":
        config = getattr(policy, "config", None)
        spans = getattr(config, "spans", None)
        span = max(spans) if spans else getattr(config, "span", None)
        return span if isinstance(span, int) else bound
    return bound


class RankMonitor:
    """Follows one rank.

    bound: judged instead of the policy's own claim, where given. patience: rounds without any progress, longest: rounds
    altogether, that count as starvation. now: the round. findings: what was noted, the most
    important first. plans: of all rounds; digest: of them, with what the policy remembered.
    """

    def __init__(self, rank: int, bound: Bound | None, patience: int = PATIENCE, longest: int = 100_000) -> None:
        self.rank, self.bound, self.patience, self.longest = rank, bound, patience, longest
        self.findings: list[Finding] = []
        self.plans: list[Plan] = []
        self.digest = self.rounds = self.launched = 0
        self.invariants: Invariants | None = None
        self._claim: Bound = "backlog"
        self.now = -1
        self._plan = Plan(round=-1)
        self._stale = 0
        self._moved = True
        self._ready_since = -1
        self._continues = False
        self._granted = self._grants = 0
        self._epochs: set[int] = set()
        self._judged = False

    def adopt(self, policy: Policy) -> None:
        """The rank goes on under this policy."""
        self._claim = self.bound if self.bound is not None else declared(policy)
        self._judged = False

    def attend(self, rank: Rank) -> None:
        """The rank is there."""
        self.invariants = Invariants(rank)

    def find(self, cls: Class, rule: str, say: str, where: str = "") -> Found:
        """Note what ends the run; raise the result."""
        round_ = self.now
        finding = Finding(cls, rule, f"{say} (rank {self.rank}, round {round_})", self.rank, round_, where)
        self.findings.insert(0, finding)
        return Found(finding)

    # -- what the rank sees and does ----------------------------------------------------------------------------

    def planned(self, views: tuple[RankView, ...], before: Memory, plan: Plan, after: Memory) -> None:
        """A round begins. Raises Found for a plan that no rank can follow, and for starvation."""
        moved = self._moved or plan.idle or plan.activate >= 0 or plan.promote >= 0 or plan.inbox > before.inbox
        self._plan, self._moved = plan, False
        self.rounds += 1
        self.plans.append(plan)
        self.digest = control.fold(self.digest, control.digest_of(plan, after))
        self._sane(views, before, plan, after)
        self._stale = 0 if moved else self._stale + 1
        if self._stale > self.patience or self.rounds > self.longest:
            raise self.starved()

    def starved(self) -> Found:
        """The run goes on and gets nowhere."""
        ready = self._ready_since >= 0 and not self._continues
        what = f"D is ready since round {self._ready_since} and does not launch" if ready else "nothing is launched"
        kernel = self.invariants.rank.turnstile.snapshot if self.invariants is not None else None
        if kernel is not None and self._plan.epoch >= 0:
            what += f"; P e{kernel.epoch} stands at boundary {kernel.reached} of {kernel.boundaries}"
        how = f"{self._stale} rounds without progress" if self._stale > self.patience else f"{self.rounds} rounds"
        rule = "decode_bound" if ready and self._plan.epoch < 0 else "epochs_complete"
        return self.find(Class.STARVATION, rule, f"{how}: {what}")

    def viewed(self, views: Sequence[RankView]) -> None:
        """An exchange of views has ended: from here on D is ready, or is not."""
        complete = all(view.complete and view.epoch == views[0].epoch for view in views)
        ready = any(view.ready or (view.promotable and complete) for view in views if not view.paused)
        if not ready:
            self._ready_since, self._continues = -1, False
        elif self._ready_since < 0:
            self._waits(self._plan.round + 1)
        elif self._continues:
            # Rows that go on are ready from their last launch on, as this view tells.
            self._continues = False
            self._judge()

    def granted(self, epoch: int, boundaries: int) -> None:
        """P may enqueue so many more boundaries."""
        self._moved = self._moved or boundaries > 0
        if self._ready_since < 0 or not boundaries:
            return
        self._granted += boundaries
        self._grants += 1
        self._epochs.add(epoch)
        if not self._continues:
            self._judge()

    def launches(self) -> None:
        """This round's D iteration is submitted."""
        self._moved = True
        self.launched += 1
        self._waits(self._plan.round)
        self._continues = True

    # -- inside -------------------------------------------------------------------------------------------------

    def _waits(self, since: int) -> None:
        self._ready_since, self._granted, self._grants = since, 0, 0
        self._epochs.clear()

    def _judge(self) -> None:
        """Whether the ready D has waited for too much of P."""
        claim, since = self._claim, self._ready_since
        if self._judged or claim == "backlog":
            return
        if claim == "epoch":
            late, most = len(self._epochs) > 1, "one epoch"
        elif isinstance(claim, int):
            late, most = self._granted > claim, f"{claim} boundar{'y' if claim == 1 else 'ies'}"
        else:
            late, most = self._grants > 1 or self._plan.span >= ALL, "one segment"
        if late:
            self._judged = True
            say = f"D is ready since round {since} and has not launched after {self._granted} boundaries of P"
            say = f"{say} in {len(self._epochs)} epoch{'s'[: len(self._epochs) > 1]}; the bound is {most}"
            self.find(Class.STARVATION, "decode_bound", say)

    def _sane(self, views: tuple[RankView, ...], before: Memory, plan: Plan, after: Memory) -> None:
        def rule(name: str, say: str) -> Found:
            return self.find(Class.RULE, name, f"the plan {say}")

        seen = min(view.inbox for view in views)
        if plan.round != before.round or after.round != plan.round + 1:
            raise rule("round", f"has round {plan.round}, and {after.round} comes next, where {before.round} is due")
        if not before.inbox <= plan.inbox <= seen or after.inbox != plan.inbox:
            raise rule("inbox", f"takes entries up to {plan.inbox} where {before.inbox} were taken and {seen} are seen")
        if plan.promote >= 0 and not all(view.epoch == plan.promote and view.complete for view in views):
            raise rule("promotion", f"promotes epoch {plan.promote}, which is not complete on every rank")
        if plan.activate >= 0 and (before.open and plan.promote < 0):
            raise rule("one epoch", f"activates epoch {plan.activate} while epoch {before.epoch} is open")
        if plan.idle and (plan.bucket or plan.epoch >= 0):
            raise rule("idle", "is idle with work in it")


class WatchedRendezvous:
    """`kernel.ports.Rendezvous` that tells a monitor of every exchange."""

    def __init__(self, rendezvous: Rendezvous, monitor: RankMonitor) -> None:
        self._rendezvous, self._monitor = rendezvous, monitor

    async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
        """See the port. Raises Found where an invariant does not hold."""
        monitor = self._monitor
        has_view = tag not in ("pre-d", "why")
        if monitor.invariants is not None:
            monitor.invariants.exchange(control.decode(payload)[0] if has_view else None)
        answers = await self._rendezvous.exchange(tag, payload)
        if has_view:
            monitor.viewed([control.decode(answer)[0] for answer in answers])
        return answers

    def close(self) -> None:
        """See the port."""
        self._rendezvous.close()


class WatchedJournal(Journal):
    """Tells a monitor what its rank does; records nothing."""

    def __init__(self, monitor: RankMonitor) -> None:
        super().__init__(NullRecorder())
        self._monitor = monitor

    def submitted(self, label: str, phase: Phase, calls: Sequence[Call], a: int, b: int, size: int) -> None:
        """A D iteration or a P segment [a, b) enters the device."""
        monitor = self._monitor
        if phase is Phase.D:
            if monitor.invariants is not None:
                monitor.invariants.iteration()
            monitor.launches()
        elif monitor.invariants is not None:
            monitor.invariants.segment(self.epoch, a, b)

    def permit(self, start: int, end: int) -> None:
        """P may enqueue [start, end)."""
        self._monitor.granted(self.epoch, end - start)

    def promote(self, epoch: int, turns: int) -> None:
        """An epoch's results become decodable."""
        if self._monitor.invariants is not None:
            self._monitor.invariants.promoted(epoch)
