"""Who belongs to a group, from the dumps of several ranks: listed, inferred from who called it, or contradicted.

Each process lists the members of its own groups. Where the lists of one group contradict each other, the one that more
than half of those ranks hold is believed. Where there is none, nothing in the group is compared, nobody is missing from
it, and this is said: such a list is damaged, or two groups have one name.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from verify import words
from verify.readers.calls import Group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from verify.readers.calls import Name

Members = tuple[int, ...]
Views = dict[Members, list[int]]
"""A list of members -> the ranks whose dumps hold it."""


class Membership(NamedTuple):
    """groups: of each rank and name. disputed: groups of which it is not known who belongs to them.

    outside: rank and name, where the rank's own list is not believed and it belongs to no other. unknown: lines.
    """

    groups: dict[tuple[int, Name], Group]
    disputed: frozenset[Group]
    outside: frozenset[tuple[int, Name]]
    unknown: tuple[str, ...]


def resolve(listed: Mapping[int, Mapping[Name, Members]], called: Mapping[int, Iterable[Name]]) -> Membership:
    """Who belongs to which group. listed: rank -> its groups, () where no members are. called: rank -> what it used."""
    views: dict[Name, Views] = defaultdict(lambda: defaultdict(list))
    users: dict[Name, set[int]] = defaultdict(set)
    for rank, groups in listed.items():
        for name, members in groups.items():
            if members:
                views[name][members].append(rank)
    for rank, names in called.items():
        for name in names:
            if not listed[rank].get(name):
                users[name].add(rank)
    unknown: list[str] = []
    settled: dict[tuple[int, Name], Members] = {}
    disputed: set[Group] = set()
    dismissed: set[Group] = set()
    for name, mine in sorted(views.items()):
        for part in _contradictions(mine):
            members, sure = _believed(part)
            holders = (rank for ranks in part.values() for rank in ranks)
            settled |= {(rank, name): members for rank in (*members, *holders)}
            unknown.append(_told(name, part, members if sure else ()))
            disputed |= set() if sure else {Group(name, members)}
            dismissed |= {Group(name, each) for each in part if each != members}
    world = tuple(sorted({*listed, *(rank for mine in views.values() for members in mine for rank in members)}))
    found: dict[tuple[int, Name], Group] = {}
    outside: set[tuple[int, Name]] = set()
    guessed: set[Name] = set()
    same: dict[Members, Members] = {}
    for rank, groups in listed.items():
        for name in dict.fromkeys([*groups, *called.get(rank, ())]):
            members = settled.get((rank, name)) or groups.get(name) or ()
            held = [] if members else [each for each in views[name] if Group(name, each) not in dismissed]
            others = [each for each in held if rank in each]
            if len(others) == 1:
                members = others[0]
            if not members and name[1] == "default_pg":
                members = world
            if not members and name in users:
                members = tuple(sorted(users[name]))
                guessed.add(name)
            if members and rank not in members:
                outside.add((rank, name))
            # One object for equal lists: comparing those of thousands of ranks takes long.
            found[rank, name] = Group(name, same.setdefault(members, members))
    if guessed:
        labels = sorted(desc or name for name, desc in guessed)
        unknown.append(
            f"members of {', '.join(labels[:4])}{' and others' * (len(labels) > 4)} are not in the dumps: "
            "inferred from who called it, so that a member that never did is not seen"
        )
    return Membership(found, frozenset(disputed), frozenset(outside), tuple(unknown))


def _contradictions(views: Views) -> list[Views]:
    """The lists of one group that have ranks in common with another list, together; those of their own are left out.

    A list without the rank that holds it contradicts itself.
    """
    parts: list[tuple[set[int], Views]] = []
    for members, ranks in views.items():
        everybody, mine = {*members, *ranks}, {members: list(ranks)}
        for other in [part for part in parts if not part[0].isdisjoint(everybody)]:
            parts.remove(other)
            everybody |= other[0]
            mine |= other[1]
        parts.append((everybody, mine))
    return [mine for everybody, mine in parts if len(mine) > 1 or not everybody <= set(next(iter(mine)))]


def _believed(views: Views) -> tuple[Members, bool]:
    """The list that more than half of the ranks hold, who are all in it; else all ranks that any names, and False."""
    holders = sum(map(len, views.values()))
    for members, ranks in views.items():
        if 2 * len(ranks) > holders and set(ranks) <= set(members):
            return members, True
    return tuple(sorted({rank for members, ranks in views.items() for rank in (*members, *ranks)})), False


def _told(name: Name, views: Views, believed: Members) -> str:
    label = name[1] or name[0]
    odd = sorted(rank for members, ranks in views.items() if members != believed for rank in ranks)
    what = f"the dump of {words.ranks(odd)} lists" if len(odd) == 1 else f"the dumps of {words.ranks(odd)} list"
    if believed:
        return f"{what} other members of {label} than most do, and is not believed"
    return f"who belongs to {label}: {what} members that contradict each other, so nothing in it is compared"


def damaged(sides: Sequence[str]) -> str:
    """A line about names of operations that could not be read."""
    told = ", ".join(repr(each) for each in sides[:3]) + (f" and {len(sides) - 3} more" if len(sides) > 3 else "")
    return f"no operation that is known: {told}: damaged, perhaps, and not compared"
