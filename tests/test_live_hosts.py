"""A run on several hosts: what agents send is what they see, who is refused, and what is unknown when one is gone."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kernel.errors import UsageError
from kernel.record import Kind
from rollout import cli
from tests import commands
from tests.live_world import LiveWorld
from tests.test_live_check import enter, ring, writer
from verify.blame import Class
from verify.events import Communicator, Event
from verify.events import Kind as What
from verify.hosts import wire
from verify.hosts.collector import Collector
from verify.hosts.delta import Receiver, Sender
from verify.live.rings import Facts, Look
from verify.readers.found import Found
from verify.top.follow import Follower
from verify.top.screen import picture
from verify.top.web import frame_body

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
until = partial(commands.until, timeout_s=60.0)


@given(data=st.data())
def test_changes_add_up_to_what_the_agent_sees(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    random = Random(data.draw(st.integers(0, 1 << 32)))
    world = LiveWorld(tmp_path_factory.mktemp("delta"), 3, 3, fences=data.draw(st.sampled_from([(), (0,), (0, 1, 2)])))
    follower, sender, receiver = Follower(world.recs[0].path.parent.parent), Sender(), Receiver()
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(random.randrange(30)):
            world.step(random.randrange(1 << 30))
        look = follower.read()
        _, rows = follower.rows(look)
        receiver.take(wire.parse(wire.line(sender.changes(look, rows))))
        for rank, now in receiver.ranks.items():
            assert now.events() == [event for event in look.found.events if event.rank == rank]
            assert (now.facts, now.row) == (look.facts[rank], rows[rank])
    again = follower.read()
    sent = sender.changes(again, rows)
    assert not sent["groups"]
    assert not any("set" in changed or "drop" in changed for changed in sent["ranks"].values()), "nothing has moved"
    world.close()


@given(orders=st.lists(st.permutations("abcd").flatmap(lambda p: st.integers(0, 4).map(lambda n: p[:n])), max_size=6))
def test_calls_that_change_their_places_keep_the_order_of_the_host(orders: list[str]) -> None:
    sender, receiver = Sender(), Receiver()
    facts = {0: Facts(1, True, False, False, False, False)}
    for order in orders:
        events = tuple(
            Event(0, What.COLLECTIVE, "AR", communicator=Communicator((0, 1), name), sequence=3) for name in order
        )
        look = Look(Found("run", events=events), facts)
        receiver.take(wire.parse(wire.line(sender.changes(look, {}))))
        assert receiver.ranks[0].events() == list(events)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data())
def test_a_message_that_was_tampered_with_is_refused_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("tampered")
    ring(run)
    follower = Follower(run)
    look = follower.read()
    message = json.loads(wire.line(Sender().changes(look, follower.rows(look)[1])))
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = message
        while isinstance(at, dict | list) and at:
            key: Any = data.draw(st.sampled_from(sorted(at)) if isinstance(at, dict) else st.integers(0, len(at) - 1))
            if data.draw(st.booleans()) or not isinstance(at[key], dict | list) or not at[key]:
                at[key] = data.draw(JSON)
                break
            at = at[key]
    receiver = Receiver()
    with suppress(wire.Malformed):
        receiver.take(message)
        for now in receiver.ranks.values():
            assert all(isinstance(event, Event) for event in now.events())


def test_a_token_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    made = wire.read_token(tmp_path / "token", make=True)
    assert len(made) == 64
    assert wire.read_token(tmp_path / "token", make=True) == made
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "token").chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        wire.read_token(tmp_path / "token")
    with pytest.raises(UsageError, match="copy the one"):
        wire.read_token(tmp_path / "absent")


# -- over loopback ---------------------------------------------------------------------------------------------------


def split(run: Path, *parts: tuple[int, ...]) -> list[Path]:
    """Directories as several hosts have them: each with the rings of some ranks."""
    hosts = []
    for number, ranks in enumerate(parts):
        host = run.with_name(f"{run.name}-host{number}")
        (host / "record").mkdir(parents=True)
        for rank in ranks:
            (host / "record" / f"rank{rank}.ring").symlink_to(run / "record" / f"rank{rank}.ring")
        hosts.append(host)
    return hosts


@contextmanager
def agent(address: tuple[str, int], token: Path, run: Path, *before: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "turnstile", "top", "--agent", f"{address[0]}:{address[1]}",
         "--token-file", str(token), str(run)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@contextmanager
def collector(tmp_path: Path, silent_s: float = 60.0) -> Iterator[Collector]:
    with Collector(("127.0.0.1", 0), tmp_path / "token", silent_s) as made:
        yield made


def test_a_ring_over_two_hosts_is_certain_and_undecided_while_one_is_gone(tmp_path: Path) -> None:
    ring(tmp_path / "run")
    first, second = split(tmp_path / "run", (0,), (1,))
    with collector(tmp_path) as made, agent(made.address, tmp_path / "token", first):
        until(lambda: made.read().facts.keys() == {0})
        for _ in range(3):
            frame = made.look()
        assert frame.check is None
        assert frame.missing == (1,)
        with agent(made.address, tmp_path / "token", second) as other:
            until(lambda: made.read().facts.keys() == {0, 1})
            other.kill()
            until(lambda: made.read().facts.keys() == {0})
            for _ in range(3):
                frame = made.look()
            assert frame.check is None, "what rank 1 did last may not be what it does"
            assert {row.rank: row.status for row in frame.rows}[1] == "unknown"
            assert not any(row.blocks for row in frame.rows if row.rank == 1) or frame.rows[1].status == "unknown"
            assert ["agent is gone" in line for line in frame.hosts] == [True]
        with agent(made.address, tmp_path / "token", second):
            until(lambda: made.look().check)
            frame = made.look()
        assert frame.check is not None
        assert (frame.check.verdict.cls, frame.check.verdict.ranks) == (Class.CYCLE, (0, 1))
        assert not frame.hosts


def test_an_agent_that_is_silent_is_told_of_and_comes_back(tmp_path: Path) -> None:
    enter(writer(tmp_path / "run", 0), 1)
    enter(writer(tmp_path / "run", 1), 1)
    first, second = split(tmp_path / "run", (0,), (1,))
    with (
        collector(tmp_path, silent_s=0.3) as made,
        agent(made.address, tmp_path / "token", first),
        agent(made.address, tmp_path / "token", second) as other,
    ):
        until(lambda: made.read().facts.keys() == {0, 1})
        other.send_signal(signal.SIGSTOP)

        def silent() -> str:
            """What is told of it; the agent of rank 0 may be late itself, for a moment."""
            return next((line for line in made.look().hosts if "rank 1 is unknown" in line), "")

        assert "has been silent" in until(silent)
        other.send_signal(signal.SIGCONT)
        until(lambda: made.read().facts.keys() == {0, 1})


def test_agents_find_a_collector_that_comes_later_or_again(tmp_path: Path) -> None:
    ring(tmp_path / "run")
    wire.read_token(tmp_path / "token", make=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    with agent(address, tmp_path / "token", tmp_path / "run"):
        for _ in range(2):
            with Collector(address, tmp_path / "token", 60.0) as made:
                until(lambda made=made: made.look().check)  # type: ignore[misc]


def test_a_wrong_token_gets_one_line_on_both_sides(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ring(tmp_path / "run")
    (tmp_path / "mine").write_text("x" * 64)
    (tmp_path / "mine").chmod(0o600)
    with collector(tmp_path) as made, agent(made.address, tmp_path / "mine", tmp_path / "run") as refused:
        until(lambda: made.read() and refused.poll() is not None)
        assert refused.returncode == 2
        assert refused.stderr is not None
        last = refused.stderr.read().splitlines()[-1]
        assert last.startswith(f"turnstile: --agent 127.0.0.1:{made.address[1]}: wrong token: give it a copy of")
        assert not made.read().facts
    err = capfd.readouterr().err
    assert "was refused: wrong token" in err
    assert err.count("\n") == 1


def test_two_agents_for_one_rank_and_two_runs_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ring(tmp_path / "run")
    enter(writer(tmp_path / "large", 7, size=8), 1)
    with collector(tmp_path) as made, agent(made.address, tmp_path / "token", tmp_path / "run"):
        until(lambda: made.read().facts.keys() == {0, 1})
        for run, why in ((tmp_path / "run", "is told by the agent of"), (tmp_path / "large", "collect one run")):
            with agent(made.address, tmp_path / "token", run) as second:
                until(lambda second=second: made.read() and second.poll() is not None)  # type: ignore[misc]
                assert second.returncode == 2
                assert second.stderr is not None
                assert why in second.stderr.read()
        assert made.read().facts.keys() == {0, 1}


def test_strangers_that_talk_nonsense_cost_the_collector_nothing(tmp_path: Path) -> None:
    ring(tmp_path / "run")
    with collector(tmp_path) as made, agent(made.address, tmp_path / "token", tmp_path / "run"):
        until(lambda: made.read().facts)
        links = [socket.create_connection(made.address) for _ in range(100)]
        try:
            for at, link in enumerate(links):
                nonsense = (b"GET / HTTP/1.1\r\n\r\n", b"{" * 100 + b"\n", b"[]\n", b"x" * 10000, b"", b'{"seen":1}\n')
                link.sendall(nonsense[at % 6])
            frame = until(lambda: next((f for f in [made.look()] if f.check is not None), None))
            assert {row.rank for row in frame.rows} == {0, 1}
        finally:
            for link in links:
                link.close()


def test_the_page_and_the_screen_show_what_agents_send(tmp_path: Path) -> None:
    ring(tmp_path / "run")
    with collector(tmp_path) as made:
        assert "no agent has told anything yet" in frame_body(made.look())
        with agent(made.address, tmp_path / "token", tmp_path / "run"):
            made.gather()
            frame = until(lambda: next((f for f in [made.look()] if f.check), None))
    page = frame_body(frame)
    assert "live check: a certain fault" in page
    assert "The ring" in page
    assert json.loads(json.dumps(frame.to_dict()))["check"]["class"] == "cycle"
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(picture(frame))
    assert "live check: cycle (certain)" in console.export_text()


def test_the_run_ends_on_all_hosts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    world = LiveWorld(tmp_path / "run", 2, 2)
    while world.step(0):
        pass
    first, second = split(tmp_path / "run", (0,), (1,))
    port = socket.create_server(("127.0.0.1", 0))
    address = port.getsockname()[:2]
    port.close()
    wire.read_token(tmp_path / "token", make=True)
    codes: list[int] = []
    where = ["--collect", f"127.0.0.1:{address[1]}", "--token-file", str(tmp_path / "token")]
    thread = threading.Thread(target=lambda: codes.append(cli.main(["top", *where, "--check", "--every", "0.05"])))
    with agent(address, tmp_path / "token", first) as one, agent(address, tmp_path / "token", second) as two:
        thread.start()
        thread.join(60)
        assert codes == [0]
        assert (one.wait(60), two.wait(60)) == (0, 0)
    assert "nothing wrong" in capfd.readouterr().out


def test_arguments_that_do_not_fit_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring(tmp_path / "run")
    run, token = str(tmp_path / "run"), ["--token-file", str(tmp_path / "token")]
    for arguments, said in (
        ([], "no run directory"),
        (["--agent", "h:1", run], "a collector and its agents need one"),
        (["--agent", "h", run, *token], "give ADDR:PORT"),
        (["--agent", "h:1", *token], "no run directory"),
        (["--agent", "h:1", run, *token], "copy the one that the collector has made"),
        (["--agent", "h:1", run, "--check", *token], "shows nothing"),
        (["--collect", "127.0.0.1:1", run, *token], "leave out"),
        (["--collect", "300.0.0.1:1", *token], "name an address of this host"),
        (["--check", "--once", run], "leave out --once"),
        ([*token, run], "is that of --collect and --agent"),
        (["--collect", "127.0.0.1:x", *token], "give ADDR:PORT"),
    ):
        (tmp_path / "token").unlink(missing_ok=True)
        assert cli.main(["top", *arguments]) == 2, arguments
        out, err = capsys.readouterr()
        assert said in err
        assert err.count("\n") == 1
        assert not out


# -- over two network namespaces -------------------------------------------------------------------------------------


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check, timeout=60)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces that a pair of virtual interfaces joins: 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    names = f"ts{os.getpid()}a", f"ts{os.getpid()}b"
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ends = [f"v{name} netns {name}" for name in names]
            ip(*f"link add {ends[0]} type veth peer {ends[1]}".split())
            for number, name in enumerate(names, 1):
                ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"v{name}")
                ip("-n", name, "link", "set", f"v{name}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


@pytest.mark.netns
@pytest.mark.slow
def test_a_ring_over_two_network_namespaces(tmp_path: Path, two_hosts: tuple[str, str]) -> None:
    recs = ring(tmp_path / "run")
    first, second = split(tmp_path / "run", (0,), (1,))
    token, address = tmp_path / "token", ("10.77.0.1", 7077)
    wire.read_token(token, make=True)
    here, there = (("ip", "netns", "exec", name) for name in two_hosts)
    command = [*here, sys.executable, "-m", "turnstile", "top", "--collect", "10.77.0.1:7077", "--check"]
    # Rank 1 keeps moving: nothing is certain as long as it does.
    moving = threading.Event()

    def move() -> None:
        while not moving.wait(0.02):
            recs[1].event(Kind.PLAN)

    mover = threading.Thread(target=move)
    mover.start()
    made = subprocess.Popen(
        [*command, "--token-file", str(token), "--silent", "1"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        with agent(address, token, first, *here), agent(address, token, second, *there) as other:
            assert other.stderr is not None
            until(lambda: "connected" in other.stderr.readline())
            other.send_signal(signal.SIGKILL)
            other.wait()
            moving.set()
            mover.join(60)
            time.sleep(2)
            assert made.poll() is None, "the ring closed, and the host of rank 1 is not heard of"
            with agent(address, token, second, *there):
                out, _ = made.communicate(timeout=120)
        assert made.returncode == 1
        assert out.startswith("verdict   cycle (certain): ranks 0 and 1")
    finally:
        moving.set()
        made.kill()
        made.communicate()
