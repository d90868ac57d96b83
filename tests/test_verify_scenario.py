"""What an execution is: scenarios, their family, and that the shipped policies are clean in all of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.inbox import (
    Abort,
    EndSession,
    Entry,
    Flush,
    Inbox,
    Pause,
    Resume,
    Stop,
    Submit,
    UpdateWeights,
    UsePolicy,
)
from kernel.request import Request, SamplingParams
from kernel.sched.policy import Plan
from kernel.topology import World
from verify.sim.errors import Deadlock
from verify.sim.kv import continuation
from verify.trial.enact import Outcome, attempt, run
from verify.trial.family import START, family
from verify.trial.scenario import VOCAB, Feeder, Scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.sim.scheduler import Actor

SHIPPED = (
    "fine", "fine:span=2", "fine:span=3", "lean", "adaptive", "global_complete", "global_enqueue", "normal",
)  # fmt: skip
WORLDS = (World(2), World(2, adp=2, ep=2), World(3), World(4, adp=2), World(4, adp=4, ep=4))
CROSSED = World(4, adp=2)
FEW = (World(2), World(2, adp=2, ep=2), CROSSED)


def shuffled(seed: int) -> Any:
    draws = random.Random(seed)

    def choose(options: Sequence[Actor]) -> int:
        return draws.randrange(len(options))

    return choose


def submit(number: int, replica: int = 0, prompt: int = 3, out: int = 4) -> Submit:
    params = SamplingParams(max_tokens=out, ignore_eos=True)
    return Submit(Request(number, number, replica, tuple(range(prompt)), params))


def seen(outcome: Outcome) -> Any:
    """Everything that must not depend on the schedule."""
    turns = {number: (turn.tokens, turn.finish) for number, turn in outcome.turns.items()}
    return outcome.rounds, outcome.digest, turns


# -- the shipped policies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SHIPPED)
@pytest.mark.parametrize("world", FEW, ids=str)
def test_shipped_policies_are_clean_in_every_scenario(world: World, policy: str) -> None:
    for segments in (1, 3):
        for scenario in family(world, policy, segments, 2, meetings=1 + segments // 2):
            outcome = run(scenario)
            assert outcome.clean, (str(scenario), outcome.findings)


@pytest.mark.slow
@pytest.mark.parametrize("policy", SHIPPED)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_shipped_policies_are_clean_in_larger_families(world: World, policy: str) -> None:
    for segments in (1, 2, 3):
        for scenario in family(world, policy, segments, 4):
            outcome = run(scenario)
            assert outcome.clean, (str(scenario), outcome.findings)


@given(
    st.sampled_from(SHIPPED), st.sampled_from(WORLDS), st.integers(1, 3), st.integers(0, 99), st.integers(0, 2**32),
    st.booleans(),
)  # fmt: skip
def test_shipped_policies_do_the_same_in_any_schedule(
    policy: str, world: World, segments: int, which: int, seed: int, permute: bool
) -> None:
    members = family(world, policy, segments, 3)
    scenario = members[which % len(members)]
    outcome = run(scenario, choose=shuffled(seed), permute=permute)
    assert outcome.clean, outcome.findings
    assert seen(outcome) == seen(run(scenario))


def test_no_order_at_all_gets_stuck_in_some_schedule_where_one_kernel_fits() -> None:
    scenario = replace(family(CROSSED, "unordered", 3, 3)[1], capacity=1)
    for seed in range(200):
        outcome = attempt(scenario, choose=shuffled(seed))
        if isinstance(outcome.error, Deadlock):
            break
    else:
        pytest.fail("no schedule got stuck")
    with pytest.raises(Deadlock):
        run(scenario, choose=shuffled(seed))


def test_every_turn_draws_what_its_context_alone_decides() -> None:
    for scenario in family(CROSSED, "fine", 2, 3):
        for turn in run(scenario).turns.values():
            wanted = list(continuation(turn.request.prompt, turn.request.params, VOCAB))
            assert turn.tokens == wanted[: len(turn.tokens)]
            assert turn.finish in ("length", "stop") or scenario.may_abort(turn.request)


# -- the family -------------------------------------------------------------------------------------------------------


def test_the_family_has_each_meeting_once() -> None:
    members = family(CROSSED, "fine", 3, 6)
    names = [member.name for member in members]
    assert len(set(names)) == len(names) == 17
    assert len(family(World(2), "fine", 3, 6)) == 15
    assert [name for name in names if name.startswith("P meets D")] == [f"P meets D after {n}" for n in range(4)]
    assert {name for name in names if not run(member := members[names.index(name)]).clean} == set(), member


def test_prompts_arrive_while_decode_runs() -> None:
    """The first decode iteration is planned when the family says."""
    (start, *meets) = (m for m in family(CROSSED, "fine", 3, 6) if m.name.startswith(("P before", "P meets")))
    assert max(round_ for round_, _ in start.entries) == 0
    assert [max(round_ for round_, _ in member.entries) for member in meets] == [START + n for n in range(4)]
    rounds = [run(member).rounds for member in meets]
    assert rounds == sorted(rounds)
    assert rounds[0] == run(start).rounds + 1 or rounds[0] < rounds[-1]


def test_the_pool_is_just_large_enough_for_one_turn() -> None:
    member = next(m for m in family(CROSSED, "fine", 3, 3) if "pool" in m.name)
    need = max(-(-request.longest // member.block_size) for request in member.requests)
    assert member.blocks - need < 2
    assert len([r for r in member.requests if r.replica == 0]) * need > member.blocks


def test_endless_arrivals_come_one_a_round() -> None:
    member = family(CROSSED, "fine", 3, 3, arrivals=20)[-1]
    rounds = [round_ for round_, _ in member.entries]
    assert rounds == [0, 0, *range(START, START + 20)]


# -- entries ----------------------------------------------------------------------------------------------------------


def given_at(scenario: Scenario, rank: int, rounds: Sequence[tuple[int, bool]]) -> list[tuple[int, Entry]]:
    """What a rank's feeder gives in rounds whose plans have taken so many entries and are idle or not."""
    inbox = Inbox()
    feeder, found, taken = Feeder(scenario, rank, inbox), [], 0
    for round_, (taken, idle) in enumerate(rounds):
        before = inbox.length
        feeder(None)
        feeder(Plan(round=round_, inbox=taken, idle=idle))
        found += [(round_, entry) for entry in inbox.take(inbox.length)[: inbox.length - before]]
    return found


