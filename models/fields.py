"""Reads named fields of a JSON object and collects everything wrong with them, so that one message can say it all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ABSENT: Final = object()


class Fields:
    """Typed access to `raw`. A bad field adds to `problems` and yields a harmless stand-in, so that parsing goes on.

    A method takes the field's name and other spellings of it; two spellings that disagree are a problem. Without a
    default a field is required; null counts as absent.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []

    def refuse(self, problem: str) -> None:
        """Record a problem."""
        self.problems.append(problem)

    def integer(self, name: str, *others: str, default: int | None = None) -> int:
        """An integer of at least 1 (stand-in: 1)."""
        value = self._find(name, *others, required=default is None)
        if value is _ABSENT:
            return 1 if default is None else default
        if not _is_integer(value) or value < 1:
            self.refuse(f"{name} is {value!r}: must be an integer of at least 1")
            return 1
        return int(value)

    def integers(self, name: str, *, default: Sequence[int]) -> tuple[int, ...]:
        """A list of integers of at least 0, or one of them (stand-in: the default)."""
        value = self._find(name, required=False)
        if value is _ABSENT:
            return tuple(default)
        listed = value if isinstance(value, list) else [value]
        if not all(_is_integer(item) and item >= 0 for item in listed):
            self.refuse(f"{name} is {value!r}: must be integers of at least 0")
            return tuple(default)
        return tuple(listed)

    def positive(self, name: str) -> float:
        """A finite number above 0 (stand-in: 1)."""
        return self._positive(name, self._find(name, required=True))

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false (stand-in: the default)."""
        value = self._find(name, required=False)
        if value is _ABSENT:
            return default
        if not isinstance(value, bool):
            self.refuse(f"{name} is {value!r}: must be true or false")
            return default
        return value

    def choice(self, name: str, *others: str, default: str, of: Sequence[str]) -> str:
        """One of the words `of` (stand-in: the default)."""
        value = self._find(name, *others, required=False)
        if value is _ABSENT:
            return default
        if value not in of:
            self.refuse(f"{name} is {value!r}: supported are {', '.join(of)}")
            return default
        return str(value)

    def rope_theta(self) -> float:
        """The rotary base, at the top level or inside `rope_parameters`. A rope type that scales it is refused."""
        inner: dict[str, Any] = {}
        for name in ("rope_parameters", "rope_scaling"):
            value = self.raw.get(name)
            if isinstance(value, dict):
                inner = {**value, **inner}
            elif value is not None:
                self.refuse(f"{name} is {value!r}: must be an object or null")
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind != "default":
            self.refuse(f"rope_type is {kind!r}: supported is default")
        spellings = {"rope_theta": self.raw.get("rope_theta"), "rope_parameters.rope_theta": inner.get("rope_theta")}
        return self._positive("rope_theta", self._agreed(spellings, required=True))

    # -- inside -------------------------------------------------------------------------------------------------

    def _find(self, *names: str, required: bool) -> Any:
        return self._agreed({name: self.raw.get(name) for name in names}, required)

    def _agreed(self, spellings: Mapping[str, Any], required: bool) -> Any:
        given = {name: value for name, value in spellings.items() if value is not None}
        values = list(given.values())
        if not values:
            if required:
                self.refuse(f"{' (or '.join(spellings)}{')' * (len(spellings) - 1)} is missing")
            return _ABSENT
        if any(value != values[0] for value in values[1:]):
            self.refuse(" and ".join(f"{name} {value!r}" for name, value in given.items()) + " disagree")
        return values[0]

    def _positive(self, name: str, value: Any) -> float:
        if value is _ABSENT:
            return 1.0
        number = isinstance(value, float) or _is_integer(value)
        if not number or not (math.isfinite(value) and value > 0):
            self.refuse(f"{name} is {value!r}: must be a number above 0")
            return 1.0
        return float(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
