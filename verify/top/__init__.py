"""`turnstile top`: where each rank of a run stands, live or as it was left. It reads the records and asks nobody.

Exit codes: 0 shown, 2 unusable input, 130 interrupted (not by leaving the live view).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from verify import runs
from verify.command import Parser
from verify.top.follow import STALLED_S, Follower

if TYPE_CHECKING:
    from collections.abc import Sequence

EVERY_S: Final = 0.5
WIDTH: Final = 150
"""Columns where there is no terminal to ask."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked, checked. port: of the page, 0 for any that is free. every_s, stalled_s: seconds."""

    run: str
    once: bool
    json: bool
    web: bool
    port: int
    every_s: float
    stalled_s: float


def parse(name: str, arguments: Sequence[str]) -> Options:
    """The options of the command. Raises UsageError (and SystemExit for --help)."""
    made = Parser(
        prog=f"turnstile {name}",
        description="Show where each rank of a run stands: what it has in flight, its epoch, boundary and permit, its"
        " last operation and since when, the longest gap of its loop, what is queued, and who keeps whom waiting.",
        epilog="Works while the run goes on, while it hangs and after it ended; with Ctrl-C you leave it.",
        allow_abbrev=False,
    )
    made.add_argument("run", metavar="RUN-DIRECTORY", help="of several runs in it, the one started last is shown")
    how = made.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print one frame")
    how.add_argument("--json", action="store_true", help="print one frame as a JSON object and nothing else")
    how.add_argument("--web", action="store_true", help="serve a page on 127.0.0.1 with the graph and the timetable")
    made.add_argument("--port", type=int, metavar="N", help="of the page (default: one that is free)")
    made.add_argument(
        "--every", type=float, default=EVERY_S, metavar="S", help=f"seconds between two frames (default: {EVERY_S:g})"
    )
    made.add_argument(
        "--stalled", type=float, default=STALLED_S, metavar="S",
        help=f"a rank that records nothing for so many seconds stands out (default: {STALLED_S:g})",
    )  # fmt: skip
    given = made.parse_args(list(arguments))
    if given.port is not None and not given.web:
        raise UsageError("--port is that of the page: give --web as well")
    if given.port is not None and not 0 <= given.port < 65536:
        raise UsageError(f"--port {given.port}: from 0 to 65535")
    for flag, least, most in (("every", 0.05, 3600.0), ("stalled", 0.05, 86400.0)):
        if not least <= getattr(given, flag) <= most:
            raise UsageError(f"--{flag} {getattr(given, flag):g}: from {least:g} to {most:g} seconds")
    return Options(given.run, given.once, given.json, given.web, given.port or 0, given.every, given.stalled)


def main(name: str, arguments: Sequence[str]) -> int:
    """Run the command; its exit code. Raises UsageError."""
    options = parse(name, arguments)
    follower = Follower(runs.find(options.run, newest=True), options.stalled_s)
    if options.json:
        print(json.dumps(follower.look().to_dict()))
        return 0
    if options.web:
        from verify.top.web import serve

        return serve(follower, options.port, options.every_s)
    if options.once or not sys.stdout.isatty():
        return _once(follower)
    return _live(follower, options.every_s)


def _once(follower: Follower) -> int:
    from rich.console import Console

    from verify.top.screen import picture

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(picture(follower.look()))
    return 0


def _live(follower: Follower, every_s: float) -> int:
    """Until Ctrl-C, or until the run has ended: the last frame then stays on the terminal."""
    from rich.console import Console
    from rich.live import Live

    from verify.top.screen import picture

    console = Console(highlight=False)
    frame = follower.look()
    try:
        with Live(picture(frame, console.height), console=console, screen=True, auto_refresh=False) as live:
            while not frame.ended:
                time.sleep(every_s)
                frame = follower.look()
                live.update(picture(frame, console.height), refresh=True)
    except KeyboardInterrupt:
        pass
    console.print(picture(frame))
    return 0
