"""Builds models/native/native.cpp with this host's C++ compiler, once for each source, compiler and processor.

The library has a plain C interface and needs nothing of torch, so it takes seconds to build and loads in any process.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import hashlib
import os
import platform
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from models.native import compiler as compilers
from models.native.compiler import compiler

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE: Final = Path(__file__).with_name("native.cpp")
SOURCES: Final = (SOURCE, *(Path(__file__).with_name(f"{part}.h") for part in ("products", "tiles")))
FLAGS: Final = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno")
LOCK: Final = "building.lock"
SEAL: Final = b"turnstile sha256"
"""Ends a kept library, before the digest of all that precedes it: one that was cut off would kill who calls it."""


def library(stop: threading.Event | None = None) -> Path:
    """The built library, made now where it is not there yet, or is damaged. Raises UsageError where it cannot be.

    stop: set by another thread to give up, which raises `models.native.compiler.Stopped`; the compiler is killed.
    """
    command = compiler()
    folder = _folder()
    path = folder / f"native-{_key(command, stop)}.so"
    if _whole(path):
        return path
    with _alone(folder, stop):
        if not _whole(path):  # who held the lock has made it meanwhile
            _make(command, path, stop)
    return path


async def wanted() -> Path:
    """The same on a running event loop, which goes on; who cancels this is answered as soon as the compiler is dead."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(library, stop)
    finally:
        stop.set()


@cache
def kernels() -> ctypes.CDLL:
    """The library, loaded. A call into it lets go of the interpreter. Raises UsageError as `library` does."""
    path = library()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UsageError(f"--compile: {path} does not load ({error}): remove it, or leave --compile out") from error


def _make(command: list[str], path: Path, stop: threading.Event | None) -> None:
    """Build it beside its place, and put it there whole."""
    if sys.stderr.isatty():
        name = Path(command[0]).name
        print(f"turnstile: building kernels for this processor with {name} (once, about 10 s)", file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as work:
            made = Path(work) / path.name
            compilers.build([*command, *FLAGS, "-o", str(made), str(SOURCE)], made, stop)
            with made.open("r+b") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
                file.seek(0, os.SEEK_END)
                file.write(SEAL + digest)
                file.flush()
                os.fsync(file.fileno())
            os.replace(made, path)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(
            f"--compile: the library cannot be kept in {path.parent} ({why}): set XDG_CACHE_HOME"
        ) from None


def _whole(path: Path) -> bool:
    """Whether the library is there, as it was built."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    end = len(data) - len(SEAL) - hashlib.sha256().digest_size
    return end > 0 and data[end:] == SEAL + hashlib.sha256(data[:end]).digest()


@contextmanager
def _alone(folder: Path, stop: threading.Event | None) -> Iterator[None]:
    """Among those that would build at the same time, for as long as a build may take; then, or without locks, beside.

    Two that build beside each other make the same, each in one piece: the lock spares work, no more.
    """
    try:
        held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--compile: {folder / LOCK}: {error.strerror}: set XDG_CACHE_HOME") from None
    try:
        end = time.monotonic() + compilers.PATIENCE_S
        with suppress(OSError):  # a file system without locks
            while not _locked(held) and time.monotonic() < end:
                if stop is not None and stop.is_set():
                    raise compilers.Stopped
                time.sleep(compilers.LOOK_S)
        yield
    finally:
        os.close(held)


def _locked(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _key(command: list[str], stop: threading.Event | None) -> str:
    """What the library depends on: its source, compiler, flags and processor."""
    said = compilers.version(command, stop)
    parts = [*(each.read_text() for each in SOURCES), *command, *FLAGS, said, platform.machine(), _processor()]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _processor() -> str:
    """What -march=native looks at, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part")))


def _folder() -> Path:
    """Where libraries are kept: this user's alone, since what is there is executed. Raises UsageError otherwise."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnstile"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise UsageError(f"--compile: {path}: {error.strerror}: set XDG_CACHE_HOME to a folder of yours") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(f"--compile: others can write to {path}, and what is kept there is run: chmod go-w it")
    return path
