"""What is found in an execution: broken guarantees, plans that are not shared ones, and broken invariants."""

from __future__ import annotations

import inspect
import pickle
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernel.cache
import kernel.gate
import kernel.prefill
import kernel.rank
import kernel.replica
import kernel.sched.fine
import kernel.sched.planner
import kernel.turnstile
from kernel.errors import Divergence, PolicyError, ProtocolError, UsageError
from kernel.sched import registry
from kernel.sched.fine import Fine
from kernel.sched.normal import Normal
from kernel.sched.policy import ALL, Guarantees
from kernel.topology import World
from verify.blame import Class
from verify.sim.errors import Deadlock
from verify.trial.enact import Outcome, attempt, run
from verify.trial.family import family
from verify.trial.findings import Finding, Found, from_error
from verify.trial.monitor import declared

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.sched.policy import Limits, Policy

POLICIES = Path(__file__).parent / "data" / "policies"
CROSSED = World(4, adp=2)
SMALL = World(2, adp=2, ep=2)


def wrong(name: str) -> str:
    return f"{POLICIES / name}.py:Wrong"


def check(policy: str, world: World = SMALL, segments: int = 3, rounds: int = 3, **options: Any) -> list[Outcome]:
    return [attempt(scenario, **options) for scenario in family(world, policy, segments, rounds)]


def found(outcomes: list[Outcome]) -> list[Finding]:
    return [finding for outcome in outcomes for finding in outcome.findings]


# -- guarantees -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "bound", "holds"),
    [
        ("fine", 1, True),
        ("fine:span=2", 2, True),
        ("fine:span=2", 1, False),
        ("fine:span=3", 2, False),
        ("lean:span=2", 1, False),
        ("lean", 1, True),
        ("adaptive", 4, True),
        ("adaptive", 1, False),
        ("global_enqueue", 3, True),
        ("global_enqueue", 2, False),  # Rows that go on wait for the epoch that was enqueued behind them.
        ("global_enqueue", "epoch", True),
        ("global_complete", 3, True),
        ("global_complete", 2, False),
        ("global_complete", "epoch", True),
        ("normal", "backlog", True),
        ("normal", 8, False),
        ("normal", "epoch", False),
    ],
)
def test_the_wait_of_a_ready_decode_is_judged_against_the_bound_asked_for(policy: str, bound: Any, holds: bool) -> None:
    outcomes = check(policy, bound=bound)
    assert all(outcome.clean for outcome in outcomes) is holds
    assert all(finding.rule == "decode_bound" and finding.cls is Class.STARVATION for finding in found(outcomes))


def test_prefill_priority_starves_decode_only_while_requests_keep_coming() -> None:
    failed = {outcome.scenario.name for outcome in check("normal", bound="epoch") if not outcome.clean}
    assert failed == {"a second epoch during the first", "a prompt of three epochs", "abort of a prefill",
                      "end of sessions", "endless arrivals"} & failed  # fmt: skip
    assert "endless arrivals" in failed
    (finding,) = check("normal", bound=8)[-1].findings
    assert "D is ready since round 4 and has not launched after 9 boundaries of P in 3 epochs" in finding.say


def test_a_bound_is_what_the_policy_says() -> None:
    limits = family(CROSSED, "fine", 3, 3)[0].limits
    bounds = {spec: declared(registry.create(spec, limits)) for spec in ("fine:span=3", "adaptive", "normal")}
    assert bounds == {"fine:span=3": 3, "adaptive": 4, "normal": "backlog"}
    assert declared(registry.create("global_complete", limits)) == "epoch"

    class Bare(Normal):
        guarantees = Guarantees()

    assert declared(Bare(limits)) == "span"
    assert any(
        "the bound is one segment" in each.say for each in found(check("bare", make_policy=partial(_make, Bare)))
    )


def _make(cls: Callable[[Limits], Policy], spec: str, limits: Limits) -> Policy:
    return cls(limits)


