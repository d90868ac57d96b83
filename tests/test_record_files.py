"""Ring files as a reader may find them: cut, damaged, foreign, half written; and making them, and a run of them."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.record import Kind, Recorder, Recording, read, read_run, ring_path
from kernel.record import reader as reader_room
from kernel.record.layout import EVENT, PREAMBLE
from kernel.request import Phase

GROUPS = {"D.TP": (0, 1, 2, 3), "P.TP": (0, 1, 2, 3), "P.ATP": (2, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a property."""
    return tmp_path_factory.mktemp("files")


def recorder(path: Path, **options: Any) -> Recorder:
    return Recorder(path, rank=2, groups=GROUPS, **{"capacity": 1000, "strings": 1 << 18, **options})


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with everything in it, that has wrapped."""
    rec = recorder(tmp_path_factory.mktemp("ring") / "r.ring", capacity=32, strings=4096, meta={"policy": "fine"})
    for number in range(45):
        rec.event(Kind.ENQUEUE, Phase.P, "P", 1 + number % 3, number, b=rec.site(f"AR {number % 5}"), site=rec.here())
        rec.sizes(1, number, (number, 2))
    return rec.path.read_bytes()


def survives(path: Path, data: bytes) -> Recording | None:
    """Reads, or is refused in one line."""
    path.write_bytes(data)
    try:
        recording = read(path)
    except UsageError as error:
        refused = str(error)
    else:
        refused = ""
    assert "\n" not in refused
    if refused:
        return None
    numbers = [event.number for event in recording.events]
    assert numbers == sorted(set(numbers))
    assert not numbers or numbers[-1] - numbers[0] < 32
    assert all(isinstance(recording.graph(event), tuple) for event in recording.events)
    assert isinstance(recording.sizes, dict)
    return recording


@given(data=st.data())
def test_a_file_cut_anywhere_loses_only_what_was_cut(folder: Path, ring: bytes, data: st.DataObject) -> None:
    events_at = PREAMBLE.unpack_from(ring)[-1]
    cut = data.draw(st.one_of(st.integers(0, 600), st.integers(events_at - 100, len(ring) - 1)))
    path = folder / "whole.ring"
    full = survives(path, ring)
    assert full
    part = survives(folder / "cut.ring", ring[:cut])
    if part is None:
        assert cut < 600
        return
    assert part.truncated
    assert not full.truncated
    kept = {event.number: event for event in part.events}
    assert all(kept.get(e.number, e)[:11] == e[:11] for e in full.events)
    slots = max(0, cut - events_at) // EVENT.size
    assert sorted(kept) == [event.number for event in full.events if (event.number + 1) % 32 < slots]


@given(data=st.data())
def test_damaged_bytes_never_crash_the_reader(folder: Path, ring: bytes, data: st.DataObject) -> None:
    damaged = bytearray(ring)
    events_at = PREAMBLE.unpack_from(ring)[-1]
    places = st.one_of(st.integers(0, 700), st.integers(events_at, len(ring) - 1))
    for _ in range(data.draw(st.integers(1, 8))):
        at, new = data.draw(places), data.draw(st.binary(min_size=1, max_size=80))
        damaged[at : at + len(new)] = new
    survives(folder / "damaged.ring", bytes(damaged))


@given(slot=st.integers(0, 31), payload=st.binary(min_size=EVENT.size - 16, max_size=EVENT.size - 16))
def test_a_damaged_event_is_none_or_has_names_for_what_it_lost(
    folder: Path, ring: bytes, slot: int, payload: bytes
) -> None:
    at = PREAMBLE.unpack_from(ring)[-1] + slot * EVENT.size
    recording = survives(folder / "slot.ring", ring[: at + 8] + payload + ring[at + EVENT.size - 8 :])
    assert recording
    assert len(recording.events) + recording.torn + recording.dropped == 90
    assert all(event.group in {"", *GROUPS} or event.group.startswith("?") for event in recording.events)


def test_a_stamp_that_does_not_belong_to_its_slot_is_torn(tmp_path: Path, ring: bytes) -> None:
    at = PREAMBLE.unpack_from(ring)[-1]
    stamp = (32 * 1000 + 1).to_bytes(8, "little")  # belongs to the next slot, and would make all others old
    recording = survives(tmp_path / "r.ring", ring[:at] + stamp + ring[at + 8 : at + 64] + stamp + ring[at + 72 :])
    assert recording
    assert (len(recording.events), recording.torn) == (31, 1)


def test_an_event_written_a_lap_late_is_torn(tmp_path: Path) -> None:
    """A thread that took its index and slept while the others went round the ring."""
    rec = recorder(tmp_path / "r.ring", capacity=4)
    for number in range(10):
        rec.event(Kind.BOUNDARY, a=number)
    data = bytearray(rec.path.read_bytes())
    at = PREAMBLE.unpack_from(data)[-1] + 9 % 4 * EVENT.size
    fields = list(EVENT.unpack_from(data, at))
    assert fields[0] == 9
    fields[0] = fields[-1] = 5
    EVENT.pack_into(data, at, *fields)
    rec.path.write_bytes(data)
    recording = read(rec.path)
    assert ([event.a for event in recording.events], recording.torn, recording.dropped) == ([6, 7, 9], 1, 6)


@given(st.binary(max_size=400), st.booleans())
def test_foreign_bytes_are_refused(folder: Path, data: bytes, magic: bool) -> None:
    assert survives(folder / "foreign.ring", b"TURNRING" * magic + data) is None


def test_a_slot_is_refused_while_it_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that mixes two events shows in the next one, even where its own stamps agree."""
    rec = recorder(tmp_path / "r.ring", capacity=3)
    for number in range(3):
        rec.event(Kind.BOUNDARY, a=number)
    honest, calls = reader_room.read_bytes, []

    def mixed(fd: int, at: int, size: int) -> bytes:
        data = honest(fd, at, size)
        if size == 3 * EVENT.size:
            calls.append(at)
            if len(calls) == 1:
                fields = list(EVENT.unpack_from(data, 2 * EVENT.size))
                fields[5] = 99
                return data[: 2 * EVENT.size] + EVENT.pack(*fields)
        return data

    monkeypatch.setattr(reader_room, "read_bytes", mixed)
    assert [event.a for event in read(rec.path).events] == [0, 2]


