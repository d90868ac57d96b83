"""What this host's memory holds: how much of it a process may still have, and whether KV pools fit into it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from models import kv_bytes_per_token
from rollout.ranks.memory import gib

if TYPE_CHECKING:
    from kernel.topology import World
    from models.config import DecoderConfig


def available(root: Path = Path("/")) -> int | None:
    """Bytes that processes of this control group may have: what is free, at most the group's limit. None: not told."""
    found = []
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found.append(int(value.split()[0]) << 10)
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inner = base / path.lstrip("/")
        # Within a container the path is the host's, and only the root of what is mounted may be there.
        for folder in {base, inner, *(each for each in inner.parents if each.is_relative_to(base))}:
            found += [int(text) for text in _lines(folder / file) if text.isdecimal()]
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def ranks_here(world: World) -> int:
    """Ranks of this host: all, or those that torchrun started on it."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "") if os.environ.get("TORCHELASTIC_RUN_ID") else ""
    return min(world.size, int(told)) if told.isdecimal() else world.size


def check(
    config: DecoderConfig,
    world: World,
    dtype: str,
    *,
    kv_tokens: int,
    block_size: int,
    ranks: int,
    memory: int | None,
    default: bool = False,
) -> None:
    """Raise UsageError where the KV pools of this host's `ranks` are larger than `memory` bytes.

    Weights, which ranks may share with the page cache, are not counted: what is refused cannot fit. default: nobody
    asked for this size.
    """
    each = kv_bytes_per_token(config, world, dtype) * ranks
    if memory is None or each * kv_tokens <= memory:
        return
    whose = f"{ranks} ranks" if ranks > 1 else "a rank"
    asked = f"--kv-tokens is {kv_tokens} by default, which takes" if default else f"--kv-tokens {kv_tokens} takes"
    most = memory // each // block_size * block_size
    cure = f"at most --kv-tokens {most} fits, less what weights take" if most else "use fewer ranks, or more hosts"
    raise UsageError(
        f"{asked} {gib(each * kv_tokens)} of KV pools for {whose} on this host, of which {gib(memory)} can be had:"
        f" {cure}"
    )
