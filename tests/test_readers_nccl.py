"""NCCL's COLL lines: transfers of which nobody knows whether they were one launch, and pointers that are used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.test_readers_logs import call, init, verdict, world, written
from verify.blame import Class
from verify.hang.diagnosis import diagnose_found
from verify.readers import nccl_log

if TYPE_CHECKING:
    from pathlib import Path


def test_no_rank_waits_for_itself_in_transfers_that_may_not_be_one_launch(tmp_path: Path) -> None:
    """Rank 0 leaves after its send. The last transfers of ranks 1 and 2 look like groups that can never complete."""
    text = world(3) + "".join(init(rank, "0xb", rank // 2, 2, "0xbeef") for rank in (0, 2))
    text += call(0, "Send", "0xa", 3, "0x1", root=1)
    for op, peer, stream in (("Send", 2, "0x12"), ("Recv", 0, "0x1"), ("Recv", 2, "0x12"), ("Send", 2, "0x12")):
        text += call(1, op, "0xa", 3, stream, root=peer)
    text += call(2, "Recv", "0xa", 3, "0x12", root=1) + call(2, "Send", "0xa", 3, "0x12", root=1)
    text += call(2, "AllReduce", "0xb", 2, "0x2")
    told = diagnose_found(nccl_log.READER.read(written(tmp_path, text))).verdict
    assert (told.cls, told.ranks) == (Class.MISSING, (0,))


def test_a_pointer_that_is_used_again_names_another_communicator(tmp_path: Path) -> None:
    """Rank 0's second communicator has the pointer of its first, which was destroyed; rank 1's has another."""
    text = ""
    for rank, second in ((0, "0xa"), (1, "0xc")):
        text += init(rank, "0xa", rank, 2, "0xfeed") + call(rank, "AllReduce", "0xa", 2) * 3
        text += init(rank, second, rank, 2, "0xbeef") + call(rank, "AllReduce", second, 2) * (2 - rank)
    found = nccl_log.READER.read(written(tmp_path, text))
    told = verdict(found)
    assert (told.cls, told.ranks) == (Class.MISSING, (1,))
    assert "call 2 on 0xbeef" in told.say
    whole = text + call(1, "AllReduce", "0xc", 2)
    assert verdict(nccl_log.READER.read(written(tmp_path, whole, "whole.log"))).cls is Class.NONE
