"""Where a host's ranks are born: one process that has imported torch and the models, and forks a rank for each request.

Four ranks so cost one import instead of four, and an engine started later costs none. The nursery never runs a thread
or a device call before it forks. It ends when its owner does, and its ranks end when their control sockets close. What
a rank leaves behind comes to it and is ended (`orphans`).
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from kernel.errors import UsageError
from rollout.ranks import orphans, pulse

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_COUNT = struct.Struct("<I")
STOPPED_S: Final = 30.0
"""For a nursery that is stopped to answer."""
SPAWN_S: Final = 300.0
"""For any other: it may import torch from a slow disk first."""
END_S: Final = 15.0
"""For the nursery to end by itself; it gives its ranks ten seconds."""


class Child:
    """A rank's process. `wait` gives its exit code, negative for a signal. told: the nursery has told of its end, and
    has ended what it left."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.told = False
        self._status = status
        self._waiter: asyncio.Task[int] | None = None

    async def wait(self) -> int:
        """Wait for its end; the exit code (1 when the nursery ended first and nobody can tell)."""
        if self._waiter is None:
            self._waiter = asyncio.create_task(self._wait(), name=f"exit of {self.pid}")
        # Several may wait, and one that gives up must not take the answer along.
        return await asyncio.shield(self._waiter)

    async def _wait(self) -> int:
        loop = asyncio.get_running_loop()
        data = b""
        try:
            with suppress(OSError):
                while len(data) < 4 and (more := await loop.sock_recv(self._status, 4)):
                    data += more
        finally:  # also where the loop ends before a nursery that is stopped has told
            self._status.close()
        self.told = len(data) == 4
        self.returncode = struct.unpack("<i", data)[0] if self.told else 1
        return self.returncode

    def abandon(self) -> None:
        """Nobody will wait for it."""
        self._status.close()

    def kill(self) -> None:
        """SIGKILL; nothing if it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Owns the forking process. Several engines may share one, one after the other or at once.

    threads: OpenMP threads of each rank. Close it, or use it as a context manager.
    """

    def __init__(self, threads: int = 1) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollout.ranks.nursery", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=_standard_error(),
                env={**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": str(threads)},
                start_new_session=True,  # Ctrl-C is the launcher's to handle
            )
        except OSError as error:
            ours.close()
            raise UsageError(f"ranks cannot be started: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        self._turn = asyncio.Lock()
        self._asked = False
        self._children: list[Child] = []

    async def spawn(self, fds: Sequence[int]) -> Child:
        """Fork a rank that inherits `fds` (the first is its control socket) under the same numbers.

        Raises UsageError when the nursery could not start.
        """
        # A caller that gives up must not leave its answer to the next one.
        task = asyncio.create_task(self._spawn(tuple(fds)), name="spawn")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_abandon)
            raise

    async def _spawn(self, fds: tuple[int, ...]) -> Child:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        async with self._turn:
            self._asked = True
            try:
                self._socket.setblocking(True)
                head = struct.pack(f"<I{len(fds)}i", len(fds), *fds)
                socket.send_fds(self._socket, [head], [theirs.fileno(), *fds])
                self._socket.setblocking(False)
                answer = await self._answer(loop)
            except OSError:
                answer = b""
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        if len(answer) < 4:
            ours.close()
            raise UsageError(f"ranks cannot be started: their process ended with code {self._process.wait()}")
        ours.setblocking(False)
        child = Child(struct.unpack("<i", answer)[0], ours)
        self._children = [each for each in self._children if not each.told] + [child]
        return child

    async def _answer(self, loop: asyncio.AbstractEventLoop) -> bytes:
        """What the nursery says. Raises UsageError when it is silent for too long, and ends it: an answer that comes
        later would be taken for the next one's."""
        reading = asyncio.ensure_future(loop.sock_recv(self._socket, 4))
        begun = loop.time()
        try:
            while not (await asyncio.wait([reading], timeout=0.5))[0]:
                stopped, waited = pulse.stopped(self._process.pid), loop.time() - begun
                if waited >= (STOPPED_S if stopped else SPAWN_S):
                    break
            else:
                return reading.result()
        finally:
            reading.cancel()
        self._process.kill()
        say = "it was stopped by SIGSTOP or a debugger" if stopped else "see that this host is not overloaded"
        raise UsageError(
            f"ranks cannot be started: process {self._process.pid}, which forks them (rollout.ranks.nursery), gave no"
            f" answer for {waited:.0f} s and was ended: {say}; start again"
        )

    def close(self) -> None:
        """End the nursery; ranks that run go on until their control sockets close. Idempotent."""
        if not self._asked:
            self._process.kill()  # it has no ranks, and may be importing for seconds
        with suppress(OSError):
            # A spawn that was given up may still read from the socket, and then `close` alone would end nothing.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # stopped, perhaps
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0 and (untold := {each.pid for each in self._children if not each.told}):
            orphans.end(partial(orphans.of_sessions, untold))  # what else they left came to nobody
        self._children = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _standard_error() -> int:
    """Where ranks write what a policy prints: standard output is the command's alone, `--json` one object."""
    try:
        os.fstat(2)
    except OSError:  # closed
        return subprocess.DEVNULL
    return 2


