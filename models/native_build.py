"""Builds models/native.cpp with this host's C++ compiler, once for each source, compiler and processor.

The library has a plain C interface and needs nothing of torch, so it takes seconds to build and loads in any process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from kernel.errors import UsageError

SOURCE: Final = Path(__file__).with_name("native.cpp")
SOURCES: Final = (SOURCE, *(Path(__file__).with_name(f"native_{part}.h") for part in ("products", "tiles")))
FLAGS: Final = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno")
COMPILERS: Final = ("g++", "clang++", "c++")
PATIENCE_S: Final = 300


def compiler() -> list[str]:
    """The command of a C++ compiler: what CXX says, or the first that is installed. Raises UsageError for none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for name in named[:1] or COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return [found, *named[1:]]
    wanted = f"CXX={named[0]}, which is not there" if named else f"none of {', '.join(COMPILERS)} is there"
    raise UsageError(f"--compile needs a C++ compiler ({wanted}): install g++, name one in CXX, or leave --compile out")


def library() -> Path:
    """The built library, made now where it is not there yet. Raises UsageError where it cannot be built."""
    command = compiler()
    folder = _folder()
    path = folder / f"native-{_key(command)}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / path.name
        _compile([*command, *FLAGS, "-o", str(made), str(SOURCE)])
        os.replace(made, path)  # ranks that build at the same time make the same
    return path


@cache
def kernels() -> ctypes.CDLL:
    """The library, loaded. A call into it lets go of the interpreter. Raises UsageError as `library` does."""
    path = library()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UsageError(f"--compile: {path} does not load ({error}): remove it, or leave --compile out") from error


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--compile: {command[0]} failed ({error}): name another in CXX, or leave it out") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise UsageError(
            f"--compile: {command[0]} ended with {done.returncode} ({lines[0][:200]}): name another compiler in CXX, or"
            " leave --compile out"
        )


def _key(command: list[str]) -> str:
    """What the library depends on: its source, compiler, flags and processor."""
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", check=False)
    parts = [*(each.read_text() for each in SOURCES), *command, *FLAGS, said.stdout, platform.machine(), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


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
