"""What gloo says where a rank gets more data than its own call has room for, before it aborts the process.

    terminate called after throwing an instance of 'gloo::EnforceNotMet'
      what():  [enforce fail at .../gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 64 vs 32. Received
    data size doesn't match expected size. Is there a distributed collective mismatch in your code?

Calls that meet were of two sizes there, or were not the same call. Where faulthandler wrote the stacks after it, the
line of the call is among them. A rank that goes on after it was started again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from verify.events import Kind
from verify.readers.attempts import present_lines
from verify.readers.found import REFUSED_DATA, Found
from verify.readers.lines import MOST, goes_on, holds, rank_in
from verify.readers.stacks import from_lines
from verify.readers.standing import stands_in

if TYPE_CHECKING:
    from pathlib import Path

    from verify.events import Site

WHAT: Final = "log"
NEEDLE: Final = b"op.preamble.length <= op.nbytes"
FOLLOWING: Final = 4096
"""Lines after it that may be the stacks."""
NOBODY: Final = -1
"""In place of a rank that nothing names."""
_SIZES: Final = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d{1,19}) vs (\d{1,19})")


class GlooWordsReader:
    """See the module."""

    name = "gloo's words"

    def recognises(self, path: Path, head: bytes) -> bool:
        """A text file with the line anywhere in it."""
        return holds(path, head, (NEEDLE,))

    def read(self, path: Path) -> Found:
        """Which ranks said it, with which sizes. Raises UsageError for a file that cannot be read."""
        said: dict[int, tuple[str, str, list[str]]] = {}
        for _, line in present_lines(WHAT, path):
            rank = rank_in(line, path)
            whose = NOBODY if rank is None else rank
            if (found := _SIZES.search(line)) and whose not in said and len(said) < MOST:
                said[whose] = (found[1], found[2], [])
            elif whose in said and goes_on(line):
                del said[whose]
            elif whose in said and len(lines := said[whose][2]) < FOLLOWING:
                lines.append(line)
        remarks = []
        for rank, (got, room, lines) in sorted(said.items()):
            site = _call(lines, path, rank)
            at = f" at {site}" if site is not None else ""
            remarks.append((rank, f"{REFUSED_DATA}{got} bytes of another rank, and its call{at} has room for {room}"))
        ranks = frozenset(said) - {NOBODY}
        return Found(path.name, present=ranks, expected=ranks, remarks=tuple(remarks))


def _call(lines: list[str], path: Path, rank: int) -> Site | None:
    """The line of the program that made the call in which a thread stood."""
    try:
        stacks = from_lines(lines, path, max(rank, 0))
    except UsageError:  # there are none
        return None
    for stack in stacks:
        event = stands_in(stack)
        if event is not None and event.kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV):
            return event.site
    return None


READER = GlooWordsReader()
