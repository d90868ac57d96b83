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
LINGERS = """
import asyncio
import os
from kernel.sched.fine import Fine

HERE = os.path.dirname(os.path.abspath(__file__))

def turns():
    try:
        with open(os.path.join(HERE, 'run', 'requests.jsonl'), 'rb') as rows:
            return rows.read().count(b'\\n')
    except OSError:
        return 0

class Lingers(Fine):
    late = 0

    async def turn(self, gate):
        if turns() >= TURNS and not os.path.exists(os.path.join(HERE, 'cured')):
            self.late += 1
            await asyncio.sleep(0.02 * self.late)
        await super().turn(gate)
"""


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


def lingering(folder: Path, turns: int = 3) -> tuple[str, str]:
    """Arguments for a policy under which the run in `folder/run` goes slower from round to round once it has done some
    turns, until `folder/cured` is there: whoever hits it in the middle is not too late, however slow the machine."""
    (folder / "lingers.py").write_text(LINGERS.replace("TURNS", str(turns)))
    return "--policy", f"{folder / 'lingers.py'}:Lingers"


def until(true: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Wait for it; what it gave."""
    end = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
    return found