@pytest.mark.parametrize("field", [0, -1])
def test_a_half_written_slot_is_torn(tmp_path: Path, field: int) -> None:
    rec = recorder(tmp_path / "r.ring", capacity=4)
    for number in range(6):
        rec.event(Kind.BOUNDARY, a=number)
    data = bytearray(rec.path.read_bytes())
    at = PREAMBLE.unpack_from(data)[-1] + 4 % 4 * EVENT.size  # stamp 4, which is event 3
    fields = list(EVENT.unpack_from(data, at))
    assert fields[0] == 4
    fields[field] = 8
    EVENT.pack_into(data, at, *fields)
    rec.path.write_bytes(data)
    recording = read(rec.path)
    assert ([event.a for event in recording.events], recording.torn, recording.dropped) == ([2, 4, 5], 1, 2)


def test_what_is_no_ring_is_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "missing", tmp_path / "nul\0", Path(os.devnull)):
        with pytest.raises(UsageError, match=r"^record .*turnstile rollout[^\n]*$"):
            read(path)


def test_a_newer_format_is_named(tmp_path: Path, ring: bytes) -> None:
    (tmp_path / "r.ring").write_bytes(ring[:8] + b"\x09\x00" + ring[10:])
    with pytest.raises(UsageError, match="format 9"):
        read(tmp_path / "r.ring")


# -- making a ring, and a run of them --------------------------------------------------------------------------------


def test_what_cannot_be_made_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for options in ({"capacity": 0}, {"capacity": 1 << 40}, {"strings": 1}, {"meta": {"long": "x" * (1 << 23)}}):
        with pytest.raises(UsageError, match=r"^record [^\n]*$"):
            recorder(tmp_path / "r.ring", **options)
    with pytest.raises(UsageError, match=r"^record [^\n]*--out$"):
        recorder(tmp_path / "file" / "r.ring")
    with pytest.raises(UsageError, match=r"'no-such' .*D\.TP"):
        recorder(tmp_path / "r.ring").group("no-such")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if hasattr(os, "posix_fallocate"):
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UsageError, match="No space left"):
            recorder(tmp_path / "full" / "r.ring")
        assert list((tmp_path / "full").iterdir()) == []


