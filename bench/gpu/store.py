"""The folder that a campaign of several invocations lives in: one JSON file a finished cell, written whole or not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kernel.errors import UsageError
from kernel.topology import World
from rollout.device import DeviceOptions
from rollout.report.files import write_json
from rollout.resume import with_defaults
from rollout.trace.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.gpu.cells import Work

SETTINGS = "settings.json"
KINDS: Final[Mapping[str, type]] = {"world": World, "device": DeviceOptions, "shape": Shape}
"""Whose fields a setting holds."""
C = TypeVar("C", bound="Work")


class Store(Generic[C]):
    """Finished and failed cells under `out`, and those that earlier invocations left in other folders (read only).

    kind: of the cells, a dataclass. settings: what must be equal for cells to be comparable. Raises UsageError, naming
    the first difference, when a folder holds cells of other settings.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], kind: type[C], earlier: Sequence[Path] = ()) -> None:
        self._out, self._kind = out, kind
        self.results: dict[C, dict[str, Any]] = {}
        self.failures: dict[C, int] = {}
        wanted: dict[str, Any] = json.loads(json.dumps(dict(settings)))
        for folder in (*earlier, out):
            if (folder / SETTINGS).exists():
                _compare(folder, json.loads((folder / SETTINGS).read_text()), wanted)
            for path in sorted((folder / "cells").glob("*.json")):
                self._read(path)
            for path in sorted((folder / "failed").glob("*.json")):
                cell = kind(**json.loads(path.read_text())["cell"])
                self.failures[cell] = self.failures.get(cell, 0) + 1
        for name in ("cells", "failed"):
            (out / name).mkdir(parents=True, exist_ok=True)
        write_json(out / SETTINGS, wanted)
        for cell, result in self.results.items():  # so that `out` alone is enough next time
            write_json(out / "cells" / f"{cell.key}.json", result)

    def _read(self, path: Path) -> None:
        try:
            result = json.loads(path.read_text())
            self.results[self._kind(**result["cell"])] = result
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path}: not a finished cell: remove it, and it is measured again") from None

    @property
    def seconds(self) -> dict[C, float]:
        """How long each finished cell took."""
        return {cell: result["seconds"] for cell, result in self.results.items()}

    @property
    def makespans(self) -> dict[C, float]:
        """Of each finished cell, in seconds."""
        return {cell: result["metrics"]["makespan_s"] for cell, result in self.results.items()}

    def finished(self, cell: C, seconds: float, metrics: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Keep a result."""
        result = {"cell": asdict(cell), "seconds": seconds, "metrics": dict(metrics), "about": dict(about)}
        write_json(self._out / "cells" / f"{cell.key}.json", result)
        self.results[cell] = result

    def failed(self, cell: C, message: str) -> None:
        """Note that a cell failed; it is tried again by a later invocation."""
        count = self.failures[cell] = self.failures.get(cell, 0) + 1
        write_json(self._out / "failed" / f"{cell.key}.{count}.json", {"cell": asdict(cell), "error": message})


def _compare(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, kind in KINDS.items():
        found, wanted = ({**each, name: with_defaults(each.get(name), kind)} for each in (found, wanted))
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise UsageError(
                f"{folder}: its cells were measured with {name} {found.get(name)!r}, and this command says"
                f" {wanted.get(name)!r}: give the same, or another folder"
            )
