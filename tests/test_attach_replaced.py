"""A process whose record another job has taken the name of, or somebody has deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.record import ring_path
from tests.commands import until
from tests.test_live_threads import process
from tests.test_live_timed import REAL
from verify.attach import attach, ring_paths
from verify.live.named import _has_one_record

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = REAL
WRITER = """
import ctypes, sys
sys.path.insert(0, {house!r})
from kernel.record import Recorder, ring_path
recorder = Recorder(ring_path({out!r}, 1), rank=1, groups={{}}, capacity=16)
def tick():
    ctypes.CDLL(None).prctl(15, b"turnstile", 0, 0, 0)
    while True: time.sleep(0.2)
threading.Thread(target=tick, daemon=True).start()
open({ready!r}, "w").close()
threading.Event().wait()
"""


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A rank with a record and its thread, as `install` makes them."""
    monkeypatch.setenv("RANK", "1")
    house, ready = str(Path(__file__).resolve().parent.parent), tmp_path / "ready"
    with process(WRITER.format(house=house, out=str(tmp_path / "run"), ready=str(ready))) as pid:
        until(ready.exists)
        until(lambda: _has_one_record(Path(f"/proc/{pid}")))
        yield pid


@pytest.mark.parametrize(("again", "said"), [(True, "was replaced by that of a later job"), (False, "was deleted")])
def test_a_record_that_lost_its_name_is_told_of(again: bool, said: str, writer: int, tmp_path: Path) -> None:
    ring = ring_path(tmp_path / "run", 1)
    assert ring_paths(writer) == [ring]
    assert not any("its record" in line for line in attach([writer], spy=None).unknown)
    other = tmp_path / "other.ring"
    shutil.copy(ring, other)
    ring.unlink()
    if again:
        os.rename(other, ring)
    assert ring_paths(writer) == []
    lines = [line for line in attach([writer], spy=None, beside=True).unknown if "its record" in line]
    told = f"pid {writer}: its record {ring} {said} while it runs: not used; give each job a directory of its own"
    assert lines == [told]
    assert _has_one_record(Path(f"/proc/{writer}")), "its thread is the record's still"
