"""Ranks that torchrun starts, over TCP and gloo: the same tokens as over shared memory on one host."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kernel.topology import World
from models.tiny import write_checkpoint
from tests.hosts_program import generate

if TYPE_CHECKING:
    from pathlib import Path


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
