"""JSON of strangers: memory stays in proportion to the file."""

from __future__ import annotations

import json
from typing import Any, Final

FREE: Final = 1 << 16
SHARE: Final = 6
"""Bytes of a file for each list and dictionary in it: those of evidence take far more, and an empty one costs 72."""


def load(content: bytes) -> Any:
    """What it holds. Raises ValueError, with a line, for what is damaged, nested too deep or nothing but brackets."""
    if boxes(content, b"[{") > FREE + len(content) // SHARE:
        raise ValueError("it is little but brackets")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except MemoryError:
        raise ValueError("it needs more memory than there is") from None


def boxes(content: bytes, marks: bytes) -> int:
    """How many of the bytes are one of `marks`."""
    return len(content) - len(content.translate(None, marks))
