"""Rings that were cut off or changed: what they have lost convicts nobody."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.record import Kind, read, ring_path
from kernel.record.layout import EVENT
from tests.installed_rings import Rank, pair, told
from tests.test_readers_record import Run
from verify.blame import Certainty, Class
from verify.hang.diagnosis import diagnose_found
from verify.hang.text import timetable
from verify.readers.damage import newest_gap

if TYPE_CHECKING:
    from pathlib import Path

CAPACITY = 40


def crossed(out: Path) -> list[Rank]:
    """A ring of two ranks and two groups, after two calls that met."""
    ranks = [Rank(out, number, capacity=CAPACITY) for number in (0, 1)]
    for number, rank in enumerate(ranks):
        one, other = rank.group("P", 0, 1), rank.group("D", 0, 1)
        rank.over(rank.call(one), rank.call(other))
        rank.wait(rank.call((one, other)[number]))
    return ranks


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files alone, whose writers are gone."""
    out = tmp_path_factory.mktemp("crossed")
    kept = crossed(out)
    shutil.copytree(out / "record", copy := tmp_path_factory.mktemp("copy") / "run" / "record")
    for ring in copy.iterdir():
        ring.chmod(0o600)
    del kept
    return copy.parent


@given(data=st.data())
def test_a_ring_that_was_cut_or_shifted_makes_its_rank_no_culprit(data: st.DataObject, whole: Path) -> None:
    """Wherever that is: the two wait in a ring, or what is left does not decide."""
    path = ring_path(whole, 1)
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content)))
    damaged = content[:at] if data.draw(st.booleans(), label="cut") else content[:at] + b"\xff" * 8 + content[at:]
    try:
        path.write_bytes(damaged)
        with suppress(UsageError):
            found = told(whole)
            verdict = found.verdict
            assert (verdict.cls, verdict.ranks) == (Class.CYCLE, (0, 1)) or not verdict.ranks, verdict.say
            assert verdict.certainty is not Certainty.CERTAIN or verdict.cls is Class.CYCLE
            if verdict.certainty is Certainty.UNDECIDED and "damaged" in verdict.say:
                assert "the ring of rank 1 is damaged" in verdict.say
                assert not any("not called" in line for line in timetable(found) if "rank 1 " in line)
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("kept", [0, 3])
def test_a_ring_whose_newest_events_are_cut_off_says_so(kept: int, tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    path = ring_path(tmp_path / "run", 1)
    events_at = path.stat().st_size - CAPACITY * EVENT.size
    with path.open("rb+") as file:
        file.truncate(events_at + (kept + 1) * EVENT.size)  # the first slot stays blank in the first lap
    assert len(read(path).events) == kept
    found = told(tmp_path / "run")
    assert (found.code, found.verdict.ranks) == (3, ())
    assert "the ring of rank 1 is damaged" in found.verdict.say
    lines = [line for line in found.unknown if "rank 1: its ring" in line]
    assert lines == ["run: rank 1: its ring is damaged: the file is cut off"]


def test_a_file_that_is_cut_behind_its_newest_event_has_lost_none(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    path = ring_path(tmp_path / "run", 1)
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - EVENT.size)
    assert (told(tmp_path / "run").verdict.cls, told(tmp_path / "run").verdict.ranks) == (Class.CYCLE, (0, 1))


@pytest.mark.parametrize(("later", "code"), [(False, 3), (True, 1)])
def test_an_event_that_cannot_be_read_may_have_been_the_call_until_a_later_one_counts_it(
    later: bool, code: int, tmp_path: Path
) -> None:
    (one, group), (other, same) = pair(tmp_path)
    for rank, its in ((one, group), (other, same)):
        rank.over(rank.call(its))
    number = other.recorder.event(Kind.DECISION, epoch=0)  # torn below
    if later:
        one.over(one.call(group))
        other.over(other.call(same))
    else:
        other.recorder.event(Kind.DECISION, epoch=0)
    one.wait(one.call(group))
    path = ring_path(tmp_path, 1)
    with path.open("rb+") as file:
        file.seek(path.stat().st_size - 1000 * EVENT.size + (number + 1) % 1000 * EVENT.size)
        file.write(bytes(8))
    assert newest_gap(read(path)) == number
    found = told(tmp_path)
    assert found.code == code
    assert found.verdict.ranks == ((1,) if later else ())


def test_a_run_of_ours_with_a_ring_that_was_cut_blames_nobody(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for journal in run.journals:
        journal.exchange("views", leaves=False)
        journal.exchange("views", leaves=True)
    run.journals[0].exchange("views", leaves=False)
    path = ring_path(tmp_path, 1)
    path.chmod(0o600)
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - (read(path).capacity - 1 - len(read(path).events)) * EVENT.size)
    found = diagnose_found(run.found())
    assert (found.code, found.verdict.ranks) == (3, ())
    assert "the ring of rank 1 is damaged" in found.verdict.say
