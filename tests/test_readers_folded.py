"""Dumps of long jobs: what is left out of them before it is judged changes no diagnosis, no lane and no picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from tests.fr_dumps import Recorder, recorders, save, write
from verify.hang.diagnosis import diagnose_found
from verify.hang.text import as_text
from verify.html import diagnosis_page
from verify.readers.dumps import together
from verify.readers.flight_recorder import READER, decode
from verify.readers.found import Damaged
from verify.readers.gather import gather
from verify.readers.workers import CHUNK, decode_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    from verify.readers.found import Found

GROUPS = {
    "0": ("default_pg", (0, 1, 2, 3)), "1": ("tp", (0, 1)), "2": ("tp", (2, 3)), "3": ("dp", (0, 2)),
    "4": ("dp", (1, 3)), "5": ("ep", (0, 1, 2)), "6": ("own", (3,)), "7": ("pp", (0, 3)), "8": ("ring", (0, 1, 2, 3)),
}  # fmt: skip
KINDS = (
    ("plain",), ("plain", "plain", "plain", "pair"), ("plain", "pair", "batch"), ("plain", "uneven"),
    ("plain", "two lines"), ("plain", "joined"),
)  # fmt: skip
FAULTS = ("none", "missing", "differs", "stalls", "crossed", "leaves", "noise", "sizes", "all open")
Call = tuple[str, str, int, str, int]
"""Kind, group, size, operation, line."""


def call(rank: Recorder, each: Call, at: int, lines: int | None) -> None:
    """Record one call of a program, if the rank is a member. lines: every so often the first member has another."""
    kind, group, size, operation, line = each
    members = GROUPS[group][1]
    if rank.rank not in members:
        return
    here, many = members.index(rank.rank), len(members)
    if kind == "uneven" and many > 1:
        rank.call(group, "all_to_all", size=size + here, out=size + many - 1 - here, line=line)
    elif kind == "joined" and many > 1:
        for n, name in enumerate(("_broadcast_oop", "_broadcast_oop", "ALLGATHER_coalesced")):
            rank.call(group, name, size=size + n, line=line, same=n > 0)
    elif kind == "pair" and many > 1:
        source, target = size % many, (size + 1) % many
        if here == source:
            rank.call(group, f"send {source}->{target}", size=size, line=line)
        elif here == target:
            rank.call(group, f"recv {target}<-{source}", size=size, line=line)
    elif kind == "batch" and many > 1:
        rank.call(group, f"send {here}->{(here + 1) % many}", size=size, line=line)
        rank.call(group, f"recv {here}<-{(here - 1) % many}", size=size, line=line, same=True)
        if size == 2:
            rank.call(group, "coalesced", size=size, line=line, same=True, is_p2p=True)
    else:
        if kind == "two lines":
            line += 50 * (here == many - 1)
        elif lines and here == 0 and at % lines == 0:
            line += 100
        taken, given = {"all_gather": (size, size * many), "_reduce_scatter_base": (size * many, size)}.get(
            operation, (size, size)
        )
        rank.call(group, operation, size=taken, out=given, line=None if lines is None else line)


def program(random: Random) -> list[Call]:
    kinds = random.choice(KINDS)
    operations = ["all_reduce", "all_reduce", "all_gather", "broadcast", "all_to_all", "_reduce_scatter_base"]

    def one() -> Call:
        name = random.choice(operations)
        return random.choice(kinds), random.choice(sorted(GROUPS)), random.randint(1, 2), name, random.randint(10, 13)

    body = [one() for _ in range(random.randint(1, 8))]
    return [each for _ in range(random.randint(1, 40)) for each in (*body, *[one()] * (random.random() < 0.1))]


def spoilt(random: Random, calls: list[Call], fault: str, at: int) -> list[Call]:
    """The program of the rank that is at fault."""
    mine = list(calls)
    _, group, _, _, line = calls[at]
    if fault == "missing":
        del mine[at]
    elif fault == "differs":
        mine[at] = ("plain", group, 7, random.choice(["all_reduce", "broadcast", "all_gather"]), line)
    elif fault == "sizes":
        mine[at:] = [(*each[:2], 5, *each[3:]) if random.random() < 0.5 else each for each in mine[at:]]
    elif fault == "crossed":
        mine[at : at + 2] = mine[at : at + 2][::-1]
    elif fault == "leaves":
        del mine[at:]
    return mine


def reopen(entries: list[dict[str, Any]]) -> None:
    for each in entries:
        each.update(state="scheduled", retired=False, time_discovered_completed_ns=None)


def disturb(random: Random, rank: Recorder) -> None:
    for each in rank.entries:
        if random.random() < 0.03:
            each["state"] = "scheduled"
        if random.random() < 0.02:
            each["collective_seq_id"] += random.choice([-1, 1, 2])
        if random.random() < 0.02:
            each["input_sizes"] = random.choice([None, [[3]], []])
    if random.random() < 0.3:
        random.shuffle(rank.entries)


def ranks_of(random: Random) -> list[Recorder]:
    """What four ranks recorded of a random job that went wrong, or not."""
    found = recorders(4, GROUPS, "gloo" if random.random() < 0.1 else "nccl")
    calls, fault, lines = program(random), random.choice(FAULTS), random.choice([None, 0, 0, 3, 7])
    late = max(0, len(calls) - 1 - random.randrange(6))
    at, victim = random.choice([random.randrange(len(calls)), late]), random.randrange(4)
    for rank in found:
        mine = spoilt(random, calls, fault, at) if rank.rank == victim else calls
        for n, each in enumerate(mine):
            call(rank, each, n, lines)
        if fault in ("missing", "differs", "crossed", "leaves", "all open"):
            reopen(rank.entries[-random.choice([1, 1, 1, 2, 3, random.randint(1, 30)]) :])
        if fault == "stalls" and rank.rank == victim:
            reopen(rank.entries[at:])
        if fault == "noise":
            disturb(random, rank)
    wrapped = random.random()
    if random.random() < 0.2:
        for rank in found:
            rank.entries = [each for each in rank.entries if each["state"] != "completed"]
    keep = random.randint(1, 60)
    for rank in found:
        if wrapped < 0.5:
            rank.entries = rank.entries[-(keep if wrapped < 0.3 else random.randint(1, 60)) :]
    return found


def dumps_of(random: Random) -> dict[int, dict[str, Any]]:
    found = {}
    for rank in ranks_of(random):
        dump = rank.dump()
        if random.random() < 0.5:
            dump["pg_status"] = {
                str(at): {
                    "last_enqueued_collective": max(rank.counts.get((name, kind), -1) for kind in (True, False)),
                    "last_completed_collective": rank.counts.get((name, False), -1),
                }
                for at, name in enumerate(rank.groups)
            }
        if random.random() < 0.05:
            dump["pg_config"] = {}
        if random.random() > 0.06:
            found[rank.rank] = dump
    return found


def told(found: Found) -> tuple[Any, ...]:
    """Everything that people see of a diagnosis."""
    diagnosis = diagnose_found(found)
    page = diagnosis_page(diagnosis.to_dict(), diagnosis.situation)
    return diagnosis.to_dict(), as_text(diagnosis), page, found.unsure, found.expected, found.present


@given(random=st.randoms(use_true_random=False))
def test_leaving_calls_out_changes_nothing_seen(random: Random, tmp_path_factory: pytest.TempPathFactory) -> None:
    dumps = dumps_of(random)
    if not dumps:
        return
    folder = write(tmp_path_factory.mktemp("dumps"), dumps)
    decoded = [decode(file) for file in sorted(folder.iterdir())]
    every, folded = together(decoded, whole=True), together(decoded)
    assert told(folded) == told(every)
    assert len(folded.events) <= len(every.events)


def steps(rank: Recorder, many: int) -> None:
    for _ in range(many):
        rank.call("0", "all_reduce", line=10)
        rank.call("3" if rank.rank in (0, 2) else "4", "all_reduce", line=11)


def test_a_long_job_is_folded_to_its_end_with_places_kept(tmp_path: Path) -> None:
    ranks = recorders(4, GROUPS)
    for rank in ranks:
        steps(rank, 500)
        if rank.rank != 2:
            rank.call("0", "all_reduce", state="scheduled", line=12)
    found = gather([save(tmp_path / "dumps", ranks)])
    assert len(found.events) < 60
    diagnosis = diagnose_found(found)
    assert diagnosis.verdict.ranks == (2,)
    assert diagnosis.situation.launches[0][-1].order == 1000
    assert "older calls of 4 ranks" in diagnosis_page(diagnosis.to_dict(), diagnosis.situation)


@pytest.mark.parametrize(
    ("change", "cls", "ranks"),
    [
        (lambda entry: entry.update(input_sizes=[[9]], output_sizes=[[9]]), "mismatch", [1]),
        (lambda entry: entry.update(output_sizes=[[9]]), "mismatch", [1]),
        (lambda entry: entry.update(profiling_name="nccl:broadcast"), "mismatch", [1]),
        (lambda entry: entry.update(state="scheduled", retired=False), "device_stall", [1]),
    ],
)
def test_one_odd_call_in_the_middle_of_many_is_found(
    change: Callable[[dict[str, Any]], None], cls: str, ranks: list[int], tmp_path: Path
) -> None:
    made = recorders(4, GROUPS)
    for rank in made:
        for n in range(300):
            rank.call("0", "all_reduce", line=10 + (n % 7 == 0))
    change(made[1].entries[151])
    found = gather([save(tmp_path / "dumps", made)])
    verdict = diagnose_found(found).verdict
    assert (str(verdict.cls), list(verdict.ranks)) == (cls, ranks)
    assert "call 152 on default_pg" in (verdict.say + " ".join(verdict.chain)).lower()
    assert len(found.events) < 100


def filler(ranks: list[Recorder], group: str = "0") -> None:
    """Calls enough to push all others out of what is kept for the pictures."""
    for rank in ranks:
        for _ in range(30):
            rank.call(group, line=10)


def test_the_first_call_that_a_member_never_made_is_the_one_named(tmp_path: Path) -> None:
    ranks = recorders(4, GROUPS)
    for rank in ranks[:2]:
        for _ in range(50):
            rank.call("5", line=11)
    filler(ranks)
    found = diagnose_found(gather([save(tmp_path / "dumps", ranks)]))
    assert (found.verdict.ranks, found.code) == ((), 3)
    assert "ranks 0 and 1 finished all_reduce (call 1 on ep), which rank 2 did not call" in found.verdict.say


@pytest.mark.parametrize("transfers", [False, True])
def test_a_later_call_proves_those_that_a_ring_lost(transfers: bool, tmp_path: Path) -> None:
    """Rank 0 has not finished its tenth call; rank 3 made it long ago, and all that it holds of the group is later."""
    ranks = recorders(4, GROUPS)
    for rank in (ranks[0], ranks[3]):
        for n in range(50):
            if transfers:
                rank.call("7", "send 0->1" if rank.rank == 0 else "recv 1<-0", line=11)
            else:
                rank.call("7", line=11)
            if rank.rank == 0 and n == 9:
                reopen(rank.entries[-1:])
    filler(ranks)
    ranks[3].entries = ranks[3].entries[-40:]
    ranks[0].entries = ranks[0].entries[1:]
    found = diagnose_found(gather([save(tmp_path / "dumps", ranks)]))
    assert (str(found.verdict.cls), found.verdict.ranks) == ("device_stall", (0,))


def test_elements_that_an_all_to_all_loses_are_found_among_many(tmp_path: Path) -> None:
    ranks = recorders(4, GROUPS)
    for rank in ranks:
        for n in range(100):
            lost = int(n >= 60 and rank.rank == 1)
            rank.call("8", "all_to_all", size=4 + rank.rank, out=7 - rank.rank + lost, line=11)
    filler(ranks)
    found = gather([save(tmp_path / "dumps", ranks)])
    say = diagnose_found(found).verdict.say
    assert "Call 61 on ring: the members of this all_to_all send 22 elements and expect 23" in say
    assert len(found.events) < 100


def many_dumps(folder: Path) -> list[Path]:
    ranks = recorders(3 * CHUNK, {"0": ("default_pg", range(3 * CHUNK))})
    for rank in ranks:
        for _ in range(3):
            rank.call("0", line=10)
    return sorted(save(folder, ranks).iterdir())


def test_workers_and_this_process_read_the_same(tmp_path: Path) -> None:
    files = many_dumps(tmp_path / "dumps")
    files[40].write_bytes(files[40].read_bytes()[:200])
    here, there = decode_all(files, workers=0), decode_all(files, workers=2)
    assert [type(each) for each in here] == [type(each) for each in there]
    assert str(here[40]) == str(there[40])
    assert isinstance(there[40], Damaged)
    one, other = (
        told(together([each for each in found if not isinstance(each, Damaged)])) for found in (here, there)
    )  # fmt: skip
    assert one == other


def test_an_unsafe_dump_among_many_is_one_line_from_a_worker_too(tmp_path: Path) -> None:
    files = many_dumps(tmp_path / "dumps")
    files[70].write_bytes(b"\x80\x02cposix\nmkdir\n.")
    for workers in (0, 2):
        with pytest.raises(UsageError, match="unsafe pickle") as error:
            decode_all(files, workers=workers)
        assert str(files[70]) in str(error.value)


@pytest.mark.parametrize("boot", ["raise SystemExit(3)", "print('what is this')", "import os; os.abort()"])
def test_dumps_are_read_here_where_workers_fail(boot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verify.readers import workers

    files = many_dumps(tmp_path / "dumps")
    expected = [each.rows for each in decode_all(files, workers=0) if not isinstance(each, Damaged)]
    monkeypatch.setattr(workers, "BOOT", boot)
    assert [each.rows for each in decode_all(files, workers=2) if not isinstance(each, Damaged)] == expected
    monkeypatch.setattr(workers.sys, "executable", str(tmp_path / "no python here"))
    assert [each.rows for each in decode_all(files, workers=2) if not isinstance(each, Damaged)] == expected


def test_damaged_dumps_are_decoded_once_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verify.readers import workers

    files = many_dumps(tmp_path / "dumps")
    files[5].write_bytes(b"\x80\x02]")
    seen: list[Path] = []
    decoder = workers.Decoder.decode
    monkeypatch.setattr(workers.Decoder, "decode", lambda self, path: (seen.append(path), decoder(self, path))[1])
    found = gather([tmp_path / "dumps"])
    assert len(seen) == len(files)
    assert len(found.present) == len(files) - 1
    assert any("not used" in line and files[5].name in line for line in found.unknown)
    with pytest.raises(Damaged):
        READER.read_all(files)
