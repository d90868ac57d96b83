"""The row of a rank that `turnstile.record.install` records: its last call, what it waits in, what it decided last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from verify.live.installed import call_words
from verify.top.frame import Row

if TYPE_CHECKING:
    from verify.live.installed import LiveInstalled
    from verify.readers.installed_call import Item

SHOWN: Final = 3
"""Other open calls that are named."""


def row_of(ring: LiveInstalled, status: str, now_ns: int, quiet_s: float | None) -> Row:
    """The row. now_ns: the moment of the frame on the rank's own clock."""
    waits, since_ns, item = _waits(ring)
    open_ = ring.open
    last = item or (ring.items[-1] if ring.items else None)
    if item is None and waits:
        operation, site = waits, ""
    else:
        operation, site = (_words(last), last.site) if last is not None else ("", "")
        since_ns = last.time_ns if last is not None else since_ns
    is_open = bool(waits) or (last is not None and not last.done)
    others = [each for each in open_ if each is not last]
    if others:
        named = ", ".join(map(_words, others[:SHOWN])) + (", ..." if len(others) > SHOWN else "")
        waits = f"{waits}; open: {named}" if waits else f"open: {named}"
    return Row(
        rank=ring.rank, status=status, phase="", round=-1, epoch=-1, boundary=None, permit=None,
        operation=operation, open=is_open,
        age_s=round(max(0, now_ns - since_ns) / 1e9, 3) if since_ns is not None else None,
        site=site, quiet_s=round(quiet_s, 3) if quiet_s is not None else None, gap_ms=None, p_queue=0, d_queue=0,
        pending=len(open_), exception=ring.raised[0].text if 0 in ring.raised else "",
        waits=waits, decision=ring.decision, installed=True,
    )  # fmt: skip


def _waits(ring: LiveInstalled) -> tuple[str, int | None, Item | None]:
    """What the main thread waits in, since when, and the call if it is one."""
    if (number := ring.waits.get(0)) is not None:
        item = ring.items_by_number.get(number)
        if item is None:
            return "waits for a call", None, None
        return f"waits for {_words(item)}", item.time_ns, item
    if (entry := ring.host_wait(0)) is not None:
        return f"waits for {entry.text or 'its device'}", entry.time_ns, None
    return "", None, None


def _words(item: Item) -> str:
    via = f" by {item.call.via}" if item.call.via else ""
    return call_words(item.call, item.group.name, item.sequence + 1) + via
