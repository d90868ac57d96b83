"""What a rank writes into its record, in the rank's words. The record's format is `kernel.record`."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

from kernel.errors import said
from kernel.program import Op
from kernel.record import HOST, Kind, NullRecorder, Recorder
from kernel.record.layout import FORM
from kernel.request import Phase
from kernel.topology import Role

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from kernel.program import Call, Program
    from kernel.sched.policy import Plan

_Key = tuple[Phase, Role]
_AWAITED = FORM + "D {a}"
_ITERATION, _SEGMENT, _EPOCH = FORM + "D {round}", FORM + "P e{epoch} [{a},{b})", FORM + "P e{epoch}"


class Journal:
    """One rank's writer. Cheap enough for every collective; safe to call from stream threads."""

    def __init__(self, recorder: Recorder | NullRecorder) -> None:
        self._enqueued: dict[_Key, int] = {}
        self._started: dict[_Key, int] = {}
        self._uncounted: deque[tuple[Call, int]] = deque()
        """P's dispatches, with their numbers, that were enqueued before their counts were known: of a wide segment."""
        self._counted: Call | None = None
        """P's dispatch whose counts were known before it was enqueued."""
        self._running: set[Phase] = set()
        self._abandoned: set[Phase] = set()
        self._exchanges = 0
        self._lines: dict[Call, str] = {}
        self._labels: dict[str, tuple[int, int, int, int, int]] = {}
        self._tag = self._owner = ""
        self.moved = 0
        """Grows with everything that brings a turn nearer to its end; rounds alone do not."""
        self.round, self.epoch = 0, -1
        self._open(recorder)

    def _open(self, recorder: Recorder | NullRecorder) -> None:
        self._recorder, self._event, self._write = recorder, recorder.event, recorder.write
        self._sites: dict[Call, int] = {}
        self._ops: dict[Call, int] = {}
        self._groups: dict[_Key, int] = {}

    def switch(self, recorder: Recorder | NullRecorder) -> None:
        """Go on in another file; sequence numbers of the communicators go on."""
        self._recorder.close()
        self._open(recorder)

    def close(self) -> None:
        """End the record."""
        self._recorder.close()

    @property
    def standing(self) -> str:
        """Where the rank stands, as a clause: ` with P e3 [4,8) and D 17 in flight, in exchange 41 (post-d)`."""
        labels = list(self._labels)
        return standing(
            [next((each for each in labels if each.startswith(f"{phase} ")), "") for phase in (Phase.P, Phase.D)],
            (self._exchanges, self._tag) if self._tag else None,
            self._owner,
        )

    # -- control ------------------------------------------------------------------------------------------------

    def plan(self, plan: Plan, digest: int) -> None:
        """This round's plan."""
        self.round, self.epoch = plan.round, plan.epoch
        if plan.activate >= 0:  # what an epoch that failed has left
            self._uncounted.clear()
            self._counted = None
        self._write(Kind.PLAN, 0, 0, plan.round, plan.activate, digest, plan.bucket, 0)

    def exchange(self, tag: str, leaves: bool) -> None:
        """This rank enters or leaves an all-rank rendezvous."""
        self._exchanges += not leaves
        self._tag = "" if leaves else tag
        kind = Kind.EXCHANGE_LEAVE if leaves else Kind.EXCHANGE_ENTER
        self._write(kind, 0, self._exchanges, self.round, self.epoch, 0, self._recorder.site(tag), 0)

    def wait(self, owner: str, leaves: bool) -> None:
        """The loop's task waits for `owner`."""
        self._wait(owner, leaves, owner, 0)

    def wait_for_decode(self, number: int, leaves: bool) -> None:
        """The loop's task waits for the D iteration of round `number`."""
        self._wait("" if leaves else f"D {number}", leaves, _AWAITED, number)

    def boundary(self, epoch: int, index: int) -> None:
        """P's host enqueue stands at a boundary."""
        self._event(Kind.BOUNDARY, Phase.P, HOST, 0, 0, self.round, epoch, index, 0, 0)

    def permit(self, start: int, end: int) -> None:
        """P may enqueue [start, end)."""
        self._event(Kind.PERMIT, Phase.P, HOST, 0, 0, self.round, self.epoch, start, end, 0)

    def promote(self, epoch: int, turns: int) -> None:
        """An epoch's results became decodable."""
        self.moved += 1
        self._event(Kind.PROMOTE, Phase.P, HOST, 0, 0, self.round, epoch, turns, 0, 0)

    def no_work(self, phase: Phase, label: str) -> None:
        """This rank takes part in `label` without rows of its own."""
        site = self._recorder.site(_form(label, self.round, self.epoch, 0, 0))
        self._event(Kind.NO_WORK, phase, HOST, 0, 0, self.round, self.epoch, 0, 0, site)

    def exception(self, error: BaseException) -> None:
        """The rank ends with `error`."""
        self._text(Kind.EXCEPTION, f"{type(error).__name__}: {said(error)}"[:400])

    def mark(self, text: str, a: int = 0) -> None:
        """A remark, with a number."""
        self._event(Kind.MARK, None, HOST, 0, 0, self.round, self.epoch, a, self._recorder.site(text), 0)

    # -- device work --------------------------------------------------------------------------------------------

    def submitted(self, label: str, phase: Phase, calls: Sequence[Call], a: int, b: int, size: int) -> None:
        """A D iteration (a = bucket, b = own rows) or a P segment [a, b) was enqueued, with its collectives.

        size: logical rows of the phase's collectives, from the plan.
        """
        site = self._recorder.site(_form(label, self.round, self.epoch, a, b))
        self._labels[label] = (self.round, self.epoch, a, b, site)
        self._event(Kind.SUBMIT, phase, phase, 0, 0, self.round, self.epoch, a, b, site)
        for call in calls:
            key = (phase, call.role)
            sequence = self._enqueued[key] = self._enqueued.get(key, 0) + 1
            self._collective(Kind.ENQUEUE, key, call, sequence, size)
            if call.op is Op.DISPATCH and phase is Phase.P:
                if call == self._counted:
                    self._counted = None
                else:
                    self._uncounted.append((call, sequence))

    def device(self, phase: Phase, label: str, what: str, time_ns: int = 0) -> None:
        """The device starts or finishes a submission, or it fails; `what` says which. time_ns: when, 0 for now."""
        if what == "fail":
            self._abandoned.add(phase)
        if phase in self._abandoned:
            return
        known = self._labels.get(label) if what == "start" else self._labels.pop(label, None)
        if known is not None:
            round_, epoch, a, b, site = known
            # Decode without rows may go round for ever. Stream threads may lose a count to each other: it still grows.
            self.moved += what == "finish" and (phase is Phase.P or b > 0)
            kind = Kind.WORK_START if what == "start" else Kind.WORK_FINISH
            self._event(kind, phase, phase, 0, 0, round_, epoch, a, b, site, time_ns)

    def collective(self, phase: Phase, call: Call, size: int, finished: bool) -> None:
        """The device starts or finishes a collective.

        Nothing is written of a phase any more once work of it has failed, or it begins a collective without having
        finished the one before: the rest of a forward was given up with it, so what follows is not the call that peers
        count by its number.
        """
        key = (phase, call.role)
        if not finished:
            (self._abandoned if phase in self._running else self._running).add(phase)
        if phase in self._abandoned:
            return
        if finished:
            self._running.discard(phase)
        self.moved += finished and phase is Phase.P
        if not finished:
            self._started[key] = self._started.get(key, 0) + 1
            if call not in self._lines:
                self._name(call)
        self._collective(Kind.FINISH if finished else Kind.START, key, call, self._started[key], size)

    def splits(self, phase: Phase, call: Call, rows: Sequence[int]) -> None:
        """The rows that each member sends this rank in `call`, a dispatch of P whose counts are here now.

        It is the next one of the enqueued segment or, at its end, the next one to be enqueued.
        """
        key = (phase, call.role)
        if self._uncounted and self._uncounted[0][0] == call:
            _, number = self._uncounted.popleft()
        else:
            self._counted, number = call, self._enqueued.get(key, 0) + 1
        if phase not in self._abandoned:
            self._recorder.sizes(self._group(key), number, rows)

    # -- inside -------------------------------------------------------------------------------------------------

    def _wait(self, owner: str, leaves: bool, text: str, a: int) -> None:
        self._owner = "" if leaves else owner
        kind = Kind.HOST_WAIT_LEAVE if leaves else Kind.HOST_WAIT_ENTER
        self._write(kind, 0, 0, self.round, self.epoch, a, self._recorder.site(text), 0)

    def _text(self, kind: Kind, text: str) -> None:
        self._event(kind, None, HOST, 0, 0, self.round, self.epoch, 0, self._recorder.site(text), 0)

    def _collective(self, kind: Kind, key: _Key, call: Call, sequence: int, size: int) -> None:
        phase = key[0]
        stream = Phase.D if call.routed else phase
        group, site, op = self._group(key), self._sites.get(call), self._ops.get(call)
        if site is None:
            where = call.site if call.layer < 0 else f"{call.site} {call.layer}"
            line = self._lines.get(call)
            site = self._sites[call] = self._recorder.site(f"{line} ({where})" if line else where)
        if op is None:
            op = self._ops[call] = self._recorder.site(call.op)
        self._event(kind, phase, stream, group, sequence, self.round, self.epoch, size, op, site)

    def _group(self, key: _Key) -> int:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = self._recorder.group(group_name(*key))
        return group

    def _name(self, call: Call) -> None:
        """Find the model's line that runs `call`, once: the first frame outside the kernel."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("kernel."):
            frame = frame.f_back
        if frame is not None:
            code = frame.f_code
            self._lines[call] = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
            self._sites.pop(call, None)


def _form(label: str, round_: int, epoch: int, a: int, b: int) -> str:
    """What stands for the label of an event with these numbers in the record's table."""
    if label == f"D {round_}":
        return _ITERATION
    if label == f"P e{epoch} [{a},{b})":
        return _SEGMENT
    return _EPOCH if label == f"P e{epoch}" else label


def standing(flying: Sequence[str], exchange: tuple[int, str] | None, owner: str) -> str:
    """The clause for what is in flight ("" for nothing), the exchange a rank is in, and what its loop awaits."""
    labels = " and ".join(label for label in flying if label)
    if owner == "inbox" and not labels:
        return " while it waited for work"
    where = f", in exchange {exchange[0]} ({exchange[1]})" if exchange is not None else ""
    return f" with {labels or 'nothing of P or D'} in flight{where}"


def group_name(phase: Phase, role: Role) -> str:
    """How a record names a communicator: `P.TP`."""
    return f"{phase}.{role}"


def groups(programs: Sequence[Program], rank: int) -> dict[str, tuple[int, ...]]:
    """The communicators that a rank's record names, with their members."""
    named: dict[str, tuple[int, ...]] = {}
    for program in programs:
        for call in program.calls:
            named[group_name(program.phase, call.role)] = program.world.members(call.role, rank)
    return named