@pytest.mark.parametrize(
    ("name", "cls", "rule", "say"),
    [
        ("forgets_permit", Class.STARVATION, "epochs_complete", "rounds without progress: nothing is launched; P e0"),
        ("never_decodes", Class.STARVATION, "epochs_complete", "request 0 had 1 of 4 tokens when the plan went idle"),
        ("gives_up", Class.STARVATION, "epochs_complete", "request 2 had 0 of 2 tokens when the plan went idle"),
        ("greedy_span", Class.STARVATION, "decode_bound", "after 2 boundaries of P in 1 epoch; the bound is 1"),
        ("random_plan", Class.OUTSIDE, "outside", "decides by chance: ranks would not decide alike"),
        ("counting_plan", Class.RULE, "pure plan", "asked twice it gives span"),
        ("early_promotion", Class.RULE, "promotion", "promotes epoch 0, which is not complete on every rank"),
        ("plain_turn", Class.RULE, "turn", "turn is not an `async def`"),
        ("returns_plan", Class.RULE, "plan", "it must return (Plan, Memory)"),
    ],
)
def test_a_policy_with_one_mistake_is_found(name: str, cls: Class, rule: str, say: str) -> None:
    outcome = attempt(family(CROSSED, wrong(name), 3, 3)[1])
    finding = outcome.broken(rule)
    assert finding is not None, outcome.findings
    assert (finding.cls, say in finding.say) == (cls, True), finding
    assert "\n" not in str(finding)
    assert not (name == "greedy_span" and outcome.error), "a broken bound does not end the run"


class Odd(Fine):
    """Overridden in places by the tests below."""

    change: Any = None

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        return self.change(plan, after, views)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda plan, after, views: (replace(plan, round=0), after), "round"),
        (lambda plan, after, views: (plan, replace(after, round=plan.round)), "round"),
        (lambda plan, after, views: (replace(plan, inbox=max(v.inbox for v in views) + 1), after), "inbox"),
        (lambda plan, after, views: (plan, replace(after, inbox=0)), "inbox"),
        (lambda plan, after, views: (replace(plan, promote=plan.epoch), after), "promotion"),
        (lambda plan, after, views: (replace(plan, activate=plan.epoch), after), "one epoch"),
        (lambda plan, after, views: (replace(plan, idle=bool(plan.bucket)), after), "idle"),
    ],
)
def test_a_plan_that_no_rank_can_follow_is_a_broken_rule(change: Any, rule: str) -> None:
    cls: Any = type("Odd", (Odd,), {"change": staticmethod(change)})
    rules = {finding.rule for finding in found(check("odd", make_policy=partial(_make, cls)))}
    assert rules == {rule}


class Silent(Fine):
    """Plans nothing at all once D is ready."""

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        return (replace(plan, bucket=0, decode=()), after) if plan.bucket and plan.round > 5 else (plan, after)


def test_rounds_in_which_nothing_moves_are_starvation_and_end_the_run() -> None:
    outcome = attempt(family(CROSSED, "silent", 3, 3)[0], partial(_make, Silent))
    assert isinstance(outcome.error, Found)
    assert outcome.findings[0].cls is Class.STARVATION
    assert outcome.findings[0].rule == "decode_bound"
    assert "17 rounds without progress: D is ready since round 5 and does not launch" in outcome.findings[0].say


def test_a_policy_without_guarantees_cannot_be_used() -> None:
    class Bare:
        name = "bare"

        def __init__(self, limits: Any) -> None:
            pass

    with pytest.raises(UsageError, match="Bare has no guarantees"):
        attempt(family(CROSSED, "bare", 1, 1)[0], partial(_make, Bare))  # type: ignore[arg-type]


def test_what_the_world_raises_is_raised_and_a_deadlock_is_the_explorers_business() -> None:
    class Unfinished(Fine):
        async def turn(self, gate: Any) -> None:
            if gate.p_active:
                gate.release(1)
                await gate.enqueued()
            gate.launch_decode()

    scenario = family(CROSSED, "unfinished", 3, 3)[0]
    with pytest.raises(Deadlock) as caught:
        run(scenario, partial(_make, Unfinished))
    # Watching does not hide where a rank stands.
    assert all(f"rank {rank}: task 'main' waits at kernel/rank.py" in caught.value.waits[rank] for rank in range(4))
    outcome = attempt(scenario, partial(_make, Unfinished))
    assert outcome.findings[0].rule == "deadlock_free"


