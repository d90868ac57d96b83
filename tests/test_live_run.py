"""`--live-check` on real ranks: a ring ends the run and it can be gone on with; slow and stopped ranks are no fault."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from kernel.record import read_run
from rollout.replay import read_rows
from tests import commands
from tests.commands import lingering, until

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

for needed in ("torch", "uvloop", "numpy", "safetensors", "matplotlib"):
    pytest.importorskip(needed)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SLICE = ("--fraction", "0.08", "--turns", "3", "--length-scale", "0.03", "--time-scale", "0", "--prefill-tokens", "32")
WORLD = ("--world", "2", "--adp", "2", "--ep", "2")
POLICIES = """
    import asyncio
    import os

    from kernel.sched.fine import Fine
    from kernel.sched.policy import Guarantees


    class Hangs(Fine):
        \"\"\"From some round on, as long as there is no file `cured`, rank 1 differs from the others.\"\"\"

        guarantees = Guarantees(deadlock_free=False)

        def hangs(self, gate):
            cured = os.path.exists(os.path.join(os.path.dirname(__file__), "cured"))
            return gate._rank.rank == 1 and gate.plan.round > 60 and gate.d_ready and not cured


    class Fences(Hangs):
        \"\"\"It waits for D on its device before the rendezvous that the others launch D after.\"\"\"

        async def turn(self, gate):
            if not gate.p_active:
                gate.launch_decode()
                return
            await gate.reached()
            hangs = self.hangs(gate)
            if hangs:
                gate.launch_decode()
                await gate.drained()
            await gate.rendezvous("pre-d")
            if not hangs:
                gate.launch_decode()
            await gate.rendezvous("post-d")
            gate.release(gate.plan.span)


    class Crosses(Hangs):
        \"\"\"It launches D after P's segment, on one stream.\"\"\"

        route = "all"

        async def turn(self, gate):
            if not gate.p_active:
                gate.launch_decode()
                return
            await gate.reached()
            await gate.rendezvous("pre-d")
            if self.hangs(gate):
                gate.release(gate.plan.span)
                gate.launch_decode()
                await gate.rendezvous("post-d")
            else:
                gate.launch_decode()
                await gate.rendezvous("post-d")
                gate.release(gate.plan.span)
"""


def rollout(out: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """This file's command."""
    return commands.rollout(out, *SLICE, *WORLD, *arguments)


def policies(folder: Path) -> Path:
    path = folder / "hangs.py"
    path.write_text(textwrap.dedent(POLICIES))
    return path


def pids(out: Path) -> list[int]:
    try:
        found = read_run(out)
    except UsageError:
        return []
    return [each.pid for each in found.values()] if len(found) == 2 else []


