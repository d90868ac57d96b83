"""What the commands of this package share: a parser whose errors are one line. Loads the standard library only."""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING, Any, NoReturn

from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line and an exception."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def given(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What the arguments say. Raises UsageError, which names the nearest flags, for what is unknown."""
        known, unknown = self.parse_known_args(list(arguments))
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"see `{self.prog} --help`"
            raise UsageError(f"unknown argument {unknown[0]!r}: {hint}")
        return vars(known)
