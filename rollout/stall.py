"""A run without progress: when that is so, and the report about it.

Progress is a token, a piece of prefill that finished, an epoch that was promoted, a turn that ended: what brings work
nearer to its end. Rounds are none, so a policy that never releases prefill stalls however busy its ranks are, and so
does one that waits for something of its own on all ranks alike. Nothing is owed while no turn is in flight, and while
the engine is paused.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import HangFound, UsageError
from kernel.record import Kind, read, ring_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kernel.record import Event
    from rollout.ranks.pulse import Pulse
    from verify.blame import Verdict

STALL_TIMEOUT_S: Final = 120.0
"""The default. A segment of prefill, or a decode iteration, of the largest models on a CPU takes seconds."""
EVENTS: Final = 6
"""The newest ones of a rank, as the report shows them."""
NEWEST: Final = 4096
RECENT_NS: Final = 3_000_000_000
PATIENCE_S: Final = 5.0
MANY: Final = 8
"""Ranks whose events are shown; all of them are in the record."""


class Stalled(HangFound):
    """The run made no progress for as long as was allowed, and was ended. report: many lines; diagnosis: `hang`'s."""

    report = ""
    diagnosis: Mapping[str, Any] | None = None


class Stall:
    """Judges whether a run has come further. timeout_s: without progress, 0 for never. clock: monotonic seconds."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s, self._clock = timeout_s, clock
        self.every_s = min(1.0, timeout_s / 4)
        self._seen: object = None
        self._since = self._looked = clock()

    def look(self, progress: object, owed: bool) -> bool:
        """Whether nothing has changed for too long. progress: compared with the last one; owed: whether it is due."""
        now = self._clock()
        asleep, self._looked = now - self._looked > 3 * self.every_s + 1.0, now
        if not owed or asleep or progress != self._seen:  # whoever was asleep himself has nothing to say of others
            self._seen, self._since = progress, now
        return bool(self.timeout_s) and now - self._since >= self.timeout_s

    async def watch(self, progress: Callable[[], object], owed: Callable[[], bool]) -> None:
        """Return when the run has stalled."""
        self._since = self._looked = self._clock()
        while not self.look(progress(), owed()):  # noqa: ASYNC110  (time passing is what it waits for)
            await asyncio.sleep(self.every_s)


def found(
    timeout_s: float, record: str, pulse: Pulse, where: Mapping[int, Sequence[str]], turns: int, policy: str
) -> Stalled:
    """The error to end a stalled run with, its report made of the ranks' records while they still stand there.

    record: directory of the run, "" for none. where: for each rank the lines that its round waits in. turns: in flight.
    """
    first = f"no progress for {timeout_s:g} s under {policy}, with {turns} turn{'s' if turns != 1 else ''} in flight"
    lines = [f"stalled   {first}"]
    began_ns = time.monotonic_ns()  # reading takes seconds on a busy machine
    events = {rank: _events(record, rank) for rank in sorted(pulse.at)}
    for rank in sorted(pulse.at)[:MANY]:
        lines += _rank(rank, pulse.at[rank], events[rank], where.get(rank, ()))
    if len(events) > MANY:
        lines.append(f"          and {len(events) - MANY} ranks more")
    # Events may come for a little while after the last token; whoever is silent since then stands still.
    text, diagnosis = _diagnosis(record, events, where, policy, began_ns, min(PATIENCE_S, timeout_s) / 2)
    lines.append(text)
    error = Stalled(f"{first}: the run was ended")
    error.report, error.diagnosis = "\n".join(lines), diagnosis
    return error


def _diagnosis(
    record: str,
    events: Mapping[int, Sequence[Event]],
    where: Mapping[int, Sequence[str]],
    policy: str,
    now_ns: int,
    patience_s: float,
) -> tuple[str, dict[str, Any]]:
    """What `turnstile hang` says of the run; where ranks stall alike, which it cannot see, that instead.

    patience_s: of a rank that has been silent for so long nothing more is waited for.
    """
    from verify.blame import Certainty, Class
    from verify.hang.diagnosis import Diagnosis, diagnose_found
    from verify.hang.text import as_text
    from verify.readers.record import RecordReader

    going = _going(events, now_ns)
    alike = _alike(events, where, policy, going)
    try:
        found = diagnose_found(RecordReader(patience_s).read(Path(record)), quiet=not going) if record else None
    except UsageError:
        found = None
    if found is None:
        found = Diagnosis(alike, policy, ("who waits for whom: there is no record",))
    elif going or found.verdict.cls is Class.NONE or found.verdict.certainty is Certainty.UNDECIDED:
        unknown = tuple(line for line in found.unknown if "look again" not in line)
        found = replace(found, verdict=alike, unknown=unknown)
    return as_text(found), found.to_dict()


def _going(events: Mapping[int, Sequence[Event]], now_ns: int) -> int:
    """The round that all ranks have come to while nothing came of the rounds; 0 where they stand still."""
    rounds = [
        {each.round for each in some if each.kind is Kind.PLAN and now_ns - each.time_ns < RECENT_NS}
        for some in events.values()
    ]
    return max(max(each) for each in rounds) if rounds and all(len(each) > 1 for each in rounds) else 0


def _alike(
    events: Mapping[int, Sequence[Event]], where: Mapping[int, Sequence[str]], policy: str, going: int
) -> Verdict:
    """What is common to all ranks, of which none waits for another."""
    from verify.blame import Certainty, Class, Verdict

    newest = [[e for e in some if e.kind is Kind.BOUNDARY][-1:] for some in events.values()]
    stands = {f"P e{each.epoch} stands at boundary {each.a}" for some in newest for each in some}
    if going:
        return Verdict(
            Class.STARVATION,
            Certainty.CONDITIONAL,
            say=f"All ranks go from round to round (now {going}), and nothing comes of it"
            + (f": {stands.pop()}." if len(stands) == 1 else "."),
            fix=f"Look at what {policy} plans, and whether its turn() releases P and launches D; `turnstile check` can"
            " show the schedule.",
            condition="no later round would have changed that",
        )
    if silent := sorted(events.keys() - where.keys()):
        names = ", ".join(map(str, silent))
        who = f"Ranks {names} do" if len(silent) > 1 else f"Rank {names} does"
        return Verdict(
            Class.OUTSIDE,
            ranks=tuple(silent),
            say=f"{who} not answer: the event loop is held by code that computes or blocks, or the process is stopped.",
            fix=f"Look at what {policy} does in plan() and turn(), and with --stall-timeout 0 at the ranks' stacks.",
        )
    waits = [some[-1].text if some and some[-1].kind is Kind.HOST_WAIT_ENTER else "" for some in events.values()]
    if waits and set(waits) == {"inbox"}:
        return Verdict(
            Class.STARVATION,
            say="All ranks wait for work while turns are waiting: the plan admits none of them.",
            fix=f"Look at what {policy} plans when nothing is in flight; `turnstile check` can show it.",
        )
    places = {tuple(where.get(rank, ())[-1:]) for rank in events}
    if len(places) == 1 and (place := next(iter(places))):
        return Verdict(
            Class.OUTSIDE,
            say=f"All ranks wait at {place[0]}, and none of them for another.",
            fix="Let a turn await its gate only: what else it waits for may never come, and not at the same time.",
        )
    return Verdict(
        Class.TIMEOUT,
        Certainty.UNDECIDED,
        say="No rank is seen to wait for another, and they do not stand alike.",
        fix="Look at the stacks of the ranks: `turnstile hang RUN --pid PID`.",
        condition="the records do not show what the ranks wait for",
    )


def _events(record: str, rank: int) -> list[Event]:
    if not record:
        return []
    try:
        return [each for each in read(ring_path(record, rank)).events[-NEWEST:] if each.kind is not Kind.MARK]
    except UsageError:
        return []


def _rank(rank: int, at: str, events: Sequence[Event], where: Sequence[str]) -> list[str]:
    now = time.monotonic_ns()
    lines = [f"rank {rank:<5}{at.strip().removeprefix('with ')}"]
    lines += [f"          waits at {line}" for line in where[-1:]]
    for event in events[-EVENTS:]:
        age = (now - event.time_ns) / 1e9
        about = " ".join(
            part for part in (str(event.phase or ""), event.group, event.text, event.site.rpartition("/")[2]) if part
        )
        kind = event.kind.name.lower()
        lines.append(f"          {age:8.3f} s ago  round {event.round}  {kind} {about}"[:120].rstrip())
    return lines
