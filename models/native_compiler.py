"""This host's C++ compiler: which one, and running it so that it ends when we do and tells what went wrong."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

from kernel.errors import UsageError

COMPILERS: Final = ("g++", "clang++", "c++")
VERSION_S: Final = 30.0
PATIENCE_S: Final = 300.0
"""For one build; a processor that many share takes a minute."""
TOLD: Final = 300
"""Characters of a compiler's last lines that an error repeats."""
CURE: Final = "name another compiler in CXX, or leave --compile out"


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


def version(command: list[str]) -> str:
    """What the compiler says of itself. Raises UsageError where it is no program, or does not answer."""
    return _run([*command, "--version"], VERSION_S)[1]


def build(command: list[str], made: Path) -> None:
    """Run the compiler, which is to make this file. Raises UsageError, with its last lines, where it does not."""
    code, _, told = _run(command, PATIENCE_S)
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


def _run(command: list[str], patience_s: float) -> tuple[int, str, str]:
    """Exit code, standard output and standard error.

    It has a session of its own, so that Ctrl-C is this process's to handle: whatever ends the wait kills the compiler
    and what it started, and goes on as what it is.
    """
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=patience_s)
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
    return process.returncode, out, err
