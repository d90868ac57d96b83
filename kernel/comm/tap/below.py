"""Calls that C++ makes: functional collectives, and those of DistributedDataParallel's reducer.

A kernel of the dispatcher key that every operator passes (`BackendSelect`) stands before the operator's own ones. That
of the functional operators is always there and costs other calls nothing. That of the operators which all process
groups use (`c10d::allreduce_`) costs each call some microseconds, so it is put there with the first forward pass of a
DistributedDataParallel module, and passes on what Python's wrappers have noted already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed.distributed_c10d
from torch._C._distributed_c10d import ProcessGroup, Work

from kernel.comm.tap.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.comm.tap.groups import Groups
    from kernel.comm.tap.notes import Note
    from kernel.comm.tap.patches import Patches

_RESOLVE: Any = getattr(torch.distributed.distributed_c10d, "_resolve_process_group", None)
"""The group of a name; not public, but what functional collectives use."""
_LIBRARY: Any = torch.library.Library
MOST: Final = 4096
"""Results of functional collectives that nobody has waited for."""
REDUCTIONS: Final = {
    "allreduce_": ("allreduce", 0), "allreduce_coalesced_": ("allreduce_coalesced", 0), "broadcast_": ("broadcast", 0),
    "allgather_": ("allgather", 1), "_allgather_base_": ("_allgather_base", 1),
    "_reduce_scatter_base_": ("_reduce_scatter_base", 1), "reduce_scatter_": ("reduce_scatter", 1),
}  # fmt: skip
"""Operators that C++ of torch calls -> the method of the same form, and whether outputs come before inputs."""


class Below:
    """See the module."""

    def __init__(self, groups: Groups) -> None:
        self.groups, self.notes, self.local = groups, groups.notes, groups.local
        self.off = False
        self._libraries: list[Any] = []
        self._results: dict[int, Note] = {}
        key = torch._C.DispatchKey.BackendSelect
        self._after = torch._C._dispatch_keyset_full_after(key)

    def put(self, patches: Patches) -> None:
        """Put the functional kernels there, and await the first reducer."""
        try:
            library = _LIBRARY("_c10d_functional", "IMPL")
            self._libraries.append(library)
            for name, (shape, many) in FUNCTIONAL.items():
                self._kernel(library, "_c10d_functional", name, self._functional(shape, many))
            self._kernel(library, "_c10d_functional", "wait_tensor", self._wait)
        except Exception as error:
            self.notes.broken("functional collectives", error)
        patches.method(torch.nn.parallel.DistributedDataParallel, "forward", self._forward)

    def undo(self) -> None:
        """Take the kernels out. Idempotent."""
        while self._libraries:
            self._libraries.pop()._destroy()

    def _kernel(self, library: Any, space: str, name: str, around: Callable[..., Any]) -> None:
        packet = getattr(getattr(torch.ops, space), name, None)
        if packet is None:
            return
        redispatch, after = packet.default._handle.redispatch_boxed, self._after

        def kernel(keys: Any, *args: Any, **named: Any) -> Any:
            def original() -> Any:
                return redispatch(keys & after, *args, **named)

            if self.off or getattr(self.local, "busy", False):
                return original()
            return around(original, args, named)

        library.impl(name, kernel, "BackendSelect", with_keyset=True)

    # -- functional -----------------------------------------------------------------------------------------------

    def _functional(self, shape_of: Callable[..., Shape], many: bool) -> Callable[..., Any]:
        def around(original: Callable[[], Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
            self.local.busy = True
            try:
                note = None
                try:
                    group = named.get("group_name", args[shape_of.where])  # type: ignore[attr-defined]
                    if isinstance(group, str):
                        group = _RESOLVE(group)
                    name = "a functional collective"
                    note = self.groups.before(group, lambda rest, _: shape_of(rest), args, {}, name)
                except Exception as error:
                    self.notes.broken("a functional collective", error)
                try:
                    result = original()
                except BaseException as error:
                    self.groups.after(note, None, error)
                    raise
                if note is not None:
                    while len(self._results) >= MOST:
                        self._results.pop(next(iter(self._results)), None)
                    for each in result if isinstance(result, list | tuple) else [result]:
                        self._results[_storage(each)] = note
                return result
            finally:
                self.local.busy = False

        return around

    def _wait(self, original: Callable[[], Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        note = None
        try:
            note = self._results.pop(_storage(args[0]), None)
            if note is not None and note.done:
                note = None
            if note is not None:
                self.notes.wait(note)
        except Exception as error:
            self.notes.broken("wait_tensor", error)
        try:
            result = original()
        except BaseException as error:
            if note is not None:
                self.notes.done(note, error)
            raise
        if note is not None:
            if note.on_host:
                self.notes.done(note)
            else:
                self.groups.device.joined(note)
                self.notes.wait(note, over=True)
        return result

    # -- DistributedDataParallel ----------------------------------------------------------------------------------

    def _forward(self, original: Any) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            if len(self._libraries) < 2 and not self.off:
                self._reducers()
            return original(*args, **named)

        return forward

    def _reducers(self) -> None:
        try:
            library = _LIBRARY("c10d", "IMPL")
            self._libraries.append(library)
            for name, (method, outputs) in REDUCTIONS.items():
                self._kernel(library, "c10d", name, self._reduction(method, outputs))
        except Exception as error:
            self.notes.broken("the reducer of DistributedDataParallel", error)

    def _reduction(self, method: str, outputs: int) -> Callable[..., Any]:
        from kernel.comm.tap.shapes import SHAPES

        def shape_of(rest: Sequence[Any], named: dict[str, Any]) -> Shape:
            # As the method's plain form: tensors, then the root or the reduction as objects of C++.
            tensors = rest[: 1 + outputs]
            found = SHAPES[method](tensors, {"root": rest[2 + outputs]} if method == "broadcast" else {})
            # What is reduced how is an object that C++ does not show; a reducer only ever sums.
            found.asynchronous = True
            return found

        def around(original: Callable[[], Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
            note = None
            self.local.busy = True
            try:
                try:
                    group = ProcessGroup.unbox(args[1 + outputs])
                    note = self.groups.before(group, shape_of, args, {}, method)
                except Exception as error:
                    self.notes.broken(method, error)
                try:
                    result = original()
                except BaseException as error:
                    self.groups.after(note, None, error)
                    raise
                if note is not None:
                    try:
                        work = Work.unbox(result[-1] if isinstance(result, list | tuple) else result)
                        # Nobody in Python holds it, and its tensors are the reducer's.
                        self.groups.watch.keep(work, note)
                    except Exception as error:
                        self.notes.broken("the work of a reducer", error)
                return result
            finally:
                self.local.busy = False

        return around


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _functional_shape(
    op: str,
    where: int,
    *,
    reduce: int | None = None,
    root: int | None = None,
    splits: bool = False,
    grows: bool = False,
) -> Callable[..., Shape]:
    """The shape of a functional operator. where: place of the group among its arguments; reduce, root: likewise."""

    def shape(args: Sequence[Any]) -> Shape:
        tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        found = Shape(
            op, ins=tensors, outs=() if grows or splits else tensors, asynchronous=True,
            reduce=str(args[reduce]).upper() if reduce is not None else "",
            root=int(args[root]) if root is not None else None,
        )  # fmt: skip
        if splits:
            row = tensors[0].numel() // max(1, tensors[0].shape[0]) if tensors[0].dim() else 1
            found.splits_out, found.splits_in = ([int(each) * row for each in args[n]] for n in (1, 2))
        return found

    shape.where = where  # type: ignore[attr-defined]
    return shape


FUNCTIONAL: Final[dict[str, tuple[Callable[..., Shape], bool]]] = {
    "all_reduce": (_functional_shape("all_reduce", 2, reduce=1), False),
    "all_reduce_": (_functional_shape("all_reduce", 2, reduce=1), False),
    "all_reduce_coalesced": (_functional_shape("all_reduce", 2, reduce=1), True),
    "all_reduce_coalesced_": (_functional_shape("all_reduce", 2, reduce=1), True),
    "all_gather_into_tensor": (_functional_shape("all_gather", 2, grows=True), False),
    "all_gather_into_tensor_out": (_functional_shape("all_gather", 2, grows=True), False),
    "all_gather_into_tensor_coalesced": (_functional_shape("all_gather", 2, grows=True), True),
    "reduce_scatter_tensor": (_functional_shape("reduce_scatter", 3, reduce=1, grows=True), False),
    "reduce_scatter_tensor_out": (_functional_shape("reduce_scatter", 3, reduce=1, grows=True), False),
    "reduce_scatter_tensor_coalesced": (_functional_shape("reduce_scatter", 3, reduce=1, grows=True), True),
    "all_to_all_single": (_functional_shape("all_to_all", 3, splits=True), False),
    "broadcast": (_functional_shape("broadcast", 2, root=1), False),
    "broadcast_": (_functional_shape("broadcast", 2, root=1), False),
}
"""Operators of `_c10d_functional`, and whether they take several tensors."""
