"""Jobs with several threads a rank: calls of different threads have no order between them.

A job is run by an oracle of its own, stopped at any moment, and told as a record tells it: of threads that have made a
call, what they made and whether they wait; of all others, nothing. What the processes do then is as /proc would say.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from verify.blame import Certainty, Class
from verify.events import Communicator, Event, Kind, State
from verify.hang.diagnosis import diagnose_found
from verify.live.threads import Moves
from verify.readers.found import Found, waits_for_nothing

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from verify.blame import Verdict

MEMBERS = ((0, 1), (0, 1, 2), (1, 2), (0, 2))
RANKS = frozenset({0, 1, 2})
SLOW = Moves(others=("a thread that waits for the clock, in 9 s",))


@dataclass
class Thread:
    """A thread of a rank and the groups of the calls that it has still to make; "" stands for the end of a round, at
    which it waits for the other threads of its rank.
    """

    rank: int
    name: str
    todo: list[str]
    inside: bool = False


@dataclass
class Job:
    """Threads that call groups, each as long as all members are in it. groups: name -> members."""

    groups: dict[str, tuple[int, ...]]
    threads: list[Thread]
    events: list[Event] = field(default_factory=list)

    def step(self, choice: int) -> bool:
        """Let one thread enter its next call, or one call end; False where nothing can move."""
        self._join()
        idle = self._ready()
        full = [name for name in self.groups if len(self._inside(name)) == len(self.groups[name])]
        if not idle and not full:
            return False
        choice %= len(idle) + len(full)
        if choice < len(idle):
            thread = idle[choice]
            thread.inside = True
            self.events.append(self._call(thread))
        else:
            self._end(full[choice - len(idle)])
        return True

    def end_what_is_full(self) -> None:
        """A call that all members are in takes no time."""
        for name in self.groups:
            if len(self._inside(name)) == len(self.groups[name]):
                self._end(name)

    def _end(self, name: str) -> None:
        for thread in self._inside(name):
            thread.inside = False
            call = self._call(thread)
            place = next(n for n, event in enumerate(self.events) if event == call)
            self.events[place] = replace(call, state=State.COMPLETED)
            thread.todo.pop(0)

    def _join(self) -> None:
        """Begin the next round on ranks whose threads have all ended theirs."""
        for rank in RANKS:
            mine = [thread for thread in self.threads if thread.rank == rank]
            while mine and all(thread.todo[:1] == [""] for thread in mine):
                for thread in mine:
                    thread.todo.pop(0)

    def _ready(self) -> list[Thread]:
        return [thread for thread in self.threads if thread.todo and thread.todo[0] and not thread.inside]

    def _inside(self, name: str) -> list[Thread]:
        return [thread for thread in self.threads if thread.inside and thread.todo[0] == name]

    def _call(self, thread: Thread) -> Event:
        group = Communicator(self.groups[thread.todo[0]], thread.todo[0])
        return Event(
            thread.rank, Kind.COLLECTIVE, "all_reduce", thread=thread.name, communicator=group, medium="gloo",
            stream=f"{thread.name} {thread.todo[0]}", blocking=True, state=State.SCHEDULED,
        )  # fmt: skip

    def told(self) -> Found:
        last = {(event.rank, event.thread): event for event in self.events}
        idle = [waits_for_nothing(*who) for who, event in last.items() if event.state is State.COMPLETED]
        present = frozenset({event.rank for event in self.events})
        return Found(
            "record", (*self.events, *idle), present, RANKS, whole=present, idle=RANKS,
        )  # fmt: skip

    def see(self, ranks: Collection[int]) -> Mapping[int, Moves]:
        """A thread that is between two calls takes its time; one that has made all of its calls is gone."""
        slow = {thread.rank for thread in self._ready()}
        return {rank: SLOW if rank in slow else Moves() for rank in ranks}

    def verdict(self, seen: bool) -> Verdict:
        return (diagnose_found(self.told(), look=self.see) if seen else diagnose_found(self.told())).verdict


@st.composite
def correct(draw: st.DrawFn) -> Job:
    """Rounds of tasks. Those of a round use groups of their own and go to the threads of a pool, on each rank as it
    comes; a rank begins a round when its tasks of the one before are over, so that no call waits for a later one.
    """
    size = draw(st.integers(1, 3))
    groups = {f"g{task}{n}": draw(st.sampled_from(MEMBERS)) for task in range(size) for n in range(2)}
    threads = [Thread(rank, name, []) for rank in sorted(RANKS) for name in ("", "one", "two")[:size]]
    by = {(thread.rank, thread.name): thread for thread in threads}
    names = ["", "one", "two"][:size]
    for _ in range(draw(st.integers(1, 3))):
        calls = [draw(st.lists(st.sampled_from([f"g{task}0", f"g{task}1"]), max_size=3)) for task in range(size)]
        for rank in sorted(RANKS):
            for name, task in zip(draw(st.permutations(names)), range(size), strict=True):
                by[rank, name].todo += [*(call for call in calls[task] if rank in groups[call]), ""]
    return Job(groups, threads)


@given(correct(), st.lists(st.integers(0, 99), max_size=40), st.booleans())
def test_correct_programs_of_several_threads_are_never_convicted(job: Job, choices: list[int], seen: bool) -> None:
    """Stopped at any moment. seen: the processes run here, and show that threads are on their way."""
    for choice in choices:
        if not job.step(choice):
            break
    job.end_what_is_full()
    verdict = job.verdict(seen)
    assert verdict.certainty is not Certainty.CERTAIN or verdict.cls is Class.NONE
    if verdict.cls is Class.CYCLE:
        # Without their processes, a ring is told on the condition that there is no thread that has called nothing yet.
        assert verdict.certainty is Certainty.UNDECIDED or (not seen and "no thread of" in verdict.condition)


@given(correct(), st.lists(st.integers(0, 99), min_size=200, max_size=200))
def test_correct_programs_of_several_threads_end(job: Job, choices: list[int]) -> None:
    """The oracle itself: nothing of it is stuck."""
    for choice in choices:
        job.step(choice)
    assert not any(thread.todo for thread in job.threads)
    assert job.verdict(seen=True).cls is Class.NONE


@given(st.integers(2, 3), st.integers(0, 2), st.lists(st.integers(0, 99), min_size=60, max_size=60), st.data())
def test_a_cross_between_threads_is_found(size: int, before: int, choices: list[int], data: st.DataObject) -> None:
    """A ring over pairs of ranks, each of which calls its two groups in a thread of its own, one after the other; all
    other threads of the ranks wait for these. Who made the calls before does not matter.
    """
    ranks = list(range(size))
    pairs = {f"p{rank}": tuple(sorted({rank, (rank + 1) % size})) for rank in ranks}
    threads = []
    for rank in ranks:
        first, second = f"p{rank}", f"p{(rank - 1) % size}"
        name, other = data.draw(st.permutations(["", "one"]))
        threads += [Thread(rank, other, ["all"] * before), Thread(rank, name, [first, second])]
    job = Job({**pairs, "all": tuple(ranks)}, threads)
    if size == 2:
        # Two groups of the same two ranks.
        job.groups = {"p0": (0, 1), "p1": (0, 1), "all": (0, 1)}
    for choice in choices:
        job.step(choice)
    while job.step(0):
        pass
    assert all(thread.inside == bool(thread.todo) for thread in job.threads)
    verdict = job.verdict(seen=True)
    assert (verdict.cls, verdict.certainty) == (Class.CYCLE, Certainty.CERTAIN)
    assert set(verdict.ranks) <= set(ranks)
    assert len(verdict.ranks) == size


def crossing(extra: dict[int, list[str]]) -> Job:
    """Two ranks whose main threads wait in two groups; extra: groups that other threads of a rank called before."""
    job = Job({"a": (0, 1), "b": (0, 1), "c": (0, 1)}, [])
    for rank in (0, 1):
        job.threads += [Thread(rank, "", ["a" if rank == 0 else "b"])]
        job.threads += [Thread(rank, f"t{n}", [name]) for n, name in enumerate(extra.get(rank, []))]
    while job.step(0):
        pass
    return job


def test_a_thread_that_may_still_call_leaves_a_ring_undecided() -> None:
    """It called another group before; that it never called this one says nothing."""
    job = crossing({0: ["c"], 1: ["c"]})
    told = diagnose_found(job.told()).verdict
    assert (told.cls, told.certainty, told.ranks) == (Class.CYCLE, Certainty.UNDECIDED, ())
    assert "rank 0 (thread t0)" in told.say
    assert "wait in a ring" in told.say


def test_what_is_not_seen_is_a_condition_and_what_is_seen_is_none() -> None:
    job = crossing({})
    assert diagnose_found(job.told()).verdict.condition == (
        "no thread of ranks 0 and 1 that made no call so far makes the one that is missing"
    )
    assert job.verdict(seen=True).certainty is Certainty.CERTAIN


def test_a_main_thread_that_waits_for_what_is_outside_may_make_the_call() -> None:
    """It is in no call of the job, and neither in a wait for another thread of its process."""
    job = Job({"a": (0, 1), "b": (0, 1)}, [Thread(0, "work", ["a"]), Thread(1, "work", ["b"])])
    while job.step(0):
        pass
    gone = 1 << 30  # nothing is seen of what it waits for
    for locked, certainty in ((True, Certainty.CERTAIN), (False, Certainty.UNDECIDED)):
        now = Moves(locked=locked, pid=gone)
        verdict = diagnose_found(job.told(), look=lambda ranks, now=now: dict.fromkeys(ranks, now)).verdict
        assert (verdict.cls, verdict.certainty) == (Class.CYCLE, certainty)
