"""The files of a run's directory: made once, each written whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import stat
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel import files
from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOM: Final = 1 << 16
"""Bytes that must fit on the disk before anything starts; records take their own before ranks write them."""
PACKAGES: Final = ("turnstile", "torch", "numpy", "safetensors", "uvloop", "matplotlib")


def write(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: a reader sees the old file or the new one. Raises OSError that names it."""
    try:
        with files.replacing(path) as fd, open(fd, "wb", closefd=False) as file:
            file.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` as indented JSON, in one step."""
    write(path, (json.dumps(value, indent=2) + "\n").encode())


def directory(out: Path | None, *, resume: bool = False, made: list[Path] | None = None) -> Path:
    """Make the run's directory, for this user alone: `out`, or `runs/<UTC time>`.

    Raises UsageError when it holds a run already, unless that is to be resumed, when it cannot be made or written, or
    when somebody else could change what is in it. made: gets the directories that were made, the innermost first;
    when this raises, they are gone again.
    """
    made = [] if made is None else made
    named = out is not None
    path = out or Path("runs") / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    base, again = path, 1
    while not named and path.exists():
        again += 1
        path = base.with_name(f"{base.name}-{again}")
    try:
        begun = (path / "run.json").exists()
    except OSError as error:
        raise UsageError(f"--out {str(path)[:80]}...: {error.strerror}: choose another directory") from None
    if begun and not resume:
        raise UsageError(
            f"--out {path}: it holds a run already (run.json): choose another directory, remove it, or --resume it"
        )
    if resume and not begun:
        raise UsageError(f"--resume: {path} holds no run (run.json): name its directory with --out")
    if (file := next((each for each in (*reversed(path.parents), path) if each.exists() and not each.is_dir()), None)):
        what = "it is a file" if file == path else f"{file} above it is a file"
        raise UsageError(f"--out {path}: {what}: choose a directory that can be written")
    try:
        for above in reversed(path.parents):
            _make(above, 0o777, made)
        _make(path, 0o700, made)
        check_private(path)
        _check_way(path)
        if links := sorted(each.name for each in path.iterdir() if each.is_symlink()):
            raise UsageError(f"--out {path}: {links[0]} in it is a link, which is not followed: remove it")
        if resume:
            for name in ("run.json", "requests.jsonl"):
                if (path / name).exists():
                    check_private(path / name)
        probe = path / f".room.{os.getpid()}"
        try:
            probe.write_bytes(bytes(ROOM))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        remove(made)
        raise UsageError(
            f"--out {path}: {error.strerror}: choose a directory that can be written, on a disk with room"
        ) from None
    except BaseException:
        remove(made)
        raise
    return path


def _make(path: Path, mode: int, made: list[Path]) -> None:
    """Make a directory where there is none. Raises OSError."""
    if path.is_dir():
        return
    made.insert(0, path)  # before, so that an interruption in between leaves nothing
    try:
        path.mkdir(mode=mode)
    except OSError:
        made.remove(path)
        if not path.is_dir():  # else another has made it meanwhile
            raise


def remove(made: Sequence[Path]) -> None:
    """Take away directories, the innermost first, as far as they are empty."""
    for path in made:
        with suppress(OSError):
            path.rmdir()


def hold(path: Path, *, resume: bool) -> int:
    """Keep every other run out of the directory for as long as the descriptor that this returns is open.

    Raises UsageError when a run is going on in it, or when one has begun there since it was looked at.
    """
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise UsageError(f"--out {path}: another run is going on in it: wait for its end, or choose another") from None
    except OSError:
        return held  # a file system without locks
    if (path / "run.json").exists() and not resume:
        os.close(held)
        raise UsageError(f"--out {path}: another run has just begun in it: choose another directory")
    return held


def check_private(path: Path, option: str = "--out ") -> None:
    """Raise UsageError unless this user alone can change it. option: that named it."""
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise UsageError(f"{option}{path}: it belongs to another user (uid {found.st_uid}): choose one of your own")
    if found.st_mode & 0o022:
        raise UsageError(
            f"{option}{path}: others may write it (mode {found.st_mode & 0o7777:o}): `chmod go-w` it, or choose another"
        )


def _check_way(path: Path) -> None:
    """Raise UsageError where another user could put another directory in the place of this one, or of one above it.

    A user's own group counts as the user (umask 002 is the default of many systems). Root, who works in a directory of
    somebody else's (a container's mounted checkout), trusts that one user.
    """
    trusted = {0, os.geteuid()}
    if os.geteuid() == 0:
        trusted.add(Path.cwd().stat().st_uid)
    for above in path.resolve().parents:
        found = above.stat()
        own = 0o020 if found.st_gid == os.getegid() else 0
        if found.st_uid not in trusted:
            what = f"belongs to another user (uid {found.st_uid})"
        elif found.st_mode & 0o022 & ~own and not found.st_mode & stat.S_ISVTX:
            what = f"can be changed by others (mode {found.st_mode & 0o7777:o})"
        else:
            continue
        raise UsageError(f"--out {path}: {above} above it {what}, who could replace it: choose a directory elsewhere")


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
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
