"""How torch's symmetric memory finds a group that torch.distributed has not made.

In a process of its own: what torch is told of a group stays for the process's life.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.gpu.page import HOUSE

pytest.importorskip("torch")

BEGIN = """
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import _symmetric_memory as symm_mem
from kernel.comm.exchange.symm import introduce
from kernel.comm.nccl import Communicator

def communicator(name):
    made = object.__new__(Communicator)
    made.name, made.store = name, dist.HashStore()
    made._group = dist.ProcessGroup(made.store, 0, 1)
    return made

one = communicator("D.TP of 0")
"""


def run(script: str) -> None:
    command = [sys.executable, "-c", BEGIN + script]
    done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_group_of_all_ranks_is_this_one_where_there_is_no_default_group() -> None:
    run("""
assert one.registered() == "D.TP of 0"
assert c10d._resolve_process_group("D.TP of 0") is one._group
assert c10d._resolve_process_group("0") is one._group
""")


def test_a_default_group_stays_what_it_is() -> None:
    run("""
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mine = c10d._resolve_process_group("0")
one.registered()
assert c10d._resolve_process_group("0") is mine is dist.group.WORLD
""")


def test_versions_that_ask_for_ranks_and_store_are_told_once() -> None:
    run("""
for name in ("D.TP of 0", "0", "D.TP of 0"):
    introduce(name, 0, 1, one.store)
assert symm_mem.is_symm_mem_enabled_for_group("D.TP of 0")
symm_mem.enable_symm_mem_for_group("0")  # which asks torch.distributed, and fails, where it was not told
try:
    c10d._SymmetricMemory.set_group_info("0", 0, 1, one.store)
except RuntimeError:
    pass
else:
    raise SystemExit("torch was not told of it")
""")
