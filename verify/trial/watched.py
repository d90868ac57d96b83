"""Between a rank and its policy: every callback is watched, judged for purity, and never hangs the checker."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, cast

from kernel.errors import TurnstileError, UsageError
from kernel.sched.policy import Guarantees, Memory, Plan
from verify.blame import Class
from verify.sources import raised_at
from verify.trial.findings import Found, one_line
from verify.trial.guard import Guard, Halt
from verify.trial.private_state import PrivateState, reads_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from kernel.sched.policy import Gate, Policy, RankView
    from verify.trial.monitor import RankMonitor


class Watched:
    """A policy, watched. `plan` is asked twice, of the policy and of one that has no past: both must agree."""

    def __init__(self, policy: Policy, monitor: RankMonitor, guard: Guard, feed: Callable[[Plan | None], None]) -> None:
        if not isinstance(getattr(policy, "guarantees", None), Guarantees):
            raise UsageError(f"policy {type(policy).__name__} has no guarantees: subclass kernel.sched.planner.Planner")
        self.policy, self.monitor, self._guard, self._feed = policy, monitor, guard, feed
        self.name: str = policy.name
        self.guarantees: Guarantees = policy.guarantees
        self.route: str | None = getattr(policy, "route", None)
        self.limits = policy.limits
        self.guarded = guard.knows(policy)
        self._fresh = _pristine(policy)
        self._state = PrivateState(policy) if self.guarded else None
        if self.guarded and (where := reads_environment(policy)):
            say = f"{where} reads the environment of its process: ranks would not decide alike"
            raise UsageError(f"policy {policy.name}: {say}; give it a Config instead")
        monitor.adopt(policy)

    def plan(self, views: tuple[RankView, ...], memory: Memory) -> tuple[Plan, Memory]:
        """See `kernel.sched.policy.Policy`. Raises Found."""
        self.monitor.now = memory.round
        self._feed(None)
        answer = self._ask(self.policy, views, memory)
        again = self._ask(self._fresh(), views, memory)
        if not self._is_plan(answer):
            raise self.monitor.find(Class.RULE, "plan", f"plan returns {_short(answer)}: it must return (Plan, Memory)")
        if answer != again:
            self._differs(answer, again)
        self._unchanged("plan")
        plan, after = answer
        self.monitor.planned(views, memory, plan, after)
        self._feed(plan)
        return plan, after

    async def turn(self, gate: Gate) -> None:
        """See `kernel.sched.policy.Policy`. Raises Found."""
        try:
            watched = WatchedGate(gate, self)
            turn = self.policy.turn(watched)
            if not inspect.iscoroutine(turn):
                raise self.monitor.find(Class.RULE, "turn", "turn is not an `async def`")
            await watched.steps(turn)
        except (Halt, Exception, SystemExit, KeyboardInterrupt) as error:
            self._failed("turn", error)
        if self._guard.found is not None:
            self._failed("turn", Halt())
        self._unchanged("turn")

    # -- inside -------------------------------------------------------------------------------------------------

    def _ask(self, policy: Any, views: tuple[RankView, ...], memory: Memory) -> Any:
        try:
            if self.guarded:
                self._guard.enter("plan", self.monitor.rank, memory.round)
            try:
                answer = policy.plan(views, memory)
            finally:
                if self.guarded:
                    self._guard.leave()
        except (Halt, Exception, SystemExit, KeyboardInterrupt) as error:
            self._failed("plan", error)
        if self._guard.found is not None:
            self._failed("plan", Halt())
        return answer

    def _unchanged(self, what: str) -> None:
        """A policy remembers in its memory, and nowhere else: ranks do not share a process."""
        changed = self._state.changed() if self._state is not None else ""
        if changed:
            say = f"{what} changes {changed}: what a policy remembers belongs into its Memory"
            raise self.monitor.find(Class.RULE, "memory", say)

    def _failed(self, what: str, error: BaseException) -> None:
        """Raise what a policy's callback ended with, in one line. Errors of the kernel pass."""
        guard, monitor = self._guard, self.monitor
        if guard.found is not None:
            if guard.found not in monitor.findings:
                monitor.findings.insert(0, guard.found)
            raise Found(guard.found) from error
        flat = list(_flat(error))
        for each in flat:
            if isinstance(each, TurnstileError):
                raise error
        first = flat[0]
        if _through_gate(first):
            say = f"the kernel fails in {what} at {raised_at(first)}: {type(first).__name__}: {one_line(str(first))}"
            raise monitor.find(Class.EXCEPTION, "kernel", say) from error
        where = raised_at(first)
        say = f"policy {self.name} raises {type(first).__name__} in {what} at {where}: {one_line(str(first))}"
        raise monitor.find(Class.EXCEPTION, "policy", say, where) from error

    @staticmethod
    def _is_plan(answer: Any) -> bool:
        return (
            isinstance(answer, tuple)
            and len(answer) == 2
            and isinstance(answer[0], Plan)
            and isinstance(answer[1], Memory)
        )

    def _differs(self, answer: tuple[Plan, Memory], again: Any) -> None:
        name, values = "answer", f"{_short(answer)} and {_short(again)}"
        if self._is_plan(again):
            pairs: list[tuple[Any, Any]] = list(zip(answer, again, strict=True))
            for one, other in pairs:
                for field in dataclasses.fields(one):
                    a, b = getattr(one, field.name), getattr(other, field.name)
                    if a != b:
                        name = field.name if isinstance(one, Plan) else f"memory {field.name}"
                        values = f"{_short(a)} and {_short(b)}"
                        break
                else:
                    continue
                break
        say = f"plan is not a function of views and memory: asked twice it gives {name} {values}"
        raise self.monitor.find(Class.RULE, "pure plan", say)


