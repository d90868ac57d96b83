"""Following a ring comes to the same as reading it at once, however it grows, wraps, tears or is replaced."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.record import Kind, Recorder, RingFollower, read
from kernel.record import follow as following
from kernel.record.layout import EVENT

if TYPE_CHECKING:
    from pathlib import Path



def recorder(path: Path, **options: Any) -> Recorder:
    ticks = iter(range(1000, 1 << 60))
    return Recorder(
        path, rank=2, groups={"g": (1, 2)}, clock=lambda: next(ticks), **{"capacity": 64, "strings": 1 << 16, **options}
    )


def write(rec: Recorder, count: int, first: int) -> None:
    for number in range(first, first + count):
        rec.event(Kind.MARK, a=number, b=rec.site(f"text {number}"), site=rec.site(f"x.py:{number % 7} f"))


@given(counts=st.lists(st.integers(0, 90), min_size=1, max_size=6), capacity=st.integers(1, 64))
def test_looks_together_hold_each_event_once(
    counts: list[int], capacity: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rec = recorder(tmp_path_factory.mktemp("f") / "r.ring", capacity=capacity)
    follower, known, written = RingFollower(rec.path), list[Any](), 0
    for count in counts:
        write(rec, count, written)
        written += count
        recording, fresh = follower.look()
        known = list(recording.events) if fresh else known + recording.events
        whole = read(rec.path)
        # What is not fresh goes on without a gap; what is fresh is what the ring holds.
        assert known[-len(whole.events) :] == whole.events if whole.events else known == []
        assert [event.number for event in known] == list(range(known[0].number if known else 0, written))
        assert fresh or count <= capacity
        assert recording.torn == 0
    assert not follower.look().recording.events


def slot_of(rec: Recorder, number: int) -> int:
    return rec._events_at + (number + 1) % rec._capacity * EVENT.size


@given(data=st.data())
def test_an_event_that_is_written_late_is_handed_out_by_the_look_that_finds_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rec = recorder(tmp_path_factory.mktemp("f") / "r.ring")
    follower, seen = RingFollower(rec.path), list[int]()
    before = data.draw(st.integers(0, 10))
    write(rec, before, 0)
    seen += [event.number for event in follower.look().recording.events]
    write(rec, 20, before)
    late = data.draw(st.sets(st.integers(before, before + 19), max_size=5))
    whole = {}
    for number in late:
        at = slot_of(rec, number)
        whole[number] = bytes(rec._map[at : at + EVENT.size])
        # Nothing of it, or only its first half: a thread that was interrupted there.
        part = whole[number][:40] if number % 2 else b""
        rec._map[at : at + EVENT.size] = part.ljust(EVENT.size, b"\0")
    recording, fresh = follower.look()
    assert not fresh
    found = [event.number for event in recording.events]
    assert found == sorted(set(range(before, before + 20)) - late)
    # What is missing behind the newest event may never have been begun.
    assert recording.torn == len([number for number in late if found and number < found[-1]])
    seen += found
    for number, data_ in whole.items():
        at = slot_of(rec, number)
        rec._map[at : at + EVENT.size] = data_
    recording = follower.look().recording
    assert recording.torn == 0
    seen += [event.number for event in recording.events]
    assert sorted(seen) == list(range(before + 20))


def test_a_slot_that_two_readings_show_differently_waits_for_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rec = recorder(tmp_path / "r.ring")
    follower = RingFollower(rec.path)
    follower.look()
    write(rec, 3, 0)
    plain, slots = following.read_bytes, [0]

    def mixed(fd: int, at: int, size: int) -> bytes:
        data = plain(fd, at, size)
        slots[0] += at >= rec._events_at
        if at < rec._events_at or slots[0] > 1:
            return data
        fields = list(EVENT.unpack_from(data, EVENT.size))  # the second event, half of it another one's
        fields[5] = 99
        return data[: EVENT.size] + EVENT.pack(*fields) + data[2 * EVENT.size :]

    monkeypatch.setattr(following, "read_bytes", mixed)
    found = [event.a for event in follower.look().recording.events]
    found += [event.a for event in follower.look().recording.events]
    assert 99 not in found
    assert sorted(found) == [0, 1, 2]


def test_what_lies_behind_a_gap_that_nobody_will_fill_counts_as_overwritten(tmp_path: Path) -> None:
    rec = recorder(tmp_path / "r.ring", capacity=1024)
    write(rec, 600, 0)
    for number in (100, 590):
        at = slot_of(rec, number)
        rec._map[at : at + EVENT.size] = bytes(EVENT.size)
    recording, fresh = RingFollower(rec.path).look()
    assert fresh
    assert [event.number for event in recording.events] == [*range(101, 590), *range(591, 600)]
    assert (recording.dropped, recording.torn) == (101, 1), "the late one may still come"


def test_a_ring_that_takes_the_place_of_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    rec = recorder(tmp_path / "r.ring")
    follower = RingFollower(rec.path)
    write(rec, 5, 0)
    assert follower.look().fresh
    again = recorder(tmp_path / "r.ring")
    write(again, 2, 100)
    recording, fresh = follower.look()
    assert (fresh, [event.a for event in recording.events]) == (True, [100, 101])
    again.close()
    assert follower.look().recording.closed_ns is not None
    again.path.unlink()
    write(again, 1, 102)
    assert [event.a for event in follower.look().recording.events] == [102], "its file is open still"


def test_a_look_reads_what_is_new_and_little_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the ring."""
    rec = recorder(tmp_path / "r.ring", capacity=1 << 16)
    write(rec, 3000, 0)
    follower = RingFollower(rec.path)
    follower.look()
    total = [0]
    plain = following.read_bytes

    def counted(fd: int, at: int, size: int) -> bytes:
        total[0] += size
        return plain(fd, at, size)

    monkeypatch.setattr(following, "read_bytes", counted)
    write(rec, 10, 3000)
    assert len(follower.look().recording.events) == 10
    assert total[0] < 5 * following.AHEAD * EVENT.size