def test_errors_have_classes() -> None:
    assert from_error(Deadlock((), 0, only_timers=True)).cls is Class.TIMEOUT
    assert from_error(PolicyError("x")).cls is Class.EXCEPTION
    assert from_error(Divergence((2,), 7, "span", "")).rank == 2
    assert from_error(ProtocolError("x", rank=3, epoch=0, boundary=0)) == Finding(
        Class.RULE, "turnstile", "x (rank 3, epoch 0, boundary 0)", 3
    )
    assert from_error(KeyError("x")).cls is Class.EXCEPTION


# -- invariants -------------------------------------------------------------------------------------------------------


def mutate(patch: pytest.MonkeyPatch, owner: type, name: str, old: str, new: str) -> None:
    """Plant a mistake in a method of the kernel: `old` in its source becomes `new`."""
    member = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(member.fget if isinstance(member, property) else member))
    assert source.count(old) == 1, (name, old)
    space: dict[str, Any] = {}
    exec(source.replace(old, new), vars(sys.modules[owner.__module__]), space)
    patch.setattr(owner, name, space[name])


CACHE, REPLICA = kernel.cache.KVCache, kernel.replica.Replica
TURNSTILE, RANK, EPOCH = kernel.turnstile.Turnstile, kernel.rank.Rank, kernel.prefill.Epoch

MUTANTS: list[tuple[type, str, str, str, str, str]] = [
    (CACHE, "release", "self._free.extend(reversed(lease.blocks[keep:]))", "pass", "kv", "is lost"),
    (CACHE, "release", "lease.blocks[keep:]", "lease.blocks[max(0, keep - 1):]", "kv", "belongs to the free list and"),
    (CACHE, "release", "keep = self.need(len(kept))", "keep = self.need(len(kept) + 4)", "kv", "keeps"),
    (CACHE, "forget", "self._free.extend(reversed(kept.blocks))", "pass", "kv", "is lost"),
    (CACHE, "_evict", "kept.blocks.pop()", "kept.blocks[-1]", "kv", "belongs to session"),
    (CACHE, "_evict", "self._reusable -= drop", "pass", "view", "free KV blocks where"),
    (CACHE, "reserve", "self._free.pop()", "self._free[-1]", "kv", "KV block"),
    (CACHE, "reserve", "self._leases[request] = lease", "pass", "kv", "is lost"),
    (REPLICA, "_retire", "if turn.flying:\n        return", "pass", "lease", "in flight"),
    (REPLICA, "_retire", "self._slots.append(turn.slot)", "pass", "lease", "slots are lost"),
    (REPLICA, "begin", "turn.slot = self._slots.pop()", "turn.slot = self._slots[-1]", "lease", "slot"),
    (REPLICA, "abort", "elif was is State.RUNNING:", "else:\n        self._retire(turn)\n    if was is State.RUNNING:",
     "lease", "its prefill is in flight"),
    (REPLICA, "ready", "if len(t.tokens) + t.flying < t.longest", "", "lag", "beyond its"),
    (REPLICA, "_commit", "self._running.remove(turn)", "pass", "lag", "which is finished"),
    (REPLICA, "launch", "turn.written += 1", "turn.written += 9", "lease", "past its blocks"),
    (TURNSTILE, "release", "start + span", "start + span + 1", "permit", "granted"),
    (RANK, "release", "epoch.submit(start, end, self._plan.round)", "epoch.submit(start, end, self._plan.round);"
     " self.turnstile._permit -= 1", "permit", "permit"),
    (RANK, "_exchange", "await self._harvest(self._plan.round - 1)", "await self._harvest(self._plan.round - 2)",
     "lag", "not committed in round"),
    (RANK, "_settle", "await self.p_drained()", "epoch.settled = True", "promotion", "complete before it has finished"),
    (RANK, "_view", "replica.free_slots", "1", "view", "free slots where"),
    (RANK, "_view", "bool(self._flights)", "False", "view", "busy=False with 1 iterations in flight"),
    (RANK, "release", "self.turnstile.release(epoch.number, span)",
     "self.turnstile.release(epoch.number, span); start = max(0, start - 1)", "permit", "after boundary"),
    (RANK, "_apply", "self._journal.promote(plan.promote,", "self._journal.promote(plan.promote - 1,", "promotion",
     "epoch -1 is promoted where the open one is e0"),
    (TURNSTILE, "complete", "self._status = Status.COMPLETE", "self._status = Status.COMPLETE; self._epoch -= 2",
     "permit", "epoch -2 follows epoch 0"),
    (RANK, "launch", "calls = self._d.program.calls",
     "calls = self._d.program.calls; self.turnstile._permit = self.turnstile._reached = 0", "permit",
     "back to permit 0"),
    (TURNSTILE, "complete", "self._status = Status.COMPLETE", "self._status = Status.COMPLETE; self._permit += 1",
     "permit", "has permit 4 where 3 was granted"),
    (CACHE, "__init__", "range(blocks - 1, -1, -1)", "range(blocks, 0, -1)", "kv", "holds KV block 16 of a pool of 16"),
    (REPLICA, "_retire", "self.cache.release(turn.request.id, context[:known])", "pass", "lease", "outlived its turn"),
    (REPLICA, "begin", "turn.written = lease.blocks", "turn.written = lease.blocks[::-1]", "lease", "of a lease of"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "old", "new", "rule", "say"), MUTANTS, ids=[f"{m[0].__name__}.{m[1]} {m[3]}" for m in MUTANTS]
)
def test_a_mistake_in_the_kernel_breaks_an_invariant(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, old: str, new: str, rule: str, say: str
) -> None:
    mutate(monkeypatch, owner, name, old, new)
    seen = []
    for scenario in family(SMALL, "fine", 3, 6):
        seen += attempt(scenario).findings
        if any(each.cls is Class.INVARIANT and each.rule == rule and say in each.say for each in seen):
            return
    pytest.fail(f"found only {seen}")


