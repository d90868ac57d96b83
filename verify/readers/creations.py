"""Groups that ranks make, from an installed record: who waits for whom there, and whether they make the same ones.

All ranks of a job count the groups that are made, and whoever is to be in one waits for its other members, but for
nobody else: a rank that is not to be in it goes on at once. Ranks that make different groups under one number are wrong
as soon as one waits for a member that has made another group, or for nobody at all: torch finds the members of a group
by its number, so that two groups with one number may take each other's. Where nobody waits, it went well: no alarm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kernel.record.foreign import NEW_GROUPS, members_of
from verify.events import Communicator, State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from verify.events import Event

CREATION = "INIT"


def settled(events: Iterable[Event]) -> list[Event]:
    """The events of all ranks, with each creation of a group as a call of those who are to be in it. Where ranks make
    different groups it stays a call of everybody, with the members that each rank names as what must agree.
    """
    found = list(events)
    made: dict[int, dict[int, Event]] = {}
    for event in found:
        if _is_creation(event):
            made.setdefault(event.sequence or 0, {})[event.rank] = event
    last = {rank: number for number in sorted(made) for rank in made[number]}
    differing = {number for number, mine in made.items() if _differs(mine)}
    told: list[Event] = []
    for event in found:
        number = event.sequence or 0
        if not _is_creation(event) or number in differing:
            told.append(event)
            continue
        members = members_of(event.tag)
        lost = members is not None and any(rank not in made[number] and last.get(rank, -1) > number for rank in members)
        if members is None or lost:
            told.append(replace(event, tag=""))
        elif event.rank in members:
            told.append(replace(event, tag="", communicator=Communicator(tuple(sorted(members)), NEW_GROUPS)))
    return told


def _is_creation(event: Event) -> bool:
    group = event.communicator
    return event.operation == CREATION and bool(event.tag) and group is not None and group.name == NEW_GROUPS


def _differs(made: dict[int, Event]) -> bool:
    """Whether somebody waits for a member that has made another group, or though all have come, while other ranks have
    made another one. made: the creations of one number, by rank.
    """
    tags = {event.tag for event in made.values()}
    for rank, event in made.items():
        members = members_of(event.tag) or ()
        if event.state is State.COMPLETED or rank not in members or len(tags) < 2:
            continue
        others = [made[other].tag for other in members if other in made]
        if len(others) == len(members) or any(tag != event.tag for tag in others):
            return True
    return False
