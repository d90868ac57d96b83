"""The CPU device: streams as worker threads, P's route through D's stream, failure and the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kernel.comm.local import LocalCollectives  # noqa: E402
from kernel.comm.shared import Arena  # noqa: E402
from kernel.comm.shm_collectives import SharedCollectives  # noqa: E402
from kernel.device.cpu import CpuDevice, TorchLayout  # noqa: E402
from kernel.device.worker import Completion  # noqa: E402
from kernel.errors import OrderViolation, RankLost  # noqa: E402
from kernel.program import Call, Op, Program, Site  # noqa: E402
from kernel.request import Phase  # noqa: E402
from kernel.topology import Role, World  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop]
with contextlib.suppress(ImportError):
    import uvloop

    LOOPS.append(uvloop.new_event_loop)

CALLS = [Call(index, Site.GATHER, index, Op.ALL_REDUCE, Role.TP, routed=True) for index in range(40)]
BOUND_S = 30.0
"""No wait of a test exceeds this; all are over in milliseconds unless something hangs."""


def local() -> dict[Phase, LocalCollectives]:
    return {phase: LocalCollectives() for phase in Phase}


@contextlib.asynccontextmanager
async def device(**settings: Any) -> AsyncIterator[CpuDevice]:
    made = CpuDevice(0, settings.pop("collectives", None) or local(), **settings)
    try:
        async with asyncio.timeout(BOUND_S):
            yield made
    finally:
        await made.close()


def on_every_loop(test: Callable[[], Awaitable[None]]) -> Callable[[int], None]:
    """Run an async test on asyncio's loop and on uvloop."""

    @pytest.mark.parametrize("which", range(len(LOOPS)), ids=["asyncio", "uvloop"][: len(LOOPS)])
    def run(which: int) -> None:
        with asyncio.Runner(loop_factory=LOOPS[which]) as runner:
            runner.run(test())  # type: ignore[arg-type]

    return run


# -- streams ----------------------------------------------------------------------------------------------------------


