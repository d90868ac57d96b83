"""Rings that were cut, grew or were written over: nobody is blamed for what they have lost."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.record import Kind, read, ring_path
from kernel.record.layout import EVENT, USED_AT, WORD
from kernel.record.reader import read_head
from tests.installed_rings import Rank, pair
from verify.blame import Certainty, Class, Verdict
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.hang.text import as_text, timetable
from verify.readers.record import RecordReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernel.record.foreign import Group
    from verify.events import Event

SIZE, STEPS = 3, 30
SCENES = ("crossed", "missing", "raised", "differ", "slow", "well")
SECTOR = 512


def job(out: Path, scene: str) -> list[Rank]:
    """Three ranks after some steps, stuck by one fault, in which rank 1 has a part, or is not to blame."""
    ranks = pair(out, size=SIZE)
    for rank, world in ranks:
        one, other = rank.group("one", 0, 1, 2), rank.group("other", 0, 1, 2)
        for step in range(STEPS):
            rank.over(rank.call(world, line=step + 1), rank.call((one, other)[step % 2], "broadcast", root=0))
        _last(rank, world, one, other, scene)
    return [rank for rank, _ in ranks]


def _last(rank: Rank, world: Group, one: Group, other: Group, scene: str) -> None:
    if scene == "crossed":
        rank.wait(rank.call((other, one, one)[rank.rank], line=40))
    elif scene == "well":
        rank.over(rank.call(other, line=40))
    elif scene in ("slow", "differ") or rank.rank < 2:
        rank.wait(rank.call(world, size=8 if rank.rank == 2 and scene == "differ" else 4, line=40))
    elif scene == "raised":
        rank.text(Kind.EXCEPTION, "ValueError: bad batch")


class Jobs:
    """Those of all scenes, and what is said of them undamaged."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ranks = {scene: job(home / scene, scene) for scene in SCENES}
        self.truth = {scene: judged(home / scene).verdict for scene in SCENES}

    def damaged(self, scene: str, rank: int, change: Callable[[bytearray], None]) -> Path:
        """A copy in which the ring of one rank is changed."""
        to = self.home / "damaged"
        shutil.rmtree(to, ignore_errors=True)
        for each in range(SIZE):
            there = ring_path(to, each)
            there.parent.mkdir(parents=True, exist_ok=True)
            if each != rank:
                os.link(ring_path(self.home / scene, each), there)
                continue
            data = bytearray(ring_path(self.home / scene, each).read_bytes())
            change(data)
            there.write_bytes(data)
        return to

    def places(self, scene: str, rank: int) -> tuple[int, int, int]:
        """Where the strings of a ring begin, its events, and the one after the newest."""
        path = ring_path(self.home / scene, rank)
        fd = os.open(path, os.O_RDONLY)
        try:
            head = read_head(path, fd)
        finally:
            os.close(fd)
        newest = read(path).events[-1].number
        return head.strings_at, head.events_at, head.events_at + (newest + 2) % head.capacity * EVENT.size


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("damage"))


def judged(out: Path) -> Diagnosis:
    return diagnose_found(RecordReader().read(out))


def test_the_jobs_are_what_they_are_said_to_be(jobs: Jobs) -> None:
    told = {scene: (verdict.cls, verdict.ranks) for scene, verdict in jobs.truth.items()}
    assert told == {
        "crossed": (Class.CYCLE, (0,)), "missing": (Class.MISSING, (2,)), "raised": (Class.EXCEPTION, (2,)),
        "differ": (Class.MISMATCH, (2,)), "slow": (Class.BELOW, ()), "well": (Class.NONE, ()),
    }  # fmt: skip