class WatchedGate:
    """One round's gate, as the policy sees it: the same calls, with the guard off while the kernel's code runs."""

    def __init__(self, gate: Gate, watched: Watched) -> None:
        self._gate, self._watched = gate, watched
        self.plan = gate.plan
        self._steps: _Steps | None = None

    def steps(self, turn: Any) -> _Steps:
        """The turn, step by step."""
        self._steps = _Steps(turn, self._watched)
        return self._steps

    @property
    def p_active(self) -> bool:
        """See `kernel.sched.policy.Gate`."""
        return self._gate.p_active

    @property
    def d_ready(self) -> bool:
        """See `kernel.sched.policy.Gate`."""
        return self._gate.d_ready

    async def reached(self) -> None:
        """See `kernel.sched.policy.Gate`."""
        await self._through(self._gate.reached())

    async def enqueued(self) -> None:
        """See `kernel.sched.policy.Gate`."""
        await self._through(self._gate.enqueued())

    async def completed(self) -> None:
        """See `kernel.sched.policy.Gate`."""
        await self._through(self._gate.completed())

    async def drained(self) -> None:
        """See `kernel.sched.policy.Gate`."""
        await self._through(self._gate.drained())

    async def rendezvous(self, tag: str) -> None:
        """See `kernel.sched.policy.Gate`."""
        await self._through(self._gate.rendezvous(tag))

    def launch_decode(self) -> None:
        """See `kernel.sched.policy.Gate`."""
        steps = self._kernel()
        try:
            self._gate.launch_decode()
        finally:
            self._policy(steps)

    def release(self, span: int) -> None:
        """See `kernel.sched.policy.Gate`."""
        steps = self._kernel()
        try:
            invariants = self._watched.monitor.invariants
            if invariants is not None and self.p_active:
                invariants.released(self.plan.epoch, span)
            self._gate.release(span)
        finally:
            self._policy(steps)

    async def _through(self, call: Any) -> None:
        steps = self._kernel()
        if steps is not None:
            steps.inside = True
        try:
            await call
        finally:
            if steps is not None:
                steps.inside = False
            self._policy(steps)

    def _kernel(self) -> _Steps | None:
        """Kernel code begins; the turn's steps if it is they that call, not a task that the turn has started."""
        steps = self._steps
        if steps is None or not steps.running:
            return None
        self._watched._guard.leave()
        return steps

    def _policy(self, steps: _Steps | None) -> None:
        if steps is not None and steps.running:
            steps.enter(fresh=False)


class _Steps:
    """A turn's coroutine, driven as `await` would, with the guard on while the policy's own code runs.

    It looks like the coroutine that it drives to whoever walks a chain of awaits.
    """

    def __init__(self, turn: Any, watched: Watched) -> None:
        self._turn, self._watched = turn, watched
        self.inside = self.running = False

    def enter(self, fresh: bool) -> None:
        """The policy's own code goes on."""
        watched = self._watched
        if watched.guarded:
            watched._guard.enter("turn", watched.monitor.rank, watched.monitor.now, fresh)

    def send(self, value: Any) -> Any:
        """One step."""
        return self._step(self._turn.send, value)

    def throw(self, error: Any, value: Any = None, trace: Any = None) -> Any:
        """One step, from an exception."""
        return self._step(self._turn.throw, value if isinstance(value, BaseException) else error)

    def close(self) -> None:
        """Abandon it."""
        self._turn.close()

    def _step(self, go: Callable[[Any], Any], value: Any) -> Any:
        self.running = True
        if not self.inside:
            self.enter(fresh=True)
        try:
            return go(value)
        finally:
            self.running = False
            self._watched._guard.leave()

    def __await__(self) -> Generator[Any, Any, Any]:
        return cast("Generator[Any, Any, Any]", self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    @property
    def cr_frame(self) -> Any:
        """Of the coroutine."""
        return self._turn.cr_frame

    @property
    def cr_await(self) -> Any:
        """Of the coroutine."""
        return self._turn.cr_await


def _through_gate(error: BaseException) -> bool:
    """Whether a policy got this exception from a call of its gate."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename == __file__ and code.co_qualname.startswith("WatchedGate."):
            return True
        trace = trace.tb_next
    return False


def _pristine(policy: Any) -> Callable[[], Any]:
    """Makes policies that have planned nothing yet, cheaply: what cannot change is shared."""
    try:
        original = copy.deepcopy(policy)
        changeable = [name for name, value in vars(original).items() if not _frozen(value)]
    except Exception:
        return lambda: policy

    def fresh() -> Any:
        twin = copy.copy(original)
        for name in changeable:
            setattr(twin, name, copy.deepcopy(getattr(original, name)))
        return twin

    return fresh


def _frozen(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return isinstance(value, int | float | str | tuple | frozenset | type(None)) or dataclasses.is_dataclass(value)


def _flat(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _flat(each)
    else:
        yield error


def _short(value: Any) -> str:
    text = one_line(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
