"""Work in a child process that somebody watches, so that a wait or a loop which no hook sees ends with its line named.

The child tells by a counter in shared memory that it goes on. When it has been silent for too long, a signal makes
CPython write the stack, also of a thread that is stuck in C code; only one that stands in a policy's own code counts.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import re
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Final, NoReturn, TypeVar

from kernel.errors import TurnstileError, UsageError, said
from verify.blame import Class
from verify.sources import foreign, ours, place
from verify.trial.findings import Finding

T = TypeVar("T")

Beat = Callable[[], None]
"""Shows that things go on; costs under a microsecond. `verify.trial.guard` calls one at each callback of a policy."""

SILENCE_S: Final = 10.0
"""Seconds without a callback after which a policy's code that is running counts as stuck; imports must be faster."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (.+)')


def supervised(work: Callable[[Beat], T], seconds: float, unusable: str = "") -> T | Finding:
    """What `work(beat)` returns, computed in a forked child; a Finding when it gets stuck in a policy's code.

    seconds: of silence of `beat` before the child's stack is looked at. Result and exceptions must be picklable; an
    exception of the work is raised here. What the work prints goes to standard error, and it has no terminal to read.
    A child that ends by itself (a crash in C code, `os._exit`) is a Finding too; before any beat, where `unusable` is
    given, a UsageError that says so.
    """
    with mmap.mmap(-1, 8) as counter, tempfile.TemporaryFile("w+b") as dump:
        receiver, sender = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with warnings.catch_warnings():
            # CPython warns where other threads exist. The child runs nothing that they could have locked.
            warnings.simplefilter("ignore", DeprecationWarning)
            # An interrupt waits until somebody is there to end the child; what runs at a fork would swallow it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            try:
                child = os.fork()
            except OSError:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                raise
        if not child:
            os.close(receiver)
            _child(work, counter, dump, sender, before)
        os.close(sender)
        _grouped(child)
        status = -1
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            answer = _listen(child, receiver, counter, dump, seconds)
            started = any(counter[:])
            if not isinstance(answer, Finding):
                _, status = os.waitpid(child, 0)
        finally:
            os.close(receiver)
            if status < 0:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
    if isinstance(answer, Finding):
        return answer
    if not answer:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        if unusable and not started:
            raise UsageError(f"{unusable}, {how}")
        say = f"the checked code ended its process, {how}: a policy must return or raise"
        return Finding(Class.EXCEPTION, "policy", say)
    try:
        failed, value = pickle.loads(answer)
    except Exception as error:  # it needs a module that only the child has, or that acts otherwise here
        why = f"{type(error).__name__}: {said(error)}"
        raise TurnstileError(f"the answer of the checked code cannot be read: {why}") from error
    if failed:
        raise value
    result: T = value
    return result


def _grouped(child: int) -> None:
    """A child leads a group of its own, which ends with it: no process that it has started is left behind."""
    with suppress(OSError):  # the child does the same, and may have ended
        os.setpgid(child, child)


def _child(
    work: Callable[[Beat], Any], counter: mmap.mmap, dump: IO[bytes], sender: int, mask: set[int | signal.Signals]
) -> NoReturn:
    code = 1
    try:
        _grouped(0)
        # No Ctrl-C comes here, the terminal's is the parent's: a KeyboardInterrupt is then of the code that raises it.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # `faulthandler.dump_traceback_later` would wait for a thread of the parent's, where one was running.
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=False, chain=False)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        beats = 0

        def beat() -> None:
            nonlocal beats
            beats += 1
            counter[:] = beats.to_bytes(8, "little")

        try:
            answer = _pickled(False, work(beat))
        except BaseException as error:
            answer = _pickled(True, error)
        while answer:
            answer = answer[os.write(sender, answer) :]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        code = 0
    finally:
        os._exit(code)


def _pickled(failed: bool, value: Any) -> bytes:
    """An answer that can be read again: an exception that cannot is told by its line."""
    try:
        answer = pickle.dumps((failed, value))
        if failed and not _known(type(value)):
            raise TurnstileError("its class may not be there for the parent")
        pickle.loads(answer)
    except Exception as problem:
        error = value if failed else problem
        answer = pickle.dumps((True, TurnstileError(f"{type(error).__name__}: {said(error)}")))
    return answer


def _known(cls: type[Any]) -> bool:
    """Whether the parent can raise an exception's class too: it is built in, or of this package, and ends nothing."""
    if not issubclass(cls, Exception):
        return False
    return cls.__module__ == "builtins" or ours(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")


def _listen(child: int, receiver: int, counter: mmap.mmap, dump: IO[bytes], seconds: float) -> bytes | Finding:
    """The child's answer, b"" when it ended without one."""
    answer, last, since = b"", counter[:], time.monotonic()
    while True:
        if select.select([receiver], [], [], min(0.2, seconds / 4))[0]:
            part = os.read(receiver, 1 << 20)
            if not part:
                return answer
            answer += part
            since = time.monotonic()
        elif counter[:] != last:
            last, since = counter[:], time.monotonic()
        elif time.monotonic() - since > seconds:
            where = _stands(child, dump)
            if where and counter[:] == last:
                say = f"policy code at {where} does not return: it blocks, or loops in C code (for {seconds:g} s)"
                return Finding(Class.OUTSIDE, "outside", say, where=where)
            since = time.monotonic()


def _stands(child: int, dump: IO[bytes]) -> str:
    """Where in a policy's code the child stands; "" when it is somewhere else."""
    start = os.fstat(dump.fileno()).st_size
    os.kill(child, signal.SIGUSR1)
    size, patience = start, time.monotonic() + 5
    while time.monotonic() < patience:
        time.sleep(0.02)
        now = os.fstat(dump.fileno()).st_size
        if now > start and now == size:
            break
        size = now
    text = os.pread(dump.fileno(), max(0, size - start), start).decode(errors="replace")
    return _policy_line([(path, int(line)) for path, line, _ in _FRAME.findall(text)])


def _policy_line(frames: list[tuple[str, int]]) -> str:
    """The innermost frame outside this package that was called from it, of frames in order from the innermost.

    Whoever called `supervised` may be outside too, and so may the work itself: they are no policies.
    """
    inner = [path for path, _ in frames]
    frames = frames[: inner.index(__file__)] if __file__ in inner else frames
    for at, site in enumerate(frames):
        if foreign(site[0]):
            return place(site) if any(ours(path) for path, _ in frames[at + 1 :]) else ""
    return ""
