"""Run one scenario once: the unmodified rank, planner, policy and cache on a simulated world, watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kernel.cache import KVCache
from kernel.errors import TurnstileError, UsageError, said
from kernel.inbox import Inbox, Pause, Resume
from kernel.rank import Ports, Rank
from kernel.sched import registry
from verify.blame import Class
from verify.sim.kv import SimKV, continuation
from verify.sim.model import FREE, SimModel
from verify.sim.world import SimRank, SimWorld
from verify.sources import raised_at
from verify.trial.findings import Finding, Found, from_error
from verify.trial.guard import Guard
from verify.trial.monitor import PATIENCE, Bound, RankMonitor, WatchedJournal, WatchedRendezvous
from verify.trial.scenario import VOCAB, Feeder, Scenario
from verify.trial.watched import Watched
from verify.trial.watched_exchange import WatchedExchange

if TYPE_CHECKING:
    from kernel.inbox import UsePolicy
    from kernel.replica import Output
    from kernel.request import Request
    from kernel.sched.policy import Limits, Plan, Policy

MakePolicy = Callable[[str, "Limits"], "Policy"]


@dataclass(slots=True)
class TurnEnd:
    """What became of a turn. tokens: drawn. finish: stop, length or abort; "" when it did not end. late: tokens that it
    drew after its end."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    late: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One execution.

    turns: by request id. rounds: of rank 0. digest: of all plans of rank 0, equal for equal plans. steps: of the
    scheduler. findings: what the monitors found, most important first. error: what ended the run early, as the world
    raised it; from a Found its finding is the first one. plans: of rank 0, one a round.
    """

    scenario: Scenario
    turns: dict[int, TurnEnd]
    rounds: int
    digest: int
    steps: int
    findings: tuple[Finding, ...]
    error: Exception | None
    plans: tuple[Plan, ...] = ()

    @property
    def clean(self) -> bool:
        """Nothing was found, and the run ended by itself."""
        return not self.findings and self.error is None

    def broken(self, rule: str) -> Finding | None:
        """The first finding of a rule (`verify.trial.findings.GUARANTEES` and others)."""
        return next((each for each in self.findings if each.rule == rule), None)


def run(
    scenario: Scenario,
    make_policy: MakePolicy = registry.create,
    world: Callable[..., SimWorld] = SimWorld,
    *,
    bound: Bound | None = None,
    guard: Guard | None = None,
    **options: Any,
) -> Outcome:
    """Run `scenario` once, and raise what a rank or the world raised: Deadlock, Divergence, ...; see `attempt`.

    A Found is not raised: it is in the Outcome, as all findings are.
    """
    outcome = attempt(scenario, make_policy, world, bound=bound, guard=guard, **options)
    if outcome.error is not None and not isinstance(outcome.error, Found):
        raise outcome.error
    return outcome


def attempt(
    scenario: Scenario,
    make_policy: MakePolicy = registry.create,
    world: Callable[..., SimWorld] = SimWorld,
    *,
    bound: Bound | None = None,
    guard: Guard | None = None,
    **options: Any,
) -> Outcome:
    """Run `scenario` once. What goes wrong in the run is in the Outcome.

    world: makes the simulated world, called as SimWorld with `options` (choose, permute, skew, ...). bound: of the wait
    of a ready D, judged instead of the policy's own claim. guard: watches the policy's code; a new one by default.
    Raises UsageError for a policy that cannot be used.
    """
    options = {"log": False, "livelock": 10_000 + 1_000 * scenario.world.size, **options}
    simulated = world(scenario.world, capacity=scenario.capacity, weights=scenario.weights, **options)
    turns = {request.id: TurnEnd(request) for request in scenario.requests}
    patience = PATIENCE + sum(rounds for *_, rounds in scenario.late)
    monitors = [RankMonitor(sim.rank, bound, patience, scenario.longest) for sim in simulated.ranks]
    with guard or Guard() as guard:
        actors = [
            _Actor(scenario, sim, monitor, partial(_emit, turns), make_policy, guard)
            for sim, monitor in zip(simulated.ranks, monitors, strict=True)
        ]

        async def main(sim: SimRank) -> None:
            await actors[sim.rank].rank.run()

        error: Exception | None = None
        try:
            simulated.run(main)
        except Exception as failure:
            error = failure
        finally:
            for actor in actors:
                actor.model.close()
    findings = [finding for monitor in monitors for finding in monitor.findings]
    if error is None:
        findings += _judge(scenario, turns, actors[0].feeder.stopped_in)
    else:
        first = from_error(error)
        findings = [first, *(finding for finding in findings if finding != first)]
    return Outcome(
        scenario, turns, monitors[0].rounds, monitors[0].digest, simulated.scheduler.steps, _unique(findings), error,
        tuple(monitors[0].plans),
    )  # fmt: skip


class _Actor:
    """One rank with all that it is plugged into."""

    def __init__(
        self,
        scenario: Scenario,
        sim: SimRank,
        monitor: RankMonitor,
        emit: Callable[[Output], None],
        make_policy: MakePolicy,
        guard: Guard,
    ) -> None:
        inbox = Inbox()
        self.feeder = Feeder(scenario, sim.rank, inbox)
        self.model = SimModel(scenario.world, sim.device, scenario.segments, FREE, SimKV(scenario.block_size), VOCAB)
        limits = scenario.limits
        if sim.device.expert_exchange is not None:
            sim.device.expert_exchange = WatchedExchange(sim.device.expert_exchange, monitor)

        def make(spec: str) -> Policy:
            # A Protocol's class variables cannot be told from this object's own attributes of the same names.
            return cast("Policy", Watched(_created(make_policy, spec, limits), monitor, guard, self.feeder))

        def use(entry: UsePolicy) -> Policy:
            return make(entry.spec)

        ports = Ports(
            device=sim.device,
            rendezvous=WatchedRendezvous(sim.rendezvous, monitor),
            model=self.model,
            cache=KVCache(scenario.blocks, scenario.block_size),
            inbox=inbox,
            journal=WatchedJournal(monitor),
            emit=emit,
            use_policy=use,
        )
        self.rank = Rank(sim.rank, scenario.world, limits, make(scenario.policy), ports)
        monitor.attend(self.rank)


def _created(make_policy: MakePolicy, spec: str, limits: Limits) -> Policy:
    try:
        return make_policy(spec, limits)
    except TurnstileError:
        raise
    except (Exception, SystemExit) as error:
        where, say = raised_at(error), said(error)
        raise UsageError(f"policy {spec} cannot be made, {where}: {type(error).__name__}: {say}") from error


def _emit(turns: dict[int, TurnEnd], output: Output) -> None:
    turn = turns.get(output.request)
    if turn is not None:
        if output.token >= 0:
            turn.tokens.append(output.token)
            turn.late += bool(turn.finish)
        turn.finish = turn.finish or output.finish


def _judge(scenario: Scenario, turns: dict[int, TurnEnd], stopped_in: int) -> list[Finding]:
    """Every turn has ended, with the tokens that its context alone decides."""
    findings = []
    pauses = [type(entry) for _, entry in scenario.entries if isinstance(entry, Pause | Resume)]
    paused = bool(pauses) and pauses[-1] is Pause
    for turn in turns.values():
        request, most = turn.request, turn.request.params.max_tokens
        whole = turn.finish in ("stop", "length")
        if not whole and not (turn.finish == "abort" and (paused or scenario.may_abort(request))):
            had = f"{len(turn.tokens)} of {most} tokens"
            say = f"request {request.id} had {had} when the plan went idle for good in round {stopped_in}"
            findings.append(Finding(Class.STARVATION, "epochs_complete", say, -1, stopped_in))
        if turn.late:
            say = f"request {request.id} drew {turn.late} tokens after its end ({turn.finish})"
            findings.append(Finding(Class.INVARIANT, "lag", say))
        wanted = list(continuation(request.prompt, request.params, VOCAB))
        if turn.tokens != (wanted if whole else wanted[: len(turn.tokens)]):
            say = f"request {request.id} drew {turn.tokens} where its context alone gives {wanted}"
            findings.append(Finding(Class.INVARIANT, "kv", say))
    return findings


def _unique(findings: list[Finding]) -> tuple[Finding, ...]:
    """One of each rule: ranks find the same things."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.rule, finding)
    return tuple(first.values())
