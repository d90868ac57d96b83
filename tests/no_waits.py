"""A block in which a call that waits for the GPU is an error."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_waits() -> Iterator[None]:
    """torch raises at calls that synchronise the host with the device; those it knows of."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not know of all
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
