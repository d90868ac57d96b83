"""What may move in a process: real ones that wait, seen from outside as /proc shows them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.commands import until
from tests.test_live_timed import REAL
from verify.live.idle import sample, switches
from verify.live.named import is_of_torch, of_torch
from verify.live.threads import Moves, moves, of_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = REAL
START = "import threading, time, subprocess, select, os\nprint('here', flush=True)\n"


@contextmanager
def process(program: str) -> Iterator[int]:
    """A Python that runs a few lines."""
    child = subprocess.Popen(
        [sys.executable, "-c", START + program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        yield child.pid
    finally:
        os.killpg(child.pid, signal.SIGKILL)  # with what it has started
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def seen(pid: int, what: Callable[[Moves], bool]) -> Moves:
    """What is seen of a process when it has come to where it waits."""

    def now() -> Moves | None:
        found = moves(pid)
        return found if found is not None and what(found) else None

    found: Moves = until(now)
    return found


HELPER = "threading.Thread(target={}, daemon=True).start()\n"


@pytest.mark.parametrize(
    ("program", "closed"),
    [
        ("threading.Event().wait()", True),
        (HELPER.format("threading.Event().wait") + "threading.Event().wait()", True),
        (HELPER.format("lambda: time.sleep(900)") + "threading.Event().wait()", False),
        (HELPER.format("lambda: threading.Event().wait(900)") + "threading.Event().wait()", False),
        (HELPER.format("lambda: os.read(os.pipe()[0], 1)") + "threading.Event().wait()", False),
        ("subprocess.Popen(['sleep', '900'])\nthreading.Event().wait()", False),
    ],
)
def test_a_process_is_closed_where_every_thread_waits_for_another(program: str, closed: bool) -> None:
    with process(program) as pid:
        now = seen(pid, lambda now: now.locked and not now.main and bool(now.others) is not closed)
        assert now.closed is closed


@pytest.mark.parametrize(
    "wait",
    ["time.sleep(900)", "threading.Event().wait(900)", "select.select([os.pipe()[0]], [], [], 900)",
     "import queue; queue.Queue().get(timeout=900)"],
)  # fmt: skip
def test_a_main_thread_that_waits_for_the_clock_says_how_long(wait: str) -> None:
    with process(wait) as pid:
        now = seen(pid, lambda now: now.main.startswith("the clock"))
        words = now.main.split()
        if words[-1] != "clock":  # its memory may be read
            assert 800 < float(words[-2]) <= 900
        assert not now.closed


def test_a_main_thread_that_waits_for_a_child_or_a_file() -> None:
    with process("subprocess.run(['sleep', '900'])") as pid:
        assert seen(pid, lambda now: bool(now.main)).main == "a child process"
    with process("os.read(os.pipe()[0], 1)") as pid:
        now = seen(pid, lambda now: not now.locked)
        assert (now.main, now.closed) == ("", False)


def test_a_process_that_is_gone_tells_nothing() -> None:
    with process("time.sleep(900)") as pid:
        assert list(of_processes({0: pid}, [0, 1])) == [0]
    assert moves(pid) is None
    assert of_processes({0: pid}, [0]) == {}



@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("import multiprocessing; multiprocessing.Event().wait()", "another process"),
        (
            "import signal; signal.signal(signal.SIGALRM, print); signal.setitimer(signal.ITIMER_REAL, 600);"
            " threading.Event().wait()",
            "a signal that it catches (SIGALRM)",
        ),
        (
            "import signal; signal.signal(signal.SIGUSR1, print); threading.Event().wait()",
            "a signal that it catches (SIGUSR1)",
        ),
        (
            "import signal; signal.signal(signal.SIGRTMIN, print); threading.Event().wait()",
            "a signal that it catches (a real-time signal)",
        ),
    ],
    ids=["event of several processes", "clock", "another program", "real-time"],
)
def test_what_another_process_or_a_signal_ends(program: str, ends: str) -> None:
    """Such a wait is none for a thread of its own: the process is neither closed nor idle for good."""
    with process(program) as pid:
        assert not seen(pid, lambda now: now.main == ends).closed
        found = sample(pid)
        assert found is not None
        assert not found.still


FROM_OUTSIDE = {
    "a connection of TCP": (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "mine = socket.create_connection(server.getsockname()); there = server.accept()\n"
        "wait = lambda: mine.recv(1)",
        "a file or a socket (recvfrom)",
    ),
    "a connection of TCP that is full": (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "mine = socket.create_connection(server.getsockname()); there = server.accept()\n"
        "wait = lambda: mine.sendall(bytes(1 << 28))",
        "a file or a socket (sendto)",
    ),
    "datagrams": (
        "import socket\n"
        "mine = socket.socket(type=socket.SOCK_DGRAM); mine.bind(('127.0.0.1', 0))\n"
        "wait = lambda: mine.recv(1)",
        "a file or a socket (recvfrom)",
    ),
    "a terminal": ("ends = os.openpty()\nwait = lambda: os.read(ends[1], 1)", "a file or a socket (read)"),
    "changes of files": (
        "import ctypes\n"
        "libc = ctypes.CDLL(None); descriptor = libc.inotify_init()\n"
        "while descriptor < 0: time.sleep(0.1); descriptor = libc.inotify_init()\n"  # a user may have few at a time
        "libc.inotify_add_watch(descriptor, os.environ['EMPTY'].encode(), 2)\n"
        "wait = lambda: os.read(descriptor, 1000)",
        "a file or a socket (read)",
    ),
    "a signal that is blocked": (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "wait = lambda: signal.sigwait([signal.SIGUSR1])",
        "a signal (rt_sigtimedwait)",
    ),
    "a lock on a file": (
        "import fcntl\n"
        "holder = os.open(os.environ['LOCKED'], os.O_RDWR)\n"
        "wait = lambda: fcntl.flock(holder, fcntl.LOCK_EX)",
        "a lock on a file (flock)",
    ),
    "a semaphore of System V": (
        "import ctypes\n"
        "libc = ctypes.CDLL(None); made = int(os.environ['SEMAPHORE'])\n"
        "class Op(ctypes.Structure): _fields_ = [(n, ctypes.c_short) for n in ('num', 'op', 'flg')]\n"
        "wait = lambda: libc.semop(made, ctypes.byref(Op(0, -1, 0)), 1)",
        "a semaphore of the system (sem",
    ),
}
"""Waits of a helper thread that another process ends, and what is told of them."""


@contextmanager
def semaphore() -> Iterator[int]:
    """One of System V, which outlives whoever made it."""
    libc = ctypes.CDLL(None)
    made = libc.semget(0, 1, 0o1600)
    try:
        yield made
    finally:
        libc.semctl(made, 0, 0)  # IPC_RMID


@pytest.mark.parametrize("what", FROM_OUTSIDE)
def test_a_helper_that_waits_for_another_process_may_let_the_main_thread_go(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the kernel calls the wait, only one in a private futex is a wait for the process itself."""
    lines, said = FROM_OUTSIDE[what]
    monkeypatch.setenv("LOCKED", str(tmp_path / "locked"))
    monkeypatch.setenv("EMPTY", str(tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    with (tmp_path / "locked").open("w") as mine, semaphore() as made:
        fcntl.flock(mine, fcntl.LOCK_EX)
        monkeypatch.setenv("SEMAPHORE", str(made))
        with process(f"{lines}\n{HELPER.format('wait')}threading.Event().wait()") as pid:
            now = seen(pid, lambda now: now.locked and not now.main and any(said in other for other in now.others))
            assert not now.closed
            found = sample(pid)
            assert found is not None
            assert not found.still


CALLED = "import ctypes; ctypes.CDLL(None).prctl(15, {!r}, 0, 0, 0)"


@pytest.mark.parametrize("name", ["gloo_prefetch", "pt_gloo_runloop", "turnstile-io", "cuda-EvtHandlr"])
def test_a_thread_of_the_program_is_none_of_torch_by_how_its_name_begins(name: str) -> None:
    program = f"def work():\n    {CALLED.format(name.encode())}; time.sleep(900)\n"
    with process(program + HELPER.format("work") + "threading.Event().wait()") as pid:
        now = seen(pid, lambda now: now.locked and not now.main and any("the clock" in other for other in now.others))
        assert not now.closed
        found = sample(pid)
        assert found is not None
        assert not found.still


@pytest.mark.parametrize("name", ["gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv", "turnstile"])
def test_a_thread_that_began_in_python_is_none_of_torch_whatever_its_name(name: str) -> None:
    """Nobody has looked at lines of Python."""
    program = f"def work():\n    {CALLED.format(name.encode())}; select.select([os.pipe()[0]], [], [])\n"
    with process(program + HELPER.format("work") + "threading.Event().wait()") as pid:
        waits = "a thread that waits for a file or a socket"
        seen(pid, lambda now: now.locked and [other.split(" (")[0] for other in now.others] == [waits])
        found = sample(pid)
        assert found is not None
        assert not found.still


GLOO = """
import sys, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[-1]}", rank=0, world_size=1)
kept = dist.TCPStore("127.0.0.1", 0, is_master=True)
print("up", flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_threads_that_torch_starts_are_known(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START + GLOO, str(tmp_path / "store")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == ["here\n", "up\n"]

        def threads() -> dict[str, Path]:
            tasks = [task for task in Path(f"/proc/{child.pid}/task").iterdir() if task.name != str(child.pid)]
            return {(task / "comm").read_text().strip(): task for task in tasks}

        # Each gives itself its name, when it first runs.
        until(lambda: {"gloo_tcp_loop", "pt_gloo_runloop"} <= threads().keys())
        named = threads()
        for name, task in named.items():
            assert is_of_torch(task, name) is of_torch(name)
        seen(child.pid, lambda now: now.closed)
    finally:
        child.kill()
        child.communicate()


def test_signals_that_every_python_may_catch_let_no_thread_go_on() -> None:
    program = "import faulthandler, signal; faulthandler.enable()\nfor s in (2, 17): signal.signal(s, print)\n"
    with process(program + "threading.Event().wait()") as pid:
        assert seen(pid, lambda now: now.locked and not now.main).closed


@pytest.mark.parametrize("ran", [False, True])
def test_threads_that_hand_on_to_one_another_are_not_all_waiting(ran: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is seen to wait, one after the other; that one ran meanwhile tells that they did not all at once."""
    with process(HELPER.format("threading.Event().wait") + "threading.Event().wait()") as pid:
        seen(pid, lambda now: now.closed)
        counts = iter([{1: 10, 2: 20}, {1: 10, 2: 20 + ran}])
        monkeypatch.setattr("verify.live.threads.switches", lambda _: next(counts))
        now = moves(pid)
        assert now is not None
        assert now.closed is not ran
        assert now.others == ("threads that run in turn",) * ran


def test_a_thread_that_runs_is_counted() -> None:
    program = HELPER.format("lambda: [time.sleep(0.01) for _ in range(10**6)]") + "threading.Event().wait()"
    with process(program) as pid:
        seen(pid, lambda now: now.locked)
        tasks = Path(f"/proc/{pid}/task")
        first = switches(tasks)
        now = until(lambda: (found := switches(tasks)) != first and found)
        assert now.keys() == first.keys()


@pytest.mark.parametrize(
    ("name", "told"),
    [("SIGTERM", "SIGTERM"), ("SIGWINCH", "SIGWINCH"), ("SIGHUP", "SIGHUP"), ("SIGINT", ""), ("SIGCHLD", "")],
)
def test_a_handler_of_the_programs_own_may_let_it_go(name: str, told: str) -> None:
    """Python has one for SIGINT by itself, and without a child no SIGCHLD comes."""
    program = f"import signal\nsignal.signal(signal.{name}, lambda *_: None)\nthreading.Event().wait()"
    with process(program) as pid:
        now = seen(pid, lambda now: now.locked)
        assert now.main == (f"a signal that it catches ({told})" if told else "")
        assert now.closed is not bool(told)
        # Many trainers catch SIGTERM: `top --check` is not blind to them.
        assert (one := sample(pid)) is not None
        assert one.still is (told in ("", "SIGTERM"))
