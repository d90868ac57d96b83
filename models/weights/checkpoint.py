"""A Hugging Face checkpoint directory: which tensors it holds, and any slice of them. Knows no family's names.

Layout (huggingface.co/docs/safetensors): `model.safetensors`, or several files and `model.safetensors.index.json` whose
`weight_map` says which tensor lies where. Files are memory-mapped, so that a slice costs no more than its own bytes.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernel import files as bounded
from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
LARGEST_INDEX: Final = 256 << 20
READABLE: Final = frozenset({"F32", "BF16", "F16"})


class Tensors(Protocol):
    """Where weights are read from: a `Checkpoint`, or what stands in for one."""

    shapes: dict[str, tuple[int, ...]]

    def check(self, expected: Mapping[str, tuple[int, ...]], allowed: Iterable[str] = ()) -> None:
        """Raise UsageError unless these are the `expected` tensors."""

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """Copy `name[index]` into `out`, converting its type."""


class Checkpoint:
    """An open checkpoint; a context manager.

    shapes: every tensor's shape by name. elements: numbers copied out so far, by `read`.
    Raises UsageError when the directory holds no readable safetensors files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.elements = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, str] = {}
        self._slices: dict[str, Any] = {}
        with ExitStack() as opened:
            for file in self._files():
                self._open(file, opened)
            self._opened = opened.pop_all()

    def check(self, expected: Mapping[str, tuple[int, ...]], allowed: Iterable[str] = ()) -> None:
        """Raise one UsageError that lists all tensors missing, misshapen, of an unreadable type, or not `expected`.

        allowed: tensors that may be there besides and are not read.
        """
        problems = [f"missing {name} {list(expected[name])}" for name in sorted(expected.keys() - self.shapes.keys())]
        for name in sorted(expected.keys() & self.shapes.keys()):
            if self.shapes[name] != expected[name]:
                problems.append(f"misshapen {name} {list(self.shapes[name])}, not {list(expected[name])}")
            if self._kinds[name] not in READABLE:
                problems.append(f"{name} has type {self._kinds[name]}, not one of {', '.join(sorted(READABLE))}")
        extra = self.shapes.keys() - expected.keys() - set(allowed)
        problems += [f"unexpected {name} {list(self.shapes[name])}" for name in sorted(extra)]
        if problems:
            raise UsageError(f"{self.path} does not fit its config.json: {'; '.join(problems)}")

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """Copy `name[index]` into `out`, converting its type. `out` has the slice's shape.

        Raises UsageError where it holds NaN or infinity.
        """
        part = self._slices[name][index]
        self._finite(name, part)
        self.elements += part.numel()
        out.copy_(part)

    def check_numbers(self, name: str) -> None:
        """Raise UsageError where a tensor holds NaN or infinity."""
        self._finite(name, self._slices[name][...])

    def _finite(self, name: str, part: Tensor) -> None:
        # The sum is not finite if an element is not, and takes no memory; it may be too large all the same.
        if part.is_floating_point() and not part.sum(dtype=torch.float64).isfinite() and not part.isfinite().all():
            raise UsageError(f"{self.path}: {name} holds numbers that are none (NaN or infinite): save the model again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slices.clear()
        self._opened.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _files(self) -> list[Path]:
        index, single = self.path / INDEX, self.path / SINGLE
        for file in (index, single):
            if file.exists() and not file.is_file():
                raise UsageError(f"{file}: not a regular file; copy the checkpoint again")
        if not index.is_file():
            if not single.is_file():
                raise UsageError(f"{self.path}: neither {SINGLE} nor {INDEX}; save the model as safetensors")
            return [single]
        try:
            names = sorted(set(json.loads(bounded.read(index, LARGEST_INDEX))["weight_map"].values()))
            files = [self.path / name for name in names]
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise UsageError(f"{index}: no weight_map of tensor names to files; copy the checkpoint again") from None
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise UsageError(f"{index} names files that are not there: {', '.join(absent)}; copy the checkpoint again")
        return files

    def _open(self, file: Path, opened: ExitStack) -> None:
        try:
            tensors = opened.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"{file}: not a safetensors file ({reason}); copy the checkpoint again") from None
        for name in tensors.keys():  # noqa: SIM118 (no mapping: only .keys() lists)
            part = tensors.get_slice(name)
            self._slices[name] = part
            self.shapes[name] = tuple(part.get_shape())
            self._kinds[name] = part.get_dtype()


def empty(shape: Iterable[int], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros to read into: what a slice does not fill (vocabulary padding) must be zero."""
    return torch.zeros(tuple(shape), dtype=dtype, device=device)
