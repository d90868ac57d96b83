"""The ring of this rank, and what has to be known to write to it: groups, threads, call sites, numbers of calls."""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch

import kernel
from kernel.record.foreign import BROKEN, HOST_MEDIA, OVER, REFUSED, Call, Captured, Group, thread_text
from kernel.record.layout import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from kernel.record.writer import Recorder

TORCH: Final = str(Path(torch.__file__).parent) + os.sep
OURS: Final = str(Path(kernel.__file__ or __file__).parent) + os.sep
FACE: Final = str(Path(OURS).parent / "turnstile") + os.sep
C10D: Final = os.path.join(TORCH, "distributed", "distributed_c10d.py")
DEEPEST: Final = 200
MOST_GROUPS: Final = (1 << 16) - 1
MOST_SITES: Final = 1 << 14
"""Call sites and calls that are remembered; programs have fewer."""

PROGRAMS, LIBRARIES, FACES, OWN = range(4)
"""Whose code it is: the program's, a library's, torch.distributed's functions, ours."""
MOST_CODES: Final = 1 << 16
# Plain numbers: packing a member of an enumeration takes a look-up more.
_CALL, _DONE, _WAIT, _WAITED = map(int, (Kind.CALL, Kind.CALL_DONE, Kind.CALL_WAIT, Kind.CALL_WAITED))

Channel = tuple[Any, ...]


class Plan:
    """What calls share that differ in sizes and line only. text: id of the call's text. cell: how many its channel has
    seen. base: calls before the record began. on_host: whether their Work says when they are over.
    """

    __slots__ = ("base", "call", "cell", "on_host", "text")

    def __init__(self, call: Call, text: int, cell: list[int], base: int) -> None:
        self.call, self.text, self.cell, self.base = call, text, cell, base
        self.on_host = call.medium in HOST_MEDIA


class Note:
    """A call that was noted. number: of its CALL event. on_host: whether its Work says when it is over."""

    __slots__ = ("call", "done", "group", "number", "on_host", "plan")

    def __init__(self, number: int, group: Known, plan: Plan) -> None:
        self.number, self.group, self.plan, self.done = number, group, plan, False
        self.call, self.on_host = plan.call, plan.on_host


class Known:
    """A group: `Group`, the backends of its devices, and the plans of its frequent calls (`Groups`)."""

    __slots__ = ("backends", "group", "plans", "rank")

    def __init__(self, group: Group, rank: int | None) -> None:
        self.group, self.rank = group, rank
        self.backends: dict[str, str] = {}
        self.plans: dict[tuple[Any, ...], Plan] = {}

    def world(self, member: int) -> int:
        """The global rank of a member, as far as known."""
        ranks = self.group.ranks
        return ranks[member] if ranks is not None and 0 <= member < len(ranks) else member


class _Over:
    """Kept by a thread for as long as it lives, and gone with it: the record says then that it has ended."""

    __slots__ = ("_notes", "_number", "_pid")

    def __init__(self, notes: Notes, number: int) -> None:
        self._notes, self._number, self._pid = ref(notes), number, os.getpid()

    def __del__(self) -> None:
        notes = self._notes()
        # Without a record any more it is that which went, and not the thread; and a process that is forked drops all
        # threads but one, while those of the record's own process live on.
        if notes is not None and not notes.off and os.getpid() == self._pid:
            with suppress(Exception):
                notes.event(Kind.MARK, epoch=self._number, b=notes.recorder.site(OVER))


