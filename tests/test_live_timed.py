"""Which waits may end by the clock: real threads that wait, and lines of the system as it prints them."""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.commands import until
from tests.standing import stands
from verify.live.calls import call_of
from verify.live.idle import _harmless
from verify.live.named import of_torch
from verify.live.origin import started_in
from verify.live.timed import timed

if TYPE_CHECKING:
    from collections.abc import Callable

TOO_LONG = 100.0
"""Seconds that a wait would take; a test ends it long before."""
TASKS = Path("/proc/self/task")
TICK = ("pt_gloo_runloop", "gloo_tcp_loop", "pt_nccl_watchdg", "pt_nccl_heartbt", "pt_tcpstore", "pt_tcpstore_uv",
        "NCCL Service  0", "NCCL Progress 7", "NCCL UDS Servic", "NCCL SockS0 0 1", "NCCL IbAsync  1", "NCCL RAS",
        "cuda-EvtHandlr", "cuda00001400006", "turnstile")  # fmt: skip


def readable() -> bool:
    try:
        return bool((TASKS / str(threading.get_native_id()) / "syscall").read_text())
    except OSError:
        return False


REAL = pytest.mark.skipif(not readable(), reason="the system does not tell in which call a thread is")


class Waiting:
    """A thread in a wait, which `ends` ends."""

    def __init__(self, wait: Callable[[], Any], ends: Callable[[], Any]) -> None:
        self._ends, self._thread = ends, threading.Thread(target=wait)

    def __enter__(self) -> Path:
        before = {int(each.name) for each in TASKS.iterdir()}
        self._thread.start()
        task = TASKS / str(self._thread.native_id)
        assert int(task.name) not in before
        until(lambda: stands(task))
        return task

    def __exit__(self, *_: object) -> None:
        self._ends()
        self._thread.join()


@REAL
@pytest.mark.parametrize("limit", [None, TOO_LONG])
@pytest.mark.parametrize("how", ["event", "queue", "poll", "select", "epoll"])
def test_real_waits(how: str, limit: float | None) -> None:
    """The same wait with a time limit and without one."""
    read, write = os.pipe()
    event = threading.Event()
    poll, epoll = select.poll(), select.epoll()
    poll.register(read, select.POLLIN)
    epoll.register(read, select.EPOLLIN)
    waits = {
        "event": lambda: event.wait(limit),
        "queue": lambda: lock.acquire(timeout=-1 if limit is None else limit),
        "poll": lambda: poll.poll(None if limit is None else limit * 1000),
        "select": lambda: select.select([read], [], [], limit),
        "epoll": lambda: epoll.poll(limit),
    }
    lock = threading.Lock()
    lock.acquire()

    def ends() -> None:
        event.set()
        lock.release()
        os.write(write, b"x")

    try:
        with Waiting(waits[how], ends) as task:
            assert timed(task) is (limit is not None)
            if how in ("event", "queue"):
                assert _harmless(task) is (limit is None)
    finally:
        epoll.close()
        os.close(read)
        os.close(write)


@REAL
def test_a_thread_that_sleeps_may_go_on_by_itself() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    ident: list[int] = []

    def sleeps() -> None:
        ident.append(threading.get_ident())
        ctypes.CDLL(None).usleep(int(TOO_LONG * 1e6))  # unlike time.sleep, a signal ends it

    try:
        with Waiting(sleeps, lambda: signal.pthread_kill(ident[0], signal.SIGUSR1)) as task:
            assert timed(task) is True
            assert not _harmless(task)
    finally:
        signal.signal(signal.SIGUSR1, before)


