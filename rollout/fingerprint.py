"""What tells one checkpoint from another without reading all of it: its config, and samples of its weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES: Final = 64
SAMPLE_BYTES: Final = 1 << 16
"""Training changes nearly every weight, and another checkpoint differs everywhere: some places of a file are enough."""


def of(checkpoint: Path) -> str:
    """SHA-256 of config.json and of evenly spaced parts of each weights file in the directory, in hexadecimal."""
    found = hashlib.sha256()
    for path in sorted([*checkpoint.glob("config.json"), *checkpoint.glob("*.safetensors")]):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= SAMPLES * SAMPLE_BYTES:
                found.update(file.read())
                continue
            for number in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()
