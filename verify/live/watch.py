"""The watcher of a run: a process of its own beside the launcher, which it neither asks nor keeps waiting.

Lines of JSON on its standard input say what to do, and its end says that nobody is left who would want to know:

    {"watch": FOLDER}    follow the rings that appear in this run directory from now on; answered by {"ready": FOLDER}
    {"end": FAILED}      the run is over; where it failed, look once more and say why

and on its standard output it says what it found:

    {"report": TEXT, "diagnosis": {...}, "ns": WHEN, "run": FOLDER}     a certain fault: `turnstile hang`'s report, once
    {"trouble": TEXT}                                                   it cannot go on, and ends
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kernel.errors import UsageError
from verify.hang.text import as_text
from verify.live.check import Check
from verify.live.rings import Rings

EVERY_S: Final = 0.2
"""Between two looks. The fourth one after a ring has closed has judged twice that it stands, and tells of it."""
SHARE: Final = 4.0
"""Sleep at least so many times as long as the last look took: a large world must not cost a whole core."""
NICE: Final = 5
_PR_SET_PDEATHSIG: Final = 1


class Watcher:
    """Follows one run directory after the other and says on `out` what is wrong. every_s: between two looks."""

    def __init__(self, out: Any, every_s: float = EVERY_S) -> None:
        self._out, self._every_s = out, every_s
        self._rings: Rings | None = None
        self._check = Check()
        self._folder = ""
        self._peeked: dict[int, tuple[int, bool, bool]] = {}
        self._still: set[int] = set()
        """Ranks that had not moved the last time."""
        self._over = False
        self._known = 0
        """Looks at what the rings show now, without a change."""

    def obey(self, line: str) -> bool:
        """Do what a line of the launcher says; False when that was to end."""
        said = json.loads(line)
        if "watch" in said:
            self._folder = str(said["watch"])
            self._rings, self._check = Rings(Path(self._folder), only_new=True), Check()
            self._peeked, self._still, self._known = {}, set(), 0
            self._say({"ready": self._folder})
            return True
        if said.get("end"):
            self._over, self._known = True, 0
            # What stands in one look and in the next is certain; a look that shows something new is followed by two.
            for _ in range(5):
                self.look()
        return False

    def look(self) -> float:
        """Look once; seconds until the next look is due."""
        began = time.monotonic()
        # A run that has not begun to record is no news, and neither is a ring that is being replaced.
        with suppress(UsageError):
            if self._rings is not None and self._worth(self._rings) and (found := self._check.take(self._rings.look())):
                said = {"report": as_text(found), "diagnosis": found.to_dict(), "run": self._folder}
                self._say({**said, "ns": time.monotonic_ns()})
        return max(self._every_s, SHARE * (time.monotonic() - began))

    def _worth(self, rings: Rings) -> bool:
        """Whether there is anything to judge: some rank has not moved for two times, and that is news.

        Events of a run that moves are not even decoded, and one that stands still is judged three times.
        """
        before, self._peeked = self._peeked, rings.peek()
        self._known = self._known + 1 if before == self._peeked else 0
        same = {rank for rank, now in self._peeked.items() if before.get(rank) == now}
        still, self._still = same & self._still, same
        if all(closed or gone for _, closed, gone in self._peeked.values()) and not self._over:
            return False  # nobody is left to wait; whether it failed, the launcher knows
        return self._known < 5 and bool(still)

    def _say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def main() -> int:
    """Entry point of the process: obey standard input until its end; the exit code."""
    # The launcher's end closes our input; should we be in the middle of a long look then, this ends us at once.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(NICE)
    watcher = Watcher(sys.stdout)
    pending, due = b"", time.monotonic()
    try:
        while True:
            ready, _, _ = select.select([0], [], [], max(0.0, due - time.monotonic()))
            if ready:
                data = os.read(0, 65536)
                if not data:
                    return 0
                *lines, pending = (pending + data).split(b"\n")
                if not all(watcher.obey(line.decode()) for line in lines):
                    return 0
            elif time.monotonic() >= due:
                due = time.monotonic() + watcher.look()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        watcher._say({"trouble": f"{type(error).__name__}: {error}"})
        return 1


if __name__ == "__main__":
    sys.exit(main())
