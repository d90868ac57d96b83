"""Files that a person names: read never for ever and never more than fits, written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import select
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PIPE_S: Final = 60.0
"""For the first byte of a pipe: one that nobody writes to would be waited for without end."""
SILENT_S: Final = 1.0
"""Of them without a word."""
_PART: Final = 1 << 20


def open_regular(path: Path, *, pipe: bool = False, waits: Callable[[str], object] | None = None) -> int:
    """A descriptor of a regular file, or of a pipe where it may be one. Raises OSError for any other.

    waits: is told, in a clause, of a pipe that has to be waited for.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)  # a pipe would block here
    except ValueError as error:  # a zero byte in its name
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or (pipe and stat.S_ISFIFO(mode))):
            raise OSError(errno.EINVAL, f"not a regular file{' or a pipe' if pipe else ''}")
        if stat.S_ISFIFO(mode):
            waiting = select.poll()
            waiting.register(fd, select.POLLIN)
            came = waiting.poll(min(SILENT_S, PIPE_S) * 1000)
            if not came and waits is not None:
                waits(f"a pipe to which nobody has written yet, waiting for at most {PIPE_S:g} s")
            if not came and not waiting.poll((PIPE_S - min(SILENT_S, PIPE_S)) * 1000):
                raise OSError(errno.ETIMEDOUT, f"a pipe that nobody wrote to for {PIPE_S:g} s")
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(path: Path, most: int, *, pipe: bool = False, waits: Callable[[str], object] | None = None) -> bytes:
    """All of a regular file of at most `most` bytes. Raises OSError, whose strerror says why, for any other."""
    parts, size = [], 0
    with os.fdopen(open_regular(path, pipe=pipe, waits=waits), "rb", buffering=0) as file:
        while part := file.read(_PART):
            parts.append(part)
            size += len(part)
            if size > most:
                raise OSError(errno.EFBIG, f"larger than {most >> 20:,} MiB")
    return b"".join(parts)


@contextmanager
def replacing(path: Path) -> Iterator[int]:
    """A descriptor to write to, of a new file that takes the place of `path` at the end: a reader sees the old one or
    the new one. Where the block raises, the old one stays.

    The new one has a name that nobody can foresee and is never a link: others may write the directory. Raises OSError.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
    finally:
        with suppress(OSError):
            os.close(fd)
