"""Wrappers of process groups and of their Work: every call that Python makes, before and after it is made."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from kernel.comm.tap.notes import MOST_SITES, Note, sent_nothing
from kernel.comm.tap.quick import QUICK
from kernel.comm.tap.shapes import SHAPES
from kernel.record.foreign import Call
from kernel.record.layout import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.comm.tap.device import Device
    from kernel.comm.tap.notes import Known, Notes
    from kernel.comm.tap.patches import Patches
    from kernel.comm.tap.quick import Parts
    from kernel.comm.tap.shapes import Shape
    from kernel.comm.tap.watch import Watch

_WAIT, _DONE = int(Kind.CALL_WAIT), int(Kind.CALL_DONE)
DTYPES: dict[Any, str] = {}


class Groups:
    """Notes calls of process groups, and what the host does with their Work."""

    def __init__(self, notes: Notes, device: Device, watch: Watch) -> None:
        self.notes, self.device, self.watch = notes, device, watch
        self.local = notes.local
        self.works: dict[ref[Any], Note | list[Note]] = watch.works
        self._forget = self.works.pop
        self.off = False
        self._patches: Patches | None = None
        self._kinds: set[type] = set()

    def put(self, patches: Patches) -> None:
        """Wrap every method that there is."""
        for name in SHAPES:
            patches.method(ProcessGroup, name, partial(self._method, name=name))
        patches.method(ProcessGroup, "_start_coalescing", self._start)
        patches.method(ProcessGroup, "_end_coalescing", self._end)
        self._patches = patches
        self._work(Work)

    def _work(self, kind: type) -> None:
        """Wrap the methods that a kind of Work has of its own."""
        self._kinds.add(kind)
        if self._patches is not None and issubclass(kind, Work):
            for name, wrap in (("wait", self._waits), ("synchronize", self._waits), ("is_completed", self._asked)):
                if name in vars(kind):
                    self._patches.method(kind, name, wrap)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _method(self, original: Any, name: str) -> Callable[..., Any]:
        local, shape_of, kinds = self.local, SHAPES[name], self._kinds
        count, parts_of = QUICK.get(name, (-1, None))
        works, forget = self.works, self._forget

        def call(group: Any, *args: Any, **named: Any) -> Any:
            if self.off or getattr(local, "busy", False):
                return original(group, *args, **named)
            local.busy = True
            try:
                note: Any = None
                if parts_of is not None and not named and len(args) == count:
                    note = self.again(group, parts_of, args, name)
                if type(note) is not Note:
                    note = self.before(group, shape_of, args, named, name, note)
                try:
                    result = original(group, *args, **named)
                except BaseException as error:
                    self.after(note, None, error)
                    raise
                if note is not None and note.on_host and type(result) in kinds:
                    works[ref(result, forget)] = note  # as `after` would
                else:
                    self.after(note, result, None)
                return result
            finally:
                local.busy = False

        return call

    def again(
        self, group: Any, parts_of: Callable[..., Parts | None], args: tuple[Any, ...], name: str
    ) -> Note | tuple[Any, ...] | None:
        """As `before`, for a call like one that was made before. For the first of its kind the key of such calls, and
        None for one that must be looked at each time.
        """
        try:
            parts = parts_of(args)
            if parts is None:
                return None
            ins, outs, key = parts
            first = ins[0] if ins else outs[0]
            stream = ""
            if not first.is_cpu:
                if not first.is_cuda or self.device.capturing:
                    return None
                stream = self.device.stream()
            site, via = self.notes.site(3)
            known = self.notes.group(group)
            key = (name, via, stream, first.dtype, len(ins), len(outs), key)
            plan = known.plans.get(key)
            if plan is None:
                return key
            uneven_in: Sequence[int] = ()
            uneven_out: Sequence[int] = ()
            if len(ins) == 1:
                taken = ins[0].numel()
            else:
                sizes = [each.numel() for each in ins]
                taken, uneven_in = sum(sizes), _uneven(sizes)
            if outs is ins:
                given, uneven_out = taken, uneven_in
            elif len(outs) == 1:
                given = outs[0].numel()
            else:
                sizes = [each.numel() for each in outs]
                given, uneven_out = sum(sizes), _uneven(sizes)
            note = self.notes.make(known, plan, taken, given, uneven_in, uneven_out, site)
        except Exception:
            return None  # the long way says what is wrong with it
        if (together := getattr(self.local, "together", None)) is not None:
            together.append(note)
        return note

    def before(
        self,
        group: Any,
        shape_of: Callable[..., Shape],
        args: Sequence[Any],
        named: dict[str, Any],
        name: str,
        key: tuple[Any, ...] | None = None,
    ) -> Note | None:
        """Note a call that is about to be made; None where that is not to be, or fails. key: of calls like it."""
        try:
            known = self.notes.group(group)
            shape = shape_of(args, named)
            tensors = shape.ins or shape.outs
            kind = tensors[0].device.type if tensors else _device_of(group)
            if kind == "meta":
                return None
            medium = self.notes.backend(known, group, kind)
            note = self.note(known, shape, medium, kind)
            if shape.blocks and note is not None:
                self.notes.wait(note)
            if key is not None and note is not None and len(known.plans) < MOST_SITES:
                known.plans[key] = note.plan
            return note
        except Exception as error:
            self.notes.broken(name, error)
            return None

    def note(self, known: Known, shape: Shape, medium: str, kind: str) -> Note | None:
        """Note a call of a known shape; None where a graph captures it."""
        ins, outs = [each.numel() for each in shape.ins], [each.numel() for each in shape.outs]
        first = shape.ins or shape.outs
        call = Call(
            shape.op,
            dtype=_dtype(first[0].dtype) if first else "",
            root=None if shape.root is None else known.world(shape.root),
            peer=shape.peer if shape.peer is None or shape.peer < 0 else known.world(shape.peer),
            tag=shape.tag,
            reduce=shape.reduce,
            ins=len(shape.splits_in) or len(ins),
            outs=len(shape.splits_out) or len(outs),
            stream=self.device.stream() if kind == "cuda" else "",
            asynchronous=shape.asynchronous,
            medium=medium,
        )
        taken, given = sum(shape.splits_in or ins), sum(shape.splits_out or outs)
        if kind == "cuda" and self.device.captures(known, call, taken, given):
            return None
        uneven_in, uneven_out = shape.splits_in or _uneven(ins), shape.splits_out or _uneven(outs)
        note = self.notes.call(known, call, taken, given, uneven_in, uneven_out)
        if (together := getattr(self.local, "together", None)) is not None:
            together.append(note)
        return note

    def after(self, note: Note | None, result: Any, error: BaseException | None) -> None:
        """Note what came of it."""
        if note is None:
            return
        try:
            if error is not None and sent_nothing(note.call, error):
                self.notes.refused(note, error)
                if (together := getattr(self.local, "together", None)) and together[-1] is note:
                    together.pop()
            elif error is not None:
                self.notes.done(note, error)
            elif isinstance(result, Work):
                for kind in type(result).__mro__ if type(result) not in self._kinds else ():
                    if kind not in self._kinds:
                        self._work(kind)
                self.works[ref(result, self._forget)] = note
                if not note.on_host:
                    self.device.launched(note)
            elif getattr(self.local, "together", None) is None:
                if note.call.op == "monitored_barrier" or note.on_host:
                    self.notes.done(note)
                else:
                    self.device.launched(note)
        except Exception as failure:
            self.notes.broken("what a call gave", failure)

    # -- several as one -------------------------------------------------------------------------------------------

    def _start(self, original: Any) -> Callable[..., Any]:
        def start(group: Any, *args: Any, **named: Any) -> Any:
            result = original(group, *args, **named)
            if not self.off:
                self.local.together = []
            return result

        return start

    def _end(self, original: Any) -> Callable[..., Any]:
        def end(group: Any, *args: Any, **named: Any) -> Any:
            notes, self.local.together = getattr(self.local, "together", None), None
            work = original(group, *args, **named)
            try:
                if notes and not self.off:
                    self.notes.event(
                        Kind.TOGETHER, group=notes[0].group.group.number, epoch=self.notes.thread(), a=notes[0].number
                    )
                    for note in notes:
                        self.device.launched(note)
                    if isinstance(work, Work):
                        self.works[ref(work, self._forget)] = notes
            except Exception as error:
                self.notes.broken("calls together", error)
            return work

        return end

    # -- Work -----------------------------------------------------------------------------------------------------

    def _of(self, work: Any) -> list[Note]:
        found = self.works.get(ref(work))
        return [] if found is None else found if isinstance(found, list) else [found]

    def _waits(self, original: Any) -> Callable[..., Any]:
        works, notes, local, write = self.works, self.notes, self.local, self.notes.write

        def wait(work: Any, *args: Any, **named: Any) -> Any:
            one = works.get(ref(work))
            if one is None or self.off:
                return original(work, *args, **named)
            if type(one) is Note and one.on_host and one.call.peer != -1:
                return simple(one, work, args, named)
            opened = self._opened(work)
            if not opened:
                return original(work, *args, **named)
            try:
                result = original(work, *args, **named)
            except BaseException as error:
                self._waited(work, opened, error)
                raise
            self._waited(work, opened, None)
            return result

        def simple(note: Note, work: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            """As above, for one call whose Work says when it is over."""
            if note.done:
                return original(work, *args, **named)
            number, group = 0, note.group.group.number
            try:
                number = local.number if hasattr(local, "number") else notes.thread()
                site = notes.site()[0] if note.call.asynchronous else 0
                write(_WAIT, group, 0, 0, number, note.number, 0, site)
            except Exception as error:
                notes.broken("a wait", error)
            try:
                result = original(work, *args, **named)
            except BaseException as error:
                self._waited(work, [note], error)
                raise
            if not note.done:
                note.done = True
                write(_DONE, group, -1, 0, number, note.number, 0, 0)
            return result

        return wait

    def _opened(self, work: Any) -> list[Note]:
        try:
            notes = [note for note in self._of(work) if not note.done]
            if notes:
                self.notes.wait(notes[-1])
            return notes
        except Exception as error:
            self.notes.broken("a wait", error)
            return []

    def _waited(self, work: Any, notes: list[Note], error: BaseException | None) -> None:
        try:
            for note in notes:
                if note.on_host or error is not None:
                    source = -1
                    if note.call.peer == -1 and error is None:
                        source = note.group.world(int(work._source_rank()))
                    self.notes.done(note, error, source)
                else:
                    self.device.joined(note)
            if not notes[-1].done:
                self.notes.wait(notes[-1], over=True)
        except Exception as failure:
            self.notes.broken("a wait", failure)

    def _asked(self, original: Any) -> Callable[..., Any]:
        def is_completed(work: Any, *args: Any, **named: Any) -> Any:
            result = original(work, *args, **named)
            try:
                if result and not self.off:
                    for note in self._of(work):
                        if note.call.peer != -1:
                            self.notes.done(note)
            except Exception as error:
                self.notes.broken("is_completed", error)
            return result

        return is_completed


def _uneven(sizes: Sequence[int]) -> Sequence[int]:
    """The sizes of several tensors that are not all alike, or nothing."""
    return sizes if len(sizes) > 1 and any(size != sizes[0] for size in sizes) else ()


def _dtype(dtype: Any) -> str:
    known = DTYPES.get(dtype)
    if known is None:
        known = DTYPES[dtype] = str(dtype).removeprefix("torch.")
    return known


def _device_of(group: Any) -> str:
    """The kind of device of a call without tensors."""
    try:
        kinds = {device.type for device in group._device_types}
    except Exception:
        return "cpu"
    return "cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu"
