"""A progress bar on stderr while trajectories are replayed; nothing where nobody would see it."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as Bar
    from rich.progress import TaskID


class Progress:
    """One bar, started anew for each run. Silent when not enabled, when stderr is no terminal, or without `rich`."""

    def __init__(self, *, enabled: bool) -> None:
        self._bar = _bar() if enabled and sys.stderr.isatty() else None
        self._task: TaskID | None = None
        self._tokens = 0

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with suppress(OSError):  # a terminal that was closed meanwhile takes nothing from the run
                self._bar.stop()

    def begin(self, label: str, requests: int) -> None:
        """A run of `requests` turns starts; `label` says which."""
        if self._bar is not None:
            self._task, self._tokens = self._bar.add_task(label, total=requests, tokens=0), 0

    def advance(self, tokens: int) -> None:
        """One more turn has finished, with `tokens` output tokens."""
        if self._bar is not None and self._task is not None:
            self._tokens += tokens
            self._bar.update(self._task, advance=1, tokens=self._tokens)


def _bar() -> Bar | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
