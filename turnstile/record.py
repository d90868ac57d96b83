"""The record of any PyTorch program, in three lines:

    from turnstile import record

    record.install("runs/x")  # on every rank, before or after init_process_group

From then on each call of torch.distributed in this process is noted in `runs/x/record/rank<k>.ring`, from where
`turnstile hang runs/x` (or `--pid`) reads it while the job hangs or after it died: who takes part (global ranks), root,
sizes, dtype, splits, peer and tag, the line of the program, what the host waits for, CUDA graph launches, DeepEP calls.
Flight Recorder dumps hold none of the last four.

Needs torch. What it cannot see: `tensor.item()` and other implicit waits for a device, and calls that other libraries
make to NCCL, MPI or NVSHMEM by themselves. Rings may be deleted at any time, but not shortened while their process
runs (a log rotation that truncates as root): a write behind the end of a mapped file ends a process by SIGBUS. Their
mode, 0400, stops everybody else.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import os

    from kernel.comm.tap.tap import Tap

TAP: Final = "kernel.comm.tap.tap"
"""Loaded by `install` only: it needs torch."""

__all__ = ["decision", "install", "uninstall"]


def install(directory: str | os.PathLike[str], *, rank: int | None = None, capacity: int = 65536) -> Tap:
    """Record what this process does with torch.distributed, in the run directory `directory` (the same on all ranks).

    rank: of this process; without it that of the default group, or of the environment (RANK as torchrun sets it,
    SLURM_PROCID, OMPI_COMM_WORLD_RANK), or from init_process_group on. capacity: events kept, 72 bytes each; a call is
    three or so. A second call returns the record that there is. Nothing is raised: where the ring cannot be written,
    or an argument is none, one line on standard error says so and the program goes on without.
    Returns the record, which ends with `uninstall()`, as a context manager, or with the program.
    """
    from kernel.comm.tap.tap import install as begin

    return begin(directory, rank, capacity)


def uninstall() -> None:
    """End the record of this process and take all wrappers out again. Idempotent."""
    if (loaded := sys.modules.get(TAP)) is not None:
        loaded.uninstall()


def decision(text: str) -> None:
    """Note something that this rank decides by itself, as "skips step 12: no tokens". Free where nothing is recorded.

    Where ranks part, the last decision of each says why. Texts are kept once each: leave out what always differs.
    """
    if (loaded := sys.modules.get(TAP)) is not None:
        loaded.decision(text)