def test_what_is_no_ring_is_one_line(tmp_path: Path) -> None:
    for make in (lambda path: path.mkdir(), lambda path: os.mkfifo(path), lambda path: path.write_bytes(b"x" * 500)):
        path = tmp_path / "x.ring"
        make(path)
        with pytest.raises(UsageError, match=r"x\.ring") as caught:
            RingFollower(path).look()
        assert "\n" not in str(caught.value)
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(UsageError, match="No such file"):
        RingFollower(tmp_path / "absent.ring").look()


def test_a_ring_that_is_cut_while_it_is_followed_is_no_crash(tmp_path: Path) -> None:
    rec = recorder(tmp_path / "r.ring")
    write(rec, 5, 0)
    follower = RingFollower(rec.path)
    follower.look()
    rec.path.chmod(0o600)
    os.truncate(rec.path, 4096)
    assert not follower.look().recording.events
    os.truncate(rec.path, 10)
    with pytest.raises(UsageError, match="cut off"):
        follower.look()


@given(counts=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=12))
def test_what_is_held_is_handed_out_by_the_next_look(
    counts: list[tuple[int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rec = recorder(tmp_path_factory.mktemp("f") / "r.ring", capacity=4096)
    follower, known, written = RingFollower(rec.path), list[int](), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "HELD", 64)
        for count, look in counts:
            for number in range(written, written + count):
                rec.event(Kind.PLAN, a=number)
            rec.event(Kind.MARK, b=rec.site("a remark"))
            written += count + 1
            newest, closed = follower.hold()
            assert (newest, closed) == (max([each.number for each in read(rec.path).events if each.kind is Kind.PLAN],
                                            default=-1), False)  # fmt: skip
            if look:
                recording, fresh = follower.look()
                found = [event.number for event in recording.events]
                known = found if fresh else known + found
                assert recording.dropped == known[0]
                assert recording.torn == 0
                assert known == list(range(known[0], written))
                assert known[0] == 0 or len(known) >= 32