def test_entries_come_in_their_rounds_and_at_once_when_all_is_idle() -> None:
    a, b, c = submit(0), submit(1), Abort(0)
    scenario = Scenario(World(2), "fine", 1, ((1, a), (5, b), (6, c)))
    busy = [(0, False), (0, False), (1, False), (1, False), (1, False), (1, False), (2, False)]
    assert given_at(scenario, 0, busy) == [(1, a), (5, b), (6, c)]
    idle = [(0, True), (1, False), (1, True), (2, False), (3, True), (4, True)]
    assert given_at(scenario, 0, idle) == [(0, a), (2, b), (3, c), (4, Stop())]


def test_a_late_rank_sees_entries_later_but_never_none_when_all_is_idle() -> None:
    a, b = submit(0), submit(1)
    scenario = Scenario(World(2), "fine", 1, ((1, a), (1, b)), late=((1, 0, 2),))
    busy = [(0, False)] * 5
    assert given_at(scenario, 0, busy) == [(1, a), (1, b)]
    assert given_at(scenario, 1, busy) == [(3, a), (3, b)]
    assert given_at(scenario, 1, [(0, True), (0, False), (0, False)]) == [(0, a), (2, b)]


def test_lateness_changes_nothing_but_the_rounds() -> None:
    start = next(m for m in family(CROSSED, "fine", 3, 3) if m.name == "P meets D after 0")
    outcomes = [run(replace(start, late=((rank, 2, late),))) for rank in range(4) for late in (0, 1, 3)]
    assert all(outcome.clean for outcome in outcomes)
    assert len({tuple(tuple(turn.tokens) for turn in outcome.turns.values()) for outcome in outcomes}) == 1
    assert len({outcome.digest for outcome in outcomes}) == 3


def test_every_kind_of_entry_takes_effect() -> None:
    entries = (
        (0, submit(0, 0, out=9)), (0, submit(1, 1, out=9)), (4, Pause()), (5, Flush()), (6, UpdateWeights("w")),
        (7, Resume()), (7, UsePolicy("normal")), (8, submit(2, 1)), (9, EndSession(1)), (10, Abort(77)),
    )  # fmt: skip
    outcome = run(Scenario(CROSSED, "global_enqueue", 2, entries))
    assert outcome.clean, outcome.findings
    assert [turn.finish for turn in outcome.turns.values()] == ["length", "abort", "length"]