@REAL
@pytest.mark.parametrize("name", TICK)
@pytest.mark.parametrize("began", ["/x/libtorch_cpu.so", "/x/libcuda.so.535", "/x/libpython3.11.so.1.0", "", None])
def test_threads_that_tick_for_ever_are_known_by_their_names_and_by_where_they_began(
    name: str, began: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = threading.Event()
    of_record = name == "turnstile"
    monkeypatch.setattr("verify.live.named.started_in", lambda _: began)
    monkeypatch.setattr("verify.live.named._has_one_record", lambda _: True)
    with Waiting(lambda: event.wait(TOO_LONG), event.set) as task:
        (task / "comm").write_text(name)
        assert timed(task) is True
        assert of_torch(name)
        assert _harmless(task) is bool(began and ("python" in began) is of_record)


@REAL
@pytest.mark.parametrize("name", TICK)
def test_a_thread_of_python_is_none_of_torch_whatever_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.live.named._RING", re.compile("none"))  # this process may have those of other tests
    event = threading.Event()
    with Waiting(lambda: event.wait(TOO_LONG), event.set) as task:
        (task / "comm").write_text(name)
        assert "python" in str(started_in(task))
        assert not _harmless(task)


@REAL
@pytest.mark.parametrize(
    "name", ["pt_data_pin", "pt_autograd_0", "pt_dist_engine", "c10worker", "python",
             "gloo", "gloo_prefetch", "gloo_tcp_loop_x", "pt_gloo_runloo", "pt_nccl_x", "NCCL", "NCCL Service", "cuda",
             "cuda-EvtHandl", "cuda_loader", "turnstile-io", "ProcessGroup"],
)  # fmt: skip
def test_threads_that_run_code_of_the_program_are_none_of_these(name: str) -> None:
    event = threading.Event()
    with Waiting(lambda: event.wait(TOO_LONG), event.set) as task:
        (task / "comm").write_text(name)
        assert not _harmless(task)


@pytest.mark.parametrize(
    ("machine", "line", "answer"),
    [
        ("x86_64", "202 0x55 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", False),
        ("x86_64", "202 0x55 0x89 0x0 0x7f79829fe960 0x0 0xffffffff 0x7f 0x7f", True),
        ("x86_64", "232 0x7 0x7f 0x40 0xa 0x0 0x0 0x7f 0x7f", True),
        ("x86_64", "281 0x3 0x7f 0x400 0xffffffff 0x0 0x8 0x7f 0x7f", False),
        ("x86_64", "7 0x3 0x1 0xffffffffffffffff 0x0 0x0 0x8 0x7f 0x7f", False),
        ("x86_64", "230 0x1 0x1 0x7f 0x0 0x0 0x7f 0x7f 0x7f", True),
        ("x86_64", "0 0x3 0x7f 0x1000 0x7f 0x0 0x7f 0x7f 0x7f", False),
        ("aarch64", "98 0x55 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", False),
        ("aarch64", "98 0x55 0x89 0x0 0x7f 0x0 0xffffffff 0x7f 0x7f", True),
        ("aarch64", "115 0x1 0x1 0x7f 0x0 0x0 0x7f 0x7f 0x7f", True),
        ("aarch64", "22 0x3 0x7f 0x400 0xffffffff 0x0 0x8 0x7f 0x7f", False),
        ("riscv64", "98 0x55 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", None),
        ("x86_64", "running", None),
        ("x86_64", "-1 0x7f 0x7f", None),
    ],
)
def test_lines_of_the_system(machine: str, line: str, answer: bool | None, tmp_path: Path) -> None:
    (tmp_path / "syscall").write_text(line + "\n")
    assert timed(tmp_path, machine) is answer


def test_what_the_system_does_not_tell_is_not_known(tmp_path: Path) -> None:
    assert timed(tmp_path) is None


@pytest.mark.parametrize(
    ("machine", "line", "inside"),
    [
        ("x86_64", "202 0x55 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", True),
        ("x86_64", "202 0x55 0x80 0x2 0x0 0x0 0x0 0x7f 0x7f", True),
        ("x86_64", "202 0x55 0x109 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", False),  # not private
        ("x86_64", "202 0x55 0x81 0x1 0x0 0x0 0x0 0x7f 0x7f", False),  # it lets others go
        ("x86_64", "128 0x7f 0x7f 0x0 0x8 0x0 0x0 0x7f 0x7f", False),
        ("x86_64", "73 0x3 0x2 0x0 0x0 0x0 0x0 0x7f 0x7f", False),
        ("x86_64", "45 0x3 0x7f 0x189 0x0 0x0 0x0 0x7f 0x7f", False),
        ("x86_64", "999 0x55 0x189 0x0 0x0 0x0 0x0 0x7f 0x7f", False),
        ("aarch64", "98 0x55 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", True),
        ("aarch64", "202 0x55 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", False),
    ],
)
def test_only_a_private_futex_is_a_wait_for_the_process_itself(
    machine: str, line: str, inside: bool, tmp_path: Path
) -> None:
    (tmp_path / "syscall").write_text(line + "\n")
    call = call_of(tmp_path, machine)
    assert call is not None
    assert call.inside is inside
