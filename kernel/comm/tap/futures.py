"""Wrappers of futures: those that a Work gives, what is chained to them, and any other that the host waits for.

A future that comes of calls, itself or through `then` and `collect_all`, is waited for as those calls are. Of any other
one that is not done yet (of an RPC, of the program itself) it is noted that the host waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from torch._C._distributed_c10d import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.comm.tap.groups import Groups
    from kernel.comm.tap.notes import Note
    from kernel.comm.tap.patches import Patches

FUTURE: Final[Any] = torch._C.Future
UNKNOWN: Final = "future: no call that is recorded gives it"


class Futures:
    """See the module."""

    def __init__(self, groups: Groups) -> None:
        self.groups, self.notes, self.local = groups, groups.notes, groups.local
        self.off = False
        self._known: dict[ref[Any], tuple[list[Note], bool]] = {}
        """A future -> the calls that it comes of, and whether their Work gave it itself."""
        self._forget = self._known.pop

    def put(self, patches: Patches) -> None:
        """Wrap the methods, and what makes one future of several."""
        patches.method(FUTURE, "wait", self._wait)
        patches.method(FUTURE, "then", self._then)
        patches.function(torch._C, "_collect_all", self._collect)
        for kind in {Work, *_below(Work)}:
            if "get_future" in vars(kind):
                patches.method(kind, "get_future", self._given)

    def _of(self, future: Any) -> list[Note]:
        return self._known.get(ref(future), ([], False))[0]

    def _comes(self, future: Any, notes: list[Note], directly: bool = False) -> None:
        if notes:
            self._known[ref(future, self._forget)] = notes, directly

    def _given(self, original: Any) -> Callable[..., Any]:
        def get_future(work: Any) -> Any:
            future = original(work)
            if not self.off:
                try:
                    found = self.groups.works.get(ref(work))
                    notes = [] if found is None else found if isinstance(found, list) else [found]
                    self._comes(future, notes, True)
                    for note in notes:
                        # Often nobody holds the Work from here on.
                        if note.on_host and not note.done:
                            self.groups.watch.keep(work, note)
                except Exception as error:
                    self.notes.broken("a future", error)
            return future

        return get_future

    def _then(self, original: Any) -> Callable[..., Any]:
        return self._follows(original, lambda future, _: self._of(future))

    def _collect(self, original: Any) -> Callable[..., Any]:
        return self._follows(original, lambda futures: [note for each in futures for note in self._of(each)])

    def _follows(self, original: Any, whence: Callable[..., list[Note]]) -> Callable[..., Any]:
        """What gives a future that comes after others. whence: the calls of those, from the same arguments."""

        def follows(*args: Any) -> Any:
            result = original(*args)
            if not self.off:
                try:
                    self._comes(result, whence(*args))
                except Exception as error:
                    self.notes.broken("a future", error)
            return result

        return follows

    def _wait(self, original: Any) -> Callable[..., Any]:
        def wait(future: Any) -> Any:
            if self.off or getattr(self.local, "busy", False):
                return original(future)
            opened: list[Note] = []
            directly = waits = False
            try:
                known = self._known.get(ref(future))
                notes, directly = known or ((), False)
                opened = [note for note in notes if not note.done]
                if opened:
                    self.notes.wait(opened[-1])
                elif known is None and not future.done():
                    self.notes.host(UNKNOWN)
                    waits = True
            except Exception as error:
                self.notes.broken("a wait for a future", error)
            try:
                result = original(future)
            except BaseException as error:
                self._waited(opened, directly, error)
                raise
            finally:
                if waits:
                    self.notes.host(UNKNOWN, over=True)
            self._waited(opened, directly, None)
            return result

        return wait

    def _waited(self, notes: list[Note], directly: bool, error: BaseException | None) -> None:
        """The host goes on. error: what the wait raised; what was chained to calls may, without any fault of theirs."""
        try:
            for note in notes if directly or error is None else ():
                if note.on_host or error is not None:
                    self.notes.done(note, error)
                else:
                    self.groups.device.joined(note)
            if notes and not notes[-1].done:
                self.notes.wait(notes[-1], over=True)
        except Exception as failure:
            self.notes.broken("a wait for a future", failure)


def _below(kind: type) -> set[type]:
    """All kinds below one."""
    found: set[type] = set()
    direct: list[type] = kind.__subclasses__()
    for each in direct:
        found |= {each} | _below(each)
    return found
