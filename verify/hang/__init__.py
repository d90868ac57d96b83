"""`turnstile hang`: the evidence of a stuck job -> one short diagnosis.

Exit codes: 0 nothing wrong, 1 a fault found (certain or conditional; also a mismatch that completed), 2 unusable input,
3 undecided.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from verify.command import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.hang.diagnosis import Diagnosis
    from verify.readers.found import Found

EPILOG: Final = (
    "Exit codes: 0 nothing wrong, 1 a fault found, 2 unusable input, 3 undecided: the evidence does not suffice,"
    " and the report says what is missing. With 2 there is one line on standard error and nothing on standard output."
)
START: Final = b"<!doctype html>"


def parser(name: str) -> Parser:
    """The parser of the command."""
    made = Parser(
        prog=f"turnstile {name}",
        description="Explain a stuck job: who waits for whom, which rank is the odd one out, and what to change.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog=EPILOG,
    )
    made.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="run directories, folders of dumps, dumps, logs and stacks of one job, together",
    )
    made.add_argument(
        "--pid", type=int, action="append", metavar="PID", help="a process of the job on this host; repeatable"
    )
    made.add_argument(
        "--html",
        metavar="FILE",
        help="write a page with the wait-for graph and the lanes as well; `-`: print it in place of the report",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return made


def main(name: str, arguments: Sequence[str]) -> int:
    """Run the command; its exit code. Raises UsageError, one line."""
    given = parser(name).given(arguments)
    paths, pids = [path for path in given.get("paths", []) if path], given.get("pid", [])
    if not paths and not pids:
        raise UsageError(f"nothing to read: name dumps, logs, a run directory or --pid; see `turnstile {name} --help`")
    if any(pid < 1 for pid in pids):
        raise UsageError(f"--pid {min(pids)}: the number of a process, from 1 on")
    page = given.get("html")
    if page == "":
        raise UsageError("--html: the name is empty: name the file of the page, or `-` for standard output")
    if page == "-" and given.get("json"):
        raise UsageError("--html - and --json: standard output holds one of them: name a file for the page")
    # Loaded here, so that --help and mistakes in the arguments cost nothing.
    from verify.hang.again import BRIEF_S, LONGEST_S, settled
    from verify.hang.diagnosis import diagnose_found
    from verify.hang.processes import look_at
    from verify.hang.text import as_text
    from verify.readers.gather import gather, merge

    def read(first: bool = False) -> Found:
        found = [gather(paths, beside=bool(pids))] if paths else []
        if pids:
            from verify.attach import attach

            # The looks after the first one are themselves what waiting would be.
            found.append(attach(pids, beside=bool(paths), rest=first))
        return merge(found)

    def judge(evidence: Found) -> Diagnosis:
        return diagnose_found(evidence, look=look_at(paths, pids, evidence))

    _, diagnosis = settled(read(first=True), read, judge, longest_s=LONGEST_S if paths else BRIEF_S)
    if page is not None:
        from verify.html import diagnosis_page

        html = diagnosis_page(diagnosis.to_dict(), diagnosis.situation, dark=diagnosis.dark)
        if page == "-":
            print(html, end="")
            return diagnosis.code
        _write(Path(page), html)
    print(json.dumps(diagnosis.to_dict()) if given.get("json") else as_text(diagnosis))
    return diagnosis.code


def _write(out: Path, page: str) -> None:
    """Write the page, in place of an older page only: evidence is never written over."""
    try:
        if out.is_file() and out.stat().st_size:
            with out.open("rb") as file:
                if file.read(len(START)).lower() != START:
                    raise UsageError(f"--html {out}: it exists and is no page: choose another name")
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {out}: cannot be written ({error.strerror})") from None
