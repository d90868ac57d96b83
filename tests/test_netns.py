"""Two hosts, as two network namespaces joined by a cable: a world of 4 under torchrun, over TCP and gloo.

The cable is pulled out, pulled for a moment, and made slow in the middle of a run.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.replay import read_rows
from tests import commands
from tests.hosts_program import generate
from tests.slow_cable import QUALITY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[1]
ADDRESSES = ("10.213.77.1", "10.213.77.2")
WORLD = World(4, 2, 4)
RUN = (
    "turnstile", "rollout", "--world", "4", "--adp", "2", "--ep", "4", "--fraction", "0.03", "--turns", "6",
    "--length-scale", "0.05", "--time-scale", "0", "--prefill-tokens", "64", "--rank-timeout", "4", "--json",
)  # fmt: skip


def _why_not() -> str:
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs `ip` (iproute2)"
    name = f"turnstile-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"cannot make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


pytestmark = [pytest.mark.netns, pytest.mark.slow]
until = partial(commands.until, timeout_s=240.0)


def _works(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Hosts:
    """Two namespaces, their cable, and what was started in them."""

    def __init__(self) -> None:
        tag = f"{os.getpid() % 100000}"
        self.names = (f"turnstile-{tag}-a", f"turnstile-{tag}-b")
        self.ends = (f"tsa{tag}", f"tsb{tag}")
        self.started: list[subprocess.Popen[str]] = []
        self._carriers: list[subprocess.Popen[bytes]] = []
        self._quality: mmap.mmap | None = None

    def open(self, *, by_hand: bool = False) -> None:
        """by_hand: packets are carried by processes of ours, and `slow` works."""
        for name in self.names:
            self.ip("netns", "add", name)
        if by_hand:
            self._carry()
        else:
            self.ip("link", "add", self.ends[0], "netns", self.names[0], "type", "veth",
                    "peer", "name", self.ends[1], "netns", self.names[1])  # fmt: skip
        for name, end, address in zip(self.names, self.ends, ADDRESSES, strict=True):
            self.ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for link in (end, "lo"):
                self.ip("-n", name, "link", "set", link, "up")

    def _carry(self) -> None:
        settings = os.memfd_create("cable")
        os.truncate(settings, QUALITY.size)
        self._quality = mmap.mmap(settings, QUALITY.size)
        sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for name, end, mine in zip(self.names, self.ends, sockets, strict=True):
            command = ["ip", "netns", "exec", name, sys.executable, str(ROOT / "tests" / "slow_cable.py"), end]
            fds = (mine.fileno(), settings)
            self._carriers.append(subprocess.Popen([*command, *map(str, fds)], pass_fds=fds))
        for name, end in zip(self.names, self.ends, strict=True):
            shown = ["ip", "-n", name, "link", "show", end]
            until(lambda shown=shown: _works(shown), timeout_s=30)
        for mine in sockets:
            mine.close()
        os.close(settings)

    def slow(self, delay_ms: float, jitter_ms: float, loss: float) -> None:
        """What the cable is like from now on, each way."""
        assert self._quality is not None
        QUALITY.pack_into(self._quality, 0, delay_ms, jitter_ms, loss)

    def close(self) -> None:
        self.end()
        for carrier in self._carriers:
            carrier.kill()
            carrier.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def end(self) -> list[str]:
        """Kill everything in the namespaces; what each torchrun said."""
        said = []
        for name in self.names:  # all that is left in it
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    if not self._of_the_cable(pid):
                        os.kill(int(pid), signal.SIGKILL)
        for process in self.started:
            process.kill()
            said.append(process.communicate()[1])
        self.started.clear()
        return said

    def _of_the_cable(self, pid: str) -> bool:
        return int(pid) in [carrier.pid for carrier in self._carriers]

    def ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)

    def cable(self, state: str) -> None:
        """up, or down."""
        self.ip("-n", self.names[1], "link", "set", self.ends[1], state)

    def torchrun(self, *program: str) -> list[subprocess.Popen[str]]:
        """One torchrun of two processes on each host."""
        for number, name in enumerate(self.names):
            command = [
                "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run",
                "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2",
                "--master-addr", ADDRESSES[0], "--master-port", "29500", "-m", *program,
            ]  # fmt: skip
            self.started.append(
                subprocess.Popen(
                    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )
            )
        return self.started


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Parameter `by_hand`: see `Hosts.open`."""
    by_hand = getattr(request, "param", "") == "by_hand"
    why = _why_not() or ("needs /dev/net/tun" if by_hand and not Path("/dev/net/tun").exists() else "")
    if why:
        pytest.skip(why)
    made = Hosts()
    try:
        made.open(by_hand=by_hand)
        yield made
    finally:
        made.close()


def lines(out: Path) -> int:
    with suppress(OSError):
        return (out / "requests.jsonl").read_bytes().count(b"\n")
    return 0


