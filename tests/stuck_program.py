"""A rank of a small job on gloo that gets stuck, as `python stuck_program.py SCENE STORE-FILE RECORD-DIRECTORY FIFO`.

RANK and WORLD_SIZE are in the environment, as torchrun sets them. Each rank prints `rank k: at the scene` right before
the calls that get stuck. With a record directory that is not "-" it records itself, in the lines that README shows.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 3


def here() -> None:
    print(f"rank {RANK}: at the scene", flush=True)


def train() -> torch.Tensor:
    """A few steps that all ranks do alike."""
    x = torch.ones(4)
    for _ in range(STEPS):
        dist.all_reduce(x)
    return x


def crossing() -> None:
    """Two groups in opposite order, and the host waits for each call."""
    one, other = dist.new_group(group_desc="P"), dist.new_group(group_desc="D")
    x = train()
    here()
    for group in (one, other) if RANK == 0 else (other, one):
        dist.all_reduce(x, group=group)


def missing() -> None:
    """The last rank goes on computing, and never makes the call."""
    x = train()
    here()
    if RANK == SIZE - 1:
        while x.sum() > 0:
            x = x * 1.0
    dist.all_reduce(x)


def died() -> None:
    """Rank 1 dies while rank 0 waits for its word."""
    train()
    store: Any = dist.distributed_c10d._get_default_store()
    here()
    if RANK == 1:
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["checkpoint written"], timedelta(minutes=10))


def died_in_a_call() -> None:
    """Rank 1 dies, and gloo tells rank 0 that is in a call with it, which keeps the exception and goes on."""
    x = train()
    here()
    if RANK == 1:
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)


def reads() -> None:
    """The last rank reads a pipe that nobody writes to."""
    x = train()
    here()
    if RANK == SIZE - 1:
        with open(FIFO) as file:
            print(file.read())
    dist.all_reduce(x)


def _locked(lock: Callable[..., object], *how: int) -> Any:
    """An open file, of which rank 0 holds the lock; the ranks have trained since."""
    opened = open(f"{file}.lock", "w")  # noqa: SIM115
    _kept.append(opened)
    if RANK == 0:
        lock(opened, fcntl.LOCK_EX, *how)
    train()
    return opened


def _keeps(lock: Callable[..., object], *how: int) -> None:
    """Rank 0 waits in a call while it holds the lock on a file; rank 1 waits for that lock before the call."""
    opened = _locked(lock, *how)
    here()
    if RANK == 1:
        lock(opened, fcntl.LOCK_EX, *how)
    dist.all_reduce(torch.ones(4))


keeps_a_lock, keeps_a_range = partial(_keeps, fcntl.flock), partial(_keeps, fcntl.lockf, 10)


def keeps_a_pipe() -> None:
    """Rank 1 reads, before a call, what rank 0 is to write after it."""
    x = train()
    pipe = os.open(FIFO, os.O_RDWR if RANK == 0 else os.O_RDONLY)
    here()
    if RANK == 1:
        os.read(pipe, 1)
    dist.all_reduce(x)
    os.write(pipe, b"x")


def locks_of_each_other() -> None:
    """Ranks 0 and 1 hold a lock each and wait for that of the other one; the last rank waits for both in a call."""
    locks = [open(f"{file}.{name}", "w") for name in "ab"]  # noqa: SIM115
    _kept.extend(locks)
    if RANK < 2:
        fcntl.flock(locks[RANK], fcntl.LOCK_EX)
    x = train()
    here()
    if RANK < 2:
        fcntl.flock(locks[1 - RANK], fcntl.LOCK_EX)
    dist.all_reduce(x)


def lock_of_a_sleeper() -> None:
    """Nothing is wrong: rank 0 holds the lock that rank 1 waits for, and lets it go when it has slept."""
    lock = _locked(fcntl.flock)
    here()
    if RANK == 0:
        time.sleep(600)
        fcntl.flock(lock, fcntl.LOCK_UN)
    if RANK == 1:
        fcntl.flock(lock, fcntl.LOCK_EX)
    dist.all_reduce(torch.ones(4))


def lock_of_a_helper() -> None:
    """Nothing is wrong: rank 0 waits in the call, and a thread of it lets the lock go when it has slept."""
    from threading import Thread

    lock = _locked(fcntl.flock)
    if RANK == 0:
        Thread(target=lambda: (time.sleep(600), fcntl.flock(lock, fcntl.LOCK_UN)), daemon=True).start()
    here()
    if RANK == 1:
        fcntl.flock(lock, fcntl.LOCK_EX)
    dist.all_reduce(torch.ones(4))


def returns() -> None:
    """The last rank has no tokens, and is through."""
    x = train()
    here()
    if RANK == SIZE - 1:
        return
    dist.all_reduce(x)


def returns_alive() -> None:
    """The same, but its process waits for more work."""
    x = train()
    here()
    if RANK == SIZE - 1:
        if RECORD:
            record.decision("skips the step: no tokens")
        while True:
            time.sleep(600)
    dist.all_reduce(x)


def serves() -> None:
    """The same, but what it waits for is up to another thread, of which there is none."""
    import threading

    x = train()
    here()
    if RANK == SIZE - 1:
        threading.Event().wait()
    dist.all_reduce(x)


def other_operation() -> None:
    """Rank 0 reduces while rank 1 broadcasts."""
    x = train()
    here()
    if RANK == 0:
        dist.all_gather([torch.empty(4) for _ in range(SIZE)], x)
    else:
        dist.broadcast(x, 0)
        dist.barrier()


def other_size() -> None:
    """Rank 0 brings more elements than rank 1."""
    train()
    here()
    dist.all_reduce(torch.ones(4 if RANK == 0 else 8))


def holds_gil() -> None:
    """The last rank is in C code that keeps the interpreter lock."""
    x = train()
    here()
    if RANK == SIZE - 1:
        ctypes.PyDLL(None).usleep(600_000_000)
    dist.all_reduce(x)


def waits_for_a_helper() -> None:
    """The last rank waits for a thread of its own that sleeps; a thread that is idle for good is beside it."""
    from concurrent.futures import ThreadPoolExecutor

    x = train()
    here()
    if RANK == SIZE - 1:
        with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as idle:
            idle.submit(int).result()
            pool.submit(time.sleep, 600).result()
    dist.all_reduce(x)


def serves_with_a_pool() -> None:
    """The last rank waits for a thread of its own that waits for nothing that comes, beside threads of a pool."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Event

    x = train()
    here()
    if RANK == SIZE - 1:
        with ThreadPoolExecutor(2) as pool:
            pool.submit(int).result()
            pool.submit(Event().wait).result()
    dist.all_reduce(x)


