"""The reader of Flight Recorder dumps: whose they are, what they hold, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from tests.fr_dumps import Recorder, recorders, save, write
from verify.blame import Class
from verify.events import Kind, State
from verify.hang.diagnosis import diagnose_found
from verify.hang.text import as_text
from verify.readers import pickled
from verify.readers.dumps import together
from verify.readers.flight_recorder import READER, Decoder, decode
from verify.readers.gather import gather

REAL = Path(__file__).parent / "data" / "fr" / "h200" / "missing_member"
CONTENT = (REAL / "dump_rank_0").read_bytes()
PAIR = {"0": ("default_pg", (0, 1))}


def one_line(error: UsageError) -> None:
    assert "\n" not in str(error)


class Harm:
    """Would leave a file behind if anything of it were run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_dump_that_names_a_class_is_refused_and_nothing_runs(tmp_path: Path, protocol: int) -> None:
    file, harm = tmp_path / "dump_rank_0", tmp_path / "harm"
    file.write_bytes(pickle.dumps({"entries": [Harm(harm)]}, protocol=protocol))
    with pytest.raises(UsageError, match="unsafe pickle"):
        gather([file])
    assert not harm.exists()
    file.write_bytes(pickle.dumps({"entries": [], "version": Path}, protocol=protocol))
    with pytest.raises(UsageError, match="unsafe pickle"):
        gather([file])


def test_the_unpickler_refuses_what_the_check_would_let_pass() -> None:
    import io

    with pytest.raises(pickled.UnsafePickle, match="posix"):
        pickled._Unpickler(io.BytesIO(pickle.dumps(os.mkdir, protocol=2))).load()
    with pytest.raises(pickled.UnsafePickle, match="posix"):
        pickled._Careful(io.BytesIO(pickle.dumps(os.mkdir, protocol=2))).load()


def test_a_pickle_cannot_take_memory_that_its_size_does_not_explain() -> None:
    with pytest.raises(pickled.UnsafePickle, match="memo"):
        pickled.load(b"\x80\x02}r" + struct.pack("<I", 2**31) + b".")
    for text in (b"\x80\x02X\xff\xff\xff\xff.", b"\x80\x04\x8d" + b"\xff" * 8 + b".", b"\x80\x02B\xff\xff\xff\x7f."):
        with pytest.raises(ValueError, match=r"early|truncated|opcode"):
            pickled.load(text)


def test_tuples_nested_without_end_do_not_end_the_process() -> None:
    """Hashed as a key, they would exhaust the C stack."""
    nested, padding = b"N" + b"\x85" * 300_000, b"X" + struct.pack("<I", 2_000_000) + b"a" * 2_000_000
    with pytest.raises(ValueError, match="no text"):
        pickled.load(b"\x80\x02}" + nested + padding + b"s.")


def test_a_file_of_empty_lists_is_refused_before_they_are_made() -> None:
    for code in (b"]", b"}", b"\x85"):
        with pytest.raises(pickled.UnsafePickle, match="memory"):
            pickled.load(b"\x80\x02N" + code * 1_000_000 + b".")


def test_both_unpicklers_agree_on_real_dumps() -> None:
    import io

    assert pickled._Careful(io.BytesIO(CONTENT)).load() == pickled.load(CONTENT)


def test_every_truncation_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "dump_rank_0"
    for length in range(0, len(CONTENT), 7):
        file.write_bytes(CONTENT[:length])
        with pytest.raises(UsageError) as error:
            decode(file)
        assert str(file) in str(error.value)
        assert "\n" not in str(error.value)


def test_a_file_of_two_gigabytes_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "dump_rank_0"
    file.write_bytes(CONTENT[:100])
    os.truncate(file, 2 << 30)
    with pytest.raises(UsageError, match="more than 64 MiB"):
        gather([file])


@pytest.mark.parametrize(
    "content",
    [b"[1, 2]", b"hello", "привет".encode(), b"\x80\x02].", b'{"entries": 3, "pg_config": {}}', b"{" * 5000,
     b'{"pg_config": ' + b"[" * 100_000, b'{"entries": [{}], "pg_config": {}}', b"\x89PNG\r\n", b"(lp0\n."],
)  # fmt: skip
def test_other_formats_are_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "dump_rank_0"
    file.write_bytes(content)
    with pytest.raises(UsageError) as error:
        gather([file])
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["dump_rank_{}", "_dump_{}", "comm_lib_trace_rank_{}", "nccl_trace_rank_node7_{}", "nccl_trace_rank_10.0.0.12_{}",
     "{}", "{}.json", "rank{}.20260102.pickle", "fr-{}-of-2", "r{}.pkl"],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_ranks_from_any_file_name(tmp_path: Path, name: str, as_json: bool) -> None:
    groups = {"0": ("default_pg", (0, 1)), "1": ("own0", (0,)), "2": ("own1", (1,))}
    ranks = recorders(2, groups)
    for rank in ranks:
        rank.call("0")
    ranks[0].call("0", state="scheduled")
    found = gather([save(tmp_path / "dumps", ranks, name=name, as_json=as_json)])
    assert found.present == {0, 1}
    assert diagnose_found(found).verdict.ranks == (1,)