@st.composite
def changes(draw: st.DrawFn, strings: int, events: int, end: int, size: int) -> tuple[str, int, int, bytes]:
    """What happens to a file, where, to how many bytes, and what is there then."""
    how = draw(st.sampled_from(("cut", "insert", "remove", "zero", "write")))
    at = draw(st.integers(64, size - 1) | st.integers(strings, strings + 3000) | st.integers(events, end))
    many = draw(st.integers(1, 300))
    if how in ("zero", "write"):
        at, many = at // SECTOR * SECTOR, draw(st.integers(1, 8)) * SECTOR
    # Zeroes over the newest event and all after it look like a ring that goes no further.
    assume(how != "zero" or not at < end <= at + many)
    return how, at, many, draw(st.binary(min_size=16, max_size=16).filter(any)) * (many // 16 + 1)


def changed(data: bytearray, how: str, at: int, many: int, new: bytes) -> None:
    match how:
        case "cut":
            del data[at:]
        case "insert":
            data[at:at] = new[:many]
        case "remove":
            del data[at : at + many]
        case "zero":
            data[at : at + many] = bytes(many)
        case _:
            data[at : at + many] = new[:many]


@given(data=st.data(), scene=st.sampled_from(SCENES), rank=st.integers(0, SIZE - 1))
def test_damage_blames_nobody(data: st.DataObject, scene: str, rank: int, jobs: Jobs) -> None:
    size = ring_path(jobs.home / scene, rank).stat().st_size
    how, at, many, new = data.draw(changes(*jobs.places(scene, rank), size))
    out = jobs.damaged(scene, rank, lambda whole: changed(whole, how, at, many, new))
    truth = jobs.truth[scene]
    try:
        found = judged(out).verdict
    except UsageError:
        return
    assert set(found.ranks) <= set(truth.ranks), found
    if found.certainty is not Certainty.UNDECIDED:
        assert (found.cls, found.ranks) == (truth.cls, truth.ranks), found


def told(jobs: Jobs, scene: str, rank: int, change: Callable[[bytearray], None]) -> tuple[Verdict, str]:
    diagnosis = judged(jobs.damaged(scene, rank, change))
    return diagnosis.verdict, as_text(diagnosis)


@pytest.mark.parametrize("at", [0.02, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("scene", ["crossed", "missing", "slow", "differ"])
def test_a_ring_that_is_cut_off_says_so_and_is_not_called_empty(jobs: Jobs, scene: str, at: float) -> None:
    _, events, end = jobs.places(scene, 1)
    where = events + int((end - events) * at) if at > 0.02 else 4096

    def cut(data: bytearray) -> None:
        del data[where:]

    found, text = told(jobs, scene, 1, cut)
    text = " ".join(text.split())
    assert (found.certainty, found.ranks) == (Certainty.UNDECIDED, ())
    assert f"ring of rank 1 is damaged (cut off at byte {where} of " in text
    assert "its ring is empty" not in text
    assert "has not called it" not in text


def test_a_ring_that_is_cut_off_behind_its_newest_event_has_lost_nothing(jobs: Jobs) -> None:
    _, _, end = jobs.places("missing", 1)

    def cut(data: bytearray) -> None:
        del data[end + EVENT.size :]

    found, text = told(jobs, "missing", 1, cut)
    assert (found.cls, found.ranks) == (Class.MISSING, (2,))
    assert "cut off, behind its newest event" in text
    path = ring_path(jobs.home / "damaged", 1)
    path.write_bytes(path.read_bytes()[: end - 1])
    assert judged(jobs.home / "damaged").verdict.ranks == ()
    assert "has not called" not in as_text(judged(jobs.home / "damaged"))


def _insert(data: bytearray, strings: int, events: int, end: int) -> None:
    data[strings + 40 : strings + 40] = bytes(8)


def _shift(data: bytearray, strings: int, events: int, end: int) -> None:
    del data[events + 100 * EVENT.size : events + 100 * EVENT.size + 8]
    data += bytes(8)


def _zero(data: bytearray, strings: int, events: int, end: int) -> None:
    data[end - 60 * EVENT.size : end - 20 * EVENT.size] = bytes(40 * EVENT.size)


def _nameless(data: bytearray, strings: int, events: int, end: int) -> None:
    WORD.pack_into(data, USED_AT, 0)


def _garbled(data: bytearray, strings: int, events: int, end: int) -> None:
    data[strings + 8 : strings + 16] = bytes(8)


def _scrambled(data: bytearray, strings: int, events: int, end: int) -> None:
    data[strings + 8 : strings + 16] = bytes([0xFF]) * 8


def _lengths(data: bytearray, strings: int, events: int, end: int) -> None:
    data[strings] ^= 1


def _half(data: bytearray, strings: int, events: int, end: int) -> None:
    data[end - 8 : end] = bytes(8)


def found_by(jobs: Jobs) -> tuple[Event, ...]:
    return RecordReader().read(jobs.home / "damaged").events


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_insert, "8 bytes longer than it was made"), (_shift, "of its slots hold no event"),
        (_zero, "40 of its events are lost"), (_nameless, "its table of names is damaged"),
        (_garbled, "its table of names is damaged"), (_scrambled, "its table of names is damaged"),
        (_lengths, "its table of names is damaged"), (_half, "1 of its slots holds no event"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scene", SCENES)
def test_each_damage_is_told_and_leaves_nothing_decided(
    change: Callable[[bytearray, int, int, int], None], what: str, scene: str, jobs: Jobs
) -> None:
    places = jobs.places(scene, 1)
    found, _ = told(jobs, scene, 1, lambda data: change(data, *places))
    recording = read(ring_path(jobs.home / "damaged", 1))
    assert what in recording.damage
    assert (found.certainty, found.ranks) == (Certainty.UNDECIDED, ())
    diagnosis = judged(jobs.home / "damaged")
    assert any(f"its ring is damaged ({recording.damage})" in line for line in diagnosis.unknown)
    assert not any("rank 1" in row and "not called" in row for row in timetable(diagnosis))
    groups = {call.communicator.name for event in found_by(jobs) for call in event.calls if call.communicator}
    assert {(1, name) for name in groups} <= diagnosis.situation.unsure


def test_a_ring_that_went_around_and_one_that_is_written_show_no_damage(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, 1, capacity=40)
    group = rank.group("world", 0)
    assert read(ring_path(tmp_path, 0)).damage == ""
    for _ in range(60):
        rank.over(rank.call(group))
        assert read(ring_path(tmp_path, 0)).damage == ""


def test_a_damage_elsewhere_takes_nothing_from_what_is_known(tmp_path: Path) -> None:
    """Rank 2 has no part in the call that lacks rank 1."""
    ranks = pair(tmp_path, size=3)
    for rank, _ in ranks:
        one = rank.group("one", 0, 1)
        if rank.rank < 2:
            rank.over(rank.call(one))
        if not rank.rank:
            rank.wait(rank.call(one))
        rank.over(rank.call(rank.group("own", rank.rank)))
    path = ring_path(tmp_path, 2)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes() + bytes(8))
    found = judged(tmp_path).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (1,))


def test_a_damaged_ring_gives_no_all_clear(tmp_path: Path) -> None:
    for rank, group in pair(tmp_path):
        rank.over(rank.call(group))
        rank.recorder.close()
    assert judged(tmp_path).code == 0
    path = ring_path(tmp_path, 1)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes() + bytes(8))
    assert judged(tmp_path).code == 3
