"""What a policy keeps outside its memory: in its module, in its classes, in helper modules.

Ranks of a simulated world share a process; real ones do not. So what a policy writes there is either shared between
ranks that could not share it, or it makes `plan` depend on more than views and memory. Only plain values are looked at.
"""

from __future__ import annotations

import sys
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from verify.sources import foreign

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DEPTH = 4
_SCALARS = (int, float, complex, str, bytes, bool, type(None))


class PrivateState:
    """Plain values in reach of a policy's code, as they were."""

    def __init__(self, policy: object) -> None:
        # Of a module only what the policy's code names: others may change what is theirs.
        self._places = {where: (values, names) for where, values, names in _places(policy)}
        self._before = self._values()

    def changed(self) -> str:
        """Which of them has changed, in words; "" where none has."""
        now = self._values()
        if now == self._before:
            return ""
        for key in (*self._before, *now):
            if self._before.get(key, ...) != now.get(key, ...):
                return f"{key[1]} in {key[0]}"
        return ""

    def _values(self) -> dict[tuple[str, str], Any]:
        found = {}
        for where, (values, names) in self._places.items():
            for name in list(values if names is None else names & values.keys()):
                frozen = _frozen(values[name], _DEPTH) if not name.startswith("__") else None
                if frozen is not None:
                    found[where, name] = frozen
        return found


def reads_environment(policy: object) -> str:
    """The function of a policy's own code that names `environ`, "" where none does."""
    for cls in _classes(policy):
        for name, value in vars(cls).items():
            code = getattr(value, "__code__", None)
            if isinstance(value, FunctionType) and code is not None and "environ" in _named(code):
                return f"{cls.__name__}.{name}"
    return ""


def _named(code: CodeType) -> set[str]:
    return {*code.co_names, *(name for each in code.co_consts if isinstance(each, CodeType) for name in _named(each))}


def _classes(policy: object) -> Iterator[type]:
    for cls in type(policy).__mro__[:-1]:
        module = sys.modules.get(cls.__module__)
        if foreign(getattr(module, "__file__", None) or "<"):
            yield cls


def _places(policy: object) -> Iterator[tuple[str, Mapping[str, Any], set[str] | None]]:
    for cls in _classes(policy):
        yield f"class {cls.__name__}", vars(cls), None
        for function in vars(cls).values():
            if not isinstance(function, FunctionType):
                continue
            space, names = function.__globals__, _named(function.__code__)
            yield f"the module of {cls.__name__}.{function.__name__}", space, names
            for name in names & space.keys():
                value = space[name]
                if isinstance(value, ModuleType) and foreign(getattr(value, "__file__", None) or "<"):
                    yield f"module {value.__name__}", vars(value), None


def _frozen(value: Any, depth: int) -> Any:
    """A value that can be compared later; None for what is not plain."""
    if isinstance(value, _SCALARS):
        return (type(value).__name__, value)
    if depth and isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(_frozen(each, depth - 1) for each in value[:1000]), len(value))
    if depth and isinstance(value, dict):
        items = list(value.items())[:1000]
        return ("dict", tuple((_frozen(key, 1), _frozen(each, depth - 1)) for key, each in items), len(value))
    if isinstance(value, (set, frozenset)):
        return ("set", len(value), tuple(sorted(map(repr, value)))[:1000])
    return None
