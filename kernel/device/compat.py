"""What differs between the torch versions that we support (2.11 to 2.13 and later): found by looking, not by number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


def gather_into() -> Callable[..., Any]:
    """The all-gather into one tensor: (output, input, group=, async_op=).

    torch 2.13 renamed it and warns about the old name.
    """
    found: Callable[..., Any] | None = getattr(dist, "all_gather_single", None)
    if found is None:
        found = dist.all_gather_into_tensor
    return found
