"""Run the Promela model with spin and a C compiler.

`python -m tests.spin_oracle 300 2 3 4` prints the table of README.md: at most 300 s a search, ranks 2 to 4.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.spin_variants import VARIANTS, Variant, Verdict

MODEL: Final = Path(__file__).resolve().parent / "spin" / "turnstile.pml"
BUILD_S: Final = 120
MEMORY_MB: Final = 6000
DEPTH: Final = 1_000_000


class OracleError(Exception):
    """spin, the compiler or the search failed: there is no verdict."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of an exhaustive search or, with an error, until there. seconds: of searching."""

    verdict: Verdict
    states: int
    seconds: float
    detail: str


def missing() -> str | None:
    """Why the model cannot be run on this machine."""
    if shutil.which("spin") is None:
        return "spin is not installed (on Debian and Ubuntu the package spin)"
    if compiler() is None:
        return "spin needs a C compiler, and there is neither cc nor gcc"
    return None


def compiler() -> str | None:
    """The C compiler that is used."""
    return shutil.which("cc") or shutil.which("gcc")


def check(variant: Variant, ranks: int, folder: Path, model: str | None = None, *, search_s: float = 540) -> Result:
    """Build and run one variant in `folder`. model: another text than that of turnstile.pml. Raises OracleError."""
    large = ranks in variant.grid or not variant.asyncio or variant.live
    (folder / "turnstile.pml").write_text(MODEL.read_text() if model is None else model)
    flags = [f"-D{key}={value}" for key, value in variant.definitions(ranks).items()]
    _run(["spin", *flags, "-a", "turnstile.pml"], folder, BUILD_S)
    # spin's partial-order reduction is not sound together with an LTL claim.
    kind = ["-DNOREDUCE", "-DNFAIR=3"] if variant.live else ["-DSAFETY", "-DNOFAIR"]
    # Compiling takes longer than most searches.
    level = "-O1" if large else "-O0"
    limits = [f"-DMEMLIM={MEMORY_MB}", "-DVECTORSZ=2048"]
    _run([compiler() or "cc", level, "-w", *kind, *limits, "-o", "pan", "pan.c"], folder, BUILD_S)
    mode = ["-a", "-f"] if variant.live else []
    if variant.expected not in (Verdict.OK, Verdict.DEADLOCK, Verdict.STARVATION):
        mode.append("-E")  # an assertion is looked for, though a hang may be nearer
    printed = _run(["./pan", f"-m{DEPTH if variant.live else DEPTH // 100}", *mode], folder, search_s)
    return read(printed, variant)


def _run(command: list[str], folder: Path, limit_s: float) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise OracleError(f"{' '.join(command)}: no answer within {limit_s:g} s") from None
    if done.returncode != 0:
        raise OracleError(f"{' '.join(command)}: exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


ERRORS: Final = {
    r"invalid end state": Verdict.DEADLOCK,
    r"acceptance cycle": Verdict.STARVATION,
    r"assertion violated same_order": Verdict.ORDER,
    r"assertion violated within_permit": Verdict.PERMIT,
    r"assertion violated same_call": Verdict.CALL,
    r"assertion violated .*diverged": Verdict.DIVERGENCE,
    r"assertion violated behind_counts": Verdict.COUNTS,
    r"assertion violated not_pending": Verdict.PENDING,
    r"assertion violated not_retired": Verdict.RETIRED,
}


def read(printed: str, variant: Variant) -> Result:
    """The verdict in what pan printed. Raises OracleError where it found nothing in a search that was cut short."""
    counted = re.search(r"errors: (\d+)", printed)
    stored = re.search(r"^ *(\d+) states, stored", printed, re.MULTILINE)
    took = re.search(r"elapsed time ([\d.]+)", printed)
    complaint = re.search(r"^pan:\d+: (.*?)(?: \(at depth \d+\))?$", printed, re.MULTILINE)
    if counted is None or stored is None:
        raise OracleError(f"{variant.name}: the search was not exhaustive: {printed[-2000:]}")
    if counted[1] == "0":
        if any(note in printed for note in ("Search not completed", "too small", "reached -DMEMLIM")):
            raise OracleError(f"{variant.name}: the search was not exhaustive: {printed[-2000:]}")
        verdict, detail = Verdict.OK, ""
    else:
        detail = complaint[1] if complaint else ""
        found = [verdict for pattern, verdict in ERRORS.items() if re.search(pattern, detail)]
        if not found:
            raise OracleError(f"{variant.name}: an error that is no verdict: {printed[-2000:]}")
        verdict = found[0]
    return Result(verdict, int(stored[1]), float(took[1]) if took else 0.0, detail)


def table(sizes: list[int], search_s: float) -> str:
    """All variants at these numbers of ranks, measured now, in Markdown."""

    def cell(variant: Variant, ranks: int) -> str:
        if ranks not in variant.ranks:
            return "-"
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = check(variant, ranks, Path(folder), search_s=search_s)
            except OracleError as error:
                print(error, file=sys.stderr)
                return "no verdict"
        wrong = "" if found.verdict is variant.expected else f" NOT {variant.expected}"
        more = variant.grid_flags if ranks in variant.grid else {}
        given = " ".join(f"{key}={value}" for key, value in more.items())
        return f"{found.verdict}{wrong}, {found.states:,}, {found.seconds:.1f} s" + (f" ({given})" if given else "")

    lines = ["| variant | flags | " + " | ".join(f"N={n}" for n in sizes) + " |", "| --- " * (2 + len(sizes)) + "|"]
    with ThreadPoolExecutor(2) as pool:
        cells = [[pool.submit(cell, variant, n) for n in sizes] for variant in VARIANTS]
        for variant, row in zip(VARIANTS, cells, strict=True):
            lines.append(f"| {variant.name} | `{variant.given}` | " + " | ".join(each.result() for each in row) + " |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    limit, *numbers = [int(each) for each in sys.argv[1:]] or [300, 2, 3]
    print(table(numbers, limit))