def _abandon(spawning: asyncio.Task[Child]) -> None:
    if not spawning.cancelled() and spawning.exception() is None:
        spawning.result().abandon()


def search_path() -> str:
    """Where the ranks find this package, also when it runs from a checkout, and what the caller imports from."""
    return os.pathsep.join(dict.fromkeys(os.path.abspath(entry or ".") for entry in [_home(), *sys.path]))


def _home() -> str:
    return str(Path(__file__).absolute().parents[2])


# -- the forking process ---------------------------------------------------------------------------------------------


def _owner(pid: int) -> int:
    """A descriptor that is readable once the owner has gone, -1 where the system has none (before Linux 5.3).

    The control socket alone does not tell: whatever the owner has forked, a pool of workers say, holds its end too.
    """
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        found = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(0)  # it has gone already
    except OSError:
        return -1
    if os.getppid() != pid:  # and its number is another's by now
        os._exit(0)
    return found


def _serve(control: socket.socket, owner: int = -1) -> None:
    wakeup, ring = socket.socketpair()
    wakeup.setblocking(False)
    ring.setblocking(False)
    signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        if owner >= 0:
            selector.register(owner, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wakeup:
                    with suppress(BlockingIOError):
                        wakeup.recv(4096)
                    _reap(children)
                elif key.fd == owner or not _fork(control, children, (selector, wakeup, ring), owner):
                    _end(children)
                    return orphans.end(partial(orphans.adopted, (), ()))


def _end(children: dict[int, socket.socket]) -> None:
    """The owner has gone: its ranks end by themselves as their control sockets close, or are killed if they cannot, or
    if something that the owner forked keeps these open."""
    for _ in range(100):
        _reap(children)
        if not children:
            return
        time.sleep(0.1)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for _ in range(100):
        _reap(children)
        if not children:
            return
        time.sleep(0.02)


def _fork(
    control: socket.socket, children: dict[int, socket.socket], ours: tuple[object, ...], owner: int
) -> bool:
    head, fds, _, _ = socket.recv_fds(control, 4096, 250)
    if not head:
        return False
    (count,) = _COUNT.unpack_from(head)
    wanted = struct.unpack_from(f"<{count}i", head, _COUNT.size)
    status, received = socket.socket(fileno=fds[0]), fds[1:]
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status.close()
        control.close()
        for each in (*ours, *children.values()):
            each.close()  # type: ignore[attr-defined]
        if owner >= 0:
            os.close(owner)
        _be_rank(wanted, received)
    for fd in received:
        os.close(fd)
    children[pid] = status
    try:
        control.sendall(struct.pack("<i", pid))
    except BrokenPipeError:
        return False  # the owner has gone meanwhile; the rank's control socket has closed too
    return True


def _be_rank(wanted: Sequence[int], received: Sequence[int]) -> None:
    """Move descriptors to the numbers that the arena knows them by, and run the rank. Never returns."""
    from rollout.ranks.worker import run_loop

    code = 1
    try:
        # Two steps, since a wanted number may be another received one.
        high = [_dup_above(fd, max(wanted) + 1) for fd in received]
        for fd in received:
            os.close(fd)
        for fd, number in zip(high, wanted, strict=True):
            os.dup2(fd, number, inheritable=False)
            os.close(fd)
        os.setsid()
        code = run_loop(str(wanted[0]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _dup_above(fd: int, lowest: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(lowest, 64))


def _reap(children: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if (told := children.pop(pid, None)) is not None:
            orphans.end(partial(orphans.adopted, children, {pid}))
            with suppress(OSError):
                told.sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))
            told.close()


def main() -> None:
    """Entry point of the forking process."""
    control = socket.socket(fileno=int(sys.argv[1]))
    owner = _owner(int(sys.argv[2]))
    orphans.adopt()
    import torch  # noqa: F401
    import uvloop  # noqa: F401

    import rollout.ranks.links
    import rollout.ranks.worker  # noqa: F401

    _serve(control, owner)


if __name__ == "__main__":
    main()
