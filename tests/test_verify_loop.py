"""The rank loop against stock asyncio: the same program shows the same events, in the same order, at the same times."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.sim.errors import Deadlock
from verify.sim.loop import RankLoop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

Log = list[tuple[str, float]]


class Stuck(Exception):
    """The stock loop would wait for ever."""


class Numbered(asyncio.Task[Any]):
    """Sets of these have the order of their creation: what asyncio does in the order of a set is comparable."""

    def __init__(self, coro: Any, *, loop: Any, **kwargs: Any) -> None:
        self.number = loop.born = getattr(loop, "born", 0) + 1
        super().__init__(coro, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self.number


class StockInVirtualTime(asyncio.SelectorEventLoop):
    """The oracle: asyncio's own loop, whose selector jumps to the next timer instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(lambda loop, coro, **kwargs: Numbered(coro, loop=loop, **kwargs))
        self._now = 0.0
        selector = self._selector  # type: ignore[attr-defined]
        poll = selector.select

        def select(timeout: float | None = None) -> Any:
            events = poll(0)
            if not events and timeout is None:
                raise Stuck
            self._now += timeout or 0.0
            return events

        selector.select = select

    def time(self) -> float:
        return self._now


def run_on(
    factory: Callable[[], asyncio.AbstractEventLoop],
    main: Callable[[Log], Coroutine[Any, Any, None]],
    cleanup: bool = False,
) -> Log:
    """The log of `main` on a loop, with how it ended; `cleanup` also what was logged after that.

    The runner cancels what is left in the order of a set that the whole process shares, which may differ.
    """
    log: Log = []
    with asyncio.Runner(loop_factory=factory) as runner:
        try:
            runner.run(main(log))
            log.append(("returned", 0.0))
        except (Stuck, Deadlock):
            log.append(("stuck", 0.0))
        except (Exception, asyncio.CancelledError) as error:
            log.append((f"raised {type(error).__name__}", 0.0))
        ended = list(log)
    return log if cleanup else ended


# -- random programs --------------------------------------------------------------------------------------------------

names = st.integers(0, 1)
millis = st.integers(0, 4)
leaf = st.one_of(
    st.tuples(st.just("sleep"), millis),
    st.tuples(st.sampled_from(["yield", "soon", "later", "put", "get", "set", "wait", "clear", "release"]), names),
    st.tuples(st.sampled_from(["locked", "notify", "await_notify", "semaphore", "cancel", "join"]), names),
    st.tuples(st.just("fail"), names),
)
blocks = st.deferred(lambda: st.lists(node, min_size=1, max_size=4))
node: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        leaf
        | st.tuples(
            st.sampled_from(["spawn", "group", "gather", "gather_errors", "shield", "first", "generator"]), blocks
        )
        | st.tuples(st.sampled_from(["timeout", "wait_for"]), millis, blocks)
    )
)


