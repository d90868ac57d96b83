"""CUDA graphs under an installed record: a capture lists its calls once, launches name them.

Where there is no GPU, the device is pretended: tensors without storage, streams and graphs that only count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.comm.tap.notes import Notes
from kernel.comm.tap.watch import Watch
from kernel.record import Kind, read
from tests.installed import one_rank
from tests.installed_rings import KEPT
from turnstile import record
from verify.events import Kind as What
from verify.events import State
from verify.hang import main
from verify.readers.record import READER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

torch = pytest.importorskip("torch")
dist = torch.distributed
ROUNDS = 20
SIZE = 1 << 20


class OnDevice(torch.Tensor):  # type: ignore[misc, name-defined]
    """A tensor of a device that is not there."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, size: int) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (size,), dtype=torch.float32, device="cuda")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} has no device to run on")


class Later(dist.Work):  # type: ignore[misc, name-defined]
    """The Work of a device: waiting for it holds the stream, not the host."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return False


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class Device:
    """What torch.cuda is made to look like. stuck: nothing is ever over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.capturing, self.stuck = Stream(0), False, False
        cuda = torch.cuda
        device = self

        class Event:
            def record(self, stream: Any = None) -> None: ...

            def query(self) -> bool:
                return not device.stuck

            def synchronize(self) -> None: ...

            def wait(self, stream: Any = None) -> None: ...

        class Graph:
            def capture_begin(self, *_: Any, **__: Any) -> None:
                device.capturing = True

            def capture_end(self) -> None:
                device.capturing = False

            def replay(self) -> None: ...

        monkeypatch.setattr(cuda, "Event", Event)
        monkeypatch.setattr(cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(cuda, "current_stream", lambda *_: self.current)
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(cuda, "synchronize", lambda *_: None)
        group = torch._C._distributed_c10d.ProcessGroup
        for name in ("allreduce", "_allgather_base"):
            monkeypatch.setattr(group, name, lambda *_, **__: Later())
        monkeypatch.setattr(Notes, "backend", lambda *_: "nccl")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    record.uninstall()


def _opts() -> Any:
    return torch._C._distributed_c10d.AllgatherOptions()


def sync(options: Any) -> Any:
    options.asyncOp = False
    return options


def job(rank: int, out: Path, device: Device, body: Callable[[Any, Any, Any], None]) -> None:
    """One rank of two, of the program that body is; its record is left as a stuck process leaves it."""
    import torch.testing._internal.distributed.fake_pg as fake_pg

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=2)
    made = record.install(out, rank=rank)
    try:
        full_tp = dist.new_group([0, 1], group_desc="P_full_tp")
        dp_attn = dist.new_group([0, 1], group_desc="D_dp_attn")

        def p() -> None:
            full_tp.allreduce([OnDevice(SIZE)], sync(dist.AllreduceOptions()))

        def d() -> None:
            dp_attn._allgather_base(OnDevice(2 * SIZE), OnDevice(SIZE), sync(_opts()))

        p()
        d()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        d()
        graph.capture_end()
        device.stuck = True
        body(rank, p, graph.replay)
        # The host stands in a wait for its device, which never returns.
        assert made._notes is not None
        number = made._notes.recorder.site("device")
        made._notes.event(Kind.SYNC, b=number, site=made._notes.site()[0])
    finally:
        device.stuck = True
        assert made._recorder is not None
        KEPT.append(made._recorder)  # its process is there still
        made._recorder.close = lambda: None  # type: ignore[method-assign]
        made._finish()
        device.stuck = False
        dist.destroy_process_group()


def crossed(rank: int, p: Any, d: Any) -> None:
    for _ in range(ROUNDS):
        for step in (p, d) if rank == 0 else (d, p):
            step()


def straight(rank: int, p: Any, d: Any) -> None:
    for _ in range(ROUNDS):
        p()
        d()


def verdict(capsys: pytest.CaptureFixture[str], out: Path) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main("hang", ["--json", str(out)])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, answer


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of this process count as those of one that has been silent for long."""
    monkeypatch.setattr("verify.readers.installed._age", lambda *_: None)


@pytest.mark.usefixtures("quiet")
def test_a_crossing_of_calls_and_graph_launches_on_one_stream_is_a_cycle(
    tmp_path: Path, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Flight Recorder dumps of this very program cannot show."""
    for rank in (0, 1):
        job(rank, tmp_path / "run", device, crossed)
    code, answer = verdict(capsys, tmp_path / "run")
    assert (code, answer["class"], answer["certainty"], answer["ranks"]) == (1, "cycle", "certain", [0, 1])
    assert "all_gather (call 2 on D_dp_attn" in answer["say"]
    assert "all_reduce (call 2 on P_full_tp" in answer["say"]
    assert "on stream the default stream" in answer["say"]


