"""What a task of a rank may touch of what the rank's tasks share, judged from its code.

Most tasks may do anything, so that any two of them conflict. Two kinds may not: the kernel's own, which wait for a
piece of device work and do nothing else; and coroutines of a policy that do nothing but call the gate, each for one
phase. The latter is seen from the bytecode: no store but into local variables, no free variable, no global, no
attribute but those of a gate. What cannot be told is taken to touch everything.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kernel.prefill import Epoch
from kernel.request import Phase
from verify.sim.device import SimEvent

if TYPE_CHECKING:
    import asyncio
    from types import CodeType

Things = tuple[tuple[Any, ...], ...]

_OF_EPOCH = frozenset(work.__code__ for work in (Epoch._stand, Epoch._finish, Epoch._through))
"""They wait for device work, and go on with P's own forward: what others see of it, the rank's task publishes."""

_PHASE_OF = {
    "reached": Phase.P, "enqueued": Phase.P, "completed": Phase.P, "release": Phase.P,
    "drained": Phase.D, "launch_decode": Phase.D,
}  # fmt: skip
_PLAIN = frozenset({"plan", "p_active", "d_ready", "span", "activate", "epoch", "bucket", "round"})
_STORES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_SLICE")
_READS = (
    "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "IMPORT_NAME",
    "MAKE_FUNCTION",  # what an inner function does is in other code
)  # fmt: skip


def touched(task: asyncio.Task[Any], rank: int) -> Things:
    """What each step of `task`, one of rank `rank`, may touch."""
    coro: Any = task.get_coro()
    code = getattr(coro, "cr_code", None)
    if code is SimEvent.wait.__code__:
        return ()
    frame = getattr(coro, "cr_frame", None)
    if code in _OF_EPOCH:
        return ()
    phases = gate_calls(code) if code is not None else None
    if phases is None or frame is None or not all(_harmless(value) for value in frame.f_locals.values()):
        return everything(rank)
    return tuple(("gate", rank, phase) for phase in phases)


def everything(rank: int) -> Things:
    """All that the tasks of a rank share."""
    return (("python", rank), *(("gate", rank, str(phase)) for phase in Phase))


@lru_cache(maxsize=512)
def gate_calls(code: CodeType) -> tuple[str, ...] | None:
    """The phases whose part of the gate a coroutine uses, where it uses nothing else; None where that is not so."""
    if code.co_freevars or code.co_cellvars or code.co_argcount > 2 or code.co_kwonlyargcount:
        return None
    parameters = code.co_varnames[: code.co_argcount]
    phases: dict[str, None] = {}
    for step in dis.get_instructions(code):
        name = step.opname
        if name in _READS or name in _STORES or name.startswith("DELETE_"):
            return None
        if name.startswith("LOAD_FAST") and "self" in parameters and "self" in str(step.argval):
            return None
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            if step.argval in _PHASE_OF:
                phases[str(_PHASE_OF[step.argval])] = None
            elif step.argval not in _PLAIN:
                return None
    return tuple(sorted(phases))


def _harmless(value: Any) -> bool:
    """Whether a parameter is a gate, the policy itself (which the code does not use) or a plain value."""
    return (
        isinstance(value, (int, float, str, bytes, type(None)))
        or all(hasattr(type(value), name) for name in ("launch_decode", "release", "rendezvous"))
        or all(hasattr(type(value), name) for name in ("plan", "turn"))
    )
