"""The files of a run's directory: made once, each written whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGES: Final = ("turnstile", "torch", "numpy", "safetensors", "uvloop", "matplotlib")


def write(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: a reader sees the old file or the new one."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(data)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` as indented JSON, in one step."""
    write(path, (json.dumps(value, indent=2) + "\n").encode())


def directory(out: Path | None, *, resume: bool = False) -> Path:
    """Make the run's directory: `out`, or `runs/<UTC time>`.

    Raises UsageError when it holds a run already, unless that is to be resumed, or when it cannot be made.
    """
    named = out is not None
    path = out or Path("runs") / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    base, again = path, 1
    while not named and path.exists():
        again += 1
        path = base.with_name(f"{base.name}-{again}")
    if (path / "run.json").exists() and not resume:
        raise UsageError(
            f"--out {path}: it holds a run already (run.json): choose another directory, remove it, or --resume it"
        )
    if resume and not (path / "run.json").exists():
        raise UsageError(f"--resume: {path} holds no run (run.json): name its directory with --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}: choose a directory that can be written") from None
    return path


def slug(policy: str) -> str:
    """A policy's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", Path(policy).name).strip("-.") or "policy"


def surroundings() -> dict[str, Any]:
    """What a run should say about where it ran: command, versions, host and, in a checkout, the commit."""
    return {
        "command": ["turnstile", *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"python": platform.python_version(), **_versions()},
        "host": {"system": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()},
        **({"commit": commit} if (commit := _commit()) else {}),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The checkout's commit, with `-dirty` for uncommitted changes; None when the package is not in its checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
