"""Labels of iterations, segments and waits read as they were written, and a run of any length fits the string table."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kernel.journal import Journal
from kernel.program import Call, Op, Site
from kernel.record import Kind, Recorder, read
from kernel.record.layout import USED_AT, WORD
from kernel.request import Phase
from kernel.sched.policy import Plan
from kernel.topology import Role

NUMBERS = st.integers(0, 2**40)
LABELS = st.one_of(
    NUMBERS.map("D {}".format),
    st.builds("P e{} [{},{})".format, NUMBERS, NUMBERS, NUMBERS),
    NUMBERS.map("P e{}".format),
    st.sampled_from(["inbox", "P device", "D", "D {a}", "{round}", "D 007", "D ²", ""]),
)


def journal(path: Path) -> Journal:
    """One that writes to `path`."""
    return Journal(Recorder(path, rank=0, groups={"D.TP": (0,)}, capacity=1 << 12, strings=1 << 14))


@given(label=LABELS, own=st.booleans(), round_=NUMBERS, epoch=NUMBERS, a=NUMBERS, b=NUMBERS)
def test_labels_read_as_they_were_written(label: str, own: bool, round_: int, epoch: int, a: int, b: int) -> None:
    if own:  # as the kernel writes them, from the event's own numbers
        label = f"D {round_}" if a % 2 else f"P e{epoch} [{a},{b})"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank0.ring"
        writer = journal(path)
        writer.plan(Plan(round=round_, epoch=epoch), 0)
        writer.submitted(label, Phase.D, (), a, b, 8)
        writer.device(Phase.D, label, "start")
        writer.device(Phase.D, label, "finish")
        writer.no_work(Phase.D, label)
        writer.wait(label, leaves=False)
        writer.close()
        events = {event.kind: event for event in read(path).events}
    for kind in (Kind.SUBMIT, Kind.WORK_START, Kind.WORK_FINISH, Kind.NO_WORK):
        assert events[kind].site == label
    assert events[Kind.HOST_WAIT_ENTER].text == label


def test_what_a_phase_does_after_a_collective_was_given_up_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ring"
    writer = Journal(Recorder(path, rank=0, groups={"D.TP": (0, 1), "P.TP": (0, 1)}))
    first, second = (Call(n, Site.GATHER, n, Op.ALL_REDUCE, Role.TP) for n in range(2))
    other, routed = replace(first, index=5), replace(first, index=6, routed=True)
    writer.collective(Phase.D, first, 8, False)
    writer.collective(Phase.D, first, 8, True)
    writer.collective(Phase.D, second, 8, False)  # given up: it never finishes
    for phase, call in ((Phase.D, first), (Phase.P, routed), (Phase.P, other)):
        writer.collective(phase, call, 8, False)
        writer.collective(phase, call, 8, True)
    writer.close()
    seen = [(each.kind, each.stream, each.seq) for each in read(path).events]
    other_phase = [(Kind.START, "D", 1), (Kind.FINISH, "D", 1), (Kind.START, "P", 2), (Kind.FINISH, "P", 2)]
    assert seen == [(Kind.START, "D", 1), (Kind.FINISH, "D", 1), (Kind.START, "D", 2), *other_phase]


def test_a_long_run_does_not_fill_the_string_table(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ring"
    writer, used = journal(path), []
    for number in range(3_000):
        writer.plan(Plan(round=number, epoch=number), 0)
        for phase, label in ((Phase.D, f"D {number}"), (Phase.P, f"P e{number} [0,4)")):
            writer.submitted(label, phase, (), 0, 4, 8)
            writer.device(phase, label, "start")
            writer.device(phase, label, "finish")
        writer.wait_for_decode(number, leaves=False)
        writer.wait_for_decode(number, leaves=True)
        writer.no_work(Phase.P, f"P e{number}")
        if number in (100, 2_999):
            used.append(WORD.unpack_from(path.read_bytes(), USED_AT)[0])
    writer.close()
    assert used[0] == used[1]
    last = [event for event in read(path).events if event.kind is Kind.SUBMIT][-2:]
    assert [event.site for event in last] == ["D 2999", "P e2999 [0,4)"]
    assert read(path).events[-2].text == "D 2999"
