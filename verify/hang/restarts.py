"""Groups that were made anew in one process, with their numbers from the start: the calls of both are kept apart.

A dump names a group by a number that a second `init_process_group` gives again. Where the numbers of a rank's calls
in one group go back, a new group begins. Ranks are aligned by the newest one, since what is lost of a ring is its
beginning; but a rank whose calls begin with the first one ever, and that has made fewer groups, is still in an old one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from verify.events import Communicator, Kind, State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from verify.events import Event


def _begins(event: Event) -> bool:
    """Whether a call may be the first one of a group that was made anew: its first is there, since a ring loses what is
    older first, and the calls of a group whose numbers go back are all kept. Lines of a log, which come after the calls
    of a dump and repeat some of them, do not know their sizes, or are of open calls.
    """
    return event.sizes is not None and event.sequence == 0


def kept_apart(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events, with another name for the groups of collectives that were made anew: `dp (2)` for the second one."""
    events = tuple(events)
    last: dict[tuple[int, Communicator], int] = {}
    first: dict[tuple[int, Communicator], int] = {}
    made: dict[tuple[int, Communicator], int] = {}
    open_: set[tuple[int, Communicator, int]] = set()
    which: list[int] = []
    for event in events:
        which.append(0)
        if event.kind is not Kind.COLLECTIVE or event.communicator is None or event.sequence is None:
            continue
        key = (event.rank, event.communicator)
        first.setdefault(key, event.sequence)
        again = event.sequence <= last.get(key, -1) and _begins(event) and (*key, event.sequence) not in open_
        made[key] = made.get(key, 0) + again
        last[key] = event.sequence if again else max(event.sequence, last.get(key, -1))
        if event.state is not State.COMPLETED:
            open_.add((*key, event.sequence))
        which[-1] = made[key]
    if not any(made.values()):
        return events
    most: dict[Communicator, int] = defaultdict(int)
    for (_, group), times in made.items():
        most[group] = max(most[group], times)
    names: dict[tuple[Communicator, int], Communicator] = {}
    found: list[Event] = []
    for event, number in zip(events, which, strict=True):
        old = event.communicator
        if event.kind is not Kind.COLLECTIVE or old is None or event.sequence is None or not most[old]:
            found.append(event)
            continue
        at = number + (0 if first[event.rank, old] == 0 else most[old] - made[event.rank, old])
        label = f"{old.name} ({at + 1})" if at else old.name
        known = names.setdefault((old, at), Communicator(old.members, label))
        found.append(replace(event, communicator=known))
    return tuple(found)
