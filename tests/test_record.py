"""The record: what was written is what is read, whatever became of the writer or of the file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.record import HOST, Event, GraphCall, Kind, NullRecorder, Recorder, Recording, read, ring_path
from kernel.record.layout import EVENT, HEADER_AT, LANES, LISTS, SIZES, TEXTS
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS = {"D.TP": (0, 1, 2, 3), "P.TP": (0, 1, 2, 3), "P.ATP": (2, 3)}
SIGNED = st.integers(-(1 << 63), (1 << 63) - 1)
UNSIGNED = st.integers(0, (1 << 64) - 1)
NUMBERS = st.tuples(
    st.sampled_from([kind for kind in Kind if kind not in TEXTS and kind not in LISTS]),
    st.sampled_from([None, Phase.D, Phase.P]),
    st.sampled_from([HOST, "D", "P"]),
    st.integers(0, len(GROUPS)),
    SIGNED,
    SIGNED,
    SIGNED,
    UNSIGNED,
    UNSIGNED,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a property; each replaces the ring of the one before."""
    return tmp_path_factory.mktemp("record")


def recorder(path: Path, **options: Any) -> Recorder:
    ticks = iter(range(1000, 1 << 60))
    return Recorder(
        path, rank=2, groups=GROUPS, **{"clock": lambda: next(ticks), "capacity": 1000, "strings": 1 << 18, **options}
    )


def consistent(recording: Recording) -> None:
    """What holds for every reading of a ring whose file is its own."""
    numbers = [event.number for event in recording.events]
    assert numbers == sorted(set(numbers))
    assert all(recording.dropped <= number for number in numbers)
    assert len(numbers) <= recording.capacity
    if numbers:
        assert numbers[-1] - numbers[0] < recording.capacity


# -- one writer ------------------------------------------------------------------------------------------------------


@given(events=st.lists(NUMBERS, max_size=40), capacity=st.integers(1, 50))
def test_the_last_events_are_read_as_written(folder: Path, events: list[Any], capacity: int) -> None:
    path = folder / "wrap.ring"
    rec = recorder(path, capacity=capacity)
    for event in events:
        rec.event(*event, rec.site(f"model.py:{len(event)} forward"))
    recording = read(path)
    names = ["", *GROUPS]
    expected = [
        Event(
            number,
            recording.monotonic_ns + number + 1,
            kind,
            phase,
            stream,
            names[group],
            *rest,
            "model.py:9 forward",
            "",
        )
        for number, (kind, phase, stream, group, *rest) in enumerate(events)
    ]
    first = max(0, len(events) - capacity)
    # The clock ticks once an event; where it started is not this test's business.
    offset = recording.events[0].time_ns - expected[first].time_ns if recording.events else 0
    assert [event._replace(time_ns=event.time_ns - offset) for event in recording.events] == expected[first:]
    assert (recording.dropped, recording.torn, recording.truncated) == (first, 0, False)


@given(count=st.integers(0, 30), since=st.integers(-1, 40))
def test_since_leaves_out_what_was_seen(folder: Path, count: int, since: int) -> None:
    path = folder / "since.ring"
    rec = recorder(path, capacity=16)
    for number in range(count):
        rec.event(Kind.BOUNDARY, a=number)
    seen = [event.number for event in read(path, since=since).events]
    assert seen == [n for n in range(count) if n > since and n >= count - 16]


def test_strings_name_sites_operations_and_waits(tmp_path: Path) -> None:
    rec = recorder(tmp_path / "r.ring")
    allreduce, here = rec.site("AR"), rec.here()
    rec.event(Kind.ENQUEUE, Phase.P, "D", rec.group("P.TP"), 7, 1, 3, 4096, allreduce, here)
    rec.event(Kind.HOST_WAIT_ENTER, b=rec.site("event of P e3 [4,8) ü"))
    rec.event(Kind.PLAN, b=allreduce)
    first, second, third = read(rec.path).events
    assert first[2:11] == (Kind.ENQUEUE, Phase.P, "D", "P.TP", 7, 1, 3, 4096, allreduce)
    assert (first.text, first.site) == (
        "AR",
        f"{__file__}:{test_strings_name_sites_operations_and_waits.__code__.co_firstlineno + 2} "
        "test_strings_name_sites_operations_and_waits",
    )
    assert (second.text, second.site, second.stream, second.phase) == ("event of P e3 [4,8) ü", "", HOST, None)
    assert third.text == "", "b of a plan is a number"


