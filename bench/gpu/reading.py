"""Finished runs whose records are read while the next one runs: by a process beside, since on the ranks' time it would
cost a GPU's."""

from __future__ import annotations

import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bench.gpu import spans
from bench.gpu.cells import Work
from kernel.record import read_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future
    from pathlib import Path
    from types import TracebackType

    from bench.gpu.store import Store

C = TypeVar("C", bound=Work)


class Readers(Generic[C]):
    """Runs on their way into `store`. keep: leave their records in the folder. A context: at its end all are stored."""

    def __init__(self, store: Store[C], keep: bool) -> None:
        self._store, self._keep = store, keep
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self._pending: dict[C, tuple[float, dict[str, Any], Mapping[str, Any], Future[dict[str, Any]]]] = {}

    @property
    def seconds(self) -> dict[C, float]:
        """How long each run took, those included that are being read."""
        return self._store.seconds | {cell: taken for cell, (taken, *_) in self._pending.items()}

    @property
    def makespans(self) -> dict[C, float]:
        """Of each, in seconds, likewise."""
        return self._store.makespans | {cell: each["makespan_s"] for cell, (_, each, *_) in self._pending.items()}

    def add(self, cell: C, taken: float, metrics: dict[str, Any], folder: Path, about: Mapping[str, Any]) -> None:
        """A run has ended, its record in `folder`; and what has been read of earlier ones is stored."""
        future = self._pool.submit(read, str(folder), metrics["makespan_s"], self._keep)
        self._pending[cell] = taken, metrics, about, future
        self._collect(wait=False)

    def __enter__(self) -> Readers[C]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._collect(wait=True)
        finally:
            self._pool.shutdown()

    def _collect(self, *, wait: bool) -> None:
        for cell in [cell for cell, (*_, reading) in self._pending.items() if wait or reading.done()]:
            taken, metrics, about, reading = self._pending.pop(cell)
            self._store.finished(cell, taken, metrics | reading.result(), about)


def read(folder: str, makespan_s: float, keep: bool) -> dict[str, Any]:
    """What a finished run's record tells."""
    found = spans.measure(read_run(folder), makespan_s)
    if not keep:
        shutil.rmtree(folder)
    return dict(found)
