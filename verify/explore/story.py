"""What people see of a trace: the events that matter, in lanes, from the last point that went as planned.

Left out: what device work does by itself and finishes, and steps of asyncio's own. A rank's events stay in the order in
which they happened; between ranks, the order is one that the causes of the trace allow, with few switches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from kernel.sched.policy import ALL
from verify.explore.shrink import also_before, few_switches, rank_of
from verify.sim.standstill import brief

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kernel.sched.policy import Plan
    from verify.sim.trace import Trace

SWITCHES = 6
"""Changes of rank that a story has at most."""

ROWS = 13
"""Its lines at most."""

_COLLECTIVE = re.compile(r"[DP] \w+ [A-Z]+ #\d+")
_COMPUTE = re.compile(r"[DP] ((attention|experts) \d+|head)")
_CLOSING = ("views", "end", "post-d")
"""Exchanges that end a round (`kernel.rank`)."""


@dataclass(frozen=True)
class Row:
    """One event: what `rank` did, and in which step. critical: after this, nothing could succeed any more."""

    rank: int
    text: str
    step: int
    critical: bool = False


@dataclass(frozen=True)
class Cut:
    """A point that everybody has passed: so many steps of an order are before it; what has happened, in words."""

    steps: int
    caption: str


@dataclass(frozen=True)
class Arrangement:
    """All steps of a trace in another order that means the same, and the cuts in it."""

    order: tuple[int, ...]
    cuts: tuple[Cut, ...]


def arrange(trace: Trace) -> Arrangement:
    """Rendezvous by rendezvous, with few switches between ranks inside each."""
    also = also_before(trace)
    order: list[int] = []
    done: set[int] = set()
    cuts = [Cut(0, "")]
    for steps, caption in _passed(trace):
        past = _past(trace, also, steps)
        order += few_switches(trace, sorted(past - done))
        done |= past
        cuts.append(Cut(len(order), caption))
    order += few_switches(trace, [step for step in range(len(trace.names)) if step not in done])
    return Arrangement(tuple(order), tuple(cuts))


def as_it_is(trace: Trace) -> Arrangement:
    """All steps in the order in which they were taken."""
    cuts = [Cut(max(steps) + 1, caption) for steps, caption in _passed(trace)]
    return Arrangement(tuple(range(len(trace.names))), (Cut(0, ""), *cuts))


@dataclass(frozen=True)
class Story:
    """caption: what is left out before the rows. ranks: whose rows these are."""

    caption: str
    rows: tuple[Row, ...]
    ranks: tuple[int, ...]

    @property
    def switches(self) -> int:
        """How often the rank changes from row to row."""
        return sum(one.rank != other.rank for one, other in pairwise(self.rows))


def tell(
    trace: Trace, cuts: Sequence[Cut], critical: int = -1, ops: Iterable[str] = (), ranks: Sequence[int] = ()
) -> Story:
    """The end of a failing trace, which must have its notes, from the latest cut that shows what matters.

    critical: a step. ops: operations that the finding names: their enqueue and their start matter. ranks: those to
    show; by default all.
    """
    events = Events(trace, tuple(ops))
    if critical >= 0 and not events.of(critical):
        events.add(rank_of(trace.names[critical]), subject(trace, critical), critical)
    shown = tuple(ranks) or tuple(sorted({note.rank for note in trace.notes}))
    told: Story | None = None
    for cut in reversed(cuts):
        rows = [
            replace(row, critical=step == critical)
            for step in range(cut.steps, len(trace.names)) for row in events.of(step) if row.rank in shown
        ]  # fmt: skip
        story = Story(cut.caption, tuple(rows), shown)
        if told is not None and (len(rows) > ROWS or story.switches > SWITCHES):
            break
        needs = {step for step, rank in events.held.items() if rank in shown} | ({critical} - {-1})
        if len(rows) > 1 and all(step >= cut.steps for step in needs):
            told = story
            if all(step >= cut.steps for step, rank in events.enqueued.items() if rank in shown):
                break
    return _fit(told or story)


def planned(plans: Sequence[Plan], upto: int = -1, most: int = 8) -> tuple[str, ...]:
    """What the last rounds did, up to a round, by their plans; rounds in a row that do the same share a line."""
    lines: list[tuple[int, int, str]] = []
    for plan in plans:
        if 0 <= upto < plan.round:
            break
        said = _plan(plan)
        first = lines.pop()[0] if lines and lines[-1][2] == said else plan.round
        lines.append((first, plan.round, said))
    return tuple(
        f"round{f's {first}-{last}' if first < last else f' {first}'}: {said}" for first, last, said in lines[-most:]
    )


def _plan(plan: Plan) -> str:
    rows = f"D of {'+'.join(map(str, plan.decode))} rows" if plan.bucket else "no D"
    state = "starts" if plan.activate == plan.epoch else "goes on"
    span = "all" if plan.span >= ALL else plan.span
    epoch = f"P e{plan.epoch} {state}, span {span}" if plan.epoch >= 0 else "no P"
    return f"{rows}, {epoch}" + (", idle" if plan.idle else "")


def _fit(story: Story) -> Story:
    """As much of the end of a story as there is room for; the critical row stays."""
    kept: list[Row] = []
    changes = 0
    for row in reversed(story.rows):
        changes += bool(kept) and kept[-1].rank != row.rank
        if len(kept) >= ROWS or changes > SWITCHES:
            break
        kept.append(row)
    kept.reverse()
    first = next((row for row in story.rows if row.critical), None)
    if first is not None and first not in kept:
        kept = [first, *kept[2:]]
        while Story("", tuple(kept), ()).switches > SWITCHES:
            del kept[1]
    left = len(story.rows) - len(kept)
    if not left:
        return story
    caption = f"{story.caption}; " if story.caption else ""
    return Story(f"{caption}{left} earlier event{'s'[: left > 1]} not shown", tuple(kept), story.ranks)


def _passed(trace: Trace) -> Iterator[tuple[list[int], str]]:
    """For each rendezvous that everybody has left: the steps in which they did, and a caption."""
    leaves: dict[int, list[int]] = {}
    tags: list[str] = []
    counts: dict[tuple[int, str], int] = {}
    ranks = {note.rank for note in trace.notes}
    for note in trace.notes:
        if note.where == "host" and note.step >= 0:
            number = counts.get((note.rank, note.what), 0)
            counts[note.rank, note.what] = number + 1
            if note.what == "leave":
                leaves.setdefault(number, []).append(note.step)
            elif number == len(tags):
                tags.append(note.which)
    for number, steps in sorted(leaves.items()):
        if len(steps) == len(ranks):
            yield steps, _caption(tags[: number + 1])


def _past(trace: Trace, also: dict[int, list[int]], steps: Sequence[int]) -> set[int]:
    past: set[int] = set()
    todo = list(steps)
    while todo:
        step = todo.pop()
        if step not in past:
            past.add(step)
            todo += trace.before[step]
            todo += also.get(step, ())
    return past


def _caption(tags: Sequence[str]) -> str:
    ended = sum(tag in _CLOSING for tag in tags) - ("views" in tags)
    rounds = "" if ended < 1 else "round 0 went as planned" if ended == 1 else f"rounds 0-{ended - 1} went as planned"
    if tags[-1] in _CLOSING and "views" in tags:
        return rounds or "the ranks have started"
    if "views" not in tags:
        return f"all ranks have passed rendezvous '{tags[-1]}' #{len(tags) - 1}"
    return f"{rounds}{', ' if rounds else ''}and all ranks have passed {tags[-1]} of round {ended}"


class Events:
    """The events of a trace, by step. held, enqueued: steps in which an operation of the finding took its place, and in
    which it was enqueued, with the rank."""

    def __init__(self, trace: Trace, ops: Sequence[str]) -> None:
        self._ops = set(ops)
        self._rows: dict[int, list[Row]] = {}
        finished = {(n.rank, n.which) for n in trace.notes if n.what == "finish" and n.step >= 0}
        left: dict[int, int] = {}
        for note in trace.notes:
            if note.what == "leave":
                left[note.rank] = left.get(note.rank, 0) + 1
        enqueued: dict[tuple[int, int], list[tuple[str, str]]] = {}
        arrived: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.enqueued: dict[int, int] = {}
        for note in trace.notes:
            if note.step < 0:
                continue
            if note.what == "enqueue":
                before = enqueued.setdefault((note.step, note.rank), [])
                self._enqueue(before, note.step, note.rank, note.where, note.which)
            elif note.what == "start" and (note.rank, note.which) not in finished and _COLLECTIVE.fullmatch(note.which):
                where = f" on stream {note.where}" if note.where != note.which[0] else ""
                self.add(note.rank, f"{brief(note.which)} starts{where}", note.step)
                if brief(note.which) in self._ops:
                    self.held[note.step] = note.rank
            elif note.what == "arrive":
                arrived[note.rank] = arrived.get(note.rank, 0) + 1
                waits = arrived[note.rank] > left.get(note.rank, 0)
                self.add(note.rank, f"{'waits in' if waits else 'comes to'} rendezvous {note.which}", note.step)
        self._roomless(trace, finished)

    def of(self, step: int) -> list[Row]:
        """What is seen of a step."""
        return self._rows.get(step, [])

    def add(self, rank: int | None, text: str, step: int) -> None:
        """One more event."""
        if rank is not None:
            self._rows.setdefault(step, []).append(Row(rank, text, step))

    def _enqueue(self, before: list[tuple[str, str]], step: int, rank: int, where: str, which: str) -> None:
        """The last thing that a submission enqueues is named after it."""
        if _COLLECTIVE.fullmatch(which) or _COMPUTE.fullmatch(which):
            before.append((where, which))
            return
        named = []
        for stream, label in before:
            if _COLLECTIVE.fullmatch(label) and (stream != label[0] or brief(label) in self._ops):
                named.append(brief(label)[2:] + (f" on stream {stream}" if stream != label[0] else ""))
            if brief(label) in self._ops:
                self.enqueued[step] = rank
        before.clear()
        more = f" ({', '.join(named[:2])}{', ...' if len(named) > 2 else ''})" if named else ""
        self.add(rank, f"{'launches' if where == 'D' else 'enqueues'} {which}{more}", step)

    def _roomless(self, trace: Trace, finished: set[tuple[int, str]]) -> None:
        """Kernels that came to the device and found no room."""
        queues: dict[tuple[int, str], list[str]] = {}
        started = {(note.rank, note.which) for note in trace.notes if note.what == "start"}
        for note in trace.notes:
            if note.what == "enqueue" and (_COLLECTIVE.fullmatch(note.which) or _COMPUTE.fullmatch(note.which)):
                queues.setdefault((note.rank, note.where), []).append(note.which)
        for (rank, stream), labels in sorted(queues.items()):
            head = next((n for n, label in enumerate(labels) if (rank, label) not in finished), None)
            steps = [step for step, name in enumerate(trace.names) if name == f"rank {rank} stream {stream}"]
            if head is not None and (rank, labels[head]) not in started and len(steps) > head:
                self.add(rank, f"{brief(labels[head])} finds no room", steps[head])


def subject(trace: Trace, step: int) -> str:
    """What the actor of a step did in it, in words, without its rank."""
    rows = Events(trace, ()).of(step)
    submitted = [row.text for row in rows if row.text.startswith(("launches", "enqueues"))]
    if submitted:
        return submitted[0]
    name = trace.names[step]
    stream = re.fullmatch(r"rank (\d+) stream (\w+)", name)
    if stream is not None:
        label = _head(trace, step, int(stream[1]), stream[2])
        return f"brings {brief(label)} to the device" if label else f"moves stream {stream[2]}"
    if rows:
        return rows[0].text
    what = name.partition(": ")[2]
    if what.endswith(" delivered"):
        return f"is told of the end of {what.removesuffix(' delivered')}"
    return f"goes on in task {what!r}" if rank_of(name) is not None else f"{name} finishes"


def _head(trace: Trace, step: int, rank: int, stream: str) -> str:
    """The kernel that comes to the device in a step of its stream."""
    here = [n.which for n in trace.notes if n.step == step and (n.rank, n.what, n.where) == (rank, "start", stream)]
    if here:
        return here[0]
    number = sum(name == trace.names[step] for name in trace.names[:step])
    # Work that takes no time and no room passes with what is before it, without a step of its own.
    timed = any(note.what == "start" and _COMPUTE.fullmatch(note.which) for note in trace.notes)
    labels = [
        note.which for note in trace.notes
        if note.what == "enqueue" and (note.rank, note.where) == (rank, stream)
        and (_COLLECTIVE.fullmatch(note.which) or (timed and _COMPUTE.fullmatch(note.which)))
    ]  # fmt: skip
    return labels[number] if number < len(labels) else ""
