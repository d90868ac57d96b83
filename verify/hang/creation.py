"""Groups that ranks created with different members: each rank's record says whom it believes to be in a group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from verify import words
from verify.blame import CREATION, Class, Verdict, minority
from verify.events import Confidence

if TYPE_CHECKING:
    from verify.events import Site
    from verify.hang.case import Case
    from verify.matching import Channel

ABOVE = (Class.EXCEPTION, Class.MISMATCH)


def groups_that_differ(case: Case) -> Case | None:
    """Calls of one group that do not meet, as its callers created it with different members."""
    if case.verdict.cls is Class.NONE or (case.verdict.cls in ABOVE and not case.verdict.condition):
        return None
    views: dict[str, dict[Channel, set[int]]] = {}
    for meeting in case.situation.meetings.values():
        channel, calls = meeting.key[0], [call for _, call in meeting.arrived.values()]
        # Groups that torch has no object for are named by what they do, and may have the same name.
        if channel.kind != "collective" or not channel.name or any(call.medium in ("host", "") for call in calls):
            continue
        seen = {call.rank for call in calls if call.confidence is Confidence.OBSERVED}
        views.setdefault(channel.name, {}).setdefault(channel, set()).update(seen)
    for name, sides in views.items():
        channels = [channel for channel in sides if sides[channel] and _open(case, channel)]
        if len(channels) < 2 or not set(channels[0].members) & set(channels[1].members):
            continue
        # What logs and dumps say of members is less than all, and each rank's own record says it once.
        callers = [rank for channel in channels for rank in sides[channel]]
        if len(set(callers)) < len(callers) or not case.found.whole.issuperset(callers):
            continue
        return replace(case, verdict=_told(case, name, {channel: sides[channel] for channel in channels}))
    return None


def _open(case: Case, channel: Channel) -> bool:
    """Whether a rank waits in a call of it."""
    meetings = (meeting for meeting in case.situation.meetings.values() if meeting.key[0] == channel)
    return any(not launch.done for meeting in meetings for launch, _ in meeting.arrived.values())


def _told(case: Case, name: str, sides: dict[Channel, set[int]]) -> Verdict:
    everybody = {rank for channel in sides for rank in channel.members}
    odd = minority(sides.values(), of=len(everybody))
    parts = []
    for channel, ranks in sides.items():
        made = next((site for rank in sorted(ranks) if (site := _made(case, rank, channel)) is not None), None)
        where = f", created at {made}" if made is not None else ""
        parts.append(f"{words.ranks(channel.members)} on {words.ranks(ranks)}{where}")
    say = f"{name[0].upper()}{name[1:]} has other members on some ranks than on others: {'; '.join(parts)}."
    say += f" The odd one is {words.ranks(odd)}." if odd else " No majority tells which side is wrong."
    return Verdict(Class.MISMATCH, ranks=odd, chain=tuple(parts), say=say, fix=words.CREATE)


def _made(case: Case, rank: int, channel: Channel) -> Site | None:
    """The line of the last creation of a group before a rank's first call in it."""
    found: Site | None = None
    for launch in case.situation.launches.get(rank, ()):
        for meeting in launch.meetings:
            if meeting.key[0] == channel:
                return found
        if launch.event.operation == CREATION:
            found = launch.event.site
    return None
