"""What tells one checkpoint from another without reading all of it: its config, and samples of its weights."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Final

from kernel import files
from kernel.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES: Final = 64
SAMPLE_BYTES: Final = 1 << 16
"""Training changes nearly every weight, and another checkpoint differs everywhere: some places of a file are enough."""


def of(checkpoint: Path) -> str:
    """SHA-256 of config.json and of evenly spaced parts of each weights file in the directory, in hexadecimal.

    Raises UsageError where one of them is no regular file, or cannot be read.
    """
    found = hashlib.sha256()
    for path in sorted([*checkpoint.glob("config.json"), *checkpoint.glob("*.safetensors")]):
        try:
            _add(found, path)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}; copy the checkpoint again") from None
    return found.hexdigest()


def _add(found: hashlib._Hash, path: Path) -> None:
    with os.fdopen(files.open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        found.update(f"{path.name} {size}\n".encode())
        if size <= SAMPLES * SAMPLE_BYTES:
            found.update(file.read())
            return
        for number in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            found.update(file.read(SAMPLE_BYTES))
