"""PyTorch's own analyzer beside ours on the same dumps: we get right what it does, and its mistakes are none of ours.

What it prints is asserted too, so that a later version which is better shows up. It runs once, in one process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fr_dumps import Recorder, recorders, save
from verify.hang.diagnosis import diagnose_found
from verify.readers.gather import gather

if TYPE_CHECKING:
    from collections.abc import Callable

REAL = Path(__file__).parent / "data" / "fr"
TWO = {"0": ("default_pg", (0, 1)), "1": ("pg_a", (0, 1)), "2": ("pg_b", (0, 1))}
THREE = {"0": ("default_pg", (0, 1, 2))}
DRIVER = """
import json, logging, sys, traceback
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components import fr_logger
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("Flight Recorder").addHandler(Keep())
told = {}
for name, folder, prefix in json.load(sys.stdin):
    lines.clear()
    try:
        fr_trace.main([folder, "-p", prefix])
        failed = ""
    except Exception as error:
        failed = type(error).__name__
    told[name] = [failed, "\\n".join(lines)]
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Case:
    """make: the dumps. theirs: what its report holds, a regular expression; "" where it reports nothing. ours: class,
    certainty, ranks.
    """

    make: Callable[[Path], Path]
    theirs: str
    ours: tuple[str, str, tuple[int, ...]]


def of(ranks: list[Recorder], **how: object) -> Callable[[Path], Path]:
    return lambda folder: save(folder, ranks, **how)


def crossing(*states: str) -> list[Recorder]:
    ranks = recorders(2, TWO)
    for rank, names in zip(ranks, (("1", "2"), ("2", "1")), strict=True):
        for name, state in zip(names, states, strict=False):
            rank.call(name, state=state)
    return ranks


def ring() -> list[Recorder]:
    ranks = recorders(3, {"1": ("p01", (0, 1)), "2": ("p12", (1, 2)), "3": ("p02", (0, 2))})
    for rank, name in zip(ranks, ("1", "2", "3"), strict=True):
        rank.call(name, state="scheduled")
    return ranks


def pipeline() -> list[Recorder]:
    ranks = recorders(3, THREE)
    ranks[0].call("0", "send 0->1")
    ranks[1].call("0", "recv 1<-0")
    ranks[1].call("0", "send 1->2")
    ranks[2].call("0", "recv 2<-1")
    return ranks


def sends() -> list[Recorder]:
    ranks = recorders(2, TWO)
    ranks[0].call("1", "send 0->1", state="scheduled")
    ranks[1].call("1", "send 1->0", state="scheduled")
    return ranks


def two(first: str, second: str, shift: int = 0, **how: object) -> list[Recorder]:
    ranks = recorders(2, TWO)
    for rank, operation in zip(ranks, (first, second), strict=True):
        rank.call("1", operation, out=16 if operation == "all_gather" else None, **how)
    for entry in ranks[1].entries:
        entry["record_id"] += shift
    return ranks


def left_out() -> list[Recorder]:
    ranks = two("all_reduce", "all_reduce")
    ranks[0].call("1", state="scheduled")
    return ranks


def relayed() -> list[Recorder]:
    ranks = recorders(3, THREE)
    for rank in ranks:
        rank.call("0", "broadcast", state="completed" if rank.rank == 0 else "started")
    return ranks


CASES = {
    "asynchronous crossing": Case(of(crossing("scheduled", "scheduled")), "", ("cycle", "conditional", (0, 1))),
    "crossing, heads started": Case(
        of(crossing("started", "scheduled")), "STATE_MISMATCH", ("cycle", "conditional", (0, 1))
    ),
    "crossing of hosts": Case(
        of(crossing("scheduled")), r"missing ranks: \{(0\}[\s\S]*missing ranks: \{1|1\}[\s\S]*missing ranks: \{0)\}",
        ("cycle", "conditional", (0, 1)),
    ),
    "ring of three pairs": Case(of(ring()), r"(missing ranks[\s\S]*){3}", ("cycle", "conditional", (0, 1, 2))),
    "both send first": Case(of(sends()), "SIZE_OR_SYNTAX_MISMATCH", ("cycle", "conditional", (0, 1))),
    "pipeline that completed": Case(of(pipeline()), "Not all ranks joining", ("none", "certain", ())),
    "broadcast done on its root": Case(of(relayed()), "STATE_MISMATCH", ("device_stall", "undecided", ())),
    "records of one rank shifted": Case(
        of(two("all_reduce", "all_gather", shift=100, state="scheduled")), r"missing ranks: \{0\}",
        ("mismatch", "certain", ()),
    ),
    "all equal and stuck": Case(of(two("all_reduce", "all_reduce", state="scheduled")), "", ("below", "undecided", ())),
    "a dump is missing": Case(of(two("all_reduce", "all_reduce", state="scheduled")[:1]), "AssertionError",
                              ("missing", "undecided", ())),
    "a member left out a call": Case(of(left_out()), r"missing ranks: \{1\}", ("missing", "conditional", (1,))),
    "other operations": Case(of(two("all_reduce", "all_gather")), "COLLECTIVE_TYPE_MISMATCH",
                             ("mismatch", "certain", ())),
    "equal and done": Case(of(two("all_reduce", "all_reduce")), "", ("none", "certain", ())),
}  # fmt: skip
FOLDERS: dict[str, tuple[str, str, str, tuple[str, str, tuple[int, ...]]]] = {
    "consistent": ("h200/consistent", "dump_rank_", "", ("none", "certain", ())),
    "graph replays": ("h200/crossed_same_stream_graph", "dump_rank_", "", ("below", "undecided", ())),
    "no dump of rank 0": ("h200/host_blocked", "dump_rank_", "AssertionError", ("none", "undecided", ())),
    "op_mismatch": ("h200/op_mismatch", "dump_rank_", "TYPE_MISMATCH", ("mismatch", "certain", ())),
    "size_mismatch": ("h200/size_mismatch_completes", "dump_rank_", "SIZE_OR_SYNTAX", ("mismatch", "certain", ())),
    "lock_gil": ("megatron16/lock_gil", "_dump_", r"(missing ranks[\s\S]*){14}", ("missing", "conditional", (9, 14))),
    "gpu_error": ("megatron16/gpu_error", "_dump_", r"(missing ranks[\s\S]*){21}",
                  ("device_stall", "conditional", (12, 14))),
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What torchfrtrace says of every case, or the name of the exception that it ends with."""
    pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    base = tmp_path_factory.mktemp("cases")
    asked = [(name, str(case.make(base / str(n))), "dump_rank_") for n, (name, case) in enumerate(CASES.items())]
    asked += [(name, str(REAL / folder), prefix) for name, (folder, prefix, _, _) in FOLDERS.items()]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER], input=json.dumps(asked), capture_output=True, text=True,
        timeout=300, check=True,
    )  # fmt: skip
    told = json.loads(ran.stdout.splitlines()[-1])
    return {name: failed or report.strip() for name, (failed, report) in told.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *FOLDERS])
def test_beside_the_analyzer_of_pytorch(name: str, reports: dict[str, str], tmp_path: Path) -> None:
    if name in CASES:
        folder, theirs, ours = CASES[name].make(tmp_path / "job"), CASES[name].theirs, CASES[name].ours
    else:
        place, _, theirs, ours = FOLDERS[name]
        folder = REAL / place
    report = reports[name]
    assert re.search(theirs, report) if theirs else not report, report
    verdict = diagnose_found(gather([folder])).verdict
    assert (str(verdict.cls), str(verdict.certainty), verdict.ranks) == ours