@given(calls=st.lists(st.tuples(st.text(), st.sampled_from(sorted(GROUPS)), st.integers(0, 1 << 70)), max_size=50))
def test_a_graphs_collectives_outlive_the_ring(folder: Path, calls: list[tuple[str, str, int]]) -> None:
    rec = recorder(folder / "graph.ring", capacity=2)
    graph = rec.graph([GraphCall(*call) for call in calls])
    rec.event(Kind.GRAPH_CAPTURE, Phase.D, "D", b=graph)
    for launch in range(5):
        rec.event(Kind.GRAPH_LAUNCH, Phase.D, "D", a=launch, b=graph)
    recording = read(rec.path)
    assert [event.kind for event in recording.events] == [Kind.GRAPH_LAUNCH] * 2
    assert list(recording.graph(recording.events[-1])) == calls


@given(
    sizes=st.dictionaries(
        st.tuples(st.sampled_from(sorted(GROUPS)), st.integers(0, 99)),
        st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=30).map(tuple),
        max_size=5,
    )
)
def test_split_sizes_of_any_width(folder: Path, sizes: dict[tuple[str, int], tuple[int, ...]]) -> None:
    rec = recorder(folder / "sizes.ring")
    for (group, seq), rows in sizes.items():
        rec.sizes(rec.group(group), seq, rows)
    assert read(rec.path).sizes == sizes


def test_split_sizes_that_lost_a_part_are_left_out(tmp_path: Path) -> None:
    rec = recorder(tmp_path / "r.ring", capacity=3)
    rec.sizes(1, 0, range(20))
    rec.sizes(1, 1, (5, 6))
    assert read(rec.path).sizes == {("D.TP", 1): (5, 6)}


def test_the_header_says_who_and_where(tmp_path: Path) -> None:
    rec = recorder(ring_path(tmp_path, 2), meta={"world": "g4 adp2 ep4", "policy": "fine", "versions": {"torch": "2"}})
    recording = read(rec.path)
    assert (recording.rank, recording.pid, recording.groups) == (2, os.getpid(), GROUPS)
    assert recording.meta == {"world": "g4 adp2 ep4", "policy": "fine", "versions": {"torch": "2"}}
    assert recording.host
    assert recording.wall(recording.monotonic_ns + 5) == recording.wall_ns + 5


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        rec = recorder(tmp_path / "deep" / "er" / "r.ring")
    finally:
        os.umask(before)
    assert rec.path.stat().st_mode & 0o777 == 0o400
    assert [entry.name for entry in rec.path.parent.iterdir()] == ["r.ring"], "no other file is left"


def test_closing_marks_the_end_and_late_events_are_kept(tmp_path: Path) -> None:
    rec = recorder(tmp_path / "r.ring")
    assert read(rec.path).closed_ns is None
    rec.close()
    closed = read(rec.path).closed_ns
    assert closed
    rec.event(Kind.MARK, b=rec.site("late"))
    rec.close()
    assert read(rec.path).closed_ns == closed
    assert [event.text for event in read(rec.path).events] == ["late"]


def test_a_full_string_table_says_so(tmp_path: Path) -> None:
    rec = recorder(tmp_path / "r.ring", strings=4096)
    ids = [rec.site(f"{number:0100}") for number in range(100)]
    assert len(set(ids)) < 50
    assert ids[0] != ids[-1] == rec.site("x" * 100)
    for site in (ids[0], ids[-1]):
        rec.event(Kind.MARK, b=site)
    assert [event.text for event in read(rec.path).events] == [f"{0:0100}", "(string table full)"]
    assert rec.site(f"{0:0100}") == ids[0]


def test_a_null_recorder_has_the_same_methods() -> None:
    rec = NullRecorder()
    rec.event(Kind.ENQUEUE, Phase.D, "D", rec.group("any"), b=rec.site("AR"), site=rec.here())
    rec.sizes(0, 0, (1,))
    rec.graph([])
    rec.close()


def test_the_layout_is_that_of_format_1() -> None:
    assert (EVENT.size, SIZES.size, HEADER_AT) == (72, 72, 64)
    assert len(LANES) == 9
    assert len({int(kind) for kind in Kind}) == len(Kind.__members__)


# -- several threads -------------------------------------------------------------------------------------------------


def run_threads(rec: Recorder, threads: int, each: int) -> None:
    start = threading.Barrier(threads)

    def work(worker: int) -> None:
        start.wait(30)
        for number in range(each):
            rec.event(Kind.MARK, None, HOST, 0, number, worker, -1, number, rec.site(f"text {number % 1000}"))

    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(threads)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_switches")
