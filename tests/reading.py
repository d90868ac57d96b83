"""What the tests of the readers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from verify.readers.found import Found, Reader


def read_or_line(reader: Reader, path: Path) -> Found | None:
    """What a reader finds in a file, or None where it refuses it, as it must: with one line that names the file."""
    try:
        found = reader.read(path)
    except UsageError as error:
        text = str(error)
        if "\n" in text or path.name not in text or len(text) > 1000:
            raise AssertionError(f"not one line that names the file: {text!r}") from error
        return None
    lines = [line for line in found.unknown if "\n" in line]
    if lines:
        raise AssertionError(f"more than a line: {lines!r}")
    return found
