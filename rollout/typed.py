"""Arguments of the Python API that are of another type than they must be: one line that names the argument."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType, NoneType
from typing import Any, Final

from kernel.errors import TurnstileError, UsageError, shown
from kernel.request import SamplingParams
from kernel.topology import World
from rollout.device import DeviceOptions
from rollout.ranks.nursery import Nursery

_PATH: Final = (str, os.PathLike)
_SECONDS: Final = "a number of seconds"
KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = MappingProxyType(
    {
        "model": (_PATH, "a path, as text or as a pathlib.Path"),
        "path": (_PATH, "a path, as text or as a pathlib.Path"),
        "out": ((*_PATH, NoneType), "a path, as text or as a pathlib.Path, or None"),
        "record": ((*_PATH, NoneType), "a path, as text or as a pathlib.Path, or None"),
        "world": ((World, NoneType), "a turnstile.World, or None"),
        "policy_config": ((Mapping, NoneType), "a mapping of option to value, or None"),
        "device": ((str, DeviceOptions), "cpu, cuda, or rollout.device.DeviceOptions"),
        "compiled": ((bool, NoneType), "True, False or None"),
        "nursery": ((Nursery, NoneType), "a rollout.ranks.nursery.Nursery, or None"),
        "exit_s": ((Real, NoneType), f"{_SECONDS}, or None"),
        "rank_timeout_s": ((Real,), f"{_SECONDS}, 0 for never"),
        "stall_timeout_s": ((Real,), f"{_SECONDS}, 0 for never"),
        "params": ((SamplingParams, NoneType), "turnstile.SamplingParams, or None"),
        "error": ((TurnstileError,), "a kernel.errors.TurnstileError"),
    }
)


def check(**given: Any) -> None:
    """Raise UsageError for the first argument that is not of a kind of its name in `KINDS`."""
    for name, value in given.items():
        kinds, what = KINDS[name]
        if not isinstance(value, kinds):
            raise UsageError(f"{name}={shown(value)}: must be {what}")