class Hasty(Fine):
    """Does not wait until P stands at its endpoint, and claims no order."""

    guarantees = Guarantees(deadlock_free=False)

    async def turn(self, gate: Any) -> None:
        gate.launch_decode()
        if gate.plan.round > 6:
            gate.launch_decode()
        await gate.rendezvous("post-d")
        gate.release(gate.plan.span)


def test_two_pending_dispatches_are_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    second = 'raise self._error("a second D launch in one round")'
    mutate(monkeypatch, kernel.gate.RankGate, "launch_decode", second, "pass")
    says = [each.say for each in found(check("hasty", make_policy=partial(_make, Hasty)))]
    assert any("are pending together" in say for say in says), says
    # A boundary that is published late, as those that depend on data are.
    mutate(monkeypatch, EPOCH, "submit", "if not late:", "if end > 2:")
    says = [each.say for each in found(check("hasty", make_policy=partial(_make, Hasty)))]
    assert any("submits [1,2) while it stands at boundary 0" in say for say in says), says


def test_what_the_kernel_raises_through_the_gate_is_not_laid_at_the_policys_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch, RANK, "_view", "complete = epoch is None or epoch.settled", "complete = True")
    finding = found(check("fine"))[0]
    assert (finding.cls, finding.rule, finding.where) == (Class.EXCEPTION, "kernel", "")
    assert "the kernel fails in turn at kernel/prefill.py:" in finding.say


def test_an_invariant_names_its_block_turn_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, REPLICA, "_retire", "if turn.flying:\n        return", "pass")
    findings = found(check("fine"))
    assert any("request 0 holds no lease of KV block 0, and D" in each.say and "(rank 0, round" in each.say
               for each in findings), findings  # fmt: skip


@given(st.lists(st.text(max_size=8), max_size=4), st.sampled_from(Class), st.integers(-1, 9))
def test_a_finding_is_one_line_and_travels(parts: list[str], cls: Class, rank: int) -> None:
    finding = Finding(cls, "kv", " ".join(" ".join(parts).split()), rank, where="a/b.py:3")
    assert pickle.loads(pickle.dumps(finding)) == finding
    assert len(str(finding).splitlines()) <= 1
    assert pickle.loads(pickle.dumps(Found(finding))).finding == finding


def test_spans_that_let_prefill_run_to_its_end_are_finite_for_nobody() -> None:
    class Whole(Fine):
        def span(self, now: Any) -> int:
            return ALL

    findings = found(check("whole", make_policy=partial(_make, Whole)))
    assert {each.rule for each in findings} == {"decode_bound"}