def listening(name: str) -> dict[tuple[str, str], int]:
    """(address, command line) -> port, of what processes in this namespace listen on over TCP."""
    found = {}
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout.split()
    for pid in pids:
        sockets = set()
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and fields[9] in sockets:
                        where, _, port = fields[1].partition(":")
                        found[where, command] = int(port, 16)
    return found


async def test_the_tokens_are_those_of_one_host(hosts: Hosts, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    sizes = [str(WORLD.size), str(WORLD.adp), str(WORLD.ep)]
    first, second = hosts.torchrun("tests.hosts_program", str(tmp_path / "model"), str(tmp_path / "out"), *sizes)
    for each in (first, second):
        _, stderr = each.communicate(timeout=300)
        assert each.returncode == 0, stderr
    assert json.loads((tmp_path / "out").read_text()) == await generate(str(tmp_path / "model"), WORLD)


def test_ranks_listen_at_the_addresses_given_only(hosts: Hosts, tmp_path: Path) -> None:
    out = tmp_path / "run"
    hosts.torchrun(*RUN, "--out", str(out))
    until(lambda: lines(out) >= 1)
    for name, address in zip(hosts.names, ADDRESSES, strict=True):
        own = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
        found = {
            where
            for where, command in listening(name)
            # torchrun's own agent keeps its store, on all interfaces.
            if "torch.distributed.run" not in command
        }
        assert found == {own}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[int, ...]]:
    """Tokens of each turn of the run, from one host."""
    out = tmp_path_factory.mktemp("one") / "run"
    subprocess.run(
        [sys.executable, "-m", *RUN, "--out", str(out)], cwd=ROOT, check=True, capture_output=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return tokens(out)


def tokens(out: Path) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(row.trajectory, row.turn): row.tokens for row in read_rows(out / "requests.jsonl")}


def test_a_cable_that_is_pulled_out_ends_the_run_and_names_the_host(
    hosts: Hosts, undisturbed: dict[tuple[str, int], tuple[int, ...]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first, _ = hosts.torchrun(*RUN, "--out", str(out))
    until(lambda: lines(out) >= 3 or first.poll() is not None)
    hosts.cable("down")
    # The command ends by itself; torchrun's agents may go on looking for each other.
    try:
        until(lambda: json.loads((out / "run.json").read_text())["status"] != "running", timeout_s=60)
        until(lambda: not _ranks(hosts), timeout_s=60)
    finally:
        status, left, said = (out / "run.json").read_text(), _ranks(hosts), hosts.end()
    assert json.loads(status)["status"] == "failed", (left, said)
    [line] = [line for line in said[0].splitlines() if line.startswith("turnstile: ")]
    assert re.fullmatch(
        rf"turnstile: ranks 2, 3 at {re.escape(ADDRESSES[1])} have not answered for 4 s"
        r" \(stopped, or the host or the link to it is down\); rank 2 [^\n]*; rank 3 [^\n]*",
        line,
    )
    kept = tokens(out)
    assert 3 <= len(kept) < len(undisturbed)
    assert all(undisturbed[key] == found for key, found in kept.items())
    hosts.cable("up")
    again = hosts.torchrun(*RUN, "--out", str(out), "--resume")
    for each in again:
        _, stderr = each.communicate(timeout=300)
        assert each.returncode == 0, stderr
    assert tokens(out) == undisturbed


def _ranks(hosts: Hosts) -> list[str]:
    """Processes of the command, and of its ranks, in both namespaces."""
    found = []
    for name in hosts.names:
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
        for pid in done.stdout.split():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                if "turnstile rollout" in command and "torch.distributed.run" not in command:
                    found.append(command)
    return found


def hit(hosts: Hosts, out: Path, trouble: Callable[[], None], whole: dict[tuple[str, int], tuple[int, ...]]) -> None:
    """Run, have trouble in the middle, and get the same tokens all the same."""
    first, second = hosts.torchrun(*RUN, "--out", str(out))
    until(lambda: lines(out) >= 3 or first.poll() is not None)
    trouble()
    assert lines(out) < len(whole), "it was hit in the middle"
    for each in (first, second):
        _, stderr = each.communicate(timeout=500)
        assert each.returncode == 0, stderr
    assert tokens(out) == whole


def test_a_short_outage_is_lived_through(
    hosts: Hosts, undisturbed: dict[tuple[str, int], tuple[int, ...]], tmp_path: Path
) -> None:
    def outage() -> None:
        hosts.cable("down")
        time.sleep(1)
        hosts.cable("up")

    hit(hosts, tmp_path / "run", outage, undisturbed)


@pytest.mark.parametrize("hosts", ["by_hand"], indirect=True)
def test_a_spell_of_latency_and_loss_only_takes_longer(
    hosts: Hosts, undisturbed: dict[tuple[str, int], tuple[int, ...]], tmp_path: Path
) -> None:
    out = tmp_path / "run"

    def spell() -> None:
        hosts.slow(15, 5, 0.01)
        before = lines(out)
        until(lambda: lines(out) >= before + 3)
        hosts.slow(0, 0, 0)

    hit(hosts, out, spell, undisturbed)
