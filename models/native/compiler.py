"""This host's C++ compiler: which one, and running it so that it ends when we do and tells what went wrong."""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError

if TYPE_CHECKING:
    from threading import Event

COMPILERS: Final = ("g++", "clang++", "c++")
VERSION_S: Final = 30.0
PATIENCE_S: Final = 300.0
"""For one build; a processor that many share takes a minute."""
LOOK_S: Final = 0.1
"""Between two looks at whether the build is still wanted."""
KEPT: Final = 1 << 16
"""Bytes of each of a compiler's streams that are kept, however much it writes."""
TOLD: Final = 300
"""Characters of a compiler's last lines that an error repeats."""
CURE: Final = "name another compiler in CXX, or leave --compile out"


class Stopped(Exception):
    """Who asked for a build has gone."""


def compiler() -> list[str]:
    """The command of a C++ compiler: what CXX says, or the first that is installed. Raises UsageError for none."""
    said = os.environ.get("CXX", "")
    try:
        named = shlex.split(said)
    except ValueError as error:
        raise UsageError(f"--compile: CXX={said!r} is no command ({error}): {CURE}") from None
    for name in named[:1] or COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return [found, *named[1:]]
    why = "is not executable" if named and Path(named[0]).is_file() else "is not there"
    wanted = f"CXX={named[0]}, which {why}" if named else f"none of {', '.join(COMPILERS)} is there"
    raise UsageError(f"--compile needs a C++ compiler ({wanted}): install g++, name one in CXX, or leave --compile out")


def version(command: list[str], stop: Event | None = None) -> str:
    """What the compiler says of itself. Raises UsageError where it is no program, or does not answer; Stopped."""
    return _run([*command, "--version"], VERSION_S, stop)[1]


def build(command: list[str], made: Path, stop: Event | None = None) -> None:
    """Run the compiler, which is to make this file. Raises UsageError, with its last lines, where it does not; and
    Stopped, once the compiler has been killed, when `stop` is set meanwhile."""
    code, _, told = _run(command, PATIENCE_S, stop)
    if code:
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        raise UsageError(f"--compile: {command[0]} {ended} ({_last(told)}): {CURE}")
    try:
        size = made.stat().st_size
    except OSError:
        size = 0
    if not size:
        raise UsageError(f"--compile: {command[0]} ended well but made no library ({_last(told)}): {CURE}")


def _last(text: str) -> str:
    """The end of what a compiler said, in one line: the cause comes before the line that says that it gave up."""
    joined = "; ".join(" ".join(line.split()) for line in text.splitlines()[-8:] if line.strip())
    return (joined if len(joined) <= TOLD else f"..{joined[2 - TOLD :]}") or "it said nothing"


def _run(command: list[str], patience_s: float, stop: Event | None) -> tuple[int, str, str]:
    """Exit code, and the ends of standard output and standard error.

    It has a session of its own, so that Ctrl-C is this process's to handle: whatever ends the wait kills the compiler
    and what it started, and goes on as what it is. Raises Stopped once `stop` is set, and UsageError.
    """
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                out, err = _read(process, time.monotonic() + patience_s, stop)
            except BaseException:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                raise
    except subprocess.TimeoutExpired:
        what = "did not say its version" if command[-1] == "--version" else "did not end"
        raise UsageError(f"--compile: {command[0]} {what} within {patience_s:g} s and was killed: {CURE}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--compile: {command[0]} cannot be run ({why}): {CURE}") from None
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


def _read(process: subprocess.Popen[bytes], end: float, stop: Event | None) -> tuple[bytes, bytes]:
    """The last of what it writes to both pipes, however much that is, when it has ended. Raises TimeoutExpired,
    Stopped."""
    out, err = process.stdout, process.stderr
    assert out is not None
    assert err is not None
    kept = {out: b"", err: b""}
    with selectors.DefaultSelector() as selector:
        for each in kept:
            selector.register(each, selectors.EVENT_READ)
        while selector.get_map() or process.poll() is None:
            if stop is not None and stop.is_set():
                raise Stopped
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(process.args, 0)
            if not selector.get_map():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
            for key, _ in selector.select(LOOK_S) if selector.get_map() else ():
                pipe: Any = key.fileobj
                part = os.read(pipe.fileno(), 1 << 16)
                kept[pipe] = (kept[pipe] + part)[-KEPT:]
                if not part:
                    selector.unregister(pipe)
    return kept[out], kept[err]
