"""What torch raises about a GPU or about memory, as one line that says which rank, doing what, and what to do."""

from __future__ import annotations

import re
import sys
from typing import Any

from kernel.errors import DeviceFault, TurnstileError

_SIZES = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_BYTES = re.compile(r"tried to allocate (\d+) bytes")
_TOTAL = re.compile(r"total capacity of ([\d.]+ \w+)")


def explained(error: BaseException, rank: int, doing: str) -> TurnstileError | None:
    """Our error for one that a GPU, its libraries, or too little memory caused; None for all else.

    doing: a clause such as `while it loaded the model`. Looks at torch only where it has been imported.
    """
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)):
        asked = _BYTES.search(str(error))
        numbers = f" ({int(asked[1]) / (1 << 30):,.1f} GiB more asked for)" if asked else ""
        return TurnstileError(
            f"rank {rank} ran out of memory {doing}{numbers}: lower --kv-tokens or --rows, or use fewer ranks on a host"
        )
    torch: Any = sys.modules.get("torch")
    if torch is None or isinstance(error, TurnstileError):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceFault(out_of_memory(str(error), rank, doing))
    from kernel.device.faults import of_device

    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    backend: Any = getattr(getattr(torch, "distributed", None), "DistBackendError", ())
    if isinstance(error, backend):
        return DeviceFault(f"rank {rank}: NCCL failed {doing}: {text}; set NCCL_DEBUG=INFO to see why")
    if of_device(error):
        return DeviceFault(
            f"rank {rank}: the GPU failed {doing}: {text}; its context is lost: start again, and see `nvidia-smi` and"
            " the kernel log for what happened"
        )
    return None


def out_of_memory(text: str, rank: int, doing: str) -> str:
    """The line for torch's message about memory."""
    asked, total = _SIZES.search(text), _TOTAL.search(text)
    numbers = f" ({asked[1]} more asked for{f', of {total[1]} in all' if total else ''})" if asked else ""
    return (
        f"rank {rank} ran out of GPU memory {doing}{numbers}: lower --kv-tokens, --prefill-tokens or --rows, or use"
        " more ranks"
    )