class Interpreter:
    """Runs a program of nested operations and logs what it observes."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.queues = [asyncio.Queue[int](1) for _ in range(2)]
        self.events = [asyncio.Event() for _ in range(2)]
        self.locks = [asyncio.Lock() for _ in range(2)]
        self.conditions = [asyncio.Condition() for _ in range(2)]
        self.semaphores = [asyncio.Semaphore(1) for _ in range(2)]
        self.tasks: list[asyncio.Task[None]] = []

    def note(self, what: str) -> None:
        self.log.append((what, asyncio.get_running_loop().time()))

    def delay(self, path: str, ms: int) -> float:
        """Milliseconds, and a fraction of its own for each place in the program: no two timers are due together."""
        return ms / 1e3 + int.from_bytes(hashlib.blake2b(path.encode(), digest_size=3).digest(), "big") / 1e11

    async def block(self, path: str, ops: list[Any]) -> None:
        try:
            for index, op in enumerate(ops):
                here = f"{path}.{index}"
                self.note(f"{here} {op[0]}")
                await self.op(here, op)
                self.note(f"{here} done")
        except BaseException as error:
            self.note(f"{path} {type(error).__name__}")
            raise

    async def op(self, path: str, op: Any) -> None:
        loop = asyncio.get_running_loop()
        match op:
            case "sleep", ms:
                await asyncio.sleep(self.delay(path, ms))
            case "yield", _:
                await asyncio.sleep(0)
            case "soon", _:
                loop.call_soon(self.note, f"{path} soon")
            case "later", which:
                handle = loop.call_later(self.delay(path, 0 if which else 1), self.note, f"{path} later")
                if which == 0 and len(path) % 2:
                    handle.cancel()
            case "put", which:
                await self.queues[which].put(1)
            case "get", which:
                await self.queues[which].get()
            case "set", which:
                self.events[which].set()
            case "clear", which:
                self.events[which].clear()
            case "wait", which:
                await self.events[which].wait()
            case "locked", which:
                async with self.locks[which]:
                    await asyncio.sleep(self.delay(path, 1))
            case "semaphore", which:
                await self.semaphores[which].acquire()
            case "release", which:
                self.semaphores[which].release()
            case "notify", which:
                async with self.conditions[which]:
                    self.conditions[which].notify()
            case "await_notify", which:
                async with self.conditions[which]:
                    await self.conditions[which].wait()
            case "cancel", which:
                if self.tasks:
                    self.tasks[-1 - which % len(self.tasks)].cancel()
            case "join", which:
                if self.tasks:
                    await asyncio.wait([self.tasks[which % len(self.tasks)]])
            case "fail", which:
                raise (ValueError if which else KeyError)(path)
            case "spawn", ops:
                self.tasks.append(asyncio.create_task(self.quiet(path, ops)))
            case "group", ops:
                async with asyncio.TaskGroup() as group:
                    for index, each in enumerate(ops):
                        child = self.block(f"{path}/{index}", [each])
                        try:
                            group.create_task(child)
                        except RuntimeError:  # an eager sibling has failed already
                            child.close()
                            raise
            case "gather", ops:
                await asyncio.gather(*(self.quiet(f"{path}/{index}", [each]) for index, each in enumerate(ops)))
            case "gather_errors", ops:
                parts = (self.block(f"{path}/{index}", [each]) for index, each in enumerate(ops))
                found = await asyncio.gather(*parts, return_exceptions=True)
                self.note(f"{path} {[type(each).__name__ for each in found]}")
            case "first", ops:
                tasks = [asyncio.create_task(self.quiet(f"{path}/{i}", [each])) for i, each in enumerate(ops)]
                self.tasks += tasks
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self.note(f"{path} {sorted(tasks.index(task) for task in done)}")
            case "shield", ops:
                await asyncio.shield(self.quiet(path, ops))
            case "generator", ops:

                async def generate() -> AsyncIterator[int]:
                    try:
                        for index, each in enumerate(ops):
                            await self.op(f"{path}/{index}", each)
                            yield index
                    finally:
                        self.note(f"{path} generator ends")

                async with aclosing(generate()) as items:  # type: ignore[type-var]
                    async for index in items:
                        self.note(f"{path} item {index}")
                        if index:
                            break
            case "timeout", ms, ops:
                try:
                    async with asyncio.timeout(self.delay(path, ms)):
                        await self.block(path, ops)
                except TimeoutError:
                    self.note(f"{path} timed out")
            case "wait_for", ms, ops:
                try:
                    await asyncio.wait_for(self.block(path, ops), self.delay(path, ms))
                except TimeoutError:
                    self.note(f"{path} timed out")
            case _:
                raise AssertionError(op)

    async def quiet(self, path: str, ops: list[Any]) -> None:
        """A block whose failure nobody needs to look at."""
        try:
            await self.block(path, ops)
        except Exception as error:
            self.note(f"{path} swallowed {type(error).__name__}")


def assert_same(ours: Log, theirs: Log) -> None:
    assert [what for what, _ in ours] == [what for what, _ in theirs]
    assert [at for _, at in ours] == pytest.approx([at for _, at in theirs], abs=1e-7)


@given(blocks, st.booleans())
def test_any_program_runs_as_on_stock_asyncio(program: list[Any], eager: bool) -> None:
    async def main(log: Log) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # when garbage is collected is no matter of order
        if eager and sys.version_info >= (3, 12):
            loop.born = 1  # this task
            loop.set_task_factory(asyncio.create_eager_task_factory(Numbered))
        await Interpreter(log).block("", program)

    assert_same(run_on(RankLoop, main), run_on(StockInVirtualTime, main))


# -- pieces that random programs do not reach -------------------------------------------------------------------------


async def barrier(log: Log) -> None:
    meeting = asyncio.Barrier(3)

    async def come(number: int) -> None:
        await asyncio.sleep(number / 1000)
        place = await meeting.wait()
        log.append((f"{number} got {place}", asyncio.get_running_loop().time()))

    await asyncio.gather(*(come(number) for number in (3, 1, 2)))


async def call_order(log: Log) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()

    def say(what: str) -> None:
        log.append((what, loop.time()))

    def first() -> None:
        say("first")
        loop.call_soon(say, "soon from first")

    loop.call_soon(first)
    loop.call_at(now - 1, say, "an hour late")
    loop.call_at(now - 2, say, "two hours late")
    loop.call_later(0, say, "due at once")
    loop.call_soon(say, "second")
    loop.call_soon_threadsafe(say, "from this thread")
    loop.call_later(0.001, say, "later").cancel()
    await asyncio.sleep(0.002)


async def contexts(log: Log) -> None:
    where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")

    async def child(name: str) -> None:
        log.append((where.get(), 0.0))
        where.set(name)
        await asyncio.sleep(0)
        log.append((where.get(), 0.0))

    where.set("main")
    await asyncio.gather(child("a"), child("b"))
    log.append((where.get(), 0.0))


async def abandoned_generator(log: Log) -> None:
    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0.001)
            log.append(("finalised", asyncio.get_running_loop().time()))

    async for number in numbers():
        log.append((f"got {number}", 0.0))
        break
    await asyncio.sleep(0.01)


async def left_behind(log: Log) -> None:
    """The runner cancels what is left and closes generators that are still open."""

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            log.append(("cancelled", 0.0))

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            log.append(("closed", 0.0))

    open_generator = numbers()
    await anext(open_generator)
    log.append(("kept", float(len(asyncio.all_tasks()))))
    asyncio.get_running_loop().kept = (open_generator, asyncio.create_task(forever()))  # type: ignore[attr-defined]
    await asyncio.sleep(0)


@pytest.mark.parametrize("main", [barrier, call_order, contexts, abandoned_generator, left_behind])
def test_pieces_of_asyncio_run_as_on_the_stock_loop(main: Any) -> None:
    ours, theirs = run_on(RankLoop, main, cleanup=True), run_on(StockInVirtualTime, main, cleanup=True)
    assert_same(ours, theirs)
    assert len(ours) > 2
    assert ("returned", 0.0) in ours


def test_the_clock_stands_still_unless_everybody_waits() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            await asyncio.sleep(0)
        before = loop.time()
        await asyncio.sleep(3600)
        return before, loop.time()

    with asyncio.Runner(loop_factory=RankLoop) as runner:
        assert runner.run(main()) == (0.0, 3600.0)


@given(st.lists(st.floats(0, 10), max_size=20))
def test_a_timer_fires_on_time_and_a_cancelled_one_moves_no_clock(delays: list[float]) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for delay in delays:
            before = loop.time()
            loop.call_later(delay + 1e6, print).cancel()
            await asyncio.sleep(delay)
            assert before + delay - 1e-9 <= loop.time() <= before + delay + 1e-9
            deadline = loop.time() + delay
            while loop.time() < deadline:  # noqa: ASYNC110 (rounding may take a second step, never endless ones)
                await asyncio.sleep(deadline - loop.time())
        return loop.time()

    with asyncio.Runner(loop_factory=RankLoop) as runner:
        assert runner.run(main()) == pytest.approx(2 * sum(delays), abs=1e-6)


def test_many_cancelled_timers_do_not_pile_up() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, RankLoop)
        for _ in range(5000):
            async with asyncio.timeout(60):
                await asyncio.sleep(0)
        return len(loop.scheduler._heap)

    with asyncio.Runner(loop_factory=RankLoop) as runner:
        assert runner.run(main()) < 1000


def test_unnamed_tasks_are_named_by_order_of_creation() -> None:
    async def name() -> str:
        task = asyncio.current_task()
        assert task is not None
        return task.get_name()

    async def main() -> list[str]:
        return [await asyncio.create_task(name()), await asyncio.create_task(name(), name="mine")]

    for _ in range(2):
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            assert runner.run(main()) == ["task 2", "mine"]


def test_a_group_cancels_its_tasks_in_order_of_creation() -> None:
    """asyncio goes through a set here; the order of addresses would make runs differ."""
    order: list[int] = []

    async def child(number: int) -> None:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            order.append(number)
            raise

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(child(number))
            await asyncio.sleep(0)
            raise KeyError

    with asyncio.Runner(loop_factory=RankLoop) as runner, pytest.raises(ExceptionGroup):
        runner.run(main())
    assert sorted(order) == list(range(50))
    assert order[5:40] == list(range(order[5], order[5] + 35))  # up to where the set's table begins


def test_an_exception_handler_of_the_program_is_used() -> None:
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: seen.append(type(context["exception"]).__name__))
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=RankLoop) as runner:
        runner.run(main())
    assert seen == ["ZeroDivisionError"]
