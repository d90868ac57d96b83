"""Blocks that are taken and freed again and again cost their pages once."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

ROUNDS, BLOCKS, BYTES = 20, 8, 4 << 20
PROGRAM = f"""
import resource, sys, threading
from rollout.ranks import heap
if sys.argv[1] == "kept":
    assert heap.keep_pages()

def work():
    for _ in range({ROUNDS}):
        blocks = [b"x" * {BYTES} for _ in range({BLOCKS})]
        del blocks

thread = threading.Thread(target=work)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> int:
    """Pages that were mapped anew in all rounds."""
    command, env = [sys.executable, "-c", PROGRAM, how], {**os.environ, **environment}
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_pages_are_mapped_once() -> None:
    pages = BLOCKS * BYTES // os.sysconf("SC_PAGESIZE")
    assert faults("kept") < 3 * pages < faults("plain")
    assert faults("kept", MALLOC_MMAP_THRESHOLD_="131072", MALLOC_TRIM_THRESHOLD_="131072") > 3 * pages
