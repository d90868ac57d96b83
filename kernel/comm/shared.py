"""The shared memory of one world on one host: created by the launcher, attached by each rank.

It is an anonymous file (`memfd_create`) that ranks inherit as an open descriptor. It has no name in any file system, so
nothing is left behind however the processes end, and no other program can open it by guessing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kernel.comm.futex import Fence, Futex
from kernel.comm.shared_map import ABORT_AT, FDS_AT, PAGE, STATUS, ArenaMap, Region
from kernel.errors import RankLost, UsageError
from kernel.topology import Role, World

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.request import Phase

_MAGIC: Final = b"TURNSTIL"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("=8sIIIIQ")
_STATUS: Final = struct.Struct("=II")
_TEXT: Final = struct.Struct("=I504s")


class Liveness(IntEnum):
    """Where a rank's process stands, by its own word."""

    STARTING = 0
    RUNNING = 1
    ENDED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank last said of itself. pid: 0 until it has attached."""

    state: Liveness
    pid: int
    reason: str


class Arena:
    """One world's shared memory, seen from the launcher (`rank` is None) or from a rank.

    Ranks inherit `fds`, under the same numbers: `subprocess.Popen(..., pass_fds=arena.fds)`.
    """

    def __init__(self, fd: int, where: ArenaMap, bells: tuple[int, ...], rank: int | None) -> None:
        self.fd, self.map, self.rank = fd, where, rank
        self.memory = mmap.mmap(fd, where.total)
        self.world = World(where.size, where.adp, where.ep)
        """The ranks' division. Its gather and route are the defaults: an arena serves any."""
        self.bytes = memoryview(self.memory)
        self.u32, self.u64 = self.bytes.cast("I"), self.bytes.cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._bells = bells
        self._lock = threading.Lock()
        self._open, self._released = True, False
        self._why: str | None = None

    @classmethod
    def create(cls, world: World, capacity: int = 1 << 20) -> Arena:
        """The launcher's side. capacity: bytes a member can publish at once; longer payloads go in chunks.

        Raises UsageError where the machine has no futex.
        """
        where = ArenaMap(world.size, world.adp, world.ep, -(-capacity // PAGE) * PAGE)
        fd = os.memfd_create("turnstile", os.MFD_CLOEXEC)
        os.ftruncate(fd, where.total)
        bells = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(world.size))
        arena = cls(fd, where, bells, None)
        _HEAD.pack_into(arena.memory, 0, _MAGIC, _VERSION, where.size, where.adp, where.ep, where.capacity)
        struct.pack_into(f"={world.size}i", arena.memory, FDS_AT, *bells)
        Futex(arena.address)  # fails here rather than in every rank
        return arena

    @classmethod
    def attach(cls, fd: int, rank: int) -> Arena:
        """A rank's side, over the inherited descriptor; takes the descriptors over. Raises UsageError."""
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size or _HEAD.unpack(head)[:2] != (_MAGIC, _VERSION):
            raise UsageError(f"descriptor {fd} is not this version's shared memory: let the command start the ranks")
        size, adp, ep, capacity = _HEAD.unpack(head)[2:]
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} attached to shared memory of {size} ranks: rank must be 0 to {size - 1}")
        bells = struct.unpack(f"={size}i", os.pread(fd, 4 * size, FDS_AT))
        for inherited in (fd, *bells):
            os.set_inheritable(inherited, False)
        arena = cls(fd, ArenaMap(size, adp, ep, capacity), bells, rank)
        arena.report(Liveness.STARTING)
        return arena

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that ranks inherit."""
        return (self.fd, *self._bells)

    def bell(self, rank: int) -> int:
        """The eventfd of `rank`, non-blocking."""
        return self._bells[rank]

    def ring(self, ranks: Iterable[int]) -> None:
        """Wake the event loops of `ranks`."""
        for rank in ranks:
            with suppress(BlockingIOError):  # a full counter is a bell that is ringing
                os.eventfd_write(self._bells[rank], 1)

    def region(self, phase: Phase, role: Role, rank: int) -> Region | None:
        """The communicator of `role` that `rank` belongs to; None where it is alone in it."""
        role = self.world.canonical(role)
        for region in self.map.regions:
            if region.phase is phase and region.role is role and rank in region.members:
                return region
        return None

    def exchange(self, phase: Phase, kind: str) -> Region:
        """The communicator of all ranks for the `counts` or `rows` of a phase's expert exchange."""
        return next(each for each in self.map.exchanges if each.phase is phase and each.kind == kind)

    # -- liveness -----------------------------------------------------------------------------------------------

    def report(self, state: Liveness, reason: str = "", rank: int | None = None) -> None:
        """Say where this rank (or, from the launcher, `rank`) stands."""
        who = rank if rank is not None else self.rank
        if who is None:
            raise ValueError("the launcher reports for a rank and names it")
        pid = os.getpid() if who == self.rank else self.status(who).pid
        at = self.map.status + who * STATUS
        self._write_text(at + _STATUS.size, reason)
        _STATUS.pack_into(self.memory, at, state, pid)

    def status(self, rank: int) -> RankStatus:
        """What `rank` last reported."""
        at = self.map.status + rank * STATUS
        state, pid = _STATUS.unpack_from(self.memory, at)
        return RankStatus(Liveness(state), pid, self._read_text(at + _STATUS.size))

    # -- abort --------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """End the run: everybody who waits, or will wait, in this arena raises RankLost with `reason`, at once.

        The first reason stays. Callable from any thread of any process; nothing once closed.
        """
        with self._lock:
            if not self._open:
                return
            fence = Fence()
            if self.u32[ABORT_AT // 4] == 0:
                # Each caller has its own text, so that two at once cannot mix their words; the word says whose to read.
                who = self.map.size if self.rank is None else self.rank
                self._write_text(self._abort_text(who), reason)
                fence()
                self.u32[ABORT_AT // 4] = who + 1
            fence()
            for region in (*self.map.regions, *self.map.exchanges):
                self.disturb(region)
            self.ring(range(self.map.size))

    @property
    def aborted(self) -> str | None:
        """Why the run was aborted, None while it goes on."""
        if self._released:
            return self._why
        who = self.u32[ABORT_AT // 4]
        return self._read_text(self._abort_text(who - 1)) if who else None

    def check(self, doing: str) -> None:
        """Raise RankLost, naming `doing` and the reason, once the run was aborted."""
        if (reason := self.aborted) is not None:
            raise RankLost(f"{doing} was given up: {reason}")

    def disturb(self, region: Region) -> None:
        """Make every sleeper of `region` look again."""
        # An odd value: members ring with even ones, so no sleeper can have seen it (`kernel.comm.channel`).
        self.u32[region.bell // 4] = random.getrandbits(31) << 1 | 1
        Futex(self.address + region.bell).wake()

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last object that uses it, the launcher's here. Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                for fd in self.fds:
                    os.close(fd)
                if self.rank is None:
                    self._why = self.aborted
                    self._released = True
                    for view in (self.u32, self.u64, self.bytes):
                        view.release()
                    with suppress(BufferError):  # somebody still looks at it
                        self.memory.close()

    # -- texts --------------------------------------------------------------------------------------------------

    def _abort_text(self, who: int) -> int:
        return self.map.status + who * STATUS + _STATUS.size + _TEXT.size

    def _write_text(self, at: int, text: str) -> None:
        data = " ".join(text.split()).encode(errors="backslashreplace")[:504]
        _TEXT.pack_into(self.memory, at, len(data), data)

    def _read_text(self, at: int) -> str:
        length, data = _TEXT.unpack_from(self.memory, at)
        return bytes(data[: min(length, 504)]).decode(errors="replace")