def test_threads_lose_nothing_and_keep_their_own_order(tmp_path: Path) -> None:
    rec = recorder(tmp_path / "r.ring", capacity=8000)
    run_threads(rec, 4, 2000)
    recording = read(rec.path)
    assert (len(recording.events), recording.dropped, recording.torn) == (8000, 0, 0)
    for worker in range(4):
        mine = [event for event in recording.events if event.round == worker]
        assert [event.seq for event in mine] == list(range(2000))
        assert all(event.text == f"text {event.seq % 1000}" for event in mine)
    assert len({event.b for event in recording.events}) == 1000, "one id a text"


@pytest.mark.usefixtures("hasty_switches")
def test_threads_that_lap_a_small_ring_leave_whole_events(tmp_path: Path) -> None:
    rec = recorder(tmp_path / "r.ring", capacity=64)
    run_threads(rec, 4, 2000)
    recording = read(rec.path)
    consistent(recording)
    assert recording.dropped + recording.torn + len(recording.events) <= 8000
    assert all(event.a == event.seq and event.text == f"text {event.seq % 1000}" for event in recording.events)


# -- another process -------------------------------------------------------------------------------------------------

WRITER = """
    import ctypes, sys
    from kernel.record import Kind, Recorder
    rec = Recorder(sys.argv[1], rank=0, groups={"g": (0,)}, capacity=int(sys.argv[2]))
    print("ready", flush=True)
    n = 0
    while n < int(sys.argv[3]):
        rec.event(Kind.SUBMIT, "D", "P", 1, n, n, n, n * 0x9E3779B97F4A7C15 % (1 << 64), ~n % (1 << 64), 0)
        n += 1
    print("stuck", flush=True)
    ctypes.PyDLL(None).pause()  # C code that keeps the interpreter lock
"""


class Child:
    """A writer in another process, ended when the block ends."""

    def __init__(self, path: Path, capacity: int, events: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(capacity), str(events)],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Child:
        self.wait_for(b"ready\n")
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_for(self, line: bytes) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == line

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=30)


def whole(recording: Recording) -> None:
    """Every event is one that the child wrote: no mixture of two."""
    consistent(recording)
    for event in recording.events:
        n = event.number
        assert event[4:] == ("P", "g", n, n, n, n * 0x9E3779B97F4A7C15 % (1 << 64), ~n % (1 << 64), "", "")


ENDLESS = 1 << 40


def test_a_rank_stuck_in_c_code_with_the_interpreter_lock_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "r.ring"
    with Child(path, 100, 250) as child:
        child.wait_for(b"stuck\n")
        recording = read(path)
        whole(recording)
        assert [event.number for event in recording.events] == list(range(150, 250))
        assert recording.closed_ns is None


@pytest.mark.parametrize("capacity", [1, 7, 1000, 20000])
def test_reading_beside_a_writer_at_full_speed_never_mixes_events(tmp_path: Path, capacity: int) -> None:
    path = tmp_path / "r.ring"
    with Child(path, capacity, ENDLESS) as child:
        newest, reads = -1, 0
        # A writer that a busy machine has not let run yet is waited for.
        while reads < 300_000 // (capacity + 10_000) or (capacity >= 1000 and newest <= 0):
            reads += 1
            recording = read(path)
            whole(recording)
            if recording.events:
                assert recording.events[-1].number >= newest
                newest = recording.events[-1].number
        child.kill()
        whole(read(path))


def kill_and_read(path: Path, capacity: int) -> None:
    with Child(path, capacity, ENDLESS) as child:
        while not (live := read(path).events) or live[-1].number < capacity:
            pass
        child.kill()
    dead = read(path)
    whole(dead)
    assert dead.events[-1].number >= live[-1].number
    # The slot of the newest event, which was being written, held the oldest one.
    assert (dead.torn, len(dead.events)) in {(0, capacity), (0, capacity - 1)}


def test_a_killed_writer_loses_at_most_one_event(tmp_path: Path) -> None:
    kill_and_read(tmp_path / "r.ring", 500)


@pytest.mark.grid
@pytest.mark.parametrize("attempt", range(200))
def test_writers_killed_at_many_moments(tmp_path: Path, attempt: int) -> None:
    kill_and_read(tmp_path / "r.ring", 2 + attempt * 7)