def test_a_run_is_its_ranks(tmp_path: Path) -> None:
    for rank in (0, 3, 11):
        Recorder(ring_path(tmp_path, rank), rank=rank, groups={}).event(Kind.BOUNDARY, a=rank)
    (tmp_path / "record" / "notes.txt").write_text("something else")
    for run in (tmp_path, tmp_path / "record"):
        assert {rank: found.events[0].a for rank, found in read_run(run).items()} == {0: 0, 3: 3, 11: 11}
    ring_path(tmp_path, 3).rename(ring_path(tmp_path, 4))
    with pytest.raises(UsageError, match="of rank 3"):
        read_run(tmp_path)


def test_a_run_without_rings_is_refused(tmp_path: Path) -> None:
    for run in (tmp_path, tmp_path / "missing", tmp_path / "nul\0"):
        with pytest.raises(UsageError, match=r"^record [^\n]*$"):
            read_run(run)


def test_ranks_of_one_host_share_a_clock(tmp_path: Path) -> None:
    for rank in (0, 1):
        Recorder(ring_path(tmp_path, rank), rank=rank, groups={})
    first, second = read_run(tmp_path).values()
    assert first.boot == second.boot
    times = []
    recorders = [Recorder(tmp_path / f"{name}.ring", rank=0, groups={}) for name in "ab"]
    for rec in recorders * 3:
        rec.event(Kind.MARK)
        times.append(read(rec.path).events[-1].time_ns)
    assert all(before < after for before, after in pairwise(times))


CUT = """
import os, sys
from kernel.record import Kind, Recorder
path, size, first = sys.argv[1], int(sys.argv[2]), sys.argv[3]
made = Recorder(path, rank=0, groups={}, capacity=4096)
ways = {
    "event": lambda: made.event(Kind.DECISION),
    "write": lambda: made.write(int(Kind.CALL), 0, 0, 0, -1, 0, 0, 0),
    "site": lambda: made.site("new"),
    "sizes": lambda: made.sizes(0, 1, (1, 2)),
    "beat": made.beat,
    "close": made.close,
}
for number in range(4000):
    made.event(Kind.DECISION)
os.chmod(path, 0o600)
os.truncate(path, size)
for name in (first, *ways):
    ways[name]()
print("went on")
"""


def test_its_own_user_cannot_truncate_a_ring_by_mistake(tmp_path: Path) -> None:
    """A write behind the end of a mapped file ends a process by SIGBUS."""
    made = Recorder(tmp_path / "own" / "rank0.ring", rank=0, groups={})
    nobody = 65534 if os.getuid() == 0 else os.getuid()
    if os.getuid() == 0:
        for path in (made.path, made.path.parent):
            os.chown(path, nobody, -1)
    with contextlib.chdir(made.path.parent):
        tried = subprocess.run(["truncate", "-s", "0", "rank0.ring"], capture_output=True, user=nobody, check=False)
    assert tried.returncode != 0
    for _ in range(100_000):
        made.event(Kind.DECISION)
    assert read(made.path).events
    Recorder(made.path, rank=0, groups={})  # what comes after it takes its place


@pytest.mark.parametrize("first", ["site", "beat", "close"])
def test_a_program_that_beats_outlives_the_truncation_of_its_ring(tmp_path: Path, first: str) -> None:
    """A write behind the end of a mapped file ends a process by SIGBUS."""
    ring = tmp_path / "rank0.ring"
    ended = subprocess.run(
        [sys.executable, "-c", CUT, str(ring), "0", first], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
    assert ended.stderr == f"record {ring}: somebody truncated it: nothing more is recorded\n"
    with pytest.raises(UsageError, match=r"not a ring file|cut off"):
        read(ring)