def test_turns_of_a_pause_that_nobody_ends_are_aborted_by_the_end() -> None:
    outcome = run(Scenario(CROSSED, "fine", 2, ((0, submit(0, out=9)), (5, Pause()))))
    assert outcome.clean
    assert outcome.turns[0].finish == "abort"


# -- on paper ---------------------------------------------------------------------------------------------------------

params = st.builds(
    SamplingParams, max_tokens=st.integers(1, 5), seed=st.integers(0, 9), stop_token_ids=st.tuples(st.integers(0, 9))
)
requests = st.builds(
    Request, id=st.integers(0, 2**40), session=st.integers(0, 9), replica=st.integers(0, 1),
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=5).map(tuple), params=params,
)  # fmt: skip
kinds = st.one_of(
    st.builds(Submit, requests), st.builds(Abort, st.integers(0, 9)), st.builds(EndSession, st.integers(0, 9)),
    st.builds(UsePolicy, st.text(max_size=5)), st.builds(UpdateWeights, st.text(max_size=5)),
    st.sampled_from([Flush(), Pause(), Resume(), Stop()]),
)  # fmt: skip


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    entries = draw(st.lists(kinds, max_size=5, unique_by=lambda e: e.request.id if isinstance(e, Submit) else object()))
    rounds = sorted(draw(st.lists(st.integers(0, 9), min_size=len(entries), max_size=len(entries))))
    late = tuple((draw(st.integers(0, 3)), at, draw(st.integers(0, 3))) for at in range(len(entries)) if at % 2)
    pairs = tuple(zip(rounds, entries, strict=True))
    return Scenario(
        CROSSED, draw(st.sampled_from(SHIPPED)), 3, pairs, late, draw(st.integers(2, 9)), (1, 2), name="drawn"
    )


@given(scenarios())
def test_a_scenario_prints_in_one_line_and_goes_through_json(scenario: Scenario) -> None:
    assert Scenario.from_dict(json.loads(json.dumps(scenario.to_dict()))) == scenario
    assert len(str(scenario).splitlines()) == 1


@pytest.mark.parametrize("spoil", [
    lambda plain: plain.pop("world"), lambda plain: plain.update(weights=3), lambda plain: plain.update(more=1),
    lambda plain: plain["entries"].append([0, "Nothing", {}]), lambda plain: plain["entries"].append([0, "Abort", {}]),
    lambda plain: plain["entries"].append(3), lambda plain: plain.update(late=[["a", 0, 1]]),
    lambda plain: plain["world"].update(size=0), lambda plain: plain.update(segments="three"),
])  # fmt: skip
def test_what_is_no_scenario_is_refused_in_one_line(spoil: Any) -> None:
    plain = json.loads(json.dumps(family(CROSSED, "fine", 3, 3)[0].to_dict()))
    spoil(plain)
    with pytest.raises(UsageError) as caught:
        Scenario.from_dict(plain)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "say"),
    [
        ({"segments": 0}, "segments=0"),
        ({"entries": ((2, submit(0)), (1, submit(1)))}, "must not decrease"),
        ({"entries": ((0, submit(0)), (1, submit(0)))}, "not unique"),
        ({"entries": ((0, submit(0, replica=2)),)}, "no prompt or no replica"),
        ({"entries": ((0, submit(0, prompt=60, out=9)),)}, "does not fit 16 KV blocks"),
        ({"entries": ((0, submit(0)),), "late": ((4, 0, 1),)}, "names no rank or entry"),
        ({"entries": ((0, submit(0)),), "late": ((0, 1, 1),)}, "names no rank or entry"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(changes: Any, say: str) -> None:
    with pytest.raises(UsageError, match=say):
        Scenario(**{"world": CROSSED, "policy": "fine", "segments": 2, **changes})


def test_policies_that_cannot_be_used_are_unusable_input() -> None:
    for spec in ("fines", "fine:spam=1", "fine:span=0", "nowhere.py:Wrong"):
        with pytest.raises(UsageError) as caught:
            run(Scenario(World(2), spec, 2))
        assert len(str(caught.value).splitlines()) == 1
