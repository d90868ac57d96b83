"""`turnstile trace`: what the ranks of a run did, as a timeline that Perfetto and chrome://tracing open.

Exit codes: 0 written, 2 unusable input.
"""

from __future__ import annotations

import gzip
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel import files
from kernel.errors import UsageError
from kernel.record import read_run
from kernel.record.foreign import groups_of
from verify import runs, words
from verify.command import Parser
from verify.readers.installed import is_installed
from verify.readers.jobs import of_other_jobs
from verify.readers.killed import alive
from verify.slices import timeline
from verify.trace.calls import installed_lines
from verify.trace.chrome import trace_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kernel.record import Recording


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked. out: None for `trace.json` in the run's directory, "-" for standard output."""

    run: str
    out: str | None


def parse(name: str, arguments: Sequence[str]) -> Options:
    """The options of the command. Raises UsageError (and SystemExit for --help)."""
    made = Parser(
        prog=f"turnstile {name}",
        description="Write a run's record as trace-event JSON, which ui.perfetto.dev and chrome://tracing open.",
        epilog="One process a rank: host, turnstile, P, D and the collectives of both streams; arrows join the moments"
        " at which ranks reach the same boundary of the same epoch. Of a job that turnstile.record.install records: the"
        " calls of each group and what the threads wait in; arrows join the calls that meet.",
        allow_abbrev=False,
    )
    made.add_argument("run", metavar="RUN-DIRECTORY", help="what `turnstile rollout` or record.install left, or writes")
    made.add_argument(
        "-o", dest="out", metavar="FILE", help="default: trace.json in the run; `-`: standard output; *.gz: compressed"
    )
    given = made.parse_args(list(arguments))
    return Options(given.run, given.out)


def main(name: str, arguments: Sequence[str]) -> int:
    """Run the command; its exit code. Raises UsageError."""
    options = parse(name, arguments)
    run = runs.find(options.run)
    recordings = read_run(run)
    others = of_other_jobs(recordings, alive)
    recordings = {rank: each for rank, each in recordings.items() if rank not in others}
    if any(is_installed(recording) for recording in recordings.values()):
        lines = installed_lines(recordings)
    else:
        lines = trace_lines([timeline(recording) for _, recording in sorted(recordings.items())])
    if options.out == "-":
        for line in lines:
            sys.stdout.write(line)
        return 0
    out = Path(options.out) if options.out is not None else run / "trace.json"
    size = write(out, lines)
    print(f"{out}: {_size(size)}, {words.ranks(recordings)}; open it in ui.perfetto.dev or chrome://tracing")
    for line in (*lacks(recordings), *(f"not shown: {other.line}" for other in others.values())):
        print(line)
    return 0


def write(out: Path, lines: Iterator[str]) -> int:
    """Replace `out` by the lines, compressed where its name ends in .gz, whole or not at all; its size in bytes.

    Raises UsageError where it cannot be written.
    """
    try:
        if out.is_dir():
            raise UsageError(f"-o {out}: it is a directory: name a file in it")
        if out.suffix == ".ring":
            raise UsageError(f"-o {out}: that is a rank's record: choose another name")
        if out.exists() and not out.is_file():  # a pipe, /dev/stdout: nothing that could be replaced
            with out.open("w", encoding="utf-8") as pipe:
                pipe.writelines(lines)
            return 0
        with files.replacing(out) as fd, open(fd, "wb", closefd=False) as plain:
            packed: Any = gzip.GzipFile(out.name, "wb", fileobj=plain) if out.suffix == ".gz" else plain
            with io.TextIOWrapper(packed, encoding="utf-8") as file:
                file.writelines(lines)
        return out.stat().st_size
    except BrokenPipeError:
        raise  # whoever read it has gone: no mistake of the command's user
    except OSError as error:
        raise UsageError(f"-o {out}: {error.strerror or error}: choose a file that can be written") from None


def lacks(recordings: Mapping[int, Recording]) -> list[str]:
    """What the timeline cannot show, a line each."""
    found = []
    everybody = {rank for each in recordings.values() for group in each.groups.values() for rank in group}
    for each in recordings.values():
        everybody |= {rank for group in groups_of(each.strings).values() for rank in group.ranks or ()}
    told = (
        (everybody - set(recordings), "no record"),
        ([rank for rank, each in recordings.items() if each.dropped], "older events are overwritten"),
        ([rank for rank, each in recordings.items() if each.torn], "some events could not be read"),
        ([rank for rank, each in recordings.items() if each.truncated], "the file is cut off"),
    )
    for who, what in told:
        if who:
            found.append(f"not shown: {words.ranks(who)}: {what}")
    if not runs.one_clock(recordings.values()):
        found.append("the ranks ran on several hosts: their lanes are as far apart as the hosts' clocks")
    return found


def _size(size: int) -> str:
    """Bytes in a unit that leaves a figure to see."""
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{max(0.1, size / 1e3):,.1f} kB"