def _request(kind: str) -> Callable[[], object]:
    """A wait for what another process gives: here nobody does, but nothing in this process tells so."""
    if kind == "tcp":
        server = socket.create_server(("127.0.0.1", 0))
        mine, there = socket.create_connection(server.getsockname()), server.accept()
        return lambda: (mine.recv(1), there, server)
    if kind == "signal":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        return lambda: signal.sigwait([signal.SIGUSR1])
    if kind == "lock":
        lock = open(f"{file}.lock", "w")  # noqa: SIM115
        if RANK == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
        dist.barrier()
        return lambda: fcntl.flock(lock, fcntl.LOCK_EX)
    return lambda: (ctypes.CDLL(None).prctl(15, b"gloo_prefetch", 0, 0, 0), time.sleep(600))


def _serves(kind: str) -> None:
    """Nothing is wrong: the last rank waits for a thread of its own, which waits for a request or for the clock."""
    from threading import Event, Thread

    x, came, request = train(), Event(), _request(kind)
    here()
    if RANK == SIZE - 1:
        Thread(target=lambda: (request(), came.set()), daemon=True).start()
        came.wait()
    elif kind == "lock":
        _kept.append(request)
    dist.all_reduce(x)


_kept: list[object] = []
serves_tcp, serves_signal = partial(_serves, "tcp"), partial(_serves, "signal")
serves_lock, serves_named = partial(_serves, "lock"), partial(_serves, "named")


