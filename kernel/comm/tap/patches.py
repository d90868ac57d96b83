"""Replacing attributes of modules and classes, and putting them back."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_NOTHING: Final = object()


class Patches:
    """What was replaced. `undo` puts it back, except where somebody else has replaced it since."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def method(self, owner: type, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a method of a class, found there or in a base; nothing where there is none."""
        original = getattr(owner, name, None)
        if original is not None:
            self._put(owner, name, vars(owner).get(name, _NOTHING), _named(wrap(original), original))

    def function(self, module: Any, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a function of a module under every name that loaded modules have for it."""
        original = getattr(module, name, None)
        if original is None:
            return
        replacement = _named(wrap(original), original)
        for each in list(sys.modules.values()):
            # vars: lazy modules must not be woken up.
            try:
                names = [key for key, value in list(vars(each).items()) if value is original]
            except (TypeError, RuntimeError):
                continue
            for key in names:
                self._put(each, key, original, replacement)

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._done:
            owner, name, before, mine = self._done.pop()
            if vars(owner).get(name) is not mine:
                continue
            with contextlib.suppress(AttributeError, TypeError):
                if before is _NOTHING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)

    def _put(self, owner: Any, name: str, before: Any, mine: Any) -> None:
        try:
            setattr(owner, name, mine)
        except (AttributeError, TypeError):
            return
        self._done.append((owner, name, before, mine))


def _named(wrapper: Any, original: Any) -> Any:
    with contextlib.suppress(AttributeError, TypeError):
        functools.update_wrapper(wrapper, original)
    # Compiled programs call it as it is.
    wrapper._torchdynamo_disable = True
    return wrapper
