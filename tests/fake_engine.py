"""An engine without ranks: what a replay needs of `rollout.engine.Engine`, in virtual or in real time.

A request's first token comes after a cost a missing prompt token, each further one after a step. Tokens follow from the
prompt alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import selectors
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kernel.topology import World

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path
    from types import TracebackType

    from kernel.request import SamplingParams

T = TypeVar("T")
VOCABULARY = 256


class _Jump(selectors.SelectSelector):
    """Instead of waiting, moves the loop's clock on."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is scheduled: every task waits for ever")
        if found := super().select(0):
            return found
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only while nothing can run."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def continuation(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The tokens that the fake generates for a prompt."""
    seed = hashlib.sha256(repr(tuple(prompt)).encode()).digest()
    return tuple((seed[i % 32] + i) % VOCABULARY for i in range(count))


@dataclass(frozen=True)
class FakeCompletion:
    request: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    submitted_ns: int
    first_token_ns: int
    finished_ns: int
    token_ns: tuple[int, ...]


class FakeGeneration:
    def __init__(self, task: asyncio.Task[FakeCompletion]) -> None:
        self._task = task
        self.aborted = False

    def __await__(self) -> Any:
        return self._task.__await__()

    def abort(self) -> None:
        self.aborted = True
        self._task.cancel()


@dataclass
class Call:
    """One `generate`, as the engine saw it."""

    number: int
    session: int
    prompt: tuple[int, ...]
    params: SamplingParams
    submitted_ns: int
    finished_ns: int = -1


class FakeSession:
    def __init__(self, engine: FakeEngine, number: int) -> None:
        self.engine, self.id = engine, number
        self.kept = 0
        self.closed = False
        self.generations: list[FakeGeneration] = []

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> FakeGeneration:
        assert not self.closed
        call = Call(len(self.engine.calls) + 1, self.id, tuple(prompt), params, self.engine.now_ns())
        self.engine.calls.append(call)
        generation = FakeGeneration(asyncio.get_running_loop().create_task(self._work(call)))
        self.generations.append(generation)
        return generation

    async def _work(self, call: Call) -> FakeCompletion:
        engine = self.engine
        engine.active += 1
        engine.most_active = max(engine.most_active, engine.active)
        number = call.number
        try:
            wanted = call.params.max_tokens
            given = wanted if engine.cut is None or number not in engine.cut else engine.cut[number]
            if engine.fail is not None and number == engine.fail[0]:
                raise engine.fail[1]
            await asyncio.sleep(engine.prefill_s * (len(call.prompt) - self.kept))
            stamps = []
            for at in range(given):
                if at:
                    await asyncio.sleep(engine.step_s)
                stamps.append(engine.now_ns())
        finally:
            engine.active -= 1
        cached, self.kept = self.kept, len(call.prompt) + given
        call.finished_ns = engine.now_ns()
        tokens = continuation(call.prompt, given)
        reason = "length" if given == wanted else "abort"
        return FakeCompletion(
            number, tokens, (-1.0,) * given, reason, len(call.prompt), cached, call.submitted_ns,
            stamps[0] if stamps else call.finished_ns, call.finished_ns, tuple(stamps),
        )  # fmt: skip

    async def close(self) -> None:
        self.closed = True


@dataclass
class FakeEngine:
    """cut: call number -> output tokens after which it is aborted. fail: (call number, error to raise there).

    clock: monotonic ns; by default the loop's own time. on_policy: called with (policy, run directory) at each change
    of policy.
    """

    model: Any = None
    world: World = field(default_factory=World)
    policy: str = "fine"
    prefill_s: float = 0.001
    step_s: float = 0.01
    cut: dict[int, int] | None = None
    fail: tuple[int, BaseException] | None = None
    clock: Callable[[], int] | None = None
    on_policy: Callable[[str, Path], None] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls: list[Call] = []
        self.sessions: list[FakeSession] = []
        self.policies: list[tuple[str, Path | None]] = []
        self.flushes = 0
        self.active = self.most_active = 0
        self.open = False

    async def __aenter__(self) -> Self:
        self.open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open = False

    def session(self) -> FakeSession:
        self.sessions.append(FakeSession(self, len(self.sessions)))
        return self.sessions[-1]

    def now_ns(self) -> int:
        return self.clock() if self.clock else int(asyncio.get_running_loop().time() * 1e9)

    async def flush(self) -> None:
        self.flushes += 1

    async def use_policy(self, policy: str, config: dict[str, Any] | None = None, record: Path | None = None) -> None:
        assert not self.active, "a policy changes only when nothing is in flight"
        self.policies.append((policy, record))
        if self.on_policy is not None and record is not None:
            self.on_policy(policy, record)
