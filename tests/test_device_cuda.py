"""The CUDA device's logic on a GPU that is a fake. On real ones: tests/test_device_gpu.py."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import struct
import threading
import time
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kernel.comm.local import LocalCollectives  # noqa: E402
from kernel.device import device_clock  # noqa: E402
from kernel.device.bounded import all_of  # noqa: E402
from kernel.device.cuda_route import CudaRoute  # noqa: E402
from kernel.device.cuda_stream import CudaCompletion, CudaStream  # noqa: E402
from kernel.device.device_clock import DeviceClock  # noqa: E402
from kernel.device.faults import Faults, of_device  # noqa: E402
from kernel.device.occupancy import Kernel  # noqa: E402
from kernel.errors import DeviceFault, ModelError, OrderViolation, RankLost, UsageError  # noqa: E402
from kernel.journal import Journal  # noqa: E402
from kernel.program import Call, Op, Site  # noqa: E402
from kernel.record import Recorder  # noqa: E402
from kernel.record.reader import read  # noqa: E402
from kernel.request import Phase  # noqa: E402
from kernel.topology import Role  # noqa: E402
from tests.fake_gpu import BOUND_S, FakeGpu  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CALLS = [Call(index, Site.GATHER, index, Op.ALL_REDUCE, Role.TP, routed=True) for index in range(8)]


class Fake:
    """The streams and the route of a device, on a fake GPU."""

    def __init__(self, **settings: Any) -> None:
        self.gpu = FakeGpu()
        self.torch = {phase: self.gpu.stream() for phase in Phase}
        self.faults = Faults(3)
        self.route = CudaRoute(
            self.torch[Phase.P], self.torch[Phase.D], current=self.gpu.on, events=self.gpu.event, **settings
        )
        self.watched: list[tuple[Phase, str, str, int]] = []
        self.made: list[Any] = []
        self.clock = DeviceClock(self.gpu.event)
        self.d = self._stream(Phase.D, before=self.route.before_decode)
        self.p = self._stream(Phase.P, after=self.route.after_prefill)

    def _event(self) -> Any:
        self.made.append(self.gpu.event())
        return self.made[-1]

    def _watch(self, phase: Phase, label: str, what: str, time_ns: int = 0) -> None:
        self.watched.append((phase, label, what, time_ns))

    def _stream(self, phase: Phase, **hooks: Any) -> CudaStream:
        stream = self.torch[phase]
        return CudaStream(
            phase,
            stream,
            f"fake {phase}",
            faults=self.faults,
            clock=self.clock,
            current=lambda: self.gpu.on(stream),
            prepare=lambda: None,
            watch=self._watch,
            events=self._event,
            **hooks,
        )


@contextlib.asynccontextmanager
async def fake(**settings: Any) -> AsyncIterator[Fake]:
    made = Fake(**settings)
    try:
        async with asyncio.timeout(BOUND_S):
            yield made
    finally:
        for stream in (made.d, made.p):
            stream.stop(RankLost("over"))
        made.gpu.fail(RuntimeError("CUDA error: over"))
        for stream in (made.d, made.p):
            await asyncio.wait_for(stream.ended.wait(), BOUND_S)


# -- streams ----------------------------------------------------------------------------------------------------------


async def test_work_runs_at_submission_and_completes_with_the_device() -> None:
    async with fake() as it:
        event = it.d.submit(lambda: it.gpu.launch("kernel") or 42, "D 1")
        assert it.torch[Phase.D].ops[1] == ("run", "kernel")  # on the right stream, already
        waiter = asyncio.ensure_future(event.wait())
        await asyncio.sleep(0.01)
        assert not event.done()
        assert not waiter.done()
        it.gpu.run()
        assert event.done()  # asked of the device, whatever the waiter has seen
        assert await waiter == 42
        assert await event.wait() == 42
        assert [entry[:3] for entry in it.watched] == [(Phase.D, "D 1", "start"), (Phase.D, "D 1", "finish")]
        assert 0 < it.watched[0][3] <= it.watched[1][3] <= time.monotonic_ns()


async def test_host_errors_come_at_once_and_leave_the_stream_usable() -> None:
    async with fake() as it:

        def broken() -> None:
            it.gpu.launch("half")
            raise ModelError("no such site")

        event = it.p.submit(broken, "P e0 [0,1)")
        assert event.done()
        with pytest.raises(ModelError, match="no such site"):
            await event.wait()
        after = it.p.submit(lambda: "fine", "P e0 [1,2)")
        it.gpu.run()
        assert await after.wait() == "fine"


async def test_events_are_used_again_but_never_while_somebody_may_ask_them() -> None:
    async with fake() as it:
        for number in range(20):
            event = it.d.submit(lambda number=number: number, f"D {number}")
            assert not event.done()  # an event that had kept its old record would say otherwise
            it.gpu.run()
            assert await event.wait() == number
        assert len(it.made) <= 4
        assert sum(event.records for event in it.made) == 40


async def test_the_clock_s_base_is_never_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "_REBASE_NS", 0)
    async with fake() as it:
        for number in range(10):
            event = it.d.submit(lambda number=number: number, f"D {number}")
            it.gpu.run()
            await event.wait()
        it.d.stop(RankLost("over"))
        await it.d.ended.wait()  # every event is back
        assert it.clock._base in it.made
        assert it.clock._base not in it.d._free


async def test_the_first_outcome_of_a_submission_counts() -> None:
    event = CudaCompletion[int]()
    event.succeed(1)
    event.fail(RankLost("later"))
    assert await event.wait() == 1


async def test_stopping_fails_what_has_not_finished_and_the_device_cannot_undo_it() -> None:
    async with fake() as it:
        flying = it.d.submit(lambda: 1, "D 1")
        it.d.stop(RankLost("closed"))
        with pytest.raises(RankLost, match="closed"):
            await flying.wait()
        it.gpu.run()
        await it.d.ended.wait()
        with pytest.raises(RankLost, match="closed"):
            await flying.wait()
        with pytest.raises(RankLost, match="closed"):
            await it.d.submit(lambda: 2, "D 2").wait()


# -- faults -----------------------------------------------------------------------------------------------------------


async def test_a_device_error_names_rank_phase_and_submission_once_for_all_streams() -> None:
    async with fake() as it:
        d = it.d.submit(lambda: 1, "D 17")
        p = it.p.submit(lambda: 2, "P e3 [4,8)")
        it.gpu.fail(torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ..."))
        errors = []
        for event in (d, p):
            with pytest.raises(DeviceFault) as raised:
                await event.wait()
            errors.append(raised.value)
        assert errors[0] is errors[1]
        text = str(errors[0])
        assert "\n" not in text
        assert text.startswith("rank 3's GPU failed in ")
        assert "D 17" in text
        assert "P e3 [4,8)" in text
        assert "illegal memory access was encountered;" in text


OOM = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.20 GiB is"
    " free. Including non-PyTorch memory, this process has 138.60 GiB memory in use. Of the allocated memory"
)


def test_out_of_memory_is_one_line_and_is_not_sticky() -> None:
    faults = Faults(1)
    error = faults.translate(torch.OutOfMemoryError(OOM), Phase.P, "P e0 [0,4)")
    assert isinstance(error, DeviceFault)
    assert str(error).startswith(
        "rank 1 ran out of GPU memory in P e0 [0,4): Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80"
        " GiB of which 1.20 GiB is free; use fewer KV blocks"
    )
    assert faults.first is None


def test_errors_that_are_not_the_device_s_stay_what_they_are() -> None:
    for error in (ValueError("CUDA error"), RuntimeError("shape mismatch"), ModelError("x")):
        assert not of_device(error)
        assert Faults(0).translate(error, Phase.D, "D 1") is error
    for text in ("CUDA error: invalid argument", "Triton Error [CUDA]: an illegal memory access was encountered"):
        assert of_device(RuntimeError(text))
    fault = Faults(0).translate(RuntimeError("CUDA error: x"), Phase.P, "warm")
    assert str(fault).startswith("rank 0's GPU failed in P warm: CUDA error: x;")


# -- route ------------------------------------------------------------------------------------------------------------


async def test_routed_work_runs_on_d_s_stream_between_its_neighbours_with_both_edges() -> None:
    async with fake() as it:
        gpu = it.gpu

        def segment() -> str:
            gpu.launch("P before")
            value = it.route.run(CALLS[0], lambda: gpu.launch("routed") or "sum")
            gpu.launch("P after")
            return value

        first = it.d.submit(lambda: gpu.launch("D 1"), "D 1")
        it.route.reserve(CALLS[:1])
        event = it.p.submit(segment, "P e0 [0,1)")
        second = it.d.submit(lambda: gpu.launch("D 2"), "D 2")
        assert [op for op in it.torch[Phase.D].ops if op[0] == "run"] == [
            ("run", "D 1"),
            ("run", "routed"),
            ("run", "D 2"),
        ]
        gpu.streams.reverse()  # whichever moves first
        gpu.run()
        assert await event.wait() == "sum"
        await first.wait()
        await second.wait()
        order = {name: place for place, name in enumerate(gpu.ran)}
        assert order["D 1"] < order["routed"] < order["D 2"]
        assert order["P before"] < order["routed"] < order["P after"]


@given(st.data())
def test_any_interleaving_keeps_d_s_order_and_both_edges(data: st.DataObject) -> None:
    """However the device's two streams take turns."""
    gpu = FakeGpu()
    p, d = gpu.stream(), gpu.stream()
    route = CudaRoute(p, d, current=gpu.on, events=gpu.event)
    expected, names = [], []
    for number in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            with gpu.on(d):
                route.before_decode()
                gpu.launch(f"D{number}")
            expected.append(f"D{number}")
        else:
            route.reserve([CALLS[0]])
            with gpu.on(p):
                gpu.launch(f"a{number}")
                route.run(CALLS[0], lambda number=number: gpu.launch(f"R{number}"))
                gpu.launch(f"b{number}")
            expected.append(f"R{number}")
            names.append(number)
    while any(stream.ops for stream in gpu.streams):
        stream = data.draw(st.sampled_from(gpu.streams))
        if not stream.step():
            assert any(other.step() for other in gpu.streams)
    assert [name for name in gpu.ran if name[0] in "DR"] == expected
    for number in names:
        assert gpu.ran.index(f"a{number}") < gpu.ran.index(f"R{number}") < gpu.ran.index(f"b{number}")


