"""What a report says is read at three in the morning: each condition once, verbs that agree, places that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fr_dumps import recorders, save
from tests.healthy import Working, program
from tests.stuck_jobs import RANKS
from verify.blame import Certainty, Class, Verdict
from verify.events import Communicator, Event, Kind, Site, State
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.hang.text import as_text
from verify.readers.found import Found, Stack
from verify.readers.gather import gather, merge

if TYPE_CHECKING:
    from random import Random

DATA = Path(__file__).parent / "data"
TORCH = "/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
CALL = (Site(TORCH, 9, "all_reduce"),)
KERNEL = "poll_schedule_timeout.constprop.0"
PLURAL = re.compile(r"\branks \d+(?:, \d+)* and \d+(?: more)? (?:waits|stands|does|has|is|runs|moves|polls|leaves)\b")
SINGULAR = re.compile(r"\b[Rr]ank \d+ (?:wait|stand|do|have|are|run|move|poll|leave)\b")


def read(found: Diagnosis) -> str:
    """The report as one line, which reads well."""
    text = as_text(found)
    assert len(text.splitlines()) <= 25
    told = " ".join(text.split())
    for line in (told, found.to_dict()["say"]):
        assert line.count("Only if") <= 1, line
        assert not PLURAL.search(line), line
        assert not SINGULAR.search(line), line
        assert "[kernel]" not in line
        assert ":0 in " not in line
        assert "  " not in line
    return told


@given(conditions=st.lists(st.sampled_from(["a", "b and c", "the device is full"]), min_size=1, max_size=4))
def test_conditions_are_told_once_and_all_of_them(conditions: list[str]) -> None:
    verdict = Verdict(Class.CYCLE, say="Ranks 0 and 1 wait in a ring.")
    for each in conditions:
        verdict = verdict.only_if(each)
    assert verdict.say == f"Only if {', and '.join(reversed(conditions))}: Ranks 0 and 1 wait in a ring."
    assert verdict.plain == "Ranks 0 and 1 wait in a ring."
    assert verdict.certainty is Certainty.CONDITIONAL


@pytest.mark.parametrize("folder", sorted((DATA / "fr").glob("*/*")), ids=lambda folder: folder.name)
def test_reports_of_real_dumps_read_well(folder: Path) -> None:
    read(diagnose_found(gather([folder])))


@given(
    chance=st.randoms(use_true_random=False), length=st.integers(1, 10), backend=st.sampled_from(["nccl", "gloo"]),
    moment=st.integers(0, 60), stacks=st.booleans(), dumps=st.booleans(),
)  # fmt: skip
def test_reports_of_jobs_at_any_moment_read_well(
    chance: Random, length: int, backend: str, moment: int, stacks: bool, dumps: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    job = Working(chance, program(chance, length, pairs=True), backend, None, swapped=True)
    for _ in range(moment):
        job.step()
    found = []
    if dumps or not stacks:
        ranks = [job.dump(rank, None, active=False) for rank in range(RANKS)]
        found.append(gather([save(tmp_path_factory.mktemp("dumps"), ranks)]))
    if stacks:
        seen = tuple(job.stack(rank) for rank in range(RANKS))
        found.append(Found("stacks", stacks=seen, expected=frozenset(range(RANKS))))
    answer = diagnose_found(merge(found))
    read(answer)
    assert answer.code != 3 or answer.verdict.fix


def test_a_place_in_the_kernel_is_told_in_words() -> None:
    assert str(Site("[kernel]", 0, KERNEL)) == "poll_schedule_timeout in the kernel"
    assert str(Site("libc.so.6", 0, "__poll")) == "__poll in libc.so.6"
    assert str(Site("train.py", 7, "step")) == "train.py:7 in step"
    group = Communicator((0, 1), "world")
    waits = Event(0, Kind.COLLECTIVE, "all_reduce", communicator=group, sequence=0, state=State.SCHEDULED)
    both = frozenset({0, 1})
    stack = Stack(1, "MainThread", (Site("[kernel]", 0, KERNEL),))
    told = read(diagnose_found(Found("pid 7", (waits,), both, both, (stack,))))
    assert "poll_schedule_timeout in the kernel" in told


@pytest.mark.parametrize(
    ("threads", "ranks", "said"),
    [(("", "saver"), (1,), "what rank 1 waits for is"), (("",), (1,), "what rank 1 waits for is"),
     (("",), (0, 1), "what ranks 0 and 1 wait for is")],
)  # fmt: skip
def test_who_waits_for_what_is_not_known_is_told_by_rank(
    threads: tuple[str, ...], ranks: tuple[int, ...], said: str
) -> None:
    events = tuple(Event(rank, Kind.WAIT, streams=("s",), thread=thread) for rank in ranks for thread in threads)
    assert said in read(diagnose_found(Found("record", events, frozenset({0, 1}), frozenset({0, 1}))))


def joined(call: Site, thread: str = "trainer") -> tuple[Stack, ...]:
    """A rank whose main thread waits for a thread that is in a call, as programs that train in one."""
    join = (Site("/lib/python3.12/threading.py", 1169, "Thread._wait_for_tstate_lock"), Site("train.py", 50, "main"))
    return Stack(None, "MainThread", join), Stack(None, thread, (*CALL, call))


def of(rank: int, stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    return tuple(Stack(rank, each.thread, each.frames) for each in stacks)


def test_a_program_that_trains_in_a_thread_stands_where_the_thread_does(tmp_path: Path) -> None:
    """Main threads that wait for their own threads keep nobody: it is the calls of those that cross."""
    ranks = recorders(2, {"1": ("a", (0, 1)), "2": ("b", (0, 1))})
    for rank, group in zip(ranks, "12", strict=True):
        rank.call("1", line=1)
        rank.call("2", line=2)
        rank.call(group, line=7, state="scheduled", retired=False)
    stacks = (*of(0, joined(Site("train.py", 7, "step"))), *of(1, joined(Site("train.py", 7, "step"))))
    found = diagnose_found(merge([gather([save(tmp_path, ranks)]), Found("stacks", stacks=stacks)]))
    assert (found.verdict.cls, found.verdict.ranks) == (Class.CYCLE, (0, 1))
    assert "the main thread of rank 0 waits for its thread trainer" in read(found)
    alone = diagnose_found(Found("stacks", stacks=stacks, expected=frozenset({0, 1})))
    assert (alone.code, alone.verdict.ranks) == (3, ())
    assert "ranks 0 and 1 stand in all_reduce at train.py:7 in step, in thread trainer" in read(alone)


def test_stacks_without_a_call_do_not_tell_that_none_is_open() -> None:
    stacks = tuple(stack for rank in (0, 1) for stack in of(rank, joined(Site("train.py", 7, "step"))[:1]))
    told = read(diagnose_found(Found("stacks", stacks=stacks, expected=frozenset({0, 1}))))
    assert "no stack stands in a call" in told
    assert "nobody waits" not in told


@pytest.mark.parametrize(("left", "read_it"), [("SIGKILL, as torchrun reports", False), ("ValueError: bad", True)])
def test_a_rank_that_was_killed_has_no_exception_to_read(left: str, read_it: bool) -> None:
    gone = Event(1, Kind.EXIT, left, state=State.COMPLETED)
    both, remarks = frozenset({0, 1}), ((0, "it failed after another one: lost"),)
    found = Found("log", (gone,), both, both, remarks=remarks)
    fix = diagnose_found(found).verdict.fix
    assert ("Read the exception" in fix) is read_it
    assert ("OOM killer" in fix) is not read_it


def test_a_long_exception_leaves_room_for_the_rest() -> None:
    gone = Event(1, Kind.EXIT, "RuntimeError: " + "words and more words " * 40, state=State.COMPLETED)
    both, remarks = frozenset({0, 1}), ((0, "it failed after another one: lost"),)
    found = Found("log", (gone,), both, both, remarks=remarks)
    assert "and rank 0 failed after that: lost." in read(diagnose_found(found))