class Notes:
    """Writes to `recorder`. All methods may be called from any thread; none raises but for want of memory."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.event, self.write = recorder.event, recorder.write
        self.local = threading.local()
        self.failed: list[tuple[int, int]] = []
        """(id of an exception, number of the call that raised it), the newest ones."""
        self.newest = 0
        """One more than the number of the newest call's event."""
        self.lives = 0
        """How often this process has joined a default group."""
        self.off = False
        """The record is closed."""
        self._groups: dict[ref[Any], Known] = {}
        self._named: Counter[str] = Counter()
        self._labels: dict[Any, Known] = {}
        self._channels: dict[Channel, list[int]] = {}
        self._texts: dict[Call, int] = {}
        # By the identity of code objects, which are kept: hashing one takes microseconds. Within one by the place in
        # its code, since a frame looks its line up in a table each time.
        self._sites: dict[tuple[int, int], tuple[int, Any]] = {}
        self._library: dict[int, tuple[int, Any]] = {}
        self._threads = itertools.count(1)
        self._lock = threading.Lock()
        self._broken: set[str] = set()

    # -- who and where --------------------------------------------------------------------------------------------

    def thread(self) -> int:
        """The number of this thread: 0 for the main one."""
        try:
            return self.local.number  # type: ignore[no-any-return]
        except AttributeError:
            pass
        number, mine = 0, threading.current_thread()
        if mine is not threading.main_thread():
            number = next(self._threads)
            self.recorder.site(thread_text(number, mine.name))
            if not isinstance(mine, threading._DummyThread):  # those of C++ come and go with each call of theirs
                self.local.over = _Over(self, number)
        self.local.number = number
        return number

    def site(self, depth: int = 1) -> tuple[int, str]:
        """The program's line that called, as an id, and the function of torch.distributed that it called.

        depth: frames up from here that are passed over, all of them ours.
        """
        frame: FrameType | None = sys._getframe(depth)
        via, inner = "", None
        for _ in range(DEEPEST):
            if frame is None:
                break
            code = frame.f_code
            known = self._library.get(id(code))
            where = known[0] if known is not None else self._new_code(code)
            if where == PROGRAMS:
                site = self._sites.get((id(code), frame.f_lasti))
                return (site if site is not None else self._new_site(frame))[0], via
            if where == FACES:
                via = code.co_name
            elif where == LIBRARIES and inner is None:
                inner = frame
            frame = frame.f_back
        return (0 if inner is None else self._new_site(inner)[0]), via

    def _new_code(self, code: Any) -> int:
        file = code.co_filename
        where = PROGRAMS
        if _is_library(file):
            where = FACES if file == C10D else OWN if file.startswith(OURS) else LIBRARIES
        if len(self._library) < MOST_CODES:
            self._library[id(code)] = (where, code)
        return where

    def _new_site(self, frame: FrameType) -> tuple[int, Any]:
        code = frame.f_code
        text = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
        known = (self.recorder.site(text), code)
        if len(self._sites) < MOST_SITES:
            self._sites[id(code), frame.f_lasti] = known
        return known

    # -- groups ---------------------------------------------------------------------------------------------------

    def group(self, process_group: Any) -> Known:
        """What is known of a process group, from its first call on."""
        known = self._groups.get(ref(process_group))
        return known if known is not None else self._new_group(process_group)

    def plain(self, name: str, ranks: Sequence[int] | None, backend: str = "host", key: Any = None) -> Known:
        """A group that torch has no object for. key: what tells it from another one of the same name."""
        key = (name, tuple(ranks or ())) if key is None else key
        known = self._labels.get(key)
        if known is None:
            with self._lock:
                known = self._labels.get(key)
                if known is None:
                    known = self._labels[key] = self._add(name, ranks, backend, 0, True)
        return known

    def _new_group(self, process_group: Any) -> Known:
        from torch.distributed import distributed_c10d as c10d

        with self._lock:
            if (known := self._groups.get(ref(process_group))) is not None:
                return known
            ranks: list[int] | None = None
            try:
                ranks = list(c10d.get_process_group_ranks(process_group))
            except Exception:
                size = process_group.size()
                ranks = list(range(size)) if c10d.is_initialized() and size == c10d.get_world_size() else None
            name = _label(process_group)
            if self.lives > 1:
                # Its numbers start again. All ranks count alike, whether they used those before or not.
                name += f" ({self.lives})"
            self._named[name] += 1
            if self._named[name] > 1:
                name += f", made {self._named[name]} times"
            backend, base = "", 0
            try:
                backend = c10d.get_backend(process_group)
                base = int(process_group._get_sequence_number_for_group())
            except Exception:
                pass
            known = self._add(name, ranks, backend, max(0, base), backend != "gloo")
            self._groups[ref(process_group, self._groups.pop)] = known
            return known

    def _add(self, name: str, ranks: Sequence[int] | None, backend: str, base: int, certain: bool) -> Known:
        self._named["\0"] += 1
        number = min(self._named["\0"], MOST_GROUPS)
        told = None if ranks is None else tuple(ranks)
        group = Group(number, name, told, backend, base, certain)
        self.recorder.site(group.text())
        if number == MOST_GROUPS:
            self.broken("more groups than a record can name", ValueError(f"{MOST_GROUPS}"))
        mine = self.recorder.rank
        return Known(group, told.index(mine) if told is not None and mine in told else None)

    def backend(self, known: Known, process_group: Any, device: str) -> str:
        """The backend of a group for a kind of device."""
        found = known.backends.get(device)
        if found is None:
            try:
                found = str(process_group._get_backend(torch.device(device)).name())
            except Exception:
                found = known.group.backend or "host"
            known.backends[device] = found = found.lower()
        return found

    # -- calls ----------------------------------------------------------------------------------------------------

    def call(self, known: Known, call: Call, taken: int, given: int, ins: Sequence[int], outs: Sequence[int]) -> Note:
        """Note a call before it is made. taken, given: elements. ins, outs: of each tensor or member, where uneven."""
        site, via = self.site()
        if via and via != call.op:
            call = call._replace(via=via)
        cell = self._cell(self.channel(known, call))
        plan = Plan(call, self.text(call), cell, known.group.base if call.peer is None else 0)
        return self.make(known, plan, taken, given, ins, outs, site)

    def make(
        self, known: Known, plan: Plan, taken: int, given: int, ins: Sequence[int], outs: Sequence[int], site: int
    ) -> Note:
        """The same, of a call that was seen before."""
        cell, group = plan.cell, known.group.number
        with self._lock:
            cell[0] = number = cell[0] + 1
        number += plan.base
        if ins:
            self.recorder.sizes(group, number, ins, Kind.INPUTS)
        if outs:
            self.recorder.sizes(group, number, outs, Kind.OUTPUTS)
        event = self.write(_CALL, group, number, given, self.thread(), taken, plan.text, site)
        self.newest = event + 1
        return Note(event, known, plan)

    def _cell(self, channel: Channel) -> list[int]:
        """How many calls a channel has seen."""
        found = self._channels.get(channel)
        return self._channels.setdefault(channel, [0]) if found is None else found

    def text(self, call: Call) -> int:
        """The id of a call's text."""
        known = self._texts.get(call)
        if known is None:
            known = self.recorder.site(call.text())
            if len(self._texts) < MOST_SITES:
                self._texts[call] = known
        return known

    @staticmethod
    def channel(known: Known, call: Call) -> Channel:
        """What a call is counted on."""
        if call.peer is None:
            return (known.group.number,)
        tag = call.tag if call.medium in HOST_MEDIA else ""
        return (known.group.number, call.op, call.peer, tag)

    def bases(self, channels: dict[Channel, int], known: Sequence[Known]) -> list[int]:
        """Take numbers for several calls of each channel; the first number of each."""
        with self._lock:
            firsts = []
            for (channel, count), group in zip(channels.items(), known, strict=True):
                base = group.group.base if len(channel) == 1 else 0
                cell = self._cell(channel)
                firsts.append(cell[0] + 1 + base)
                cell[0] += count
            return firsts

    def done(self, note: Note, error: BaseException | None = None, source: int = -1) -> None:
        """Note that a call is over, once; that it failed may become known later."""
        if note.done and error is None:
            return
        note.done = True
        why = self.recorder.site(exception_text(error)) if error is not None else 0
        if error is not None:
            self.failed[:-15] = []
            self.failed.append((id(error), note.number))
        self.write(_DONE, note.group.group.number, source, 0, self.thread(), note.number, why, 0)

    def refused(self, note: Note, error: BaseException) -> None:
        """Note that a call was never made: it meets nobody, and the next one of its channel has its number."""
        note.done = True
        why = self.recorder.site(f"{REFUSED}{exception_text(error)}")
        with self._lock:  # whoever takes a number later stands behind this in the record as well
            note.plan.cell[0] -= 1
            self.write(_DONE, note.group.group.number, -1, 0, self.thread(), note.number, why, 0)

    def wait(self, note: Note, over: bool = False) -> None:
        """The host waits for a call, or goes on."""
        kind = _WAITED if over else _WAIT
        # A blocking call waits where it was made.
        site = 0 if over or not note.call.asynchronous else self.site()[0]
        self.write(kind, note.group.group.number, 0, 0, self.thread(), note.number, 0, site)

    def host(self, what: str, over: bool = False) -> None:
        """The host waits for something that is no call, or goes on."""
        kind = Kind.HOST_WAIT_LEAVE if over else Kind.HOST_WAIT_ENTER
        self.event(kind, epoch=self.thread(), b=self.recorder.site(what), site=0 if over else self.site()[0])

    def say(self, kind: Kind, text: str, a: int = 0) -> None:
        """A text of a kind: a remark, a decision, an exception."""
        self.event(kind, epoch=self.thread(), a=a, b=self.recorder.site(text), site=self.site()[0])

    def broken(self, what: str, error: BaseException) -> None:
        """Something could not be noted: the record says so, once for each kind of thing."""
        if what not in self._broken and len(self._broken) < 64:
            self._broken.add(what)
            self.event(Kind.MARK, epoch=0, b=self.recorder.site(f"{BROKEN}{what} ({exception_text(error)})"))

    def captured(self, known: Known, call: Call, taken: int, given: int, branch: int) -> Captured:
        """A call that a graph holds, not made now."""
        return Captured(known.group.number, self.text(call), taken, given, branch)


