"""`turnstile rollout` as a process of its own, for tests that hit it while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[1]


@contextmanager
def rollout(out: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, running; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "turnstile", "rollout", "--out", str(out), *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(true: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Wait for it; what it gave."""
    end = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
    return found