@pytest.mark.parametrize(
    "name",
    [
        "rank_{}_gpu_{other}", "rank{}_node{other}", "rank{}_attempt2", "dump_rank_{}.v1", "rank{}of4", "rank{}_world4",
        "local_rank{other}_rank{}", "rank{}_local_rank{other}", "node-rank-{other}-rank-{}", "nccl_trace_rank_1host_{}",
    ],
)  # fmt: skip
def test_the_number_by_the_word_rank_is_the_rank(tmp_path: Path, name: str) -> None:
    ranks = recorders(4, {"0": ("default_pg", range(4))})
    for rank in ranks:
        rank.call("0")
        if rank.rank != 3:
            rank.call("0", state="scheduled")
        write(tmp_path / "dumps", {rank.rank: rank.dump()}, name=name.format("{}", other=3 - rank.rank))
    verdict = diagnose_found(gather([tmp_path / "dumps"])).verdict
    assert (verdict.cls, verdict.ranks) == (Class.MISSING, (3,))


def test_two_dumps_of_a_rank_the_later_one_counts(tmp_path: Path) -> None:
    ranks = recorders(2, PAIR)
    for rank in ranks:
        rank.call("0")
    old = ranks[1].dump() | {"entries": []}
    folder = save(tmp_path / "dumps", ranks)
    write(folder, {1: old}, name="older_rank_{}")
    found = gather([folder])
    assert len(found.events) == 2
    assert any("older_rank_1" in line for line in found.unknown)


