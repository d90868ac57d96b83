"""What tests of the order certificate share."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from verify import certificate

if TYPE_CHECKING:
    from verify.order import Result


def is_valid(result: Result, complaint: str = "") -> bool:
    """Write its certificate, and ask the checker; what that says must have `complaint` in it."""
    assert result.certificate is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "certificate.jsonl"
        result.certificate.write(path)
        wrong = certificate.check(str(path))
    assert complaint in wrong
    return not wrong
