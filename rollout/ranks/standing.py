"""Where a rank's process stands that says nothing any more: its main thread's stack, asked for by a signal.

A rank offers a file in memory, into which CPython writes on SIGUSR1, also while its loop is held by code that computes,
sleeps, or is in C. The launcher reads it through /proc before it ends the rank.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME: Final = "turnstile stack"
PATIENCE_S: Final = 3.0
"""For a process to answer that shares its core with many; one in the middle of a system call never does."""
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+) in (.+)')


def offer() -> None:
    """Let this process be asked. Nothing where there are no files in memory."""
    if hasattr(os, "memfd_create"):
        faulthandler.register(signal.SIGUSR1, file=os.memfd_create(NAME), all_threads=False, chain=False)


def ask(pids: Sequence[int], patience_s: float = PATIENCE_S) -> list[str]:
    """`/home/me/calm.py:14 in turn` of each process of ours on this host; "" for one that does not answer, or stands
    in no code from outside."""
    files = [_offered(pid) for pid in pids]
    for pid, file in zip(pids, files, strict=True):
        if file is not None:
            with suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
    end, texts = time.monotonic() + patience_s, [""] * len(pids)
    while time.monotonic() < end:
        time.sleep(0.02)
        before, texts = texts, [_read(file) for file in files]
        if texts == before and all(text or file is None for text, file in zip(texts, files, strict=True)):
            break
    return [_place(text) for text in texts]


def _offered(pid: int) -> Path | None:
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(each).startswith(f"/memfd:{NAME}"):
                    return each
    return None


def _read(file: Path | None) -> str:
    if file is not None:
        with suppress(OSError):
            return file.read_text(errors="replace")
    return ""


def _place(text: str) -> str:
    """The innermost line of code that is neither ours nor a library's; "" where there is none."""
    from verify.sources import foreign

    return next((f"{path}:{line} in {name}" for path, line, name in _FRAME.findall(text) if foreign(path)), "")
