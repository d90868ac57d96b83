"""Who is to blame when a policy's hook fails or answers wrongly: its class, method, file and line, not ours."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Final, Protocol

from kernel.errors import LeaseExpired, PolicyError, TurnstileError, said

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

    from kernel.sched.policy import Policy

FAILS: Final = BaseException
"""What a hook may raise: one that leaves the process, cancels itself, or raises a BaseException of its own, would else
end a rank without a word."""
TOLD: Final = 300
"""Characters of what an exception says."""


class Named(Protocol):
    """Whatever has a policy's hooks and its name."""

    @property
    def name(self) -> str: ...


def defined(cls: type[Any], hook: str) -> str:
    """`Calm.span (/home/me/calm.py:12)`: where a hook's method begins; without a place where it has none."""
    cls = _owner(cls, hook)
    code = getattr(vars(cls).get(hook), "__code__", None)
    return f"{cls.__qualname__}.{hook}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


def wrong(policy: Named, hook: str, what: str, where: str) -> PolicyError:
    """The error for an answer that cannot be used. what: a clause such as `returned None: it must ...`."""
    return PolicyError(f"policy {policy.name} failed: {defined(type(policy), hook)} {what} ({where})")


def raised(error: BaseException, policy: Policy, hook: str, where: str) -> None:
    """Raise PolicyError for what a hook raised, with its innermost line there. Returns where it is not the hook's:
    an error of ours, or the end of its task."""
    if isinstance(error, BaseExceptionGroup):
        error = first(error)
        if isinstance(error, TurnstileError):
            raise error
    if isinstance(error, TurnstileError) or _ends(error):
        return
    at = _inner(error, type(policy)) or defined(type(policy), hook)
    raise PolicyError(f"policy {policy.name} failed: {at}: {told(error)} ({where})") from error


def unusable(error: Exception, policy: Policy, hook: str, where: str) -> None:
    """Raise PolicyError where what the hook returned could not be carried out. Returns for a policy of ours."""
    if isinstance(error, TurnstileError | MemoryError) or _owner(type(policy), hook).__module__.startswith("kernel."):
        return
    raise wrong(policy, hook, f"returned what cannot be carried out: {told(error)}", where) from error


def line_in(error: BaseException, cls: type[Any]) -> str:
    """`file:line` of the innermost frame in the files of a policy's class; "" where the exception did not pass them."""
    return _inner(error, cls).rpartition(" at ")[2]


def interrupts(error: BaseException) -> bool:
    """Whether this may be a person's Ctrl-C: only Python's own handler raises one, and ranks and watched children
    have another. Where that is not installed, code has raised it."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _owner(cls: type[Any], hook: str) -> type[Any]:
    return next((each for each in cls.__mro__ if hook in vars(each)), cls)


def told(error: BaseException) -> str:
    """An exception in one line that is not too long."""
    text = f"{type(error).__name__}: {said(error)}".removesuffix(": ")
    return text if len(text) <= TOLD else f"{text[: TOLD - 2]}.."


def first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show of a group: one of ours before others, the earliest of its kind."""
    flat = list(_leaves(group))
    ours = (error for error in flat if isinstance(error, TurnstileError) and not isinstance(error, LeaseExpired))
    return next(ours, flat[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _ends(error: BaseException) -> bool:
    """Whether this is a cancellation that somebody else asked for, a Ctrl-C, or the end of a coroutine."""
    if isinstance(error, GeneratorExit) or interrupts(error):
        return True
    task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
    return task is not None and task.cancelling() > 0


def _files(cls: type[Any]) -> set[str]:
    """Where the policy's own classes are written, those that it inherits from included; the kernel's base is not."""
    found = set()
    for each in cls.__mro__:
        if each.__module__ in ("builtins", "kernel.sched.planner"):
            continue
        codes = (getattr(value, "__code__", None) for value in vars(each).values())
        found |= {code.co_filename for code in codes if code is not None and code.co_filename[0] != "<"}
    return found


def _inner(error: BaseException, cls: type[Any]) -> str:
    """`Calm.span at /home/me/calm.py:14`: the innermost frame in the files of a class; "" for none."""
    files, found, trace = _files(cls), "", error.__traceback__
    while trace is not None:
        code: CodeType = trace.tb_frame.f_code
        if code.co_filename in files:
            found = f"{code.co_qualname} at {code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
