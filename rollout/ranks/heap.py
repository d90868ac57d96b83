"""The process's heap keeps what it frees, so that a large intermediate result does not cost its pages again each time.

glibc gives blocks of a megabyte back to the system as they are freed; for a prefill of a few thousand tokens, zeroing
their pages anew takes a fifth of the processor time of its operations.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""mallopt(3)'s names for them."""
KEPT: Final = 1 << 30
"""Bytes free at a heap's end beyond which it shrinks after all."""
MMAPPED: Final = 1 << 25
"""Bytes from which a block is a mapping of its own: the most that glibc takes."""
AHEAD: Final = 1 << 22
"""Bytes by which a heap grows beyond what it needs."""
_OWN: Final = {
    "MALLOC_TRIM_THRESHOLD_": (_TRIM_THRESHOLD, KEPT),
    "MALLOC_MMAP_THRESHOLD_": (_MMAP_THRESHOLD, MMAPPED),
    "MALLOC_TOP_PAD_": (_TOP_PAD, AHEAD),
}


def keep_pages() -> bool:
    """Do so from now on; whether this C library can. What the environment says of a setting stays (malloc(3))."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken = [mallopt(what, value) == 1 for name, (what, value) in _OWN.items() if name not in os.environ]
    return all(taken)
