"""Trace readers: the packaged trace has every published figure, and what cannot be read is named by line and field."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollout
from kernel.errors import UsageError
from rollout.trace.read import read
from rollout.trace.trajectory import Trajectory, Turn, counted

PAPER = Path(rollout.__file__).parent / "data" / "paper_replay_1265.jsonl"
SAMPLE = Path(__file__).parent / "data" / "mooncake_sample.jsonl"
SHARED = Path(__file__).parents[2] / "shared" / "traces"

waits = st.floats(0, 1e6, allow_nan=False).map(lambda ms: round(ms, 3))
turns = st.builds(Turn, st.integers(1, 5000), st.integers(1, 3000), waits)
trajectories = st.lists(st.lists(turns, min_size=1, max_size=5), min_size=1, max_size=6)


def paper_lines(conversations: list[list[Turn]]) -> list[dict[str, Any]]:
    """Paper-shaped records, conversations interleaved."""
    records = []
    for name, conversation in enumerate(conversations):
        context = 0
        for at, turn in enumerate(conversation):
            records.append(
                {
                    "conversation_id": f"c{name}",
                    "turn": at,
                    "new_tokens": turn.new_tokens,
                    "retained_tokens": context,
                    "input_tokens": context + turn.new_tokens,
                    "output_tokens": turn.output_tokens,
                    "wait_ms": turn.wait_ms if at else None,
                }
            )
            context += turn.new_tokens + turn.output_tokens
    return sorted(records, key=lambda record: int(record["turn"]))


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_packaged_trace_has_all_fourteen_published_figures() -> None:
    # Paper section 7. Reading: new tokens over all requests, retained context and waits over continuations.
    found = read("paper").trajectories
    every = [turn for trajectory in found for turn in trajectory.turns]
    later = [turn for trajectory in found for turn in trajectory.turns[1:]]

    def pair(values: list[float]) -> tuple[float, float]:
        p50, p99 = np.percentile(values, [50, 99])
        return round(float(p50), 6), round(float(p99), 6)

    assert len(found) == 128
    assert max(len(trajectory.turns) for trajectory in found) == 10
    assert len(every) == 1265
    assert len(later) == 1137
    assert sum(turn.input_tokens for turn in every) == 6_574_104
    assert sum(turn.output_tokens for turn in every) == 220_862
    assert pair([turn.new_tokens for turn in every]) == (292, 3062)
    assert pair([turn.output_tokens for turn in every]) == (88, 1057)
    assert pair([turn.retained_tokens for turn in later]) == (4716, 12507)
    assert pair([turn.wait_ms / 1000 for turn in later]) == (3.10, 15.30)


def test_packaged_trace_is_the_published_file() -> None:
    digest = hashlib.sha256(PAPER.read_bytes()).hexdigest()
    assert digest == "6498525c321872442febdb11435eb9293bd3232f08cbb86495f270576edcfee8"
    assert read("paper").sha256 == digest
    assert digest in (PAPER.parent / "README.md").read_text()


def test_replayed_contexts_of_the_packaged_trace_are_the_recorded_ones() -> None:
    found = read("paper")
    for trajectory in found.trajectories:
        assert list(trajectory.prompts) == [turn.input_tokens for turn in trajectory.turns]
    assert counted(found.trajectories) == (1265, 6_574_104, 220_862)
    assert max(trajectory.longest for trajectory in found.trajectories) == 15_459


@given(trajectories, st.booleans(), st.booleans())
def test_paper_shaped_lines_round_trip(
    tmp_path_factory: pytest.TempPathFactory, conversations: list[list[Turn]], zipped: bool, blank: bool
) -> None:
    text = "".join(json.dumps(record) + "\n" + "\n" * blank for record in paper_lines(conversations))
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    found = read(path)
    assert found.format == "paper"
    assert [trajectory.id for trajectory in found.trajectories] == [f"c{i}" for i in range(len(conversations))]
    for trajectory, conversation in zip(found.trajectories, conversations, strict=True):
        assert [(t.new_tokens, t.output_tokens) for t in trajectory.turns] == [
            (t.new_tokens, t.output_tokens) for t in conversation
        ]
        assert [t.wait_ms for t in trajectory.turns] == [0.0, *(t.wait_ms for t in conversation[1:])]
        assert [t.input_tokens for t in trajectory.turns] == list(trajectory.prompts)


BAD_COUNT: st.SearchStrategy[Any] = st.sampled_from([None, -1, 0, 1.5, "7", True, [], {}])
BAD: dict[str, st.SearchStrategy[Any]] = {
    "conversation_id": st.sampled_from([None, "", 1.5, True, []]),
    "turn": st.sampled_from([None, -1, 99, "0", 0.5]),
    "new_tokens": BAD_COUNT,
    "output_tokens": BAD_COUNT,
    "retained_tokens": st.sampled_from([None, -1, 0.5, "0", False]),
    "input_tokens": st.sampled_from([None, 0, 10**9, "1"]),
    "wait_ms": st.sampled_from(["1", -0.5, float("nan"), float("inf"), True, "missing"]),
}


@given(trajectories, st.data())
def test_a_malformed_line_is_named_by_file_line_and_field(
    tmp_path_factory: pytest.TempPathFactory, conversations: list[list[Turn]], data: st.DataObject
) -> None:
    records = paper_lines(conversations)
    at = data.draw(st.integers(0, len(records) - 1))
    field = data.draw(st.sampled_from(sorted(BAD)))
    value = data.draw(BAD[field])
    if value == "missing":
        if records[at]["turn"] == 0:
            return  # a first turn may lack its wait
        del records[at][field]
    else:
        records[at][field] = value
    path = write(tmp_path_factory.mktemp("trace") / "t.jsonl", records)
    with pytest.raises(UsageError) as raised:
        read(path)
    message = str(raised.value)
    assert message.startswith(f"{path}:{at + 1}: field {field!r} is ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no requests"),
        (b"\n \n", "holds no requests"),
        (b'{"conversation_id": "c0"\n', ":1: not JSON"),
        (b'\n{"conversation_id": "c0", "turn": 0}\n', ":2: field 'new_tokens' is missing"),
        (b"[1]\n", ":1: not a JSON object"),
        (b'{"prompt": "hello"}\n', ":1: neither a paper-shaped line"),
        (b'{"input_length": 5, "output_length": 0, "timestamp": 0}\n', ":1: field 'output_length' is 0"),
        (b'{"input_length": 5, "output_length": 1, "timestamp": 0, "hash_ids": [1, "a"]}\n', ":1: field 'hash_ids'"),
        (b'{"input_length": 5, "output_length": 1}\n', ":1: field 'timestamp' is missing"),
        (b'\xff\xfe{"a": 1}\n', ":1: not UTF-8"),
        (gzip.compress(b'{"conversation_id": "c0"}\n' * 99, mtime=0)[:-9], "broken gzip data"),
        (b"[" * 100_000, ":1: not usable JSON"),
    ],
)
def test_unusable_files_are_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        read(path)
    assert says in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("turn", [0, 2, 7])
def test_turns_out_of_order_are_refused(tmp_path: Path, turn: int) -> None:
    records = paper_lines([[Turn(5, 5), Turn(5, 5, 1.0)]])
    records[1]["turn"] = turn
    with pytest.raises(UsageError, match=f":2: field 'turn' is {turn}: it must be 1, the next turn"):
        read(write(tmp_path / "t.jsonl", records))


@pytest.mark.parametrize("where", ["nowhere.jsonl", "."])
def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError, match="give a JSONL file"):
        read(tmp_path / where)


def blocks(*parts: tuple[int, int]) -> list[int]:
    return [base + i for base, count in parts for i in range(count)]


def mooncake(path: Path, *records: tuple[int, int, int, list[int]]) -> tuple[Trajectory, ...]:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return read(write(path, [dict(zip(keys, record, strict=True)) for record in records])).trajectories


def test_mooncake_sample_conversations() -> None:
    # Conversations of the whole trace whose lines were selected, and single requests that share the first block.
    found = read(SAMPLE)
    assert found.format == "mooncake"
    assert [len(trajectory.turns) for trajectory in found.trajectories] == [3, 1, 1, 1, 2, 1, 1, 3, 3, 2, 2, 4]
    first = found.trajectories[0].turns
    assert [turn.input_tokens for turn in first] == [2290, 2615, 3082]
    assert [turn.new_tokens for turn in first] == [2290, 2615 - 2290 - 316, 3082 - 2615 - 451]
    assert [turn.retained_tokens for turn in first] == [0, 4 * 512, 5 * 512]
    assert [turn.wait_ms for turn in first] == [0, 545_999, 642_000 - 545_999]
    # A request whose recorded prompt is shorter than the context of its parent still adds a token.
    assert found.trajectories[7].turns[1].new_tokens == 1


def test_mooncake_rule_needs_all_whole_blocks_more_than_one_and_growth(tmp_path: Path) -> None:
    parent = (0, 1300, 10, blocks((0, 3)))  # two whole blocks and a part
    grows = (5, 1400, 10, blocks((0, 2), (10, 1)))
    assert [len(t.turns) for t in mooncake(tmp_path / "a", parent, grows)] == [2]
    shorter = (5, 1290, 10, blocks((0, 2), (10, 1)))
    assert [len(t.turns) for t in mooncake(tmp_path / "b", parent, shorter)] == [1, 1]
    part = (5, 1400, 10, blocks((0, 1), (10, 2)))
    assert [len(t.turns) for t in mooncake(tmp_path / "c", parent, part)] == [1, 1]
    one_block = (0, 1000, 10, blocks((0, 2)))
    assert [len(t.turns) for t in mooncake(tmp_path / "d", one_block, grows)] == [1, 1]


def test_mooncake_parent_is_the_latest_holder_of_the_last_shared_block(tmp_path: Path) -> None:
    first, second = (0, 1100, 10, blocks((0, 3))), (1, 1200, 10, blocks((0, 2), (20, 1)))
    third = (2, 1300, 10, blocks((0, 2), (30, 1)))
    found = mooncake(tmp_path / "t", first, second, third)
    assert [[turn.arrival_ms for turn in t.turns] for t in found] == [[0, 1, 2]]


@given(st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
def test_session_extension_maps_delay_to_wait(
    tmp_path_factory: pytest.TempPathFactory, conversations: list[list[Turn]], timestamps: bool
) -> None:
    records = []
    for at in range(4):
        for name, conversation in enumerate(conversations):
            if at < len(conversation):
                turn = conversation[at]
                record: dict[str, Any] = {"session_id": name}
                record |= {"input_length": turn.new_tokens, "output_length": turn.output_tokens}
                if at:
                    record["delay"] = turn.wait_ms
                elif timestamps:
                    record["timestamp"] = 10 * name
                records.append(record)
    found = read(write(tmp_path_factory.mktemp("trace") / "s.jsonl", records)).trajectories
    assert len(found) == len(conversations)
    for name, (trajectory, conversation) in enumerate(zip(found, conversations, strict=True)):
        assert [t.new_tokens for t in trajectory.turns] == [t.new_tokens for t in conversation]
        assert [t.output_tokens for t in trajectory.turns] == [t.output_tokens for t in conversation]
        assert [t.input_tokens for t in trajectory.turns] == list(trajectory.prompts)
        expected = [10.0 * name * timestamps, *(t.wait_ms for t in conversation[1:])]
        assert [t.wait_ms for t in trajectory.turns] == expected


def test_sessions_without_delay_wait_as_long_as_between_their_arrivals(tmp_path: Path) -> None:
    records = [{"session_id": "a", "timestamp": at, "input_length": 5, "output_length": 2} for at in (100, 350)]
    assert [t.wait_ms for t in read(write(tmp_path / "s", records)).trajectories[0].turns] == [100, 250]
    with pytest.raises(UsageError, match=":2: field 'timestamp' is 350: it must not be before"):
        read(write(tmp_path / "s", [records[0] | {"timestamp": 400}, records[1]]))


@pytest.mark.parametrize(
    ("row", "file"),
    [("mooncake_conversation", "mooncake_conversation.jsonl.gz"), ("paper_replay_1265", "paper_replay_1265.jsonl")],
)
def test_published_statistics_of_whole_traces(row: str, file: str) -> None:
    if not (SHARED / "stats.csv").exists():
        pytest.skip("the whole traces and their stats.csv are not in ../shared/traces")
    with (SHARED / "stats.csv").open(newline="") as stats:
        published = next(line for line in csv.DictReader(stats) if line["trace"] == row)
    found = read(SHARED / file).trajectories
    every = [turn for trajectory in found for turn in trajectory.turns]
    later = [turn for trajectory in found for turn in trajectory.turns[1:]]
    new = [turn.input_tokens - turn.retained_tokens for turn in every]
    retained = [turn.retained_tokens for turn in (every if row.startswith("mooncake") else later)]
    columns: dict[str, list[float]] = {
        "turns": [len(trajectory.turns) for trajectory in found],
        "new": list(new),
        "retained": list(retained),
        "input": [turn.input_tokens for turn in every],
        "output": [turn.output_tokens for turn in every],
        "gap_s": [turn.wait_ms / 1000 for turn in later],
    }
    assert (int(published["requests"]), int(published["conversations"])) == (len(every), len(found))
    assert int(published["sum_input"]) == sum(turn.input_tokens for turn in every)
    assert int(published["sum_output"]) == sum(turn.output_tokens for turn in every)
    for name, values in columns.items():
        for percent in (50, 99):
            assert float(np.percentile(values, percent)) == pytest.approx(
                float(published[f"{name}_p{percent}"]), abs=0.0501
            ), f"{name} p{percent}"