def test_gloo_groups_have_members_although_no_dump_lists_them(tmp_path: Path) -> None:
    """States are always `scheduled`, and the configuration holds one group without a name."""
    groups = {"0": ("default_pg", (0, 1, 2, 3)), "1": ("undefined", (0, 1)), "2": ("undefined", (2, 3))}
    ranks = recorders(4, groups, "gloo")
    for rank in ranks:
        rank.call("0", state="scheduled", retired=True)
        rank.call("1" if rank.rank < 2 else "2", state="scheduled", retired=True)
    ranks[0].call("1", state="scheduled", retired=False)
    dumps = {rank.rank: rank.dump() | {"pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}}} for rank in ranks}
    found = gather([write(tmp_path / "dumps", dumps)])
    members = {event.communicator.members for event in found.events if event.communicator is not None}
    assert members == {(0, 1, 2, 3), (0, 1), (2, 3)}
    assert any("inferred" in line for line in found.unknown)
    verdict = diagnose_found(found).verdict
    assert (verdict.cls, verdict.ranks) == (Class.MISSING, (1,))


def test_a_ring_that_wrapped_keeps_numbers_and_order(tmp_path: Path) -> None:
    """Rank 1's ring is older by three calls: the calls they share still meet."""
    ranks = recorders(2, PAIR)
    for rank in ranks:
        for size in range(1, 9):
            rank.call("0", size=size)
    ranks[0].entries = ranks[0].entries[3:]
    ranks[1].entries = ranks[1].entries[:-1]
    ranks[0].entries[-1]["state"] = "scheduled"
    found = diagnose_found(gather([save(tmp_path / "dumps", ranks)]))
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISSING, (1,))


def test_a_dump_that_may_have_lost_the_call_is_not_blamed(tmp_path: Path) -> None:
    """Rank 1's ring holds calls of another group only, and not from the start: it may have been there long ago."""
    groups = {"0": ("default_pg", (0, 1)), "1": ("own", (1,))}
    ranks = recorders(2, groups)
    ranks[0].call("0", state="scheduled")
    for _ in range(5):
        ranks[1].call("1")
    whole = save(tmp_path / "whole", ranks)
    assert diagnose_found(gather([whole])).verdict.ranks == (1,)
    ranks[1].entries = ranks[1].entries[2:]
    lost = diagnose_found(gather([save(tmp_path / "lost", ranks)]))
    assert (lost.code, lost.verdict.ranks) == (3, ())
    assert "may have lost" in lost.verdict.say
    for enqueued, completed, blamed, cls in ((0, 0, (1,), Class.MISSING), (1, 1, (0,), Class.DEVICE_STALL)):
        dump = ranks[1].dump()
        status = {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
        dump["pg_status"] = {"0": status, "1": {"last_enqueued_collective": 5, "last_completed_collective": 5}}
        own = ranks[0].dump()
        own["pg_status"] = {"0": {"last_enqueued_collective": 1, "last_completed_collective": -1}}
        found = diagnose_found(gather([write(tmp_path / f"status{enqueued}", {0: own, 1: dump})]))
        assert (found.verdict.cls, found.verdict.ranks) == (cls, blamed)


def test_transfers_are_counted_where_the_dumps_are_whole(tmp_path: Path) -> None:
    ranks = recorders(3, {"0": ("default_pg", (0, 1, 2))})
    for _ in range(3):
        ranks[0].call("0", "send 0->1")
        ranks[1].call("0", "recv 1<-0")
        ranks[1].call("0", "send 1->2")
        ranks[2].call("0", "recv 2<-1")
    found = gather([save(tmp_path / "dumps", ranks)])
    numbers = [event.sequence for event in found.events if event.kind is Kind.RECV and event.rank == 2]
    assert numbers == [0, 1, 2]
    ranks[1].entries = ranks[1].entries[3:]
    cut = gather([save(tmp_path / "cut", ranks)])
    assert all(event.sizes is None for event in cut.events if event.kind is Kind.RECV)
    assert any("paired in their order" in line for line in cut.unknown)
    assert diagnose_found(cut).code == 0


def test_mixed_versions_and_an_empty_json_dump(tmp_path: Path) -> None:
    ranks = recorders(2, PAIR)
    ranks[0].call("0", state="scheduled")
    empty = ranks[1].dump("2.4")
    del empty["entries"]
    folder = write(tmp_path / "dumps", {1: empty}, as_json=True)
    write(folder, {0: ranks[0].dump()})
    found = gather([folder])
    assert any("2.10, 2.4" in line for line in found.unknown)
    assert found.present == {0, 1}
    assert diagnose_found(found).verdict.ranks == ()


def test_the_call_site_is_the_program_s_own(tmp_path: Path) -> None:
    event = next(event for event in READER.read(REAL / "dump_rank_0").events if event.state is State.SCHEDULED)
    assert str(event.site) == "probe/hang.py:29 in P"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_any_value_in_any_field_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    ranks = [Recorder(rank, {"0": ("default_pg", (0, 1)), "1": ("tp", (0, 1))}) for rank in (0, 1)]
    for rank in ranks:
        rank.call("0", line=3)
        rank.call("1", f"send {rank.rank}->{1 - rank.rank}", state="scheduled")
    dumps = {rank.rank: rank.dump() for rank in ranks}
    for _ in range(data.draw(st.integers(1, 3))):
        dump = dumps[data.draw(st.sampled_from([0, 1]))]
        entries = [each for each in dump["entries"] if isinstance(each, dict)] if type(dump["entries"]) is list else []
        place = data.draw(st.sampled_from([each for each in (dump, *entries) if each]))
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUES)
    folder = tmp_path_factory.mktemp("fuzz")
    as_json = data.draw(st.booleans())
    try:
        found = gather([write(folder, dumps, as_json=as_json)])
    except UsageError as error:
        one_line(error)
        return
    diagnosis = diagnose_found(found)
    assert len(as_text(diagnosis).splitlines()) <= 25
    assert json.loads(json.dumps(diagnosis.to_dict()))["class"] == diagnosis.verdict.cls


@given(st.data())
def test_damaged_bytes_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(CONTENT)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.binary(max_size=4))
        content[at : at + data.draw(st.integers(0, 3))] = new
    file = tmp_path_factory.mktemp("fuzz") / "dump_rank_0"
    file.write_bytes(content)
    try:
        found = together([decode(file)])
    except UsageError as error:
        one_line(error)
        return
    as_text(diagnose_found(found))


def test_one_entry_that_a_pickle_repeats_is_read_in_the_room_of_the_file(tmp_path: Path) -> None:
    """A few bytes of a pickle name the same entry again and again; a batch of them is kept once, not each beginning."""
    (rank,) = recorders(1, {"0": ("default_pg", (0, 1))})
    rank.call("0")
    dump = rank.dump()
    dump["entries"] = rank.entries * 3_000
    rank.call("0")
    dump["entries"] += rank.entries[1:]
    (path,) = write(tmp_path / "dumps", {0: dump}).iterdir()
    decoder = Decoder()
    found = decoder.decode(path)
    assert [batch.entries for batch in decoder.batches if batch.entries > 1] == [3_000]
    (column,) = found.columns.values()
    assert [found.batches[kind].entries for kind in column.kinds] == [3_000, 1]
