"""Ranks that torchrun starts, over TCP and gloo: the same tokens as over shared memory on one host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kernel.topology import World
from models.tiny import write_checkpoint
from tests.hosts_program import generate

ROOT = Path(__file__).parents[1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def torchrun(size: int, *program: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `python -m program` under torchrun with `size` processes on loopback."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(size),
        "--master-addr", "127.0.0.1", "--master-port", str(_free_port()), "-m", *program,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


WORLDS = [
    World(2, 2, 2),
    pytest.param(World(4, 2, 4), marks=pytest.mark.slow),
    pytest.param(World(2, 2, 2, exchange="split"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("world", WORLDS, ids=str)
async def test_torchrun_gives_the_tokens_of_one_host(world: World, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    sizes = [str(world.size), str(world.adp), str(world.ep), world.exchange]
    ended = torchrun(world.size, "tests.hosts_program", str(tmp_path / "model"), str(tmp_path / "out"), *sizes)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found == await generate(str(tmp_path / "model"), world)


def test_a_world_of_another_size_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    ended = torchrun(2, "turnstile", "rollout", "--world", "4", "--adp", "2", "--ep", "4",
                     "--model", str(tmp_path / "model"), "--out", str(tmp_path / "run"),
                     "--length-scale", "0.02", "--fraction", "0.03")  # fmt: skip
    assert ended.returncode != 0
    assert "--world 4, but torchrun started 2 processes" in ended.stderr


STOPS = """
import ctypes, os, sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "kernel.comm.exchange.gloo" or os.environ.get("RANK") != "1":
            return None
        spec = PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.GlooWire.__init__ = lambda *_: ctypes.PyDLL(None).sleep(120)  # all its threads stand

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
def test_a_rank_that_stops_while_the_exchange_is_built_is_alone_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STOPS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))
    ended = torchrun(2, "turnstile", "rollout", "--world", "2", "--adp", "2", "--ep", "2", "--exchange", "gloo",
                     "--rank-timeout", "6", "--out", str(tmp_path / "run"),
                     "--length-scale", "0.02", "--fraction", "0.03")  # fmt: skip
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("turnstile: ")]
    assert said, ended.stderr
    assert said[0].startswith("turnstile: rank 1 at 127.0.0.1 has not answered for 6 s")
