"""Installed records of receives from anybody: whoever sends ends the wait, so that no single rank is to blame."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.record import Kind
from tests.installed_rings import Rank, pair, told
from verify.blame import Certainty, Class
from verify.hang.text import as_text

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.record.foreign import Group


def recv(rank: Rank, group: Group, peer: int) -> None:
    rank.wait(rank.call(group, "recv", peer=peer, tag="0"))


def test_a_ring_holds_everybody_who_may_send(tmp_path: Path) -> None:
    """Rank 1 waits for anybody, and all others wait for rank 1."""
    ranks = pair(tmp_path, size=3)  # held: a ring that nobody maps is of a process that is gone
    for rank, group in ranks:
        rank.over(rank.call(group))
        recv(rank, group, -1 if rank.rank == 1 else 1)
    found = told(tmp_path, closed=True).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.CYCLE, Certainty.CERTAIN, (0, 1, 2))
    assert "rank 1 waits in a recv from anybody on world" in found.say.lower()
    assert "none of ranks 0 and 2 has sent" in found.say


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_rank_is_blamed_for_what_any_may_send(tmp_path: Path, size: int) -> None:
    """Rank 0 waits for rank 1, which waits for anybody; the others compute, and may send, or may be waited for."""
    ranks = pair(tmp_path, size=size)  # held: a ring that nobody maps is of a process that is gone
    for rank, group in ranks:
        rank.over(rank.call(group))
        if rank.rank == 1:
            recv(rank, group, -1)
        elif rank.rank == 0 and size > 2:
            recv(rank, group, 1)
    diagnosis = told(tmp_path)
    found = diagnosis.verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISSING, Certainty.CONDITIONAL, ())
    able = {2: "rank 0 does", 3: "rank 2 does", 4: "ranks 2 and 3 do"}[size]
    assert found.condition == f"{able} not send, or have others send, after all"
    assert "Rank 1 waits in a recv from anybody on world at train.py:7 in step" in found.say
    assert "> rank" not in as_text(diagnosis)


def test_a_rank_that_a_call_lacks_is_blamed_beside_a_recv_from_anybody(tmp_path: Path) -> None:
    ranks = pair(tmp_path, size=4)
    for rank, group in ranks:
        rank.over(rank.call(group))
    recv(*ranks[1], -1)
    (zero, world), (two, its) = ranks[0], ranks[2]
    both = zero.group("both", 0, 2), two.group("both", 0, 2)
    zero.wait(zero.call(both[0]))
    found = told(tmp_path).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (2,))
    assert (world.number, its.number) == (1, 1)


@pytest.mark.parametrize("all_", [False, True])
def test_a_sender_that_raised_is_the_fault_only_if_no_other_may_send(tmp_path: Path, all_: bool) -> None:
    ranks = pair(tmp_path, size=3)
    for rank, group in ranks:
        rank.over(rank.call(group))
    recv(*ranks[1], -1)
    for rank, _ in ranks[::2] if all_ else ranks[2:]:
        rank.text(Kind.EXCEPTION, "ValueError: bad batch")
    found = told(tmp_path).verdict
    if all_:
        assert (found.cls, found.certainty, found.ranks) == (Class.EXCEPTION, Certainty.CERTAIN, (0, 2))
    else:
        assert (found.cls, found.certainty, found.ranks) == (Class.MISSING, Certainty.CONDITIONAL, ())
        assert found.condition.startswith("rank 0 does not send")
