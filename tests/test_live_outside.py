"""What a process waits for outside of it, and who could give it: real ones, seen from outside as /proc shows them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.commands import until
from tests.standing import main_of, stands
from tests.test_live_timed import REAL
from verify.live.holders import Holders, lockers
from verify.live.outside import WHO, Outside, beyond
from verify.live.sockets import _address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = REAL
START = (
    "import asyncio, fcntl, multiprocessing, os, select, socket, subprocess, sys, time\n"
    "def forks():\n"
    "    child = os.fork()\n"
    "    if child == 0:\n"
    "        time.sleep(900); os._exit(0)\n"
    "    print(child, flush=True)\n"
    "    return child\n"
)


@contextmanager
def process(program: str, *arguments: str) -> Iterator[tuple[int, list[int]]]:
    """A Python that runs a few lines: its pid, and the numbers that it has printed."""
    lines = START + program.replace("WAIT", "print('here', flush=True)\n")
    child = subprocess.Popen(
        [sys.executable, "-c", lines, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None
        told: list[int] = []
        while (line := child.stdout.readline().strip()) != "here":
            told.append(int(line))
        yield child.pid, told
    finally:
        os.killpg(child.pid, signal.SIGKILL)  # with what it has started
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def seen(pid: int, what: Callable[[Outside], bool] = lambda _: True) -> Outside:
    """What is seen of a process when it has come to where it waits."""

    def now() -> Outside | None:
        found = beyond(pid)
        return found if found is not None and what(found) else None

    found: Outside = until(now)
    return found


ALONE = {
    "a pipe": "r, w = os.pipe()\nWAIT\nos.read(r, 1)",
    "a full pipe": "r, w = os.pipe()\nWAIT\nwhile True: os.write(w, bytes(1 << 16))",
    "a pair of sockets": "a, b = socket.socketpair()\nWAIT\na.recv(1)",
    "a connection with itself": (
        "s = socket.create_server(('127.0.0.1', 0)); a = socket.create_connection(s.getsockname()); b = s.accept()\n"
        "WAIT\na.recv(1)"
    ),
    "poll": "r, w = os.pipe(); p = select.poll(); p.register(r, 1)\nWAIT\np.poll()",
    "select": "r, w = os.pipe()\nWAIT\nselect.select([r], [], [])",
    "an event loop": "WAIT\nasyncio.new_event_loop().run_forever()",
    "multiprocessing.Pipe": "a, b = multiprocessing.Pipe()\nWAIT\na.recv()",
    "multiprocessing.Queue": "q = multiprocessing.Queue()\nWAIT\nq.get()",
}


@pytest.mark.parametrize("what", ALONE)
@pytest.mark.parametrize("forks", [False, True])
def test_both_ends_in_one_process_and_in_one_that_it_has_forked(what: str, forks: bool) -> None:
    first, _, last = ALONE[what].partition("WAIT")
    if forks and not first:
        pytest.skip("its ends are made while it waits")
    with process(f"{first}\nforks()\nWAIT{last}" if forks else ALONE[what]) as (pid, children):
        found = seen(pid, lambda found: found.holders is not None)
        assert found.holders == {pid, *children}
        assert f"pid {children[0] if forks else pid} (" in found.unless
        assert WHO in found.unless


ANYBODY = {
    "accept": ("s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1])\nWAIT\ns.accept()",
               "nobody connects to 127.0.0.1:{}"),
    "accept with a limit": ("s = socket.create_server(('127.0.0.1', 0)); s.settimeout(900); print(s.getsockname()[1])\n"
                            "WAIT\ns.accept()", "nobody connects to 127.0.0.1:{}"),
    "a server of asyncio": (
        "async def main():\n"
        "    s = await asyncio.start_server(lambda r, w: None, '127.0.0.1', 0)\n"
        "    print(s.sockets[0].getsockname()[1]); print('here', flush=True)\n"
        "    await s.serve_forever()\n"
        "asyncio.run(main())", "nobody connects to 127.0.0.1:{}"),
    "a terminal": ("m, s = os.openpty(); print(0)\nWAIT\nos.read(s, 1)", "nobody types into /dev/pts/"),
    "a datagram": ("s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0)); print(0)\nWAIT\ns.recv(1)",
                   "nothing comes through the socket"),
}  # fmt: skip


@pytest.mark.parametrize("what", ANYBODY)
def test_what_anybody_may_give_is_held_by_nobody(what: str) -> None:
    program, said = ANYBODY[what]
    with process(program) as (pid, told):
        found = seen(pid, lambda found: said.format(told[0]) in found.unless)
        assert found.holders is None


def test_a_pipe_with_a_name_that_nobody_has_opened_to_write(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with process("WAIT\nopen(sys.argv[1])", str(fifo)) as (pid, _):
        found = seen(pid, lambda found: "nobody opens" in found.unless)
        assert found == Outside(f"nobody opens {fifo} for writing, for which {WHO} waits")
    with process("f = os.open(sys.argv[1], os.O_RDWR)\nWAIT\nopen(sys.argv[1]).read()", str(fifo)) as (pid, _):
        assert seen(pid, lambda found: str(fifo) in found.unless).holders == {pid}


def test_a_socket_whose_other_end_another_process_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        program = "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\nWAIT\ns.recv(1)"
        with process(program, port) as (pid, _):
            waiting = seen(pid)
            assert waiting == Outside(f"127.0.0.1:{port} does not send through its connection with {WHO}")
            connection, _ = server.accept()
            with connection:
                found = seen(pid, lambda found: found.holders is not None)
                assert found.holders == {os.getpid()}
                assert f"pid {os.getpid()} (" in found.unless
                assert f"127.0.0.1:{port}" in found.unless


def test_a_lock_on_a_file_and_a_child(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with file.open("w") as mine:
        import fcntl

        fcntl.lockf(mine, fcntl.LOCK_EX)
        with process("f = open(sys.argv[1], 'w')\nWAIT\nfcntl.lockf(f, fcntl.LOCK_EX)", str(file)) as (pid, _):
            found = seen(pid)
            assert str(file) in found.unless
            if found.holders is not None:  # some file systems number their files otherwise in /proc/locks
                assert found.holders == {os.getpid()}
    with process("child = forks()\nWAIT\nos.waitpid(child, 0)") as (pid, children):
        found = seen(pid)
        assert found.holders == set(children)
        assert f"child pid {children[0]} (" in found.unless


def test_a_wait_for_its_own_threads_is_none_for_what_is_outside() -> None:
    with process("import threading\nWAIT\nthreading.Event().wait()") as (pid, _):
        until(lambda: stands(main_of(pid)))
        assert beyond(pid) is None
    assert beyond(pid) is None


RANGES = (
    "f = open(sys.argv[1], 'r+')\n"
    "if len(sys.argv) > 2: fcntl.lockf(f, fcntl.LOCK_EX, 5, int(sys.argv[2]))\n"
)


def test_of_several_locks_on_a_file_the_one_in_the_way_counts(tmp_path: Path) -> None:
    """One process holds the first part, another one a later one; a third waits for the first, one more behind it."""
    file = str(tmp_path / "lock")
    (tmp_path / "lock").touch()
    waits = RANGES + "WAIT\nfcntl.lockf(f, fcntl.LOCK_EX, 5)"
    sleeps = RANGES + "WAIT\ntime.sleep(900)"
    with process(sleeps, file, "0") as (first, _), process(sleeps, file, "20"), process(waits, file) as (third, _):
        assert seen(third, lambda found: found.holders is not None).holders == {first}
        with process(waits, file, "40") as (fourth, _):
            assert seen(fourth, lambda found: found.holders is not None).holders == {first}
        assert seen(third).holders == {first}


def test_a_lock_that_the_system_lists_no_holder_of_is_held_by_somebody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one that another host holds, though a process here holds a lock on another part of that file."""
    file = tmp_path / "lock"
    with file.open("w") as mine:
        number = os.fstat(mine.fileno())
        name = f"{os.major(number.st_dev):02x}:{os.minor(number.st_dev):02x}:{number.st_ino}"
        lines = tmp_path / "locks"
        lines.write_text(f"1: POSIX  ADVISORY  WRITE 71 {name} 20 24\n")
        monkeypatch.setattr("verify.live.holders.LOCKS", lines)
        assert lockers(os.getpid(), mine.fileno()) == Holders(frozenset({71}), whole=False)
        lines.write_text(f"{lines.read_text()}1:  -> POSIX  ADVISORY  WRITE {os.getpid()} {name} 0 9\n")
        assert lockers(os.getpid(), mine.fileno()) == Holders(frozenset({71}), whole=True)


@pytest.mark.skipif(sys.byteorder != "little", reason="as a machine with little ends writes them")
def test_addresses_as_linux_writes_them() -> None:
    assert _address("0100007F:1F90") == "127.0.0.1:8080"
    assert _address("00000000000000000000000001000000:0050") == "[::1]:80"
    assert _address("0000000000000000FFFF00000100007F:0016") == "127.0.0.1:22"
