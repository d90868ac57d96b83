"""Groups that two kinds of evidence tell of: a watchdog's lines do not say who is in a group, dumps do.

They are one where name and description are equal, and all ranks that the lines name are members of the one group that
the dumps have of them. A timeout whose group no line names is of the one group in which the dump of its rank has that
call open. What a dump shows of a rank itself, the lines do not tell again. Where it is not certain that two groups are
one, they stay two, and this is said. What was joined is not `loose` any more.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from verify.events import Confidence, Kind, State
from verify.readers.found import GROUP_UNTOLD, MEMBERS_UNTOLD

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from verify.events import Communicator, Event
    from verify.readers.found import Found

Place = tuple[int, "Communicator"]
"""A rank and a group."""


def join(found: Sequence[Found]) -> Sequence[Found]:
    """The same evidence, in which groups that are certainly one are one."""
    if not any(each.loose for each in found) or not any(each.named for each in found):
        return found
    known = _Known([each for each in found if each.named])
    return [known.joined(each) if each.loose else each for each in found]


def widened(found: Sequence[Found]) -> list[Found]:
    """The same evidence, in which everybody that any of it knows belongs to the group of all: of a rank that left by a
    signal, a watchdog's lines say nothing, and its stack or its last words lie in other files.
    """
    everybody = tuple(sorted(frozenset[int]().union(*(each.expected for each in found))))
    stood = {stack.rank for each in found for stack in each.stacks}
    return [_widened(each, everybody, stood) if each.loose else each for each in found]


def _widened(log: Found, everybody: tuple[int, ...], stood: Collection[int | None]) -> Found:
    """stood: ranks of which there is a stack; of others, nothing tells whether they made a call that has no line."""
    wide = {
        each.communicator: replace(each.communicator, members=everybody) for each in log.loose
        if each.of_all and set(each.communicator.members) < set(everybody)
    }  # fmt: skip
    if not wide:
        return log
    events = tuple(
        replace(event, communicator=wide[event.communicator]) if event.communicator in wide else event
        for event in log.events
    )
    loose = tuple(each._replace(communicator=wide.get(each.communicator, each.communicator)) for each in log.loose)
    lost = {
        (rank, str(group)) for group, all_ in wide.items()
        for rank in set(all_.members) - set(group.members) - {*stood}
    }  # fmt: skip
    return replace(log, events=events, loose=loose, unsure=log.unsure | lost)


class _Known:
    """Groups whose members are known, and what ranks called in them."""

    def __init__(self, found: Sequence[Found]) -> None:
        self.groups: dict[tuple[str, str], set[Communicator]] = defaultdict(set)
        self.ranks = frozenset[int]().union(*(each.present for each in found))
        for each in found:
            for named in each.named:
                self.groups[named.name, named.description].add(named.communicator)
        self.descriptions = {described for _, described in self.groups if described}
        self.newest: dict[Place, int] = {}
        self.open: dict[tuple[int, int], list[Event]] = defaultdict(list)
        """Rank and number -> calls that are not over."""
        for event in (event for each in found for event in each.events):
            if event.kind is Kind.COLLECTIVE and event.communicator is not None and event.sequence is not None:
                place = event.rank, event.communicator
                self.newest[place] = max(self.newest.get(place, -1), event.sequence)
                if event.state is not State.COMPLETED:
                    self.open[event.rank, event.sequence].append(event)

    def joined(self, log: Found) -> Found:
        """The evidence of a log."""
        same: dict[Communicator, Communicator] = {}
        apart: list[str] = []
        for each in log.loose:
            mine = {one for one in self.groups.get((each.name, each.description), ())
                    if set(each.communicator.members) <= set(one.members)}  # fmt: skip
            if len(mine) == 1:
                (same[each.communicator],) = mine
            elif mine or each.description in self.descriptions:
                apart.append(str(each.communicator))
        nameless = {each.communicator for each in log.loose if not each.name}
        events = list(self._events(log.events, same, nameless))
        labels = {str(old): str(new) for old, new in same.items()}
        unsure = {
            (rank, labels.get(label, label)) for rank, label in log.unsure
            if not (rank in self.ranks and label in labels)
        }  # fmt: skip
        settled: tuple[str, ...] = ()
        if not any(event.communicator in nameless for event in events):
            rest = [each for each in log.loose if each.communicator not in same and each.communicator not in nameless]
            settled = (GROUP_UNTOLD,) if rest else (GROUP_UNTOLD, MEMBERS_UNTOLD)
        unknown = [line for line in log.unknown if not line.endswith(settled)]
        if apart:
            told = ", ".join(sorted(apart)[:3]) + f" and {len(apart) - 3} more" * (len(apart) > 3)
            unknown.append(f"{log.source}: whether its {told} is a group of the dumps is not certain: counted apart")
        # Of a rank without a dump the lines tell the groups only in which something is open.
        stuck = {event.communicator for event in events}
        for one in {one for each in self.groups.values() for one in each} - stuck:
            unsure |= {(rank, str(one)) for rank in (log.present - self.ranks).intersection(one.members)}
        return replace(log, events=tuple(events), unsure=frozenset(unsure), unknown=tuple(unknown), loose=())

    def _events(
        self, events: Iterable[Event], same: Mapping[Communicator, Communicator], nameless: set[Communicator]
    ) -> Iterable[Event]:
        for event in events:
            group = event.communicator
            if event.kind is Kind.WAIT and group in same and event.sequence is not None:
                # The others' dumps show calls of that group that this rank has made as well.
                event = replace(event, kind=Kind.COLLECTIVE)
            if group is None or event.kind is not Kind.COLLECTIVE:
                yield event
                continue
            if group in nameless:
                mine = self._opened(event)
                if len(mine) != 1:
                    yield event
                continue
            if group in same:
                event = replace(event, communicator=same[group])
                # What a dump shows, or left out since it was over, is told already.
                newest = self.newest.get((event.rank, same[group]), -1)
                if event.sequence is not None and event.sequence <= newest:
                    continue
                if event.rank in self.ranks and event.state is State.COMPLETED:
                    continue
            yield event

    def _opened(self, event: Event) -> set[Communicator]:
        """Groups in which the rank of a timeout has that very call open."""
        if event.confidence is not Confidence.OBSERVED or event.sequence is None:
            return set()
        return {
            each.communicator for each in self.open[event.rank, event.sequence]
            if each.communicator is not None and each.operation == event.operation
            and (None in (each.sizes, event.sizes) or each.sizes == event.sizes)
        }  # fmt: skip
