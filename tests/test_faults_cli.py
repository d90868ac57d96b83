"""`turnstile rollout` on real ranks, hit in the middle: it ends as it says, keeps what is done, and goes on with it."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from kernel.record import read_run
from rollout.replay import read_rows
from tests import commands
from tests.commands import lingering, until

if TYPE_CHECKING:
    import subprocess
    from contextlib import AbstractContextManager

for needed in ("torch", "uvloop", "numpy", "safetensors", "matplotlib"):
    pytest.importorskip(needed)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ARGUMENTS = (
    "--fraction", "0.08", "--turns", "4", "--length-scale", "0.08", "--time-scale", "0", "--prefill-tokens", "64",
    "--world", "2", "--adp", "2", "--ep", "2", "--rank-timeout", "6", "--json",
)  # fmt: skip

Key = tuple[str, int]


def rollout(out: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """This file's command."""
    return commands.rollout(out, *ARGUMENTS, *arguments)


def rows(out: Path) -> dict[Key, tuple[int, ...]]:
    """The tokens of each turn in requests.jsonl, of which each is there once."""
    found = list(read_rows(out / "requests.jsonl"))
    assert len({(row.trajectory, row.turn) for row in found}) == len(found)
    return {(row.trajectory, row.turn): row.tokens for row in found}


def lines(out: Path) -> int:
    with suppress(OSError):
        return (out / "requests.jsonl").read_bytes().count(b"\n")
    return 0


def processes(out: Path) -> dict[int, int]:
    """Process of each rank, from its record."""
    with suppress(UsageError, OSError):
        found = {rank: each.pid for rank, each in read_run(out).items()}
        return found if len(found) == 2 else {}
    return {}


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, tuple[int, ...]]:
    """What the run gives when nothing happens to it."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    with rollout(out) as run:
        _, stderr = run.communicate(timeout=300)
    assert (run.returncode, stderr) == (0, "")
    return rows(out)


FAULTS: dict[str, tuple[bool, signal.Signals, int, str]] = {
    "a rank is killed": (True, signal.SIGKILL, 1, "turnstile: rank 1 was killed by signal 9 with "),
    "a rank is stopped": (True, signal.SIGSTOP, 1, "turnstile: rank 1, stopped by SIGSTOP or a debugger, has not"),
    "a rank crashes": (True, signal.SIGABRT, 1, "turnstile: rank 1 was killed by signal 6 with "),
    "the launcher is killed": (False, signal.SIGKILL, -9, ""),
    "Ctrl-C": (False, signal.SIGINT, 130, "turnstile: interrupted: "),
    "SIGTERM": (False, signal.SIGTERM, 130, "turnstile: interrupted: "),
    "SIGHUP": (False, signal.SIGHUP, 130, "turnstile: interrupted: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_done_is_kept_and_the_rest_gives_the_same_tokens(
    fault: str, undisturbed: dict[Key, tuple[int, ...]], tmp_path: Path
) -> None:
    of_rank, number, code, says = FAULTS[fault]
    out, policy = tmp_path / "run", lingering(tmp_path)
    with rollout(out, *policy) as run:
        until(lambda: lines(out) >= 3 or run.poll() is not None)
        ranks = until(lambda: processes(out))
        os.kill(ranks[1] if of_rank else run.pid, number)
        stdout, stderr = run.communicate(timeout=120)
    assert run.returncode == code
    assert stdout == ""
    assert stderr.startswith(says)
    assert stderr.count("\n") == (1 if says else 0)
    until(lambda: all(gone(pid) for pid in ranks.values()))
    kept = rows(out)
    assert 3 <= len(kept) < len(undisturbed), "it was hit in the middle"
    for name in () if number == signal.SIGKILL and not of_rank else ("report.json", "run.json"):
        assert json.loads((out / name).read_text())["status"] == ("interrupted" if code == 130 else "failed")
    (tmp_path / "cured").touch()
    with rollout(out, *policy, "--resume") as again:
        stdout, stderr = again.communicate(timeout=300)
    assert (again.returncode, stderr) == (0, "")
    found = rows(out)
    assert found == undisturbed
    assert json.loads((out / "run.json").read_text())["resumed"] == len(kept)
    assert json.loads(stdout)["policies"][0]["completed"] == len(undisturbed)


def test_a_stall_is_reported_and_can_be_gone_on_with(
    undisturbed: dict[Key, tuple[int, ...]], tmp_path: Path
) -> None:
    (tmp_path / "keeps.py").write_text(
        "import os\n"
        "from kernel.sched.fine import Fine\n"
        "class Keeps(Fine):\n"
        "    async def turn(self, gate):\n"
        "        cured = os.path.exists(os.path.join(os.path.dirname(__file__), 'cured'))\n"
        "        if gate.plan.round < 60 or not gate.p_active or cured:\n"
        "            return await super().turn(gate)\n"
        "        await gate.rendezvous('pre-d')\n"
        "        if gate.d_ready:\n"
        "            gate.launch_decode()\n"
        "        await gate.rendezvous('post-d')\n"
    )
    out, policy = tmp_path / "run", ("--policy", f"{tmp_path / 'keeps.py'}:Keeps", "--stall-timeout", "3")
    with rollout(out, *policy) as run:
        stdout, stderr = run.communicate(timeout=120)
    assert (run.returncode, stdout) == (1, "")
    assert stderr.startswith("stalled   no progress for 3 s under ")
    assert stderr.splitlines()[-1].startswith("turnstile: no progress for 3 s under ")
    assert (out / "hang.txt").read_text() == "\n".join(stderr.splitlines()[:-1]) + "\n"
    assert json.loads((out / "hang.json").read_text())["class"] == "starvation"
    kept = rows(out)
    (tmp_path / "cured").touch()
    with rollout(out, *policy, "--resume") as again:
        _, stderr = again.communicate(timeout=300)
    assert (again.returncode, stderr) == (0, "")
    assert rows(out) == undisturbed
    assert json.loads((out / "run.json").read_text())["resumed"] == len(kept)
    assert not (out / "hang.txt").exists()
