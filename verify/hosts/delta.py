"""The state of a host's ranks as an agent sends it: everything once, and then what has changed.

Of a rank that is: its open and its newest finished calls, what it waits in or how it left, its facts, and its row of
the table. Each call has a key that stays, and a number that gives its place; a place that changes is a new number.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from verify.hosts import wire
from verify.live.rings import Facts
from verify.top.frame import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from verify.events import Communicator, Event
    from verify.live.rings import Look


@dataclass
class _Sent:
    """What the collector knows of one rank."""

    numbers: dict[str, int] = field(default_factory=dict)
    events: dict[str, Event] = field(default_factory=dict)
    facts: Facts | None = None
    row: Row | None = None
    unsure: tuple[str, ...] = ()
    following: int = 0


class Sender:
    """The agent's side of one connection."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Sent] = {}
        self._groups: dict[Communicator, int] = {}

    def changes(self, look: Look, rows: Mapping[int, Row]) -> dict[str, Any]:
        """What the collector does not know yet: `groups`, in the order of their numbers, and `ranks`."""
        before = len(self._groups)
        events: dict[int, list[Event]] = {rank: [] for rank in look.facts}
        for event in look.found.events:
            events[event.rank].append(event)
        unsure: dict[int, tuple[str, ...]] = {}
        for rank, group in sorted(look.found.unsure):
            unsure[rank] = (*unsure.get(rank, ()), group)
        ranks: dict[str, Any] = {}
        for rank, facts in look.facts.items():
            sent = self._ranks.setdefault(rank, _Sent())
            if changed := self._rank(sent, events[rank], facts, rows.get(rank), unsure.get(rank, ())):
                ranks[str(rank)] = changed
        return {"groups": [wire.pack_communicator(each) for each in list(self._groups)[before:]], "ranks": ranks}

    def _rank(
        self, sent: _Sent, events: Iterable[Event], facts: Facts, row: Row | None, unsure: tuple[str, ...]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        now: dict[str, Event] = {}
        for event in events:
            key, more = _key(event), 1
            while (unique := key if more == 1 else f"{key} ({more})") in now:
                more += 1
            now[unique] = event
        place = -1
        if gone := [key for key in sent.events if key not in now]:
            found["drop"] = gone
            for key in gone:
                del sent.events[key], sent.numbers[key]
        changed = []
        for key, event in now.items():
            number = sent.numbers.get(key, -1)
            if number <= place or sent.events.get(key) != event:
                if number <= place:
                    number, sent.following = sent.following, sent.following + 1
                sent.numbers[key], sent.events[key] = number, event
                changed.append([key, number, wire.pack(event, self._groups)])
            place = number
        if changed:
            found["set"] = changed
        if facts != sent.facts:
            sent.facts, found["facts"] = facts, list(facts)
        if row is not None and row != sent.row:
            sent.row, found["row"] = row, asdict(row)
        if unsure != sent.unsure:
            sent.unsure, found["unsure"] = unsure, list(unsure)
        return found


def _key(event: Event) -> str:
    if event.calls and event.communicator is not None and event.sequence is not None and not event.parts:
        ends = "" if event.peer is None else f" {event.kind} {event.peer}"
        return f"{event.communicator.name[:200]}#{event.sequence}{ends}"
    return f"last {event.thread}".rstrip()


@dataclass
class RankNow:
    """One rank, as the collector knows it."""

    calls: dict[str, tuple[int, Event]] = field(default_factory=dict)
    facts: Facts | None = None
    row: Row | None = None
    unsure: tuple[str, ...] = ()

    def events(self) -> list[Event]:
        """In the host's order."""
        return [event for _, event in sorted(self.calls.values(), key=lambda each: each[0])]


class Receiver:
    """The collector's side of one connection."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankNow] = {}
        self._groups: list[Communicator] = []

    def take(self, message: Mapping[str, Any]) -> None:
        """Apply the changes of a message. Raises `wire.Malformed`; the state is of no use after that."""
        for each in wire.items(message.get("groups"), "groups", wire.MEMBERS):
            self._groups.append(wire.unpack_communicator(each))
        if len(self._groups) > wire.MEMBERS:
            raise wire.Malformed("too many groups")
        for name, changed in wire.table(message.get("ranks"), "ranks", wire.MEMBERS).items():
            if not name.isdecimal() or not 0 <= int(name[:9]) < wire.RANKS:
                raise wire.Malformed(f"a rank {name[:20]!r}")
            self._rank(int(name), wire.table(changed, "a rank", 16))

    def _rank(self, rank: int, changed: dict[str, Any]) -> None:
        known = self.ranks.setdefault(rank, RankNow())
        for key in wire.items(changed.get("drop", []), "drop", wire.CALLS):
            known.calls.pop(wire.text(key, "a key"), None)
        for each in wire.items(changed.get("set", []), "set", wire.CALLS):
            parts = wire.items(each, "a call", 3)
            if len(parts) != 3:
                raise wire.Malformed("a call without key or number")
            key, number = wire.text(parts[0], "a key"), wire.whole(parts[1], "a place")
            known.calls[key] = (number, wire.unpack(parts[2], rank, self._groups))
        if len(known.calls) > wire.CALLS:
            raise wire.Malformed("too many calls of a rank")
        if "facts" in changed:
            known.facts = _facts(changed["facts"])
        if "row" in changed:
            known.row = _row(rank, changed["row"])
        if "unsure" in changed:
            groups = wire.items(changed["unsure"], "unsure", wire.MEMBERS)
            known.unsure = tuple(wire.text(group, "a group's name") for group in groups)


def _facts(data: Any) -> Facts:
    parts = wire.items(data, "facts", len(Facts._fields))
    if len(parts) != len(Facts._fields) or not all(isinstance(part, bool) for part in parts[1:-1]):
        raise wire.Malformed("facts that are none")
    number, clear, ended, failed, gave_up, busy, process = parts
    return Facts(
        wire.whole(number, "the number of an event", -1),
        clear,
        ended,
        failed,
        gave_up,
        busy,
        None if process is None else wire.text(process, "the state of a process"),
    )


def _row(rank: int, data: Any) -> Row:
    given = wire.table(data, "a row", 64)
    kinds = {each.name: str(each.type) for each in fields(Row)}
    if given.keys() != kinds.keys():
        raise wire.Malformed("a row of another version")
    for name, value in given.items():
        allowed = _KINDS[kinds[name]]
        if not isinstance(value, allowed) or (isinstance(value, bool) and kinds[name] != "bool"):
            raise wire.Malformed(f"{name} of a row is no {kinds[name]}")
        if isinstance(value, str):
            wire.text(value, name)
        elif isinstance(value, int) and not isinstance(value, bool):
            wire.whole(value, name, -(1 << 62))
    if given["rank"] != rank:
        raise wire.Malformed("a row of another rank")
    return Row(**given)


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
}
