"""The CUDA device on real GPUs: streams, events, route, graphs, memory and the end. `make test-gpu PY=python3`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kernel.comm.local import LocalCollectives  # noqa: E402
from kernel.errors import DeviceFault, RankLost, UsageError  # noqa: E402
from kernel.program import Call, Op, Site  # noqa: E402
from kernel.request import Phase  # noqa: E402
from kernel.topology import Role, World  # noqa: E402
from tests.no_waits import no_waits  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kernel.device.cuda import CudaDevice

pytestmark = pytest.mark.gpu

CALLS = [Call(index, Site.GATHER, index, Op.ALL_REDUCE, Role.TP, routed=True) for index in range(8)]
BOUND_S = 60.0

# -- one GPU ----------------------------------------------------------------------------------------------------------

SPIN = """
extern "C" __global__ void spin(volatile int* stop, int limit_ms) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*stop == 0 && now - begin < (unsigned long long)limit_ms * 1000000ull);
}
"""


class Spinner:
    """A kernel that holds its stream until `release`, or for ten seconds at most."""

    def __init__(self) -> None:
        self._kernel = torch.cuda._compile_kernel(SPIN, "spin")
        self.stop = torch.zeros(1, dtype=torch.int32).pin_memory()

    def launch(self) -> None:
        self.stop.zero_()
        self._kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[self.stop, 10_000])

    def release(self) -> None:
        self.stop.fill_(1)


@contextlib.asynccontextmanager
async def cuda(**settings: Any) -> AsyncIterator[CudaDevice]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from kernel.device.cuda import CudaDevice

    made = CudaDevice(0, 0, {phase: LocalCollectives() for phase in Phase}, **settings)
    try:
        async with asyncio.timeout(BOUND_S):
            yield made
    finally:
        await made.close()


async def test_an_event_is_done_exactly_when_the_device_is() -> None:
    async with cuda() as it:
        spinner = Spinner()
        event = it.stream(Phase.D).submit(lambda: spinner.launch() or "value", "D 1")
        waiter = asyncio.ensure_future(event.wait())
        await asyncio.sleep(0.05)
        assert not event.done()
        assert not waiter.done()
        spinner.release()
        assert await waiter == "value"
        assert event.done()


async def test_the_streams_are_apart_and_d_has_priority() -> None:
    async with cuda() as it:
        spinner = Spinner()
        held = it.stream(Phase.P).submit(spinner.launch, "P e0 [0,1)")
        assert await it.stream(Phase.D).submit(lambda: 1, "D 1").wait() == 1
        assert not held.done()
        spinner.release()
        await held.wait()
        assert it.torch_stream(Phase.D).priority < it.torch_stream(Phase.P).priority


async def test_the_scope_sets_stream_and_mode_and_leaves_nothing() -> None:
    async with cuda() as it:

        def state() -> tuple[int, bool, bool]:
            return (
                torch.cuda.current_stream().cuda_stream,
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cuda"),
            )

        before = state()
        for phase in Phase:
            with it.scope(phase):
                assert state() == (it.torch_stream(phase).cuda_stream, True, False)
                torch.set_autocast_enabled("cuda", True)
            assert state() == before


async def test_watched_times_are_the_device_s() -> None:
    seen: list[tuple[str, int]] = []
    async with cuda(watch=lambda phase, label, what, time_ns=0: seen.append((what, time_ns))) as it:
        spinner = Spinner()
        await it.stream(Phase.P).submit(lambda: None, "first").wait()
        begun = time.monotonic_ns()
        event = it.stream(Phase.P).submit(spinner.launch, "P e0 [0,1)")
        await asyncio.sleep(0.2)
        spinner.release()
        released = time.monotonic_ns()
        await event.wait()
        ended = time.monotonic_ns()
        (_, start), (_, finish) = seen[-2:]
        assert begun <= start <= begun + 150_000_000
        assert released - 5_000_000 <= finish <= ended


async def test_routed_results_are_right_under_load_and_memory_comes_back() -> None:
    """Many segments whose routed results live on D's stream, with D allocating all the time."""
    async with cuda() as it:
        gpu = it.torch_device
        p, d, route = it.stream(Phase.P), it.stream(Phase.D), it.route()

        def decode() -> None:
            for _ in range(8):
                torch.full((256, 256), -1.0, device=gpu)

        def segment(number: int) -> torch.Tensor:
            x = torch.full((256, 256), float(number), device=gpu)
            for call in CALLS:
                x = route.run(call, lambda x=x: x + 1)
                x = x @ torch.eye(256, device=gpu)
            return x

        async def rounds(count: int) -> None:
            events = []
            for number in range(count):
                route.reserve(CALLS)
                events.append(p.submit(lambda number=number: segment(number), f"P e{number} [0,8)"))
                d.submit(decode, f"D {number}")
            for number, event in enumerate(events):
                value = await event.wait()
                assert bool((value == number + len(CALLS)).all())

        await rounds(2)
        await d.submit(lambda: None, "last").wait()
        gc.collect()
        before = torch.cuda.memory_allocated()  # libraries' workspaces among it
        await rounds(40)
        await d.submit(lambda: None, "last").wait()
        gc.collect()
        assert torch.cuda.memory_allocated() <= before