_SENT: Final = re.compile(
    r"connection|connect|tim(?:ed ?|e)out|peer|socket|closed|reset|abort|broken pipe|nccl|cuda|store|unreachable",
    re.IGNORECASE,
)
_LOCAL: Final = (ValueError, TypeError, IndexError, NotImplementedError)


def sent_nothing(call: Call, error: BaseException) -> bool:
    """Whether an exception, raised before there was a Work, is about the arguments of a call alone.

    Backends check these first. What they raise of another rank, of a store or of a device is a call that was made.
    """
    if call.op == "monitored_barrier":
        return False
    if type(error) in _LOCAL:
        return True
    return type(error) is RuntimeError and _SENT.search(str(error)) is None


def exception_text(error: BaseException) -> str:
    """`RuntimeError: what it says`, cut."""
    try:
        said = str(error)
    except Exception:
        said = "(its text cannot be made)"
    return f"{type(error).__name__}: {' '.join(said.split())[:600]}"


def _label(process_group: Any) -> str:
    """The name under which all members know a group."""
    name = str(getattr(process_group, "group_name", "") or "")
    described = str(getattr(process_group, "group_desc", "") or "")
    if described == "default_pg":
        return described
    if described and described != "undefined":
        return f"{described}#{name}" if name else described
    return f"group {name}" if name else "a group without a name"


def _is_library(file: str) -> bool:
    return file.startswith((TORCH, OURS, FACE, "<frozen")) or file.endswith(
        tuple(os.sep + name for name in ("contextlib.py", "functools.py", "typing_extensions.py", "deep_ep/buffer.py"))
    )
