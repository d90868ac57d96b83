"""Who belongs to a group, from the dumps of several ranks: listed, inferred from who called it, or contradicted.

Each process lists the members of its own groups. Where the lists of one group contradict each other, the one that more
than half of those ranks hold is believed. Where there is none, nothing in the group is compared, nobody is missing from
it, and this is said: such a list is damaged, or two groups have one name.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from verify import words
from verify.readers.calls import Group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from verify.readers.calls import Name

COUNTED: Final = 1 << 18
"""Ranks below it are taken for those of a job, and higher numbers in names of files for numbers of something else."""
Members = tuple[int, ...]
Views = dict[Members, list[int]]
"""A list of members -> the ranks whose dumps hold it."""


class Membership(NamedTuple):
    """groups: of each rank and name. disputed: groups of which it is not known who belongs to them.

    outside: rank and name, where the rank's own list is not believed and it belongs to no other. inferred: groups whose
    members no dump lists. unknown: lines.
    """

    groups: dict[tuple[int, Name], Group]
    disputed: frozenset[Group]
    outside: frozenset[tuple[int, Name]]
    inferred: frozenset[Name]
    unknown: tuple[str, ...]


def resolve(listed: Mapping[int, Mapping[Name, Members]], called: Mapping[int, Iterable[Name]]) -> Membership:
    """Who belongs to which group. listed: rank -> its groups, () where no members are. called: rank -> what it used."""
    sets = _Sets()
    views: dict[Name, Views] = defaultdict(dict)
    users: dict[Name, set[int]] = defaultdict(set)
    for rank, groups in listed.items():
        for name, members in groups.items():
            if members:
                views[name].setdefault(sets.one(members), []).append(rank)
    for rank, names in called.items():
        for name in names:
            if not listed[rank].get(name):
                users[name].add(rank)
    unknown: list[str] = []
    settled: dict[tuple[int, Name], Members] = {}
    disputed: set[Group] = set()
    dismissed: set[Group] = set()
    for name, mine in sorted(views.items()):
        for part in _contradictions(mine, sets):
            members, sure = _believed(part)
            holders = (rank for ranks in part.values() for rank in ranks)
            settled |= {(rank, name): members for rank in (*members, *holders)}
            unknown.append(_told(name, part, members if sure else ()))
            disputed |= set() if sure else {Group(name, members)}
            dismissed |= {Group(name, each) for each in part if each != members}
    world = tuple(sorted(frozenset(listed).union(*sets.each(members for mine in views.values() for members in mine))))
    found: dict[tuple[int, Name], Group] = {}
    outside: set[tuple[int, Name]] = set()
    guessed: set[Name] = set()
    whole: set[Name] = set()
    # Of a job there are the ranks from 0 on.
    everybody = sets.one(tuple(range(world[-1] + 1)) if world and world[-1] < COUNTED else world)
    for rank, groups in listed.items():
        for name in dict.fromkeys([*groups, *called.get(rank, ())]):
            members = settled.get((rank, name)) or groups.get(name) or ()
            held = [] if members else [each for each in views[name] if Group(name, each) not in dismissed]
            others = [each for each in held if rank in sets.of(each)]
            if len(others) == 1:
                members = others[0]
            if not members and name[1] == "default_pg":
                members = everybody
                whole.add(name)
            if not members and name in users:
                members = tuple(sorted(users[name]))
                guessed.add(name)
            if members and rank not in sets.of(members):
                outside.add((rank, name))
            found[rank, name] = Group(name, sets.one(members))
    if guessed:
        labels = sorted(desc or name for name, desc in guessed)
        unknown.append(
            f"members of {', '.join(labels[:4])}{' and others' * (len(labels) > 4)} are not in the dumps: "
            "inferred from who called it, so that a member that never did is not seen"
        )
    return Membership(found, frozenset(disputed), frozenset(outside), frozenset(guessed | whole), tuple(unknown))


class _Sets:
    """Lists of members as sets, and one list for all equal ones: looking through those of thousands of ranks takes
    long, and thousands of dumps hold the same list.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Members, Members, frozenset[int]]] = {}
        self._equal: dict[Members, tuple[Members, frozenset[int]]] = {}

    def _find(self, members: Members) -> tuple[Members, Members, frozenset[int]]:
        # By identity, of lists that are kept alive here.
        if (known := self._known.get(id(members))) is None:
            equal = self._equal.setdefault(members, (members, frozenset(members)))
            known = self._known[id(members)] = members, *equal
        return known

    def of(self, members: Members) -> frozenset[int]:
        """The set of a list."""
        return self._find(members)[2]

    def one(self, members: Members) -> Members:
        """The list that stands for all equal ones."""
        return self._find(members)[1]

    def each(self, lists: Iterable[Members]) -> list[frozenset[int]]:
        """The sets of some lists, each once."""
        return list({id(found): found for found in map(self.of, lists)}.values())


def _contradictions(views: Views, sets: _Sets) -> list[Views]:
    """The lists of one group that have ranks in common with another list, together; those of their own are left out.

    A list without the rank that holds it contradicts itself.
    """
    lists = list(views)
    if len(lists) == 1 and sets.of(lists[0]).issuperset(views[lists[0]]):
        return []
    whose: dict[int, int] = {}
    part = list(range(len(lists)))

    def root(at: int) -> int:
        while part[at] != at:
            part[at] = at = part[part[at]]
        return at

    for at, members in enumerate(lists):
        for rank in (*members, *views[members]):
            if (other := whose.setdefault(rank, at)) != at:
                part[root(other)] = root(at)
    parts: dict[int, Views] = defaultdict(dict)
    for at, members in enumerate(lists):
        parts[root(at)][members] = list(views[members])
    return [
        mine for mine in parts.values()
        if len(mine) > 1 or not sets.of(next(iter(mine))).issuperset(*mine.values())
    ]  # fmt: skip


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
