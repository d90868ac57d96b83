"""Wrappers of what makes and destroys groups, and of stores: waits for other ranks that are no collectives."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kernel.record.foreign import NEW_GROUPS, Call, members_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.comm.tap.notes import Note, Notes
    from kernel.comm.tap.patches import Patches

CREATION = "INIT"
DESTRUCTION = "FIN"
LONGEST_KEY = 80


class Life:
    """See the module."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.local = notes, notes.local
        self.off = False

    def put(self, patches: Patches) -> None:
        """Wrap the functions, under every name that loaded modules have for them, and the methods of stores."""
        c10d = dist.distributed_c10d
        self.notes.lives = int(dist.is_initialized())
        patches.function(c10d, "init_process_group", self._joins)
        patches.function(c10d, "new_group", lambda one: self._together(one, self._made))
        patches.function(c10d, "split_group", lambda one: self._together(one, self._split))
        patches.function(c10d, "destroy_process_group", lambda one: self._together(one, self._destroyed))
        for name in ("wait", "get", "multi_get", "queue_pop", "barrier"):
            patches.method(Store, name, partial(self._store, name=name))

    def _together(self, original: Any, what: Callable[..., Note | None]) -> Callable[..., Any]:
        """A call that is over when it returns."""

        def call(*args: Any, **named: Any) -> Any:
            note = None
            if not self.off:
                try:
                    note = what(args, named)
                    if note is not None:
                        self.notes.wait(note)
                except Exception as error:
                    self.notes.broken("making or destroying a group", error)
            depth: int = getattr(self.local, "making", 0)
            self.local.making = depth + 1
            try:
                result = original(*args, **named)
            except BaseException as error:
                if note is not None:
                    self.notes.done(note, error)
                raise
            finally:
                self.local.making = depth
            if note is not None:
                self.notes.done(note)
            return result

        return call

    def _joins(self, original: Any) -> Callable[..., Any]:
        """A default group, perhaps after another one."""
        together = self._together(original, self._initialised)

        def init_process_group(*args: Any, **named: Any) -> Any:
            result = together(*args, **named)
            if not self.off:
                try:
                    self.notes.lives += 1
                    mine, own = dist.get_rank(), self.notes.recorder.rank
                    if mine != own:
                        what = f"calls of this process as rank {mine} of its default group no. {self.notes.lives}"
                        self.notes.broken(what, ValueError(f"its record is that of rank {own}"))
                except Exception as error:
                    self.notes.broken("a default group", error)
            return result

        return init_process_group

    def _note(self, name: str, ranks: Sequence[int], op: str = CREATION, tag: str = "") -> Note:
        return self.notes.call(self.notes.plain(name, ranks), Call(op, tag=tag, medium="host"), 0, 0, (), ())

    def _initialised(self, args: Sequence[Any], named: dict[str, Any]) -> Note | None:
        size = named.get("world_size", args[3] if len(args) > 3 else -1)
        if not isinstance(size, int) or size < 1:
            text = os.environ.get("WORLD_SIZE", "")
            size = int(text) if text.isdigit() else 0
        return self._note("the default group", range(size)) if 0 < size <= 1 << 16 else None

    def _made(self, args: Sequence[Any], named: dict[str, Any]) -> Note | None:
        ranks = named.get("ranks", args[0] if args else None)
        everybody = range(dist.get_world_size())
        ordered = named.get("sort_ranks", args[7] if len(args) > 7 else True)
        members = everybody if ranks is None else sorted(ranks) if ordered else list(ranks)
        alone = named.get("use_local_synchronization", args[4] if len(args) > 4 else False)
        if alone and self.notes.recorder.rank not in members:
            return None
        if alone:
            return self._note("new groups of its members", members)
        # All ranks count all groups that are made, so that calls with one number are to make one group.
        return self._note(NEW_GROUPS, everybody, tag=members_text(members))

    def _split(self, args: Sequence[Any], named: dict[str, Any]) -> Note | None:
        parent = named.get("parent_pg", args[0] if args else None) or dist.group.WORLD
        ranks = self.notes.group(parent).group.ranks
        return None if ranks is None else self._note("split groups", ranks)

    def _destroyed(self, args: Sequence[Any], named: dict[str, Any]) -> Note | None:
        group = named.get("group", args[0] if args else None) or dist.group.WORLD
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        known = self.notes.group(group)
        if known.group.ranks is None or "nccl" not in known.group.backend:
            return None  # ends without the others
        return self._note(f"destruction of {known.group.name}", known.group.ranks, DESTRUCTION)

    def _store(self, original: Any, name: str) -> Callable[..., Any]:
        def wait(store: Any, *args: Any, **named: Any) -> Any:
            # The waits inside of making a group are that group's.
            if self.off or getattr(self.local, "making", 0) > 0 or getattr(self.local, "busy", False):
                return original(store, *args, **named)
            text = ""
            try:
                text = f"store: {name} {_keys(args, named)}".rstrip()
                self.notes.host(text)
            except Exception as error:
                self.notes.broken("a wait for a store", error)
            try:
                return original(store, *args, **named)
            finally:
                if text:
                    self.notes.host(text, over=True)

        return wait


def _keys(args: Sequence[Any], named: dict[str, Any]) -> str:
    keys = args[0] if args else next(iter(named.values()), "")
    text = " ".join(map(str, keys[:4])) if isinstance(keys, list | tuple) else str(keys)
    # Numbers in keys count up for ever, and the table of strings is small.
    shown = "".join("#" if sign.isdigit() else sign for sign in text)
    return "".join(sign if sign.isprintable() else "?" for sign in shown)[:LONGEST_KEY]
