"""A gloo job that gets stuck, dumps what PyTorch recorded and where its threads stand, and ends.

Arguments: rank, size, scene, folder. Run as a program, one process a rank. Each writes `dump_rank_<rank>` and
`rank<rank>.txt` into the folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main(rank: int, size: int, scene: str, out: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=size)
    pair = dist.new_group([0, 1])
    data = torch.ones(8)
    dist.all_reduce(data)
    if rank < 2:  # a dump of gloo tells the members of a group only by their calls
        dist.all_reduce(data, group=pair)

    def dump() -> None:
        # All ranks are where they will stay: each says so once it is about to enter its last call.
        while len(list(out.glob("last_*"))) < size:
            time.sleep(0.05)
        time.sleep(1.5)
        (out / f"dump_rank_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
        with open(out / f"rank{rank}.txt", "w") as file:
            faulthandler.dump_traceback(file)
        (out / f"left_{rank}").touch()
        while len(list(out.glob("left_*"))) < size:
            time.sleep(0.05)
        os._exit(0)

    threading.Thread(target=dump, daemon=True).start()
    (out / f"last_{rank}").touch()
    with contextlib.suppress(RuntimeError):  # a peer has ended first, after all had dumped
        globals()[scene](rank, data, dist, pair)
    threading.Event().wait()


def completes(rank: int, data: Any, dist: Any, pair: Any) -> None:
    for _ in range(3):
        dist.all_reduce(data)


def missing(rank: int, data: Any, dist: Any, pair: Any) -> None:
    """The last rank leaves out a call, and looks for work."""
    if rank != dist.get_world_size() - 1:
        dist.all_reduce(data)


def reads(rank: int, data: Any, dist: Any, pair: Any) -> None:
    """The last rank reads a pipe that nobody writes, before the call."""
    if rank == dist.get_world_size() - 1:
        os.read(os.pipe()[0], 1)
    dist.all_reduce(data)


def crossing(rank: int, data: Any, dist: Any, pair: Any) -> None:
    """Rank 0 is in the pair's call, rank 1 in that of all."""
    if rank == 0:
        dist.all_reduce(data, group=pair)
        dist.all_reduce(data)
    else:
        dist.all_reduce(data)
        if rank == 1:
            dist.all_reduce(data, group=pair)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