def crosses_a_request() -> None:
    """Nothing is wrong: each rank has a thread in a call that the other one makes when a request comes."""
    from threading import Thread

    one, other = dist.new_group(group_desc="P"), dist.new_group(group_desc="D")
    mine, asked = (one, other) if RANK == 0 else (other, one)
    train()
    request = _request("tcp")

    def call() -> None:
        dist.all_reduce(torch.ones(4), group=mine)

    def serve() -> None:
        request()
        dist.all_reduce(torch.ones(4), group=asked)

    threads = [Thread(target=each, daemon=True) for each in (call, serve)]
    for thread in threads:
        thread.start()
    here()
    for thread in threads:
        thread.join()


def enters_a_lock() -> None:
    """The last rank waits for a lock that a thread of its own keeps."""
    from threading import Lock

    x = train()
    guard = Lock()
    here()
    if RANK == SIZE - 1:
        guard.acquire()
        with guard:
            pass
    dist.all_reduce(x)


def pairs() -> None:
    """Both ranks receive before they send."""
    x = train()
    here()
    dist.recv(x, 1 - RANK)
    dist.send(x, 1 - RANK)


def crosses_a_helper() -> None:
    """Nothing is wrong: the main threads wait in two groups, for helpers of each other's rank that take their time."""
    from threading import Thread

    one, other = dist.new_group(group_desc="P"), dist.new_group(group_desc="D")
    mine, helped = (one, other) if RANK == 0 else (other, one)

    def help_out() -> None:
        time.sleep(600)
        dist.all_reduce(torch.ones(4), group=helped)

    x = train()
    Thread(target=help_out, daemon=True).start()
    here()
    dist.all_reduce(x, group=mine)


def crosses_under_a_lock() -> None:
    """Each rank has two threads that call under one lock, in opposite order, and a main thread that waits for them."""
    from threading import Event, Lock, Thread

    groups = [dist.new_group(group_desc=name) for name in ("P", "D")]
    guard, taken = Lock(), Event()

    def call(place: int) -> None:
        with guard:
            taken.set()
            dist.all_reduce(torch.ones(4), group=groups[place])

    train()
    threads = [Thread(target=call, args=(place,), daemon=True) for place in ((0, 1) if RANK == 0 else (1, 0))]
    for thread in threads:
        thread.start()
        taken.wait()
    here()
    for thread in threads:
        thread.join()


def crosses_by_futures() -> None:
    """Two groups in opposite order, waited for through the futures of the calls."""
    groups = [dist.new_group(group_desc=name) for name in ("P", "D")]
    train()
    here()
    for group in groups if RANK == 0 else groups[::-1]:
        dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future().wait()


def makes_other_members() -> None:
    """Rank 0 takes itself and rank 1 into a group, the others take everybody."""
    x = train()
    here()
    group = dist.new_group([0, 1] if RANK == 0 else list(range(SIZE)))
    dist.all_reduce(x, group=group)


def makes_another_order() -> None:
    """Rank 1 makes two groups in the other order."""
    x = train()
    lists = [[0, 1], [0, 1, 2]]
    here()
    for members in lists[::-1] if RANK == 1 else lists:
        dist.new_group(members)
    dist.all_reduce(x)


def tags_differ() -> None:
    """A send with one tag and a recv with another."""
    train()
    here()
    if RANK == 0:
        dist.send(torch.ones(1 << 20), 1, tag=1)
    else:
        dist.recv(torch.ones(1 << 20), 0, tag=2)


def ends() -> None:
    """Nothing is wrong, and the job waits for its next piece of work."""
    train()
    here()
    time.sleep(600)


if __name__ == "__main__":
    scene, file = sys.argv[1:3]
    RECORD, FIFO = (sys.argv[3] if sys.argv[3] != "-" else ""), sys.argv[4]
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if RECORD:
        from turnstile import record

        record.install(RECORD)
    store = dist.FileStore(file, SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(minutes=10))
    (globals().get(scene) or getattr(import_module("tests.stuck_calls"), scene))()
    if scene not in ("returns",):
        dist.barrier()
