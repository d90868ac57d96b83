"""Which GPUs this process may use, asked of the driver itself: without torch, and without a context on any of them.

The launcher asks before it starts ranks. It must not make a context, which would take memory on a rank's GPU.
"""

from __future__ import annotations

import ctypes
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from kernel.errors import UsageError
from rollout.ranks.torchrun import place

DRIVER: Final = "libcuda.so.1"
NO_DEVICE: Final = 100
"""CUDA_ERROR_NO_DEVICE."""


def visible(driver: Any = None) -> tuple[int, ...]:
    """Bytes of memory of each visible GPU, in CUDA's order (CUDA_VISIBLE_DEVICES counts); at least one.

    driver: the driver's library (None: load it). Raises UsageError when there is no driver or no GPU.
    """
    if driver is None:
        try:
            driver = ctypes.CDLL(DRIVER)
        except OSError:
            raise UsageError(f"--device cuda: there is no NVIDIA driver ({DRIVER}): use --device cpu") from None
    code = driver.cuInit(0)
    if code not in (0, NO_DEVICE):
        raise UsageError(f"--device cuda: the NVIDIA driver does not start (cuInit gives {code}): see `nvidia-smi`")
    count = ctypes.c_int(0)
    if code == NO_DEVICE or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        raise UsageError(f"--device cuda: the driver shows no GPU{_narrowed()}: use --device cpu here")
    return tuple(_memory(driver, index) for index in range(count.value))


def names() -> tuple[str, ...]:
    """What the driver calls each visible GPU. Raises UsageError as `visible`."""
    found, driver = [], ctypes.CDLL(DRIVER)
    for index in range(len(visible(driver))):
        device, name = ctypes.c_int(0), ctypes.create_string_buffer(128)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)
        found.append(name.value.decode(errors="replace"))
    return tuple(found)


def _memory(driver: Any, index: int) -> int:
    device, total = ctypes.c_int(0), ctypes.c_size_t(0)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    return total.value


def check_host(ranks: int) -> tuple[int, ...]:
    """`visible`, after checking that this host can serve a world of `ranks`. Raises UsageError.

    Under torchrun the ranks of other hosts are not counted here: each checks its own GPU.
    """
    check_torch()
    found = visible()
    if place() is None:
        check_count(ranks, len(found))
    return found


def check_count(ranks: int, gpus: int) -> None:
    """Raise UsageError unless every rank of this host has a GPU of its own, which NCCL demands."""
    if ranks > gpus:
        have = f"{gpus} {'is' if gpus == 1 else 'are'} visible"
        raise UsageError(
            f"--world {ranks} --device cuda needs {ranks} GPUs, one a rank, and {have}{_narrowed()}: lower --world"
        )


def check_torch() -> None:
    """Raise UsageError when the installed torch is a build for CPUs."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return  # whoever needs it says so
    if found.endswith("+cpu"):
        raise UsageError(f"--device cuda: torch {found} is a build for CPUs: install a build for CUDA")


def _narrowed() -> str:
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if names is None else f" (CUDA_VISIBLE_DEVICES={names})"
