"""A policy for bench_host.py: `fine`, which measures its own rank from inside and tells it in marks of the record.

First `rounds` full decode-only rounds as they are: the CPU time of the event loop's thread, of D's stream thread and of
the forward on it, and how long they take. Then as many with a clock around each part. A mark's text is
`host <plain|parts> <thread> <part> <ns|calls>` and its number the sum over those rounds.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kernel.sched.fine import Fine

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kernel.sched.policy import Gate, Limits

PARTS: Final = (
    ("plan", "kernel.sched.planner:Planner", "plan"),
    ("digest", "kernel.views", "digest_of"),
    ("views", "kernel.views", "encode decode check_peers check_equal"),
    ("view of this rank", "kernel.rank:Rank", "_view"),
    ("apply the plan", "kernel.rank:Rank", "_apply"),
    ("make the step", "kernel.rank:Rank", "_step"),
    ("launch", "kernel.rank:Rank", "launch"),
    ("order hash", "kernel.order:Order", "enqueue"),
    ("rows of the replica", "kernel.replica:Replica", "launch ready waiting"),
    ("commit tokens", "kernel.replica:Replica", "harvest"),
    ("KV cache", "kernel.cache:KVCache", "*"),
    ("record", "kernel.journal:Journal", "plan exchange wait wait_for_decode no_work submitted device collective"),
    ("rendezvous", "kernel.comm.rendezvous:SharedRendezvous", "exchange"),
    ("hand to the stream", "kernel.device.worker:WorkerStream", "submit"),
    ("await the stream", "kernel.device.worker:Completion", "wait"),
    ("wake the loop", "kernel.device.worker:Completion", "succeed fail"),
    ("outputs", "rollout.ranks.worker:Outbox", "emit flush"),
    ("forward", "kernel.driver:Driver", "advance"),
)
"""(part, module or class, functions). Each counts what the others inside it do not."""


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """rows: of each replica before it begins. settle: rounds before that. rounds: of each of both measurements."""

    rows: int = 1
    settle: int = 20
    rounds: int = 200


class Clock:
    """CPU time of parts, nested ones taken off, what the clock itself takes taken off too."""

    def __init__(self) -> None:
        self.ns: dict[tuple[int, str], float] = {}
        self.calls: dict[tuple[int, str], int] = {}
        self.on = False
        self._stacks: dict[int, list[list[float]]] = {}
        self._own = self._around = 0.0
        self._calibrate()

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function, or one that makes a coroutine, of which only the steps count."""

        def call(*given: Any, **named: Any) -> Any:
            if not self.on:
                return function(*given, **named)
            self._enter()
            try:
                result = function(*given, **named)
            finally:
                self._leave(part)
            return _stepped(_Steps(self, part, result)) if hasattr(result, "cr_frame") else result

        return call

    def _enter(self) -> None:
        stack = self._stacks.setdefault(threading.get_ident(), [])
        stack.append([0.0, 0.0, time.thread_time_ns()])

    def _leave(self, part: str, counts: int = 1) -> None:
        now, thread = time.thread_time_ns(), threading.get_ident()
        stack = self._stacks[thread]
        inner, children, start = stack.pop()
        took, key = now - start, (thread, part)
        self.ns[key] = self.ns.get(key, 0) + took - inner - children * self._around - self._own
        self.calls[key] = self.calls.get(key, 0) + counts
        if stack:
            stack[-1][0] += took
            stack[-1][1] += 1

    def _calibrate(self, calls: int = 20000) -> None:
        nothing = self.wrap("inner", lambda: None)

        def many() -> None:
            for _ in range(calls):
                nothing()

        bare = time.thread_time_ns()
        for _ in range(calls):
            (lambda: None)()
        bare = time.thread_time_ns() - bare
        self.on = True
        self.wrap("outer", many)()
        self.on, thread = False, threading.get_ident()
        self._own = self.ns[thread, "inner"] / calls
        self._around = max(0.0, (self.ns[thread, "outer"] - bare) / calls)
        self.ns.clear()
        self.calls.clear()


