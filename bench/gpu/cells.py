"""What the ladder measures, in which order, and what of it still fits an invocation. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TRACE: Final = "trace"
DECODE: Final = "decode"
"""Workloads: the paper-shaped trace, and one with hardly any prefill, for what multiplexing costs when idle."""
BEST: Final = "best"
"""Stands for the fastest `fine:span=k` at no wait, until it is known."""
SPAN: Final = re.compile(r"fine:span=\d+")


class Work(Protocol):
    """A cell of some campaign: one run of a workload. key: its name, also as a file's."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def workload(self) -> str: ...

    @property
    def wait(self) -> float: ...

    @property
    def policy(self) -> str: ...

    @property
    def repetition(self) -> int: ...

    @property
    def key(self) -> str: ...

    def __lt__(self, other: Any, /) -> bool: ...


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run. wait: factor on the recorded waits between turns."""

    workload: str
    wait: float
    policy: str
    repetition: int

    @property
    def key(self) -> str:
        """Its name, also as a file's."""
        return f"{self.workload}_w{self.wait:g}_{in_names(self.policy)}_{self.repetition}"


def in_names(policy: str) -> str:
    """A policy's name, fit for a file's."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", policy).strip("-")


@dataclass(frozen=True, slots=True)
class Ladder:
    """The cells of a campaign.

    headline: policies compared with `repetitions` runs at no wait, and at the recorded waits (1) with `recorded` runs;
    `best` among them is the fastest span. others: run once at no wait. waits: factors at which the headline policies
    run once. decode_only: how often the headline policies also run with hardly any prefill.
    """

    headline: tuple[str, ...] = ("normal", "global_enqueue", BEST)
    others: tuple[str, ...] = ("fine:span=1", "fine:span=2", "fine:span=3", "fine:span=4", "adaptive", "lean",
                               "global_complete")  # fmt: skip
    repetitions: int = 5
    waits: tuple[float, ...] = (0.01, 0.03, 0.1)
    recorded: int = 3
    decode_only: int = 3

    @property
    def spans(self) -> tuple[str, ...]:
        """The candidates for `best`."""
        return tuple(policy for policy in self.others if SPAN.fullmatch(policy))

    def cells(self, best: str | None) -> tuple[Cell, ...]:
        """All cells, in the order in which they should run; those of `best` only once it is known.

        First every policy once, then repetitions, each of which goes round the policies from another start, so that a
        drifting machine favours none; then waits, longest last, since their runs are longest.
        """
        found: list[Cell] = []
        plain = tuple(policy for policy in self.headline if policy != BEST)
        found += [Cell(TRACE, 0.0, policy, 0) for policy in (*plain, *self.others)]
        headline = tuple(best if policy == BEST else policy for policy in self.headline if best or policy != BEST)
        for repetition in range(self.repetitions):
            found += self._round(TRACE, 0.0, headline, repetition)
        for repetition in range(self.decode_only):
            found += self._round(DECODE, 0.0, headline, repetition)
        for wait in self.waits:
            found += self._round(TRACE, wait, headline, 0)
        for repetition in range(self.recorded):
            found += self._round(TRACE, 1.0, headline, repetition)
        return tuple(dict.fromkeys(found))

    @staticmethod
    def _round(workload: str, wait: float, policies: Sequence[str], repetition: int) -> Iterator[Cell]:
        return (Cell(workload, wait, policy, repetition) for policy in turned(policies, repetition))


T = TypeVar("T")


def turned(things: Sequence[T], by: int) -> tuple[T, ...]:
    """The same, begun at another one in each round."""
    turn = by % max(1, len(things))
    return (*things[turn:], *things[:turn])


def best_span(ladder: Ladder, makespans: Mapping[Cell, float]) -> str | None:
    """The span with the shortest first run at no wait, once all candidates have one (None before)."""
    firsts = {policy: makespans.get(Cell(TRACE, 0.0, policy, 0)) for policy in ladder.spans}
    known = {policy: value for policy, value in firsts.items() if value is not None}
    return min(known, key=lambda policy: known[policy]) if firsts and len(known) == len(firsts) else None


def expected_s(cell: Cell, seconds: Mapping[Cell, float], floor_s: float = 0.0) -> float | None:
    """How long a cell should take, by those that ran: the slowest of its kind, else of its workload; None if none did.

    floor_s: the waits along the longest trajectory, which no policy shortens.
    """
    alike = [value for done, value in seconds.items() if (done.workload, done.wait) == (cell.workload, cell.wait)]
    if alike:
        return max(alike)
    near = [value for done, value in seconds.items() if done.workload == cell.workload]
    return max(near) + floor_s if near else None


def next_cell(
    cells: Sequence[Cell],
    done: Mapping[Cell, float],
    failures: Mapping[Cell, int],
    left_s: float,
    *,
    floor_s: Mapping[float, float],
    margin: float = 1.15,
    tries: int = 2,
) -> Cell | None:
    """The first cell that is not done, has not failed `tries` times, and fits `left_s`; None ends the invocation.

    done: seconds that each took, replay and reading of its record. floor_s: by wait. A cell of unknown length may start
    while a minute is left. Cells behind one that does not fit are still tried, as they may be shorter.
    """
    for cell in cells:
        if cell in done or failures.get(cell, 0) >= tries:
            continue
        expected = expected_s(cell, done, floor_s.get(cell.wait, 0.0))
        if (60.0 if expected is None else expected * margin) <= left_s:
            return cell
    return None
