"""What a GPU and its libraries raise, as one line of ours that names rank, phase and submission."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import torch

from kernel.errors import DeviceFault

if TYPE_CHECKING:
    from kernel.request import Phase

_FROM_DEVICE: Final = re.compile(
    r"CUDA error|\[CUDA\]|unhandled cuda error|device-side assert|CUBLAS_STATUS|CUDNN_STATUS"
)
_SENTENCES: Final = re.compile(r"(?<=[.!]) +(?=[A-Z])")
_OTHERS_NAMED: Final = 4


class Faults:
    """Translates errors of one rank's GPU. What is in flight is known, since a GPU names no culprit.

    An error of the device is sticky: everything after it fails too, on all streams. So the first one is kept, and what
    fails later is told that one. Called from the loop's thread and the waiters'.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.first: DeviceFault | None = None
        self._flying: dict[int, str] = {}

    def enter(self, key: int, phase: Phase, label: str) -> None:
        """A submission that has not been seen to finish; key: anything that is unique meanwhile."""
        self._flying[key] = _named(phase, label)

    def leave(self, key: int) -> None:
        """It has finished, or failed."""
        self._flying.pop(key, None)

    def translate(self, error: BaseException, phase: Phase, label: str) -> BaseException:
        """`error` of the submission `label`: a DeviceFault when a GPU is behind it, else itself."""
        if isinstance(error, torch.OutOfMemoryError):
            text = " ".join(_SENTENCES.split(_line(error))[:3]).removeprefix("CUDA out of memory. ").rstrip(".")
            return DeviceFault(
                f"rank {self.rank} ran out of GPU memory in {_named(phase, label)}: {text}; use fewer KV blocks, a"
                " smaller prefill budget or smaller decode buckets, or more GPUs"
            )
        if not of_device(error):
            return error
        if self.first is None:
            me = _named(phase, label)
            others = [name for name in list(self._flying.values()) if name != me][:_OTHERS_NAMED]
            beside = f", with {', '.join(others)} in flight" if others else ""
            self.first = DeviceFault(
                f"rank {self.rank}'s GPU failed in {me}{beside}: {_line(error)}; finished turns are kept: find the"
                " kernel with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer, then --resume"
            )
        return self.first


def of_device(error: BaseException) -> bool:
    """Whether the GPU, or a library on it, reported `error`."""
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and _FROM_DEVICE.search(str(error)) is not None


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _named(phase: Phase, label: str) -> str:
    return label if label.startswith(f"{phase} ") else f"{phase} {label}"
