"""Real processes as the ranks of a world, for tests: started once, used by many calls.

    with Ranks(World(2)) as ranks:
        assert ranks.run(add, 1) == [1, 2]          # def add(me: Me, n: int) -> int: return me.rank + n

A function runs on all ranks at once. It must be importable (module level of a test file) and so must its arguments and
result be picklable. It gets `Me`: rank, world, the attached arena, and `keep`, where it can leave objects for later
calls. An `async def` runs on the rank's event loop, which lives as long as the rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from kernel.comm.shared import Arena, Liveness
from kernel.errors import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from kernel.topology import World


@dataclass
class Me:
    """This rank, as a function sees it."""

    rank: int
    world: World
    arena: Arena
    keep: dict[Any, Any] = field(default_factory=dict)


@dataclass
class _Raised:
    """An exception in parts: pickle would call its class with its message, which is not what all classes take."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    def rebuilt(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.args)
        error.__dict__.update(self.state)
        return error


class Ranks:
    """`world.size` processes with an arena.

    uvloop: run `async def` functions on uvloop rather than asyncio's loop. timeout_s: bound of each call; a rank that
    exceeds it prints its threads' stacks to stderr, the world is killed and TimeoutError raised.
    """

    def __init__(
        self, world: World, *, capacity: int = 1 << 20, uvloop: bool = True, timeout_s: float = 60.0
    ) -> None:
        self.world, self.timeout_s = world, timeout_s
        self.arena = Arena.create(world, capacity)
        self._links: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(world.size):
            ours, theirs = Pipe()
            setup = json.dumps([sys.path, rank, self.arena.fd, theirs.fileno(), uvloop, os.getpid()])
            load = "import sys, json; setup = json.loads(sys.argv[1]); sys.path[:] = setup[0]"
            code = f"{load}; from {__name__} import _serve; _serve(*setup[1:])"
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code, setup],
                    pass_fds=(*self.arena.fds, theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                )
            )
            theirs.close()
            self._links.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """function(me, *args) on all ranks; their results in rank order.

        Raises the first rank's exception if any raised, with that rank's traceback as a note.
        """
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """As `run`, but an exception takes its rank's place among the results. A rank that died is a RankLost."""
        self.start(function, *args)
        return self.finish(timeout_s)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call on all living ranks; `finish` collects it. In between, kill ranks or abort."""
        message = pickle.dumps((function, args))
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send_bytes(message)

    def finish(self, timeout_s: float | None = None) -> list[Any]:
        """The outcomes of the call that `start` began."""
        outcomes: dict[int, Any] = {}
        end = time.monotonic() + (timeout_s or self.timeout_s)
        while len(outcomes) < self.world.size:
            pending = {link: rank for rank, link in enumerate(self._links) if rank not in outcomes}
            ready = wait(list(pending), max(0.0, end - time.monotonic()))
            if not ready:
                self._stuck(sorted(pending.values()))
            for link in ready:
                assert isinstance(link, Connection)
                rank = pending[link]
                try:
                    outcome = pickle.loads(link.recv_bytes())
                    outcomes[rank] = outcome.rebuilt() if isinstance(outcome, _Raised) else outcome
                except (EOFError, OSError):
                    # What a launcher does when a rank's process ends: name it, and wake everybody who waits for it.
                    reason = f"rank {rank} ended with status {self.processes[rank].wait()}"
                    self.arena.report(Liveness.FAILED, reason, rank)
                    self.arena.abort(reason)
                    outcomes[rank] = RankLost(reason)
        return [outcomes[rank] for rank in range(self.world.size)]

    def kill(self, rank: int) -> None:
        """SIGKILL one rank, now. The world cannot be used after the call in progress."""
        self.processes[rank].kill()

    def close(self) -> None:
        """End all ranks."""
        for link in self._links:
            link.close()
        end = time.monotonic() + 5
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.arena.close()

    def _stuck(self, late: list[int]) -> None:
        for rank in late:
            self.processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        for process in self.processes:
            process.kill()
        raise TimeoutError(f"ranks {late} are stuck in the call; their stacks are on stderr")


def _serve(rank: int, arena_fd: int, link_fd: int, uvloop: bool, parent: int) -> None:
    """A rank's process: run functions until the link closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the rank never outlives its test
    if os.getppid() != parent:
        return
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(link_fd, False)
    link = Connection(link_fd)
    arena = Arena.attach(arena_fd, rank)
    me = Me(rank, arena.world, arena)
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if uvloop:
        import uvloop as fast

        factory = fast.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        while True:
            try:
                message = link.recv_bytes()
            except (EOFError, OSError):
                break
            link.send_bytes(_call(runner, me, message))
    os._exit(0)  # whatever threads and groups tests have left


def _call(runner: asyncio.Runner, me: Me, message: bytes) -> bytes:
    try:
        function, args = pickle.loads(message)
        result = function(me, *args)
        if inspect.iscoroutine(result):
            result = runner.run(result)
        return pickle.dumps(result)
    except BaseException as error:
        note = f"on rank {me.rank}:\n{''.join(traceback.format_exception(error))}"
        error.add_note(note)
        try:
            return pickle.dumps(_Raised(type(error), error.args, error.__dict__))
        except Exception:
            return pickle.dumps(_Raised(RuntimeError, (note,), {}))
