"""`turnstile top`: where each rank of a run stands, live or as it was left. It reads the records and asks nobody.

Exit codes: 0 shown (with --check: the run has ended, and nothing was wrong), 1 --check found a certain fault, 2
unusable input, 130 interrupted (not by leaving the live view).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from verify import runs
from verify.command import Parser
from verify.top.frame import STALLED_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.top.frame import View

EVERY_S: Final = 0.5
WIDTH: Final = 150
"""Columns where there is no terminal to ask."""
SILENT_S: Final = 5.0
COLLECT_AT: Final = "127.0.0.1:0"

ABOUT: Final = """\
Show where each rank of a run stands: what it has in flight, its epoch, boundary and permit, its last operation and
since when, the longest gap of its loop, what is queued, and who keeps whom waiting.

With --check nothing is shown: the run is watched until it ends, or until it is certain that ranks wait for each other
in a ring, for one that has ended, or make calls that differ. The report is that of `turnstile hang`. Ranks that are
slow, stopped or silent are no fault; of a job that `turnstile.record.install` records, a rank that others wait for is
one when all ranks of the job stand and its process shows that it will not go on by itself. Nothing is asked of the
run's processes, and nothing in them is touched.

A run on several hosts: `turnstile top --collect ADDR:PORT --token-file FILE` on one of them (with --check, --web or
--json as for a run that is read here), and `turnstile top --agent ADDR:PORT --token-file FILE RUN-DIRECTORY` on each.
Agents send what has changed of their ranks' open calls; one that is silent makes its ranks unknown, and nobody is
blamed for it."""
EPILOG: Final = """\
Works while the run goes on, while it hangs and after it ended; with Ctrl-C you leave it.
Exit codes: 0 shown; with --check: 0 the run has ended and nothing was wrong, 1 a certain fault, or the run failed;
2 unusable input; 130 interrupted."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked, checked. port: of the page, 0 for any that is free. every_s, stalled_s, silent_s: seconds.

    run: "" with `collect`. agent, collect: (address, port), None where not asked for.
    """

    run: str
    once: bool
    json: bool
    web: bool
    check: bool
    port: int
    every_s: float
    stalled_s: float
    agent: tuple[str, int] | None = None
    collect: tuple[str, int] | None = None
    token_file: Path | None = None
    silent_s: float = SILENT_S


def parse(name: str, arguments: Sequence[str]) -> Options:
    """The options of the command. Raises UsageError (and SystemExit for --help)."""
    given = _parser(name).parse_args(list(arguments))
    if given.port is not None and not given.web:
        raise UsageError("--port is that of the page: give --web as well")
    if given.port is not None and not 0 <= given.port < 65536:
        raise UsageError(f"--port {given.port}: from 0 to 65535")
    for flag, least, most in (("every", 0.05, 3600.0), ("stalled", 0.05, 86400.0), ("silent", 0.1, 86400.0)):
        if not least <= getattr(given, flag) <= most:
            raise UsageError(f"--{flag} {getattr(given, flag):g}: from {least:g} to {most:g} seconds")
    if given.check and (given.once or given.web):
        raise UsageError("--check watches until the run ends: leave out --once; the page of --web has its verdict too")
    agent = _address("--agent", given.agent) if given.agent is not None else None
    collect = _address("--collect", given.collect) if given.collect is not None else None
    if agent is not None and (collect or given.once or given.json or given.web or given.check):
        raise UsageError("--agent shows nothing: give it a run directory and --token-file only")
    if (agent or collect) and given.token_file is None:
        raise UsageError("--token-file FILE: a collector and its agents need one; the collector makes it if absent")
    if given.token_file is not None and not (agent or collect):
        raise UsageError("--token-file is that of --collect and --agent: give one of them")
    if collect is not None and given.run is not None:
        raise UsageError(f"--collect shows what agents send: leave out {given.run!r}, and give it to an --agent")
    if collect is None and given.run is None:
        raise UsageError(f"no run directory: name one that `turnstile rollout` wrote; see `turnstile {name} --help`")
    return Options(
        given.run or "", given.once, given.json, given.web, given.check, given.port or 0, given.every, given.stalled,
        agent, collect, given.token_file, given.silent,
    )  # fmt: skip


def _parser(name: str) -> Parser:
    made = Parser(
        prog=f"turnstile {name}",
        description=ABOUT,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "run", metavar="RUN-DIRECTORY", nargs="?", help="of several runs in it, the one started last is shown"
    )
    how = made.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print one frame")
    how.add_argument(
        "--json", action="store_true", help="print one frame (with --check: the report) as a JSON object, nothing else"
    )
    how.add_argument("--web", action="store_true", help="serve a page on 127.0.0.1 with the graph and the timetable")
    made.add_argument("--check", action="store_true", help="watch until the run ends or a fault is certain; see above")
    made.add_argument("--port", type=int, metavar="N", help="of the page (default: one that is free)")
    made.add_argument(
        "--every", type=float, default=EVERY_S, metavar="S", help=f"seconds between two frames (default: {EVERY_S:g})"
    )
    made.add_argument(
        "--stalled", type=float, default=STALLED_S, metavar="S",
        help=f"a rank that records nothing for so many seconds stands out (default: {STALLED_S:g})",
    )  # fmt: skip
    hosts = made.add_argument_group("several hosts")
    hosts.add_argument(
        "--collect", nargs="?", const=COLLECT_AT, metavar="ADDR:PORT",
        help="show what agents send here (default: a free port of 127.0.0.1; name an address to be reached at)",
    )  # fmt: skip
    hosts.add_argument("--agent", metavar="ADDR:PORT", help="send what this host's ranks do to the collector there")
    hosts.add_argument("--token-file", type=Path, metavar="FILE", help="a secret that both know, readable by you alone")
    hosts.add_argument(
        "--silent", type=float, default=SILENT_S, metavar="S",
        help=f"an agent that does not answer for so long leaves its ranks unknown (default: {SILENT_S:g})",
    )  # fmt: skip
    return made


def _address(flag: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise UsageError(f"{flag} {text!r}: give ADDR:PORT, as 10.0.0.1:7007")
    return host.strip("[]"), int(port)


def main(name: str, arguments: Sequence[str]) -> int:
    """Run the command; its exit code. Raises UsageError."""
    options = parse(name, arguments)
    if options.agent is not None:
        from verify.hosts.agent import serve_agent

        assert options.token_file is not None
        return serve_agent(options.agent, options.token_file, options.run, options.stalled_s)
    if options.collect is not None:
        from verify.hosts.collector import Collector

        assert options.token_file is not None
        with Collector(options.collect, options.token_file, options.silent_s) as collector:
            collector.announce()
            if options.json or options.once:
                collector.gather()
            return _show(options, collector)
    if options.check:
        from verify.top.checking import check_run

        return check_run(options.run, options.every_s, options.json)
    from verify.top.follow import Follower

    return _show(options, Follower(runs.find(options.run, newest=True), options.stalled_s))


def _show(options: Options, view: View) -> int:
    if options.check:
        from verify.top.checking import check_view

        return check_view(view, options.every_s, options.json)
    if options.json:
        print(json.dumps(view.look().to_dict()))
        return 0
    if options.web:
        from verify.top.web import serve

        return serve(view, options.port, options.every_s)
    if options.once or not sys.stdout.isatty():
        return _once(view)
    return _live(view, options.every_s)


def _once(view: View) -> int:
    from rich.console import Console

    from verify.top.screen import picture

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(picture(view.look(), width=console.width))
    return 0


def _live(view: View, every_s: float) -> int:
    """Until Ctrl-C, or until the run has ended: the last frame then stays on the terminal."""
    from rich.console import Console
    from rich.live import Live

    from verify.top.screen import picture

    console = Console(highlight=False)
    frame = view.look()
    try:
        first = picture(frame, console.height, console.width)
        with Live(first, console=console, screen=True, auto_refresh=False) as live:
            while not frame.ended:
                time.sleep(every_s)
                frame = view.look()
                live.update(picture(frame, console.height, console.width), refresh=True)
    except KeyboardInterrupt:
        pass
    console.print(picture(frame, width=console.width))
    return 0
