"""`turnstile plot RUN`: the figures of a complete run, from its rows and records, as they are drawn at its end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel import files
from kernel.errors import UsageError
from rollout.args import Parser
from rollout.replay import read_rows
from rollout.report import campaign as campaign_report
from rollout.report import files as report_files
from rollout.runs import runs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGEST: Final = 16 << 20
"""Bytes of a run.json."""


def main(command: str, argv: Sequence[str]) -> int:
    """Draw the figures of the run in a directory; 0. Raises UsageError unless a complete one is in it."""
    made = Parser(
        prog=f"turnstile {command}",
        description="Draw the figures of a run that is complete again: completion.png, and lanes-POLICY.png of each"
        " policy with a record.",
        allow_abbrev=False,
        epilog="Exit codes: 0 done, 2 unusable input, 130 interrupted.",
    )
    made.add_argument("run", metavar="RUN", help="directory of a run of `turnstile rollout` or `turnstile compare`")
    out = Path(made.parse(argv)["run"])
    about = _about(out)
    for each in (out, out / "run.json"):
        report_files.check_private(each, "")
    policies, repeat, title = (about.get(name) for name in ("policies", "repeat", "slice"))
    if not (
        isinstance(policies, list)
        and all(isinstance(each, str) for each in policies)
        and type(repeat) is int
        and isinstance(title, str)
    ):
        raise UsageError(f"{out / 'run.json'}: it names no policies, repeat and slice: put the run's own back")
    runs = {(run.policy, run.repeat): run for run in runs_of(policies, repeat, out)}
    turns: dict[str, int] = {}
    for row in read_rows(out / "requests.jsonl"):
        if (run := runs.get((row.policy, row.repeat))) is not None:
            run.rows.append(row)
            turns[row.trajectory] = max(turns.get(row.trajectory, 0), row.turn + 1)
    for run in runs.values():
        campaign_report.read_record(run)
    os.umask(0o077)
    try:
        written = campaign_report.draw(tuple(runs.values()), turns, title, out)
    except OSError as error:
        raise UsageError(f"{out}: no figure can be written there ({error.strerror}): see to room and rights") from None
    print("\n".join(str(out / name) for name in written))
    return 0


def _about(out: Path) -> dict[str, Any]:
    """A complete run's run.json. Raises UsageError for any other."""
    path = out / "run.json"
    try:
        found = json.loads(files.read(path, LARGEST).decode())
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{out}: it holds no run (run.json): name the directory of one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: it cannot be read ({getattr(error, 'strerror', None) or error})") from None
    status = found.get("status") if isinstance(found, dict) else None
    if status != "complete":
        raise UsageError(
            f"{out}: the run in it is not complete ({status or 'no status'}): its figures are drawn at its end; go on"
            f" with --out {out} --resume"
        )
    result: dict[str, Any] = found
    return result