class _Steps:
    """A coroutine, each of whose steps is timed."""

    def __init__(self, clock: Clock, part: str, inner: Any) -> None:
        self._clock, self._part, self._inner = clock, part, inner

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, value = self._inner.__await__(), None
        while True:
            self._clock._enter()
            try:
                asked = steps.send(value)
            except StopIteration as end:
                return end.value
            finally:
                self._clock._leave(self._part, 0)
            value = yield asked


async def _stepped(steps: _Steps) -> Any:
    """A coroutine again, as tasks want it."""
    return await steps


def install(clock: Clock, rank: Any) -> list[str]:
    """Put the clock around all parts; those that are not there."""
    missing = []
    for part, where, names in PARTS:
        module, _, owner = where.partition(":")
        try:
            holder = getattr(import_module(module), owner) if owner else import_module(module)
        except (ImportError, AttributeError):
            missing.append(where)
            continue
        found = [n for n, v in vars(holder).items() if callable(v) and not n.startswith("_")]
        for name in found if names == "*" else names.split():
            if not callable(getattr(holder, name, None)):
                missing.append(f"{where} {name}")
            elif not isinstance(vars(holder).get(name), staticmethod | classmethod):
                setattr(holder, name, clock.wrap(part, getattr(holder, name)))
    stream = rank.ports.device.stream(_decode())
    if getattr(stream, "_watch", None) is not None:  # bound before this file was loaded
        stream._watch = clock.wrap("record", stream._watch)
    return missing


def _decode() -> Any:
    from kernel.request import Phase

    return Phase.D


class Forward:
    """CPU and wall time of D's forwards, the only thing that is measured while the rest is left alone."""

    def __init__(self) -> None:
        from kernel.driver import Driver

        self.cpu_ns = self.wall_ns = 0
        advance = Driver.advance

        def timed(driver: Any, end: int) -> bool:
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return advance(driver, end)
            finally:
                self.cpu_ns += time.thread_time_ns() - cpu
                self.wall_ns += time.perf_counter_ns() - wall

        Driver.advance = timed  # type: ignore[method-assign, assignment]


class Probe(Fine):
    """See the module."""

    name = "probe"
    Config = ProbeConfig  # type: ignore[assignment]

    def __init__(self, limits: Limits, config: ProbeConfig | None = None) -> None:
        super().__init__(limits)
        self.sizes = config or ProbeConfig()
        self._full = 0
        self._before: dict[str, int] = {}
        self._forward: Forward | None = None
        self._clock: Clock | None = None

    async def turn(self, gate: Gate) -> None:
        """As `fine`, counting full rounds."""
        if not gate.p_active and set(gate.plan.decode) == {self.sizes.rows}:
            self._full += 1
            self._look(self._full - self.sizes.settle, gate._rank)  # type: ignore[attr-defined]
        await super().turn(gate)

    def _look(self, at: int, rank: Any) -> None:
        rounds, settle = self.sizes.rounds, self.sizes.settle
        if at == -settle + 1:
            self._forward = Forward()
        elif at == 0:
            self._before = self._now(rank)
        elif at == rounds:
            for name, value in self._now(rank).items():
                rank._journal.mark(f"host plain {name} ns", value - self._before[name])
            self._clock = Clock()
            for name in install(self._clock, rank):
                rank._journal.mark(f"host missing {name}", 1)
        elif at == rounds + settle:
            assert self._clock is not None
            self._clock.on = True
        elif at == 2 * rounds + settle:
            assert self._clock is not None
            self._clock.on, loop = False, threading.get_ident()
            for (thread, part), ns in list(self._clock.ns.items()):
                who = "loop" if thread == loop else "stream"
                rank._journal.mark(f"host parts {who} {part} ns", max(0, round(ns)))
                rank._journal.mark(f"host parts {who} {part} calls", self._clock.calls[thread, part])

    def _now(self, rank: Any) -> dict[str, int]:
        stream = rank.ports.device.stream(_decode())._thread
        assert self._forward is not None
        return {
            "loop cpu": time.thread_time_ns(),
            "stream cpu": time.clock_gettime_ns(time.pthread_getcpuclockid(stream.ident)),
            "forward cpu": self._forward.cpu_ns,
            "forward wall": self._forward.wall_ns,
            "round wall": time.perf_counter_ns(),
        }