def children(pid: int) -> dict[int, str]:
    """pid -> command line, of the processes that `pid` has started."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found[int(stat.parent.name)] = (stat.parent / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("policy", ["Fences", "Crosses"])
def test_a_ring_ends_the_run_which_can_be_gone_on_with(policy: str, tmp_path: Path) -> None:
    spec, out = f"{policies(tmp_path)}:{policy}", tmp_path / "run"
    with rollout(out, "--policy", spec, "--abort-on-cycle") as run:
        stdout, stderr = run.communicate(timeout=300)
    assert run.returncode == 1
    happened, ended, rest = stderr.split("\n")
    assert rest == ""
    assert happened.startswith("turnstile: Ranks 0 and 1 wait in a ring: ")
    assert ended.startswith(f"turnstile: the run hangs under {spec}, a certain cycle (ranks 0 and 1), and was ended: ")
    assert "--resume" in ended
    report = (out / "hang.txt").read_text()
    assert report.startswith("verdict   cycle (certain): ranks 0 and 1: run\n")
    assert report.endswith(f"\npolicy    {spec}\n")
    assert report.count("\n") <= 25
    assert json.loads((out / "hang.json").read_text())["class"] == "cycle"
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    rows = list(read_rows(out / "requests.jsonl"))
    assert rows
    assert not any(row.failed for row in rows)
    again = subprocess.run(
        [sys.executable, "-m", "turnstile", "hang", "--json", str(out)], cwd=ROOT, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert json.loads(again.stdout)["class"] == "cycle", "what is left says the same"
    (tmp_path / "cured").touch()
    with rollout(out, "--policy", spec, "--abort-on-cycle", "--resume", "--json") as run:
        stdout, stderr = run.communicate(timeout=300)
    assert (run.returncode, stderr) == (0, "")
    assert json.loads(stdout)["policies"][0]["failed"] == 0
    assert not (out / "hang.txt").exists()
    assert not (out / "warm-up").exists()


def test_without_abort_the_report_is_printed_and_the_run_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with rollout(out, "--policy", f"{policies(tmp_path)}:Fences", "--live-check") as run:
        until((out / "hang.json").exists)
        assert run.stderr is not None
        assert run.stderr.readline().startswith("verdict   cycle (certain): ranks 0 and 1")
        assert run.poll() is None
        check = subprocess.run(
            [sys.executable, "-m", "turnstile", "top", "--check", str(out)], cwd=ROOT, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert (check.returncode, check.stderr) == (1, "")
        assert check.stdout.startswith("verdict   cycle (certain)")


def test_a_stopped_rank_is_no_fault(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with rollout(out, *lingering(tmp_path), "--live-check", "--abort-on-cycle", "--json") as run:
        (watcher,) = until(lambda: [pid for pid, line in children(run.pid).items() if "verify.live.watch" in line])
        rank = until(lambda: pids(out))[1]
        os.kill(rank, signal.SIGSTOP)
        try:
            time.sleep(3)  # a dozen looks; one more or less proves no more
            assert not (out / "hang.txt").exists()
            assert run.poll() is None
        finally:
            os.kill(rank, signal.SIGCONT)
            (tmp_path / "cured").touch()
        stdout, stderr = run.communicate(timeout=300)
    assert (run.returncode, stderr) == (0, "")
    assert json.loads(stdout)["policies"][0]["failed"] == 0
    until(lambda: gone(watcher))


def test_no_watcher_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with rollout(out, *lingering(tmp_path), "--live-check") as run:
        (watcher,) = until(lambda: [pid for pid, line in children(run.pid).items() if "verify.live.watch" in line])
        until(lambda: pids(out))
        os.kill(watcher, signal.SIGSTOP)  # even one that is in the middle of something
        run.kill()
        run.wait()
        os.kill(watcher, signal.SIGCONT) if not gone(watcher) else None
        until(lambda: gone(watcher))


def test_a_run_goes_on_without_a_watcher_that_dies(tmp_path: Path) -> None:
    with rollout(tmp_path / "run", *lingering(tmp_path), "--live-check", "--json") as run:
        (watcher,) = until(lambda: [pid for pid, line in children(run.pid).items() if "verify.live.watch" in line])
        until(lambda: pids(tmp_path / "run"))
        os.kill(watcher, signal.SIGKILL)
        until(lambda: gone(watcher))
        (tmp_path / "cured").touch()
        _, stderr = run.communicate(timeout=300)
    assert run.returncode == 0
    assert stderr == "turnstile: the live check was killed; the run goes on without it\n"


def test_a_rank_that_dies_is_reported_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with rollout(out, *lingering(tmp_path), "--live-check") as run:
        os.kill(until(lambda: pids(out))[1], signal.SIGKILL)
        _, stderr = run.communicate(timeout=300)
    assert run.returncode == 1
    assert stderr.splitlines()[-1].startswith("turnstile: rank 1 was killed by signal 9")
    assert stderr.count("verdict") <= 1


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a headless Chromium")
def test_the_page_of_a_run_that_hangs_while_it_is_open(tmp_path: Path) -> None:
    """Served while the run goes on, refreshed by the page itself until it shows the verdict."""
    out = tmp_path / "run"
    with rollout(out, "--policy", f"{policies(tmp_path)}:Fences", "--live-check"):
        until(lambda: pids(out))
        page = subprocess.Popen(
            [sys.executable, "-m", "turnstile", "top", "--web", str(out)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        try:
            assert page.stdout is not None
            found = re.match(r"http://127\.0\.0\.1:\d+/", page.stdout.readline())
            assert found is not None
            shots = [chromium(tmp_path, found[0], "--dump-dom")]
            until((out / "hang.json").exists)
            # Open for some seconds, in which the page asks again and again.
            shots.append(chromium(tmp_path, found[0], "--dump-dom", "--virtual-time-budget=5000"))
            picture = tmp_path / "page.png"
            chromium(tmp_path, found[0], f"--screenshot={picture}", "--window-size=1200,1600")
            assert picture.read_bytes().startswith(b"\x89PNG")
            if keep := os.environ.get("PYTEST_KEEP_PAGE"):
                shutil.copy(picture, keep)
        finally:
            page.kill()
            page.communicate()
    assert "live check: " in shots[0]
    assert "live check: a certain fault" in shots[1]
    assert "Ranks 0 and 1 wait in a ring" in shots[1]
    assert "The ring" in shots[1]


def chromium(folder: Path, url: str, *flags: str) -> str:
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={folder / 'profile'}", *flags, url],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert "Uncaught" not in done.stderr
    assert "Content Security Policy" not in done.stderr
    return done.stdout