@pytest.mark.usefixtures("quiet")
def test_the_same_in_one_order_is_no_cycle(
    tmp_path: Path, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        job(rank, tmp_path / "run", device, straight)
    code, answer = verdict(capsys, tmp_path / "run")
    assert (code, answer["class"], answer["ranks"]) == (1, "below", [])


def test_a_capture_lists_its_calls_and_launches_name_them(tmp_path: Path, device: Device) -> None:
    job(0, tmp_path / "run", device, straight)
    path = tmp_path / "run" / "record" / "rank0.ring"
    kinds = [event.kind for event in read(path).events]
    assert kinds.count(Kind.GRAPH_CAPTURE) == 1
    assert kinds.count(Kind.REPLAY) == ROUNDS
    found = [event for event in READER.read(path).events if event.kind is What.COLLECTIVE]
    gathers = [event for event in found if event.operation == "all_gather"]
    assert [event.sequence for event in gathers] == list(range(ROUNDS + 1))
    assert {event.sizes for event in gathers} == {((SIZE,),)}
    assert {event.outputs for event in gathers} == {((2 * SIZE,),)}
    # The first of each was waited for, the others are open.
    assert [event.state is State.COMPLETED for event in gathers] == [True, *[False] * ROUNDS]
    assert {event.stream for event in found if event.medium == "nccl"} == {"the default stream"}


def states(path: Any) -> list[State]:
    return [event.state for event in READER.read(path).events if event.kind is What.COLLECTIVE]


def test_the_watch_notes_what_is_over(tmp_path: Path, device: Device) -> None:
    with one_rank(tmp_path) as fake, record.install(tmp_path / "run") as made:
        fake.groups["tp"].allreduce([OnDevice(4)], sync(dist.AllreduceOptions()))
        watch: Any = made._watch
        assert isinstance(watch, Watch)
        device.stuck = True
        watch.look()
        before = states(made.path)
        device.stuck = False
        watch.look()
        after = states(made.path)
    assert before in ([State.SCHEDULED], [State.COMPLETED])  # its thread may have looked first
    assert after == [State.COMPLETED]


def test_nothing_is_asked_of_a_device_that_captures(tmp_path: Path, device: Device) -> None:
    asked: list[int] = []
    with one_rank(tmp_path) as fake, record.install(tmp_path / "run") as made:
        device.stuck = True
        fake.groups["tp"].allreduce([OnDevice(4)], sync(dist.AllreduceOptions()))
        torch.cuda.Event.query = lambda self: asked.append(1) or False  # type: ignore[func-returns-value]
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        asked.clear()
        made._watch.look()  # type: ignore[union-attr]
        assert asked == []
        graph.capture_end()
        made._watch.look()  # type: ignore[union-attr]
        assert asked


# -- on a GPU ----------------------------------------------------------------------------------------------------------

PROGRAM = '''
import os, sys, time
import torch, torch.distributed as dist
from turnstile import record

rank, out = int(os.environ["RANK"]), sys.argv[1]
torch.cuda.set_device(rank)
record.install(out)
dist.init_process_group("nccl", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
full_tp, dp_attn = dist.new_group([0, 1], group_desc="P_full_tp"), dist.new_group([0, 1], group_desc="D_dp_attn")
x, y, out_y = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda"), torch.ones(2 << 20, device="cuda")
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
stream = torch.cuda.Stream()


def p():
    dist.all_reduce(x, group=full_tp)


def d():
    gather(out_y, y, group=dp_attn)


with torch.cuda.stream(stream):
    p()
    d()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    d()
    graph.capture_end()
    dist.barrier(device_ids=[rank])
    torch.cuda.synchronize()
    print("at the scene", flush=True)
    for _ in range(20):
        for step in (p, graph.replay) if rank == 0 else (graph.replay, p):
            step()
    torch.cuda.synchronize()
'''


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each of two ranks")
def test_the_real_crossing_on_two_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program whose Flight Recorder dumps say nothing; it hangs for good, and is killed here."""
    import os
    import subprocess
    import sys
    import time

    script = tmp_path / "crossing.py"
    script.write_text(PROGRAM)
    run, store = tmp_path / "run", tmp_path / "store"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in (0, 1):
            env = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "TORCH_NCCL_ENABLE_MONITORING": "0",
                "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
            }  # fmt: skip
            processes.append(subprocess.Popen([sys.executable, str(script), str(run), str(store)], env=env))
        end = time.monotonic() + 90
        rings = [run / "record" / f"rank{rank}.ring" for rank in (0, 1)]

        def waits(ring: Path) -> bool:
            """Whether nothing has happened for a while, after launches."""
            if not ring.exists():
                return False
            seen = read(ring).events
            launched = any(event.kind is Kind.REPLAY for event in seen)
            return launched and time.monotonic_ns() - seen[-1].time_ns > 6e9

        while not all(map(waits, rings)):
            last = [[(e.kind.name, e.time_ns) for e in read(ring).events[-6:]] for ring in rings if ring.exists()]
            assert time.monotonic() < end, f"the ranks did not get there: {last} at {time.monotonic_ns()}"
            assert all(process.poll() is None for process in processes)
            time.sleep(0.1)
        code, answer = verdict(capsys, run)
        assert (code, answer["class"], answer["ranks"]) == (1, "cycle", [0, 1])
        assert "D_dp_attn" in answer["say"]
        assert "P_full_tp" in answer["say"]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(30)
