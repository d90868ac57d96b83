"""Random jobs with one planted fault, through every format that can carry it: the class and the rank are named.

With all of the evidence the verdict is certain, as far as the format can know. With some of it - dumps missing, rings
that wrapped, versions mixed, unfinished calls only - it may be undecided, but nobody is blamed who has no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kernel.errors import UsageError
from tests import evidence_files as files
from tests.stuck_jobs import RANKS, Fault, Job, jobs
from verify.blame import Certainty, Class
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.hang.text import as_text
from verify.readers.gather import gather

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

EVERYBODY = tuple(range(RANKS))
ABSENT = (Fault.MISSING, Fault.EXIT, Fault.EXCEPTION, Fault.OUTSIDE)
DIFFER = (Fault.OPERATION, Fault.SIZE)
HEALTHY = (Fault.NONE, Fault.SITE)
"""Equal calls from other lines complete."""
MISSING = dict.fromkeys(ABSENT, Class.MISSING)
MISMATCH = dict.fromkeys(DIFFER, Class.MISMATCH)
DUMPS = {
    **MISSING, **MISMATCH, Fault.DTYPE: Class.MISMATCH, Fault.CYCLE: Class.CYCLE,
    Fault.PAIR_CYCLE: Class.CYCLE, Fault.MIXED_CYCLE: Class.CYCLE, Fault.NO_SEND: Class.MISSING,
    Fault.STALL: Class.DEVICE_STALL,
}  # fmt: skip
"""What dumps can know. Roots are not in them; that all are equal and stuck is seen, but not what keeps them."""


@dataclass(frozen=True)
class Format:
    """knows: fault -> the class that it shows as. blind: faults that leave it undecided. pairs: whether it has them.

    settles: whether it shows that a call is over. blocking: hosts of its jobs wait for each call.
    """

    write: Callable[..., Any]
    knows: Mapping[Fault, Class]
    blind: tuple[Fault, ...] = ()
    pairs: bool = True
    settles: bool = True
    how: dict[str, Any] = field(default_factory=dict)
    blocking: bool = False


BLIND = (Fault.EQUAL, Fault.ROOT)
FORMATS = {
    "2.4": Format(files.dumps, DUMPS, BLIND, how={"versions": ("2.4",)}),
    "2.9": Format(files.dumps, DUMPS, BLIND, how={"versions": ("2.9",)}),
    "2.10": Format(files.dumps, DUMPS, BLIND, how={"versions": ("2.10",)}),
    "mixed": Format(files.dumps, DUMPS, BLIND, how={"versions": ("2.4", "2.10", "2.9")}),
    "json": Format(files.dumps, DUMPS, BLIND, how={"as_json": True}),
    "joined": Format(
        files.all_of_torch, {**DUMPS, Fault.EXCEPTION: Class.EXCEPTION, Fault.OUTSIDE: Class.OUTSIDE}, BLIND
    ),
    "watchdog": Format(
        files.watchdog, {**MISSING, **MISMATCH, Fault.CYCLE: Class.CYCLE, Fault.STALL: Class.DEVICE_STALL}, BLIND,
        pairs=False, settles=False,
    ),
    "nccl": Format(
        files.nccl_lines,
        {**MISSING, **MISMATCH, Fault.DTYPE: Class.MISMATCH, Fault.ROOT: Class.MISMATCH, Fault.CYCLE: Class.CYCLE,
         Fault.PAIR_CYCLE: Class.CYCLE, Fault.MIXED_CYCLE: Class.CYCLE, Fault.NO_SEND: Class.MISSING},
        (Fault.EQUAL, Fault.STALL), settles=False,
    ),
    "ras": Format(
        files.ras, {**MISSING, Fault.OPERATION: Class.MISMATCH, Fault.CYCLE: Class.CYCLE}, pairs=False, settles=False
    ),
    "record": Format(
        files.rings,
        {Fault.MISSING: Class.MISSING, Fault.EXIT: Class.MISSING, Fault.EXCEPTION: Class.EXCEPTION,
         Fault.OUTSIDE: Class.OUTSIDE, **MISMATCH, Fault.CYCLE: Class.CYCLE,
         Fault.STALL: Class.DEVICE_STALL},
        BLIND, pairs=False, blocking=True,
    ),
}  # fmt: skip


def read(folder: Path) -> Diagnosis:
    found = diagnose_found(gather([folder]))
    assert len(as_text(found).splitlines()) <= 25
    undecided = found.verdict.certainty is Certainty.UNDECIDED
    assert not (undecided and found.verdict.ranks)
    return found


def fair(job: Job, found: Diagnosis) -> bool:
    """Whether nobody is blamed who has no part in the fault."""
    blamed = set(found.verdict.ranks)
    if not blamed or found.verdict.certainty is Certainty.UNDECIDED:
        return True
    return job.rank in blamed if found.verdict.cls is Class.CYCLE else blamed == {job.rank}


@pytest.mark.parametrize("name", FORMATS)
@given(st.data())
def test_the_planted_fault_is_named(name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    known = FORMATS[name]
    job = data.draw(jobs((*known.knows, *known.blind, *HEALTHY), known.pairs, known.blocking))
    folder = tmp_path_factory.mktemp("evidence")
    kept = known.write(folder, job, EVERYBODY, **known.how)
    found = read(folder)
    del kept  # the rings of living ranks
    event(f"{job.fault}")
    told = (found.verdict.cls, found.verdict.certainty)
    if job.fault in HEALTHY:
        assert found.code in (0, 3)
        called = all(job.launches[rank] for rank in EVERYBODY)
        assert not (known.settles and called) or told == (Class.NONE, Certainty.CERTAIN)
        return
    if job.fault in known.blind:
        # Not the fault is seen, but that its rank does not call what others wait for behind it.
        seen = told == (Class.MISSING, Certainty.CONDITIONAL) and found.verdict.ranks == (job.rank,)
        assert seen or (found.code, found.verdict.ranks) == (3, ()), found.verdict
        return
    cls = known.knows[job.fault]
    if told[1] is Certainty.UNDECIDED:
        # A broadcast is relayed: who keeps the rest is not known. A rank that called nothing has left nothing.
        relayed = job.fault is Fault.STALL and job.launches[job.rank][-1].event.operation == "broadcast"
        assert relayed or not job.launches[job.rank], found.verdict
        return
    assert told[0] is cls, found.verdict
    if cls is Class.CYCLE:
        assert job.rank in found.verdict.ranks
    elif cls is Class.MISMATCH:
        assert found.verdict.ranks == ((job.rank,) if len(job.members) > 2 else ())
    else:
        assert found.verdict.ranks == (job.rank,)


@pytest.mark.parametrize("name", FORMATS)
@given(st.data())
def test_with_some_of_the_evidence_nobody_is_blamed_wrongly(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    known = FORMATS[name]
    job = data.draw(jobs((*known.knows, *known.blind, *HEALTHY), known.pairs, known.blocking))
    folder = tmp_path_factory.mktemp("evidence")
    ranks = sorted(data.draw(st.sets(st.sampled_from(EVERYBODY), min_size=1)))
    how = dict(known.how)
    if known.write in (files.dumps, files.all_of_torch):
        how |= data.draw(st.sampled_from([{}, {"active": True}, {"keep": 1}, {"keep": 3}]))
    elif known.write is files.watchdog:
        how["chatty"] = data.draw(st.booleans())
    elif known.write is files.rings:
        how["capacity"] = data.draw(st.sampled_from([4, 9, 16, 256]))
    kept = known.write(folder, job, ranks, **how)
    try:
        found = read(folder)
    except UsageError:
        assert not any(job.launches[rank] for rank in ranks) or known.write is files.watchdog
        return
    finally:
        del kept
    event(f"{job.fault}: {found.verdict.certainty}")
    assert fair(job, found), found.verdict
    if job.fault in HEALTHY:
        assert found.code != 1, found.verdict