async def values_and_errors() -> None:
    async with device() as it:
        for phase in Phase:
            stream = it.stream(phase)
            assert stream.phase is phase
            assert await stream.submit(lambda: threading.current_thread().name, "name").wait() == f"rank0 {phase}"
            failing = stream.submit(lambda: 1 // 0, "fails")
            after = stream.submit(lambda: "fine", "after")
            for _ in range(2):  # as often as it is asked
                with pytest.raises(ZeroDivisionError):
                    await failing.wait()
            assert failing.done()
            assert await after.wait() == "fine"
            assert await after.wait() == "fine"


async def waiting_does_not_hold_the_loop() -> None:
    async with device() as it:
        go = threading.Event()
        event = it.stream(Phase.D).submit(lambda: go.wait(BOUND_S), "slow")
        waiters = [asyncio.ensure_future(event.wait()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert not event.done()
        waiters[1].cancel()
        go.set()  # only a loop that still turns gets here
        assert await waiters[0] is True
        assert await waiters[2] is True
        assert waiters[1].cancelled()
        assert event.done()


async def many_waits() -> None:
    async with device() as it:
        for number in range(500):  # finishing races with waiting
            assert await it.stream(Phase(("D", "P")[number % 2])).submit(lambda n=number: n, "n").wait() == number


async def finished_in_between() -> None:
    """The work finishes after the waiter has found it unfinished, and before it has put itself on the list."""
    event = Completion[str]()
    lock = event._lock

    class Late(contextlib.AbstractContextManager[None]):
        def __enter__(self) -> None:
            event._lock = lock
            event.succeed("just now")
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    event._lock = Late()  # type: ignore[assignment]
    assert await asyncio.wait_for(event.wait(), BOUND_S) == "just now"


test_events_carry_values_and_errors = on_every_loop(values_and_errors)
test_waiting_suspends_the_task_and_not_the_loop = on_every_loop(waiting_does_not_hold_the_loop)
test_no_wake_up_is_lost = on_every_loop(many_waits)
test_no_wake_up_is_lost_to_a_race = on_every_loop(finished_in_between)


async def test_the_two_streams_run_at_the_same_time() -> None:
    async with device() as it:
        both = threading.Barrier(2, timeout=BOUND_S)
        events = [it.stream(phase).submit(both.wait, "meet") for phase in Phase]
        assert sorted([await event.wait() for event in events]) == [0, 1]


async def test_the_scope_is_inference_without_autocast_and_leaves_nothing_behind() -> None:
    async with device(threads=3) as it:

        def state() -> tuple[bool, bool]:
            return torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

        def inside() -> list[Any]:
            seen: list[Any] = [torch.get_num_threads(), state()]
            with it.scope(Phase.P):
                seen.append(state())
                torch.set_autocast_enabled("cpu", True)  # what model code that suspends inside a context leaves on
                torch._C._set_grad_enabled(False)
            seen += [state(), torch.is_grad_enabled()]
            torch.set_autocast_enabled("cpu", True)
            with it.scope(Phase.P):
                seen.append(state())
            seen.append(state())
            torch.set_autocast_enabled("cpu", False)
            return seen

        expected = [3, (False, False), (True, False), (False, False), True, (True, False), (False, True)]
        assert await it.stream(Phase.P).submit(inside, "scope").wait() == expected
        routed = await route_one(it, CALLS[0], state)
        assert routed == (True, False)
        assert await it.stream(Phase.D).submit(state, "after").wait() == (False, False)
        assert await it.stream(Phase.D).submit(torch.get_num_threads, "threads").wait() == 3
    torch.set_num_threads(1)


async def route_one(it: CpuDevice, call: Call, work: Callable[[], Any]) -> Any:
    it.route().reserve([call])
    return await it.stream(Phase.P).submit(lambda: it.route().run(call, work), "P").wait()


# -- route ------------------------------------------------------------------------------------------------------------


async def test_routed_work_runs_on_d_s_thread_in_the_reserved_place() -> None:
    async with device() as it:
        order: list[str] = []
        go = threading.Event()
        d, p, route = it.stream(Phase.D), it.stream(Phase.P), it.route()

        def segment() -> str:
            go.wait(BOUND_S)
            first = route.run(CALLS[0], lambda: order.append("routed 0") or threading.current_thread().name)
            second = route.run(CALLS[1], lambda: order.append("routed 1") or "second")
            return f"{first}, {second}"

        before = d.submit(lambda: order.append("D before"), "D 1")
        route.reserve(CALLS[:2])
        event = p.submit(segment, "P [0,1)")
        after = d.submit(lambda: order.append("D after"), "D 2")
        await before.wait()
        await asyncio.sleep(0.01)
        assert order == ["D before"]  # D stands at the place and waits for P, which has not arrived
        assert not after.done()
        go.set()
        assert await event.wait() == "rank0 D, second"
        await after.wait()
        assert order == ["D before", "routed 0", "routed 1", "D after"]


async def interleaved(steps: list[Any], seed: int, carried: bool) -> None:
    chance = random.Random(seed)
    async with device() as it:
        ran: list[str] = []
        expected: list[str] = []
        events: list[tuple[Any, Any]] = []
        calls = iter(CALLS * 3)

        def dawdle() -> None:
            if chance.random() < 0.15:
                time.sleep(chance.random() * 0.002)

        def work(name: str) -> str:
            dawdle()
            ran.append(name)
            return name

        def routed(mine: list[tuple[Call, str]]) -> list[str]:
            dawdle()
            return [it.route().run(call, lambda name=name: work(name)) for call, name in mine]

        for number, step in enumerate(steps):
            if step == "D":
                name = f"D {number}"
                expected.append(name)
                events.append((it.stream(Phase.D).submit(lambda name=name: work(name), name), name))
                continue
            mine = [(next(calls), f"P {number}.{k}") for k in range(step)]
            expected += [name for _, name in mine]
            it.route().reserve([call for call, _ in mine])
            # A segment that awaits data in the middle goes on in a second submission, with the places of the first.
            cut = chance.randint(0, step) if carried else step
            for part in (mine[:cut], mine[cut:]):
                event = it.stream(Phase.P).submit(lambda part=part: routed(part), f"P {number}")
                events.append((event, [name for _, name in part]))
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        for event, value in events:
            assert await event.wait() == value
        assert ran == expected


@given(
    steps=st.lists(st.one_of(st.just("D"), st.integers(0, 4)), min_size=1, max_size=25),
    seed=st.integers(0, 2**32),
    carried=st.booleans(),
)
def test_d_s_order_is_exactly_the_order_of_reservation(steps: list[Any], seed: int, carried: bool) -> None:
    """Any interleaving of D submissions and P segments of 0 to 4 routed calls, with threads that dawdle."""
    asyncio.run(interleaved(steps, seed, carried))


async def test_an_exception_of_routed_work_reaches_p_and_spares_d() -> None:
    async with device() as it:
        it.route().reserve(CALLS[:2])

        def segment() -> str:
            with pytest.raises(ZeroDivisionError):
                it.route().run(CALLS[0], lambda: 1 // 0)
            return it.route().run(CALLS[1], lambda: "fine")

        event = it.stream(Phase.P).submit(segment, "P")
        assert await event.wait() == "fine"
        assert await it.stream(Phase.D).submit(lambda: "D lives", "D").wait() == "D lives"


@pytest.mark.parametrize("consumed", [0, 1, 2])
async def test_when_p_fails_d_passes_by_the_places_that_are_left(consumed: int) -> None:
    async with device() as it:
        ran: list[int] = []
        it.route().reserve(CALLS[:3])

        def segment() -> None:
            for k in range(consumed):
                it.route().run(CALLS[k], lambda k=k: ran.append(k))
            raise ValueError("the model broke")

        event = it.stream(Phase.P).submit(segment, "P [0,1)")
        after = it.stream(Phase.D).submit(lambda: "D lives", "D")
        with pytest.raises(ValueError, match="the model broke"):
            await event.wait()
        assert await after.wait() == "D lives"
        assert ran == list(range(consumed))
        # The next segment has its own places.
        assert await route_one(it, CALLS[3], lambda: "next") == "next"


@pytest.mark.parametrize("reserved", [[], [CALLS[1]], [CALLS[1], CALLS[0]]])
async def test_a_call_without_its_place_is_an_order_violation(reserved: list[Call]) -> None:
    async with device() as it:
        it.route().reserve(reserved)
        event = it.stream(Phase.P).submit(lambda: it.route().run(CALLS[0], lambda: None), "P")
        with pytest.raises(OrderViolation, match=r"AR\[TP\] routed at gather 0.*reserve"):
            await event.wait()
        assert await it.stream(Phase.D).submit(lambda: "D lives", "D").wait() == "D lives"


async def test_places_reserved_later_do_not_belong_to_earlier_work() -> None:
    async with device() as it:
        go = threading.Event()
        early = it.stream(Phase.P).submit(lambda: go.wait(BOUND_S) and it.route().run(CALLS[0], lambda: None), "early")
        it.route().reserve([CALLS[0]])
        go.set()
        with pytest.raises(OrderViolation, match="no place is left"):
            await early.wait()
        late = it.stream(Phase.P).submit(lambda: it.route().run(CALLS[0], lambda: "late"), "late")
        assert await late.wait() == "late"


# -- close ------------------------------------------------------------------------------------------------------------


async def test_close_drops_what_has_not_begun() -> None:
    it = CpuDevice(0, local())
    go = threading.Event()
    begun = threading.Event()
    running = it.stream(Phase.D).submit(lambda: begun.set() or go.wait(BOUND_S), "running")
    assert await asyncio.to_thread(begun.wait, BOUND_S)
    waiting = it.stream(Phase.D).submit(lambda: "never", "waiting")
    closing = asyncio.ensure_future(it.close())
    await asyncio.sleep(0.01)
    late = it.stream(Phase.P).submit(lambda: "never", "late")
    go.set()
    await asyncio.wait_for(closing, BOUND_S)
    await it.close()
    assert await running.wait() is True
    for event in (waiting, late):
        with pytest.raises(RankLost, match="rank 0's device was closed"):
            await event.wait()
    assert not {thread.name for thread in threading.enumerate()} & {"rank0 D", "rank0 P"}


async def test_close_ends_d_at_a_place_that_p_will_never_reach() -> None:
    it = CpuDevice(0, local())
    it.route().reserve(CALLS[:1])
    behind = it.stream(Phase.D).submit(lambda: "never", "behind")
    await asyncio.sleep(0.01)
    await asyncio.wait_for(it.close(), BOUND_S)
    with pytest.raises(RankLost, match="closed"):
        await behind.wait()


async def test_close_ends_p_at_a_place_that_d_will_never_reach() -> None:
    it = CpuDevice(0, local())
    go = threading.Event()
    it.stream(Phase.D).submit(lambda: go.wait(BOUND_S), "busy")
    it.route().reserve(CALLS[:1])
    event = it.stream(Phase.P).submit(lambda: it.route().run(CALLS[0], lambda: "never"), "P")
    await asyncio.sleep(0.01)
    closing = asyncio.ensure_future(it.close())
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait_for(closing, BOUND_S)
    with pytest.raises(RankLost, match="closed"):
        await event.wait()


@pytest.mark.parametrize("routed", [False, True])
async def test_close_ends_a_collective_that_no_peer_will_join(routed: bool) -> None:
    arena = Arena.create(World(2))
    collectives = {phase: SharedCollectives(arena, phase, 0) for phase in Phase}
    it = CpuDevice(0, collectives)

    def reduce() -> Any:
        return it.collectives(Phase.P).all_reduce(Role.TP, torch.ones(2))

    if routed:
        it.route().reserve(CALLS[:1])
    event = it.stream(Phase.P).submit(lambda: it.route().run(CALLS[0], reduce) if routed else reduce(), "P")
    await asyncio.sleep(0.02)
    assert not event.done()
    await asyncio.wait_for(it.close(), BOUND_S)
    with pytest.raises(RankLost, match="communicators were closed"):
        await event.wait()


# -- ranks in one process: the paper's crossed program ----------------------------------------------------------------


@pytest.mark.parametrize("route", ["paper", "all"])
@pytest.mark.parametrize("seed", range(3))
async def test_crossed_programs_complete_where_the_route_orders_them(route: str, seed: int) -> None:
    """Four ranks' devices run P's and D's real programs over shared memory, with the same host order on every rank."""
    world = World(4, adp=2, ep=4, route=route)
    arena = Arena.create(world)
    devices = [CpuDevice(r, {phase: SharedCollectives(arena, phase, r) for phase in Phase}) for r in range(4)]
    programs = {phase: Program(world, phase, layers=3) for phase in Phase}
    schedule = random.Random(seed).choices("DP", k=12)
    chance = random.Random(seed)

    def step(it: CpuDevice, phase: Phase, calls: tuple[Call, ...]) -> int:
        for call in calls:
            if chance.random() < 0.05:
                time.sleep(0.001)
            collectives = it.collectives(phase)

            def execute(call: Call = call, collectives: Any = collectives) -> Any:
                x = torch.full((8, 4), 1.0)
                return collectives.all_reduce(call.role, x)

            out = it.route().run(call, execute) if call.routed else execute()
            assert out[0, 0] == len(world.groups[call.role][0])
        return len(calls)

    events: deque[tuple[Any, int]] = deque()
    boundary = 0
    for turn in schedule:
        phase = Phase(turn)
        calls = programs[phase].calls if turn == "D" else programs[phase].segment(boundary, boundary + 1)
        boundary = boundary if turn == "D" else (boundary + 1) % 3
        for it in devices:
            it.route().reserve([call for call in calls if call.routed])
            event = it.stream(phase).submit(lambda it=it, p=phase, c=calls: step(it, p, c), f"{turn}")
            events.append((event, len(calls)))
    async with asyncio.timeout(BOUND_S):
        for event, count in events:
            assert await event.wait() == count
    for it in devices:
        await it.close()


# -- layout -----------------------------------------------------------------------------------------------------------


@given(
    rows=st.integers(0, 5),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_place_pads_with_zeros(rows: int, before: int, after: int, dtype: torch.dtype) -> None:
    x = torch.rand(rows, 2).to(dtype) + 1
    placed = TorchLayout().place(x, before, before + rows + after)
    assert placed.dtype is dtype
    expected = [[0.0, 0.0]] * before + x.tolist() + [[0.0, 0.0]] * after
    assert placed.tolist() == expected


@given(ranges=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).map(tuple), max_size=4))
def test_take_copies_rows(ranges: list[tuple[int, int]]) -> None:
    x = torch.arange(12.0).view(6, 2)
    taken = TorchLayout().take(x, ranges)
    assert taken.tolist() == [row for start, stop in ranges for row in x.tolist()[start:stop]]
    assert taken.shape[1] == 2
    taken += 100
    assert x.tolist() == torch.arange(12.0).view(6, 2).tolist()
