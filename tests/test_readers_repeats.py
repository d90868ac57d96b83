"""Dumps are read the same whether their entries that repeat are left out of the pickle or not."""

from __future__ import annotations

import pickle
import pickletools
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from tests.fr_dumps import Recorder
from verify.readers import flight_recorder, repeats

if TYPE_CHECKING:
    from pathlib import Path

    from verify.readers.calls import Dump

GROUPS = {"0": ("default_pg", range(4)), "1": ("tp", range(2))}
OPERATIONS = ("all_reduce", "all_gather", "send 0->1", "coalesced")


def shared_texts(dump: dict[str, Any]) -> dict[str, Any]:
    """With equal texts as one object, as torch has them: pickles write each of them once."""
    for entry in dump["entries"]:
        entry.update({key: sys.intern(each) for key, each in entry.items() if isinstance(each, str)})
        entry["input_dtypes"] = [sys.intern(each) for each in entry["input_dtypes"]]
        entry["output_dtypes"] = [sys.intern(each) for each in entry["output_dtypes"]]
    return dump


@st.composite
def dumps(draw: st.DrawFn) -> dict[str, Any]:
    """What rank 0 recorded: a few calls many times, with stacks that entries share or not."""
    rank = Recorder(0, GROUPS)
    calls = draw(st.lists(st.tuples(
        st.sampled_from(sorted(GROUPS)), st.sampled_from(OPERATIONS), st.sampled_from([8, 300, 70_000]),
        st.sampled_from(["completed", "scheduled"]), st.none() | st.integers(1, 400),
    ), min_size=1, max_size=4))  # fmt: skip
    start = draw(st.sampled_from([0, 200, 65_000, 1 << 40]))
    step = draw(st.sampled_from([1, 7, 10**9]))
    frames: dict[int | None, list[dict[str, Any]]] = {}
    shared = draw(st.booleans())
    for at in range(draw(st.integers(1, 60))):
        name, operation, size, state, line = calls[at % len(calls)]
        rank.call(name, operation, size, state=state, line=line, same=draw(st.integers(0, 9)) == 0)
        entry = rank.entries[-1]
        entry["record_id"] += start
        entry["collective_seq_id"] += start
        entry["time_created_ns"] += at * step
        if entry["time_discovered_completed_ns"] is not None:
            entry["time_discovered_completed_ns"] += at * step
        if draw(st.integers(0, 9)) == 0:
            entry["duration_ms"] = 0.5 * at
        if shared:
            entry["frames"] = frames.setdefault(line, entry["frames"])
    dump = rank.dump()
    if draw(st.integers(0, 3)):
        shared_texts(dump)
    if draw(st.booleans()):
        dump = dict(reversed(dump.items()))
    return dump


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a dump is."""
    monkeypatch.setattr(repeats, "SMALLEST", 1)


def essence(dump: Dump) -> tuple[Any, ...]:
    columns = [
        (key, list(column.rows), list(column.seqs), [dump.batches[kind] for kind in column.kinds])
        for key, column in dump.columns.items()
    ]
    return (
        dump.version, dump.groups, dump.status, dump.ids, columns, dump.rows, dump.entries, dump.moved_ns, dump.whole,
        sorted(dump.odd), dump.again,
    )  # fmt: skip


def read(path: Path, decoder: flight_recorder.Decoder) -> tuple[Any, ...] | str:
    try:
        return essence(decoder.decode(path))
    except UsageError as error:
        return str(error)


def both(path: Path, content: bytes, decoder: flight_recorder.Decoder) -> None:
    """Read it with all that repeats left out, and whole."""
    path.write_bytes(content)
    thin = read(path, decoder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "SMALLEST", 1 << 40)
        assert read(path, flight_recorder.Decoder()) == thin


@pytest.mark.usefixtures("always")
@given(dump=dumps(), other=dumps(), optimized=st.booleans(), protocol=st.integers(2, 5))
def test_it_says_the_same(
    dump: dict[str, Any], other: dict[str, Any], optimized: bool, protocol: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Of two dumps that one decoder reads, as Python writes them, and without places in the memo that nobody reads."""
    decoder = flight_recorder.Decoder()
    for each in (dump, other, dump):
        content = pickle.dumps(each, protocol=protocol)
        both(tmp_path_factory.getbasetemp() / "r0", pickletools.optimize(content) if optimized else content, decoder)


@pytest.mark.usefixtures("always")
@given(dump=dumps(), data=st.data())
def test_damage_is_seen_as_it_is_in_the_whole(
    dump: dict[str, Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(pickle.dumps(dump, protocol=2))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        junk = st.binary(max_size=6) | st.sampled_from([b"u}", b"ue(}", b"h\x01", b"q\x01", b"K\xff", b"."])
        content[at : at + data.draw(st.integers(0, 6))] = data.draw(junk)
    both(tmp_path_factory.getbasetemp() / "r0", bytes(content), flight_recorder.Decoder())


def many(calls: int) -> bytes:
    rank = Recorder(0, GROUPS)
    for at in range(calls):
        rank.call("0", OPERATIONS[at % 2], line=at % 3)
    return pickle.dumps(shared_texts(rank.dump()), protocol=2)


@pytest.mark.parametrize("calls", [999, 1000, 1001, 2500])
def test_little_is_left_of_a_dump_that_repeats(calls: int, tmp_path: Path) -> None:
    """Also across the batches of a thousand in which lists are written."""
    found = repeats.thin(many(calls), {})
    assert found is not None
    assert len(found.order) == len(found.rows) == calls
    assert found.left < 40
    assert len(pickle.loads(found.data)["entries"]) == found.left
    both(tmp_path / "r0", many(calls), flight_recorder.Decoder())


def test_what_shapes_are_known_decides_nothing(tmp_path: Path) -> None:
    """Two dumps whose fields have each other's places in the memo."""
    ranks = []
    for swapped in (False, True):
        rank = Recorder(0, GROUPS)
        for _ in range(300):
            rank.call("0")
        for entry in rank.entries:
            values = entry.pop("collective_seq_id"), entry.pop("p2p_seq_id")
            fields = [("collective_seq_id", values[0]), ("p2p_seq_id", values[1])]
            entry.update(reversed(fields) if swapped else fields)
        ranks.append(pickle.dumps(shared_texts(rank.dump()), protocol=2))
    decoder = flight_recorder.Decoder()
    for content in ranks * 2:
        both(tmp_path / "r0", content, decoder)


def test_an_entry_that_refers_into_one_that_was_left_out_makes_it_be_read_whole(tmp_path: Path) -> None:
    rank = Recorder(0, GROUPS)
    for _ in range(300):
        rank.call("0")
    rank.entries[-1]["input_sizes"] = rank.entries[200]["input_sizes"]
    both(tmp_path / "r0", pickle.dumps(shared_texts(rank.dump()), protocol=2), flight_recorder.Decoder())
