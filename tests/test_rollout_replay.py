"""Closed-loop replay in virtual time: nothing early, nothing lost, and whole rows whenever it ends."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import RankLost, TurnstileError, UsageError
from rollout.replay import Row, Sink, read_rows, replay
from rollout.trace.shape import new_tokens
from rollout.trace.trajectory import Trajectory, Turn
from tests.fake_engine import VOCABULARY, FakeEngine, continuation, run_virtual

if TYPE_CHECKING:
    from pathlib import Path

turns = st.builds(Turn, st.integers(1, 60), st.integers(1, 12), st.sampled_from([0.0, 0.001, 3.25, 80.0, 1234.5]))
traces = st.lists(st.lists(turns, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6).map(
    lambda lists: tuple(Trajectory(f"c{i}", each) for i, each in enumerate(lists))
)
TWO = (
    Trajectory("a", (Turn(5, 3), Turn(2, 4, 100.0))),
    Trajectory("b", (Turn(7, 2), Turn(3, 1, 50.0))),
)


def replayed(engine: FakeEngine, trace: tuple[Trajectory, ...], places: int | None = None) -> list[Row]:
    rows: list[Row] = []
    run_virtual(
        replay(engine, trace, policy="fine", vocabulary=VOCABULARY, seed=3, max_concurrency=places, done=rows.append)
    )
    return rows


@given(traces, st.none() | st.integers(1, 4), st.floats(0, 0.01), st.floats(0, 0.05))
def test_no_turn_is_released_early_or_out_of_place(
    trace: tuple[Trajectory, ...], places: int | None, prefill_s: float, step_s: float
) -> None:
    engine = FakeEngine(prefill_s=prefill_s, step_s=step_s)
    rows = replayed(engine, trace, places)
    by_trajectory: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_trajectory[row.trajectory].append(row)
    assert {name: len(done) for name, done in by_trajectory.items()} == {t.id: len(t.turns) for t in trace}
    for trajectory in trace:
        done = by_trajectory[trajectory.id]
        assert [row.turn for row in done] == list(range(len(done)))
        assert done[0].released_ns >= trajectory.turns[0].wait_ms * 1e6
        for turn, before, after in zip(trajectory.turns[1:], done, done[1:], strict=False):
            lag = after.released_ns - before.finished_ns - turn.wait_ms * 1e6
            # Not a nanosecond early, and in virtual time no more than the clock's resolution late.
            assert -0.5 <= lag <= 2
        if places is None:
            assert done[0].released_ns <= trajectory.turns[0].wait_ms * 1e6 + 2
    if places is not None:
        assert engine.most_active <= places
    assert all(session.closed for session in engine.sessions)


@given(traces)
def test_context_is_kept_with_the_tokens_that_were_generated(trace: tuple[Trajectory, ...]) -> None:
    engine = FakeEngine()
    rows = replayed(engine, trace)
    seen = defaultdict(list)
    for call in engine.calls:
        seen[call.session].append(call)
    for number, trajectory in enumerate(trace):
        context: tuple[int, ...] = ()
        # Sessions open in the order of their arrivals, so a conversation is known by its first prompt.
        calls = next(
            calls
            for calls in seen.values()
            if calls[0].prompt == new_tokens(3, trajectory.id, 0, trajectory.turns[0].new_tokens, VOCABULARY)
        )
        assert len(calls) == len(trajectory.turns), number
        for at, (call, turn) in enumerate(zip(calls, trajectory.turns, strict=True)):
            context += new_tokens(3, trajectory.id, at, turn.new_tokens, VOCABULARY)
            assert call.prompt == context
            assert (call.params.max_tokens, call.params.ignore_eos) == (turn.output_tokens, True)
            context += continuation(call.prompt, turn.output_tokens)
    assert sorted((row.prompt_tokens, row.output_tokens) for row in rows) == sorted(
        (prompt, turn.output_tokens) for t in trace for prompt, turn in zip(t.prompts, t.turns, strict=True)
    )
    # All context but the first prompt and each turn's new tokens comes from the cache.
    assert all(row.cached_tokens == row.prompt_tokens - row.new_tokens for row in rows)


def test_times_count_from_the_start_of_the_replay() -> None:
    async def late() -> list[Row]:
        await asyncio.sleep(1000)
        rows: list[Row] = []
        await replay(
            FakeEngine(prefill_s=0.001, step_s=0.01), TWO[:1], policy="p", vocabulary=9, repeat=2, done=rows.append
        )
        return rows

    first, second = run_virtual(late())
    assert (first.policy, first.repeat, first.request) == ("p", 2, 1)
    assert first.released_ns == first.submitted_ns == 0
    assert first.token_ns == pytest.approx((5e6, 15e6, 25e6), abs=5)
    assert first.finished_ns == first.token_ns[-1]
    assert second.released_ns == pytest.approx(125e6, abs=5)


def test_a_turn_that_ends_early_ends_its_trajectory_only() -> None:
    rows = replayed(FakeEngine(cut={1: 2}), TWO)
    assert [(row.trajectory, row.turn) for row in rows if row.failed] == [("a", 0)]
    assert [(row.trajectory, row.turn) for row in rows if not row.failed] == [("b", 0), ("b", 1)]
    assert next(row for row in rows if row.failed).finish_reason == "abort"


def test_an_error_of_the_engine_ends_the_replay() -> None:
    engine = FakeEngine(fail=(3, RankLost("rank 2 ended")))
    with pytest.raises(ExceptionGroup) as raised:
        replayed(engine, TWO)
    assert raised.group_contains(RankLost, match="rank 2 ended")
    assert engine.active == 0
    assert all(session.closed for session in engine.sessions)


@given(st.floats(0, 0.2))
def test_interrupted_anywhere_it_leaves_whole_rows_of_what_was_done(
    tmp_path_factory: pytest.TempPathFactory, after_s: float
) -> None:
    path = tmp_path_factory.mktemp("run") / "requests.jsonl"
    engine = FakeEngine()
    sink = Sink(path)

    async def interrupted() -> None:
        task = asyncio.create_task(replay(engine, TWO, policy="fine", vocabulary=VOCABULARY, done=sink))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.active == 0

    if after_s > 0.15:  # beyond the end nothing is left to cancel
        return
    run_virtual(interrupted())
    sink.close()
    rows = list(read_rows(path))
    # A turn that ends in the very moment of the interruption may be on either side of it.
    ended = [call.finished_ns for call in engine.calls if call.finished_ns >= 0]
    assert sum(ns < after_s * 1e9 - 1 for ns in ended) <= len(rows) <= len(ended)
    assert all(row.finished_ns <= after_s * 1e9 + 1 and not row.failed for row in rows)
    running = [g for s in engine.sessions for g in s.generations if g.aborted]
    assert len(engine.calls) - len(ended) <= len(running) <= len(engine.calls) - len(rows)


def test_a_full_disk_names_the_file_and_the_way_on(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.symlink_to("/dev/full")
    sink = Sink(path)
    says = rf"{path} cannot be written \(No space left on device\): .* go on with --out {tmp_path} --resume$"
    with pytest.raises(TurnstileError, match=says):
        sink(replayed(FakeEngine(), TWO)[0])
    sink.close()


def test_each_row_is_in_the_file_as_soon_as_its_turn_has_finished(tmp_path: Path) -> None:
    sink, rows = Sink(tmp_path / "requests.jsonl"), []

    def done(row: Row) -> None:
        sink(row)
        rows.append(row)
        assert list(read_rows(tmp_path / "requests.jsonl")) == rows

    run_virtual(replay(FakeEngine(), TWO, policy="fine", vocabulary=VOCABULARY, done=done))
    assert len(rows) == 4
    sink.close()


@given(traces, st.integers(0, 24), st.floats(0, 0.05))
def test_a_replay_that_goes_on_asks_for_the_rest_alone_in_the_same_contexts(
    trace: tuple[Trajectory, ...], many: int, step_s: float
) -> None:
    rows = replayed(FakeEngine(step_s=step_s), trace)
    first = rows[:many]  # in the order in which they were done: each trajectory's from its first turn on
    kept: dict[str, list[Row]] = defaultdict(list)
    for row in first:
        kept[row.trajectory].append(row)
    since = max((row.finished_ns for row in first), default=0)
    left = [each for each in trace if len(kept[each.id]) < len(each.turns)]
    second: list[Row] = []
    run_virtual(
        replay(
            FakeEngine(step_s=step_s), left, policy="fine", vocabulary=VOCABULARY, seed=3, done=second.append,
            kept=kept, since_ns=since,
        )
    )  # fmt: skip
    told, again = (
        sorted((row.trajectory, row.turn, row.prompt_tokens, row.tokens) for row in some)
        for some in (rows, [*first, *second])
    )
    assert again == told
    ended = {(row.trajectory, row.turn): row.finished_ns for row in first}
    for row in second:
        if (row.trajectory, row.turn - 1) in ended:
            assert row.released_ns + since >= ended[row.trajectory, row.turn - 1] + row.wait_ms * 1e6 - 1


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"policy": "fine"}\n')
    with pytest.raises(UsageError, match=r"requests\.jsonl:1: not a row"):
        list(read_rows(path))


def test_nothing_to_replay_is_no_error() -> None:
    assert replayed(FakeEngine(), ()) == []