async def test_places_are_taken_in_order_and_d_may_not_overtake_them() -> None:
    async with fake() as it:
        it.route.reserve(CALLS[:2])
        with pytest.raises(OrderViolation, match=r"P runs AR.TP. routed at gather 1, but the next place is for"):
            it.route.run(CALLS[1], lambda: None)
        overtaking = it.d.submit(lambda: it.gpu.launch("D"), "D 1")
        with pytest.raises(OrderViolation, match=r"D is launched before AR.TP. routed at gather 0"):
            await overtaking.wait()
        assert ("run", "D") not in it.torch[Phase.D].ops
        failed = it.p.submit(lambda: 1 // 0, "P e0 [0,2)")
        with pytest.raises(ZeroDivisionError):
            await failed.wait()
        with pytest.raises(OrderViolation, match="no place is left"):  # dropped with the segment that failed
            it.route.run(CALLS[0], lambda: None)


@pytest.mark.parametrize("keep", [True, False])
async def test_a_routed_result_is_kept_until_its_segment_has_finished_on_the_device(keep: bool) -> None:
    async with fake(keep=keep) as it:

        class Tensor:
            pass

        seen: list[weakref.ref[Any]] = []

        def work() -> Tensor:
            made = Tensor()
            seen.append(weakref.ref(made))
            return made

        def segment() -> None:
            it.route.run(CALLS[0], work)

        it.route.reserve(CALLS[:1])
        event = it.p.submit(segment, "P e0 [0,1)")
        gc.collect()
        assert (seen[0]() is not None) == keep
        it.gpu.run()
        await event.wait()
        gc.collect()
        assert seen[0]() is None


async def test_p_waits_for_d_even_behind_a_routed_call_that_failed() -> None:
    async with fake() as it:
        it.route.reserve(CALLS[:1])

        def broken() -> None:
            it.gpu.launch("half")
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            it.route.run(CALLS[0], broken)
        with it.gpu.on(it.torch[Phase.P]):
            it.gpu.launch("reuses its memory")
        it.gpu.streams.reverse()
        it.gpu.run()
        assert it.gpu.ran == ["half", "reuses its memory"]


# -- time -------------------------------------------------------------------------------------------------------------


class Moment:
    """A completed event at a device time, told as torch tells it: a float32 of milliseconds."""

    def __init__(self, device_ns: int) -> None:
        self.device_ns = device_ns

    def elapsed_time(self, end: Moment) -> float:
        return float(struct.unpack("f", struct.pack("f", (end.device_ns - self.device_ns) / 1e6))[0])


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3_000_000_000), st.integers(1_000, 200_000), st.integers(0, 500_000)), max_size=40
    ),
    ppm=st.integers(-60, 60),
    offset=st.integers(0, 10**12),
)
def test_device_times_are_true_within_bounds_and_never_outside_what_the_host_saw(
    steps: list[tuple[int, int, int]], ppm: int, offset: int
) -> None:
    host = SimpleNamespace(now=10**12)

    def device_time(host_ns: int) -> int:
        return offset + host_ns + (host_ns - 10**12) * ppm // 1_000_000

    def mark() -> Moment:
        host.now += 7_000
        made = Moment(device_time(host.now))
        host.now += 9_000
        return made

    clock = DeviceClock(mark, lambda: host.now)
    for gap, queued, late in steps:
        host.now += gap
        submitted = host.now
        happened = submitted + queued
        host.now = happened + late
        found = clock.at(Moment(device_time(happened)), submitted)
        assert submitted <= found <= host.now
        # Either bound alone is off by at most this; a lost base or an ignored drift would be off by far more.
        assert abs(found - happened) <= queued + late + 20_000


