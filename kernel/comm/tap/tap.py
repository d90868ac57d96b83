"""The record of a program that is not ours: all wrappers, on one ring, put there and taken away again."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import sys
import threading
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from kernel.comm.tap.below import Below
from kernel.comm.tap.deep_ep import DeepEP
from kernel.comm.tap.device import Device
from kernel.comm.tap.futures import Futures
from kernel.comm.tap.groups import Groups
from kernel.comm.tap.life import Life
from kernel.comm.tap.notes import Notes
from kernel.comm.tap.patches import Patches
from kernel.comm.tap.watch import Watch
from kernel.errors import UsageError
from kernel.record.foreign import PROGRAM, UNINSTALLED
from kernel.record.layout import MAX_CAPACITY, Kind
from kernel.record.writer import Recorder, ring_path

RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
SIZES: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
STRINGS: Final = 4 << 20
MOST_RANKS: Final = 1 << 20

_lock = threading.RLock()
_current: list[Tap] = []
"""The record of this process, if there is one; wrappers are of the process too."""


class Tap:
    """A record that is being written, or has ended. path: of the ring; None before the rank is known, or if it cannot
    be written. As a context manager it ends with the block.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int | None, capacity: int) -> None:
        self.directory, self.path = Path(directory).absolute(), None
        self._rank, self._capacity = rank, capacity
        self._patches = Patches()
        self._parts: list[Any] = []
        self._watch: Watch | None = None
        self._recorder: Recorder | None = None
        self._notes: Notes | None = None
        self._early = Patches()
        self._closed = False
        self._pid = os.getpid()

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    @property
    def active(self) -> bool:
        """Whether calls are recorded now."""
        return self._notes is not None and not self._closed

    def start(self) -> None:
        """Begin, at once where the rank is known, else when the program joins its default group."""
        rank, size = self._rank, _number(SIZES)
        if rank is None:
            if dist.is_initialized():
                rank, size = dist.get_rank(), dist.get_world_size()
            else:
                rank = _number(RANKS)
        if rank is not None:
            self._begin(rank, size)
        else:
            self._early.function(dist.distributed_c10d, "init_process_group", self._joins)

    def uninstall(self) -> None:
        """End the record, and put everything back. Idempotent."""
        with _lock:
            if self._closed:
                return
            if self._notes is not None and os.getpid() == self._pid:
                self._notes.say(Kind.MARK, UNINSTALLED)
            self._finish()

    def _finish(self) -> None:
        """The same at the end of the process."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            self._early.undo()
            for part in (*self._parts, self._notes):
                if part is not None:
                    part.off = True
            self._patches.undo()
            for part in self._parts:
                if hasattr(part, "undo"):
                    part.undo()
            if self._watch is not None and os.getpid() == self._pid:
                self._watch.stop()
            if self._recorder is not None and os.getpid() == self._pid:
                with contextlib.suppress(OSError, ValueError):
                    self._recorder.close()
            atexit.unregister(self._finish)
            if self in _current:
                _current.remove(self)

    def decision(self, text: str) -> None:
        """Note a decision that this rank takes by itself. Never raises."""
        if (notes := self._notes) is not None and not self._closed:
            try:
                notes.say(Kind.DECISION, str(text))
            except Exception as error:
                notes.broken("a decision", error)

    def _joins(self, original: Any) -> Any:
        def init_process_group(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            with contextlib.suppress(Exception):
                if self._notes is None and not self._closed and dist.is_initialized():
                    self._early.undo()
                    self._begin(dist.get_rank(), dist.get_world_size())
            return result

        return init_process_group

    def _begin(self, rank: int, size: int | None) -> None:
        path = ring_path(self.directory, rank)
        meta: dict[str, Any] = {"program": PROGRAM, "argv": [word[:200] for word in sys.argv[:20]]}
        meta["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
        if size is not None and size > 0:
            meta["size"] = size
        try:
            self._recorder = Recorder(path, rank=rank, groups={}, meta=meta, capacity=self._capacity, strings=STRINGS)
        except (UsageError, OSError) as error:
            why = str(error).partition(": choose another")[0]
            print(f"turnstile: no record of rank {rank}: {why}: give record.install a directory that it can write, on a"
                  " disk with room", file=sys.stderr, flush=True)  # fmt: skip
            return
        self.path = path  # type: ignore[assignment]
        notes = self._notes = Notes(self._recorder)
        notes.thread()
        watch = self._watch = Watch(notes)
        device = Device(notes, watch)
        groups = Groups(notes, device, watch)
        self._parts = [device, groups, Futures(groups), Life(notes), Below(groups), DeepEP(notes, device)]
        for part in self._parts:
            part.put(self._patches)
        self._recorder.beat()
        watch.start()
        atexit.register(self._finish)


def _number(names: tuple[str, ...]) -> int | None:
    """The first of some environment variables that is a number."""
    for name in names:
        text = os.environ.get(name, "")
        if text.isdigit() and len(text) < 8:
            return int(text)
    return None


def install(directory: str | os.PathLike[str], rank: int | None = None, capacity: int = 1 << 16) -> Tap:
    """See `turnstile.record.install`."""
    with _lock:
        if _current:
            return _current[0]
        tap = Tap(directory, rank, capacity)
        if why := _unfit(rank, capacity):
            print(f"turnstile: nothing is recorded: {why}", file=sys.stderr, flush=True)
            tap.uninstall()
            return tap
        try:
            tap.start()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            print(f"turnstile: nothing is recorded ({why}): please report this", file=sys.stderr, flush=True)
            tap.uninstall()
            return tap
        _current.append(tap)
        return tap


def _unfit(rank: object, capacity: object) -> str:
    """What is wrong with the arguments of `install`, and what to do; "" for nothing."""
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < MOST_RANKS):
        return f"rank {rank!r} is no rank: give record.install a whole number from 0 on, as int(os.environ['RANK'])"
    if not isinstance(capacity, int) or isinstance(capacity, bool) or not 1 <= capacity <= MAX_CAPACITY:
        return f"capacity {capacity!r}: give record.install a whole number of events in 1..{MAX_CAPACITY}"
    return ""


def uninstall() -> None:
    """End the record of this process, if there is one."""
    with _lock:
        for tap in list(_current):
            tap.uninstall()


def decision(text: str) -> None:
    """Note a decision in the record of this process, if there is one."""
    for tap in _current[:1]:
        tap.decision(text)


def _forked() -> None:
    """A forked child is another process, and must not write to its parent's ring."""
    global _lock
    _lock = threading.RLock()
    for tap in _current:
        for part in tap._parts:
            part.off = True
        tap._closed = True
        tap._patches.undo()
        if tap._watch is not None:
            tap._watch.leave()
        atexit.unregister(tap._finish)
    _current.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
