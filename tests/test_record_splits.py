"""Rows of each dispatch of P in the record: under its number, wherever the device reports no starts; who reads them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel.journal import Journal, groups
from kernel.program import Op, Program
from kernel.record import Kind, Recorder, ring_path
from kernel.record.reader import read_run
from kernel.request import Phase, SamplingParams
from kernel.sched.policy import Plan
from kernel.topology import World
from tests.splits import dispatches, told
from verify.blame import Class
from verify.hang.diagnosis import diagnose_found
from verify.hang.text import as_text
from verify.readers.record import RecordReader, Ring
from verify.sim.arrivals import SimTurn, Trajectory
from verify.sim.simulation import Engine, simulate
from verify.slices import timeline
from verify.trace.chrome import trace_lines

if TYPE_CHECKING:
    from pathlib import Path

PAIR = World(2, 2, 2, exchange="split")
LAYERS = 3


def journals(out: Path, world: World, age_s: float = 60.0) -> list[Journal]:
    """Of all ranks; they were written a while ago, so that silence is that of who is stuck."""
    programs = [Program(world, phase, LAYERS) for phase in Phase]
    return [
        Journal(
            Recorder(
                ring_path(out, rank),
                rank=rank,
                groups=groups(programs, rank),
                meta={"size": world.size},
                clock=lambda: time.monotonic_ns() - int(age_s * 1e9),
            )
        )
        for rank in range(world.size)
    ]


@pytest.mark.parametrize("policy", ["fine", "fine:span=2", "normal", "global_enqueue", "lean"])
@pytest.mark.parametrize("world", [PAIR, World(2, 2, 2, cut="sublayer", exchange="split"),
                                   World(4, 2, 4, exchange="split")], ids=str)  # fmt: skip
def test_the_real_rank_numbers_them_where_the_device_reports_no_starts(
    policy: str, world: World, tmp_path: Path
) -> None:
    """The simulated device enqueues in place, like a GPU. Rows are those of the very epoch whose dispatch it is."""
    made = journals(tmp_path, world)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    work = [
        Trajectory(n, (SimTurn(tuple(range(5 + 11 * n)), params), SimTurn((7, 8, 9), params))) for n in range(5)
    ]
    simulate(world, policy, work, Engine(layers=LAYERS, prefill_tokens=24), journal=made.__getitem__)
    for journal in made:
        journal.close()
    for recording in read_run(tmp_path).values():
        assert not any(event.kind is Kind.START for event in recording.events)
        wanted = dispatches(recording)
        assert len(wanted) > 3 * LAYERS
        assert sorted(told(recording)) == sorted(wanted), "each once, and nothing else"
        assert {key: sum(recording.sizes[key]) for key in wanted} == wanted


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data())
def test_any_segments_and_epochs_that_were_given_up(data: st.DataObject, tmp_path: Path) -> None:
    world = World(2, 2, 2, cut=data.draw(st.sampled_from(["layer", "sublayer"])), exchange="split")
    program = Program(world, Phase.P, LAYERS)
    [one, other] = journals(tmp_path, world)
    other.close()
    wanted = []
    for epoch in range(data.draw(st.integers(1, 4))):
        one.plan(Plan(epoch, activate=epoch, epoch=epoch), 0)
        start, ends = 0, data.draw(st.integers(1, program.boundaries))
        known = data.draw(st.integers(0, LAYERS))  # counts of so many layers come before the epoch fails
        while start < ends:
            end = min(program.boundaries, start + data.draw(st.integers(1, program.boundaries)))
            calls = program.segment(start, end)
            one.submitted(f"P e{epoch} [{start},{end})", Phase.P, calls, start, end, 64)
            for call in calls:
                if call.op is Op.NOTIFY and call.layer < known:
                    following = next(c for c in program.calls if c.op is Op.DISPATCH and c.layer == call.layer)
                    one.splits(Phase.P, following, [epoch, call.layer])
                    wanted.append((epoch, call.layer))
            start = end
    one.close()
    recording = read_run(tmp_path)[0]
    layer_of = {
        (event.group, event.seq): (event.epoch, int(event.site.split()[-1]))
        for event in recording.events
        if event.kind is Kind.ENQUEUE and event.text == Op.DISPATCH
    }
    # The last dispatch of an epoch that was given up at its boundary was never enqueued: its number is another call's.
    found = {key: rows for key, rows in recording.sizes.items() if layer_of.get(key) == rows}
    assert set(found.values()) == set(wanted) & set(layer_of.values())


def stuck(tmp_path: Path) -> list[Journal]:
    """Both ranks know what will come; rank 0 is permitted to send it, and rank 1's host never gets there.

    As long as somebody keeps the journals, the process that wrote them is there.
    """
    program = Program(PAIR, Phase.P, LAYERS)
    both = journals(tmp_path, PAIR)
    for rank, journal in enumerate(both):
        journal.plan(Plan(1, activate=0, epoch=0), 0)
        first = program.segment(0, 1)
        journal.submitted("P e0 [0,1)", Phase.P, first, 0, 1, 48)
        following = next(call for call in program.calls if call.op is Op.DISPATCH)
        journal.splits(Phase.P, following, [[20, 28], [0, 9]][rank])
        journal.device(Phase.P, "P e0 [0,1)", "start")
        journal.device(Phase.P, "P e0 [0,1)", "finish")
        if rank == 0:
            journal.submitted("P e0 [1,2)", Phase.P, program.segment(1, 2), 1, 2, 48)
            journal.wait("P device", leaves=False)
        else:
            journal.wait("a file", leaves=False)
    return both


def test_a_diagnosis_says_what_was_to_come(tmp_path: Path) -> None:
    kept = stuck(tmp_path)
    assert kept
    diagnosis = diagnose_found(RecordReader().read(tmp_path))
    assert (diagnosis.verdict.cls, diagnosis.verdict.ranks) == (Class.OUTSIDE, (1,))
    line = "rank 0 is to get 20 rows of rank 0 and 28 of rank 1 in dispatch[48] (call 2 on P.TP)"
    assert line in diagnosis.verdict.chain
    assert line in as_text(diagnosis).replace("\n          ", " ")


def test_whoever_follows_a_ring_learns_of_rows_behind_their_dispatch(tmp_path: Path) -> None:
    """In a wide segment the dispatch was enqueued, and read, before its counts came."""
    program = Program(PAIR, Phase.P, LAYERS)
    [one, _] = journals(tmp_path, PAIR)
    one.plan(Plan(1, activate=0, epoch=0), 0)
    one.submitted("P e0 [0,4)", Phase.P, program.calls, 0, 4, 48)
    first = read_run(tmp_path)[0]
    ring = Ring(first, (0, 1), None)
    ring.take(first.events)
    one.splits(Phase.P, next(call for call in program.calls if call.op is Op.DISPATCH), [20, 28])
    ring.recording = read_run(tmp_path, since=first.events[-1].number)[0]
    ring.take(ring.recording.events)
    assert [event.splits for event in ring.standing() if event.operation == "dispatch"] == [(20, 28), None, None]


def test_a_timeline_shows_what_was_to_come(tmp_path: Path) -> None:
    stuck(tmp_path)
    found = [timeline(recording) for recording in read_run(tmp_path).values()]
    assert [(moment.name, dict(moment.more)) for one in found for moment in one.moments if "rows" in moment.more] == [
        ("48 rows will come in P.TP #2", {"round": 0, "rows": {"rank 0": 20, "rank 1": 28}}),
        ("9 rows will come in P.TP #2", {"round": 0, "rows": {"rank 0": 0, "rank 1": 9}}),
    ]
    assert any('"rank 1":28' in line for line in trace_lines(found))