async def test_graphs_replay_with_stable_addresses_and_share_a_pool() -> None:
    async with cuda() as it:
        x = torch.zeros(4, 16, device=it.torch_device)
        graphs = [it.graph(Phase.D) for _ in range(2)]
        with it.scope(Phase.D):
            _ = (x[:2] * 2 + 1, x * 2 + 1)  # warm
            outs = [
                graph.capture(lambda rows=rows: x[:rows] * 2 + 1) for rows, graph in zip((2, 4), graphs, strict=True)
            ]
        assert graphs[0].pool == graphs[1].pool
        for value in (1.0, 5.0):
            for graph, out, rows in zip(graphs, outs, (2, 4), strict=True):

                def replay(graph: Any = graph, out: Any = out, value: float = value) -> Any:
                    x.fill_(value)
                    graph.replay()
                    return out.clone()

                found = await it.stream(Phase.D).submit(replay, "D").wait()
                assert found.tolist() == [[value * 2 + 1] * 16] * rows
        with pytest.raises(UsageError, match="captured once"):
            graphs[0].capture(lambda: None)


async def test_a_body_that_fails_leaves_the_stream_usable() -> None:
    async with cuda() as it:
        graph = it.graph(Phase.D)
        with pytest.raises(ZeroDivisionError):
            graph.capture(lambda: 1 // 0)
        assert not graph.captured
        assert await it.stream(Phase.D).submit(lambda: float(torch.ones(2, device="cuda").sum()), "D 1").wait() == 2.0


async def test_out_of_memory_names_the_submission_and_the_device_goes_on() -> None:
    async with cuda() as it:
        event = it.stream(Phase.P).submit(lambda: torch.empty(1 << 42, device="cuda"), "P e3 [4,8)")
        with pytest.raises(DeviceFault, match=r"rank 0 ran out of GPU memory in P e3 \[4,8\): Tried to allocate"):
            await event.wait()
        assert await it.stream(Phase.P).submit(lambda: 1, "P e4 [0,1)").wait() == 1


async def test_nothing_asks_the_allocator_or_waits_once_warm() -> None:
    async with cuda() as it:
        p, d, route = it.stream(Phase.P), it.stream(Phase.D), it.route()
        x = torch.ones(512, 512, device=it.torch_device)

        def segment() -> None:
            y = x
            for call in CALLS:
                y = route.run(call, lambda y=y: y + 1) @ x

        async def rounds(count: int) -> None:
            for number in range(count):
                route.reserve(CALLS)
                event = p.submit(segment, f"P e{number} [0,8)")
                await d.submit(lambda: x * 2, f"D {number}").wait()
                await event.wait()

        await rounds(3)
        before = torch.cuda.memory_stats()
        with no_waits():
            await rounds(20)
        after = torch.cuda.memory_stats()
        for name in ("num_device_alloc", "num_device_free", "num_alloc_retries"):
            assert after[name] == before[name], name


async def test_prefill_can_be_confined_to_some_sms() -> None:
    async with cuda(prefill_sms=32) as it:
        assert it.budget.prefill == 32
        x = torch.ones(256, 256, device=it.torch_device)

        def work() -> torch.Tensor:
            return x @ x

        found = await it.stream(Phase.P).submit(work, "P e0 [0,1)").wait()
        assert bool((found == 256).all())


async def test_close_gives_up_what_runs_and_ends_both_threads() -> None:
    async with cuda() as it:
        spinner = Spinner()
        event = it.stream(Phase.D).submit(spinner.launch, "D 1")
        threading.Timer(0.3, spinner.release).start()
        await it.close()
        with pytest.raises(RankLost, match="closed before this work had finished"):
            await event.wait()
        assert not [thread for thread in threading.enumerate() if thread.name in ("rank0 D", "rank0 P")]


# -- two GPUs ---------------------------------------------------------------------------------------------------------


def _profiled(me: Any, port: int, routed: bool) -> dict[str, list[int]]:
    """Stream ids, as CUPTI saw them, of the collectives of 10 segments; `routed`: through the route or around it."""
    from kernel.device.cuda import CudaDevice
    from tests.test_comm_nccl import open_world

    open_world(me, port)
    nccl = me.keep["nccl"]
    it = CudaDevice(me.rank, me.rank, {phase: nccl.collectives(phase) for phase in Phase})
    route, x = it.route(), torch.ones(1 << 16, device=it.torch_device)

    def reduce() -> Any:
        return it.collectives(Phase.P).all_reduce(Role.TP, x)

    def segment() -> None:
        with it.scope(Phase.P):
            if routed:
                route.run(CALLS[0], reduce)
            else:
                reduce()

    def decode() -> None:
        with it.scope(Phase.D):
            it.collectives(Phase.D).all_gather(Role.TP, x)

    async def rounds() -> None:
        for number in range(10):
            if routed:
                route.reserve(CALLS[:1])
            event = it.stream(Phase.P).submit(segment, f"P e{number} [0,1)")
            await it.stream(Phase.D).submit(decode, f"D {number}").wait()
            await event.wait()

    from torch.profiler import ProfilerActivity, profile

    async def all_of_it() -> dict[str, list[int]]:
        await rounds()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            await rounds()
        streams: dict[str, set[int]] = {}
        for event in found.profiler.kineto_results.events():
            if "nccl" in event.name().lower() and "Kernel" in event.name():
                kind = "P" if "AllReduce" in event.name() else "D"
                streams.setdefault(kind, set()).add(int(event.device_resource_id()))
        await it.close()
        return {kind: sorted(ids) for kind, ids in streams.items()}

    return asyncio.run(all_of_it())


@pytest.mark.parametrize("routed", [True, False])
def test_cupti_sees_routed_collectives_on_d_s_stream(routed: bool) -> None:
    from tests.ranks import Ranks
    from tests.test_comm_nccl import free_port, need_two

    need_two()
    with Ranks(World(2), timeout_s=120.0) as ranks:
        for streams in ranks.run(_profiled, free_port(), routed):
            assert len(streams["D"]) == len(streams["P"]) == 1
            assert (streams["D"] == streams["P"]) == routed