def test_neither_drift_nor_rounding_adds_up() -> None:
    """An hour with clocks 50 ppm apart. Few events are bounded closely; the others are seen late, or queue for long."""
    host = SimpleNamespace(now=10**12)

    def device_time(host_ns: int) -> int:
        return (host_ns - 10**12) * 1_000_050 // 1_000_000

    clock = DeviceClock(lambda: Moment(device_time(host.now)), lambda: host.now)
    worst, chance = 0, random.Random(5)
    for _ in range(36_000):
        host.now += 100_000_000
        queued, late = chance.choice([(8_000, 15_000), (1_000, 5_000_000), (400_000, 400_000), (5_000_000, 10_000)])
        submitted, happened = host.now, host.now + queued
        host.now = happened + late
        worst = max(worst, abs(clock.at(Moment(device_time(happened)), submitted) - happened))
    assert worst < 150_000


def test_the_record_takes_the_device_s_time(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ring"
    journal = Journal(Recorder(path, rank=0, groups={}, clock=lambda: 5_000))
    for label in ("D 1", "D 2"):
        journal.submitted(label, Phase.D, (), 8, 3, 8)
    journal.device(Phase.D, "D 1", "start", 1_200)
    journal.device(Phase.D, "D 1", "finish", 3_400)
    journal.device(Phase.D, "D 2", "start")
    journal.close()
    times = [(event.kind.name, event.site, event.time_ns) for event in read(path).events]
    assert times[2:] == [("WORK_START", "D 1", 1_200), ("WORK_FINISH", "D 1", 3_400), ("WORK_START", "D 2", 5_000)]


def test_calls_that_never_return_are_left_behind_and_named() -> None:
    release = threading.Event()
    ran: list[int] = []
    calls = [("stuck", lambda: release.wait(BOUND_S)), ("broken", lambda: 1 // 0), ("fine", lambda: ran.append(1))]
    assert all_of(calls, 0.2) == ["stuck"]
    assert ran == [1]
    release.set()
    assert all_of([], 0.0) == []


def test_without_a_gpu_it_says_so() -> None:
    from kernel.device.cuda import CudaDevice

    with pytest.raises(UsageError, match=r"rank 1 wants GPU 99, and torch .* sees \d+ of them"):
        CudaDevice(1, 99, {phase: LocalCollectives() for phase in Phase})


def test_what_an_exchange_holds_is_in_the_budget_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a stream is made. 132 SMs: 100 for D's collectives leave 32."""
    from kernel.device.cuda import CudaDevice

    for name, found in (
        ("is_available", lambda: True),
        ("device_count", lambda: 1),
        ("set_device", lambda _: None),
        ("get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)),
    ):
        monkeypatch.setattr(torch.cuda, name, found)
    communicators: Any = {Phase.D: SimpleNamespace(ctas=100), Phase.P: SimpleNamespace(ctas=8)}
    asked: list[int] = []

    def kernels(sms: int) -> list[Kernel]:
        asked.append(sms)
        return [Kernel("P's exchange", Phase.P, 34, "--exchange-sms")]

    with pytest.raises(UsageError, match=r"rank 0: .* need 134 SMs of 132 \(100 of NCCL of D \+ 34 of P's exchange\)"):
        CudaDevice(0, 0, communicators, exchange=kernels)
    assert asked == [132]
