"""What the grid of request rates measures, in which order, and what of it still fits an invocation. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from bench.gpu.cells import TRACE, in_names, turned

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

PLAIN: Final = "plain"
"""Weights of the device's own type: bfloat16 on cuda."""
START_S: Final = 90.0
"""Seconds that starting ranks are taken to need before any have been started."""
UNKNOWN_S: Final = 60.0
"""Seconds that a run is taken to need before any has ended."""


class Ranks(NamedTuple):
    """What needs ranks of its own: the weights' kind, `plain` or a quantization, and `--exchange`."""

    weights: str
    exchange: str

    def __str__(self) -> str:
        return f"{self.weights} weights over {self.exchange}"


@dataclass(frozen=True, slots=True, order=True)
class RateCell:
    """One run of the trace without added waits."""

    weights: str
    exchange: str
    policy: str
    repetition: int

    @property
    def workload(self) -> str:
        """The paper-shaped trace."""
        return TRACE

    @property
    def wait(self) -> float:
        """Factor on the recorded waits."""
        return 0.0

    @property
    def ranks(self) -> Ranks:
        """The ranks that it runs on."""
        return Ranks(self.weights, self.exchange)

    @property
    def key(self) -> str:
        """Its name, also as a file's."""
        return f"rate_{self.weights}_{self.exchange}_{in_names(self.policy)}_{self.repetition}"


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a campaign: each policy over each exchange with each kind of weights, `repetitions` times."""

    policies: tuple[str, ...] = ("normal", "fine:span=4")
    exchanges: tuple[str, ...] = ("none", "nccl", "deepep")
    weights: tuple[str, ...] = (PLAIN, "fp8")
    repetitions: int = 5

    def cells(self) -> Iterator[RateCell]:
        """All of them, in the order in which they should run.

        A repetition goes round all ranks, each of which run all policies one right after the other: what is compared
        with each other lies close in time. Each begins at other ranks and with another policy, so that a machine that
        drifts favours none.
        """
        kinds = [Ranks(weights, exchange) for weights in self.weights for exchange in self.exchanges]
        for repetition in range(self.repetitions):
            for place, ranks in enumerate(turned(kinds, repetition)):
                for policy in turned(self.policies, repetition + place):
                    yield RateCell(*ranks, policy, repetition)


def expected_s(cell: RateCell, seconds: Mapping[RateCell, float]) -> float:
    """How long a run should take, by those that ended: the slowest of its weights, else of all."""
    alike = [taken for done, taken in seconds.items() if done.weights == cell.weights]
    return max(alike or seconds.values(), default=UNKNOWN_S)


def next_cell(
    cells: Sequence[RateCell],
    done: Mapping[RateCell, float],
    failures: Mapping[RateCell, int],
    left_s: float,
    *,
    up: Ranks | None,
    start_s: float,
    broken: Collection[Ranks] = (),
    margin: float = 1.15,
    tries: int = 2,
) -> RateCell | None:
    """The first cell that is not done, has not failed `tries` times, and fits `left_s`; None ends the invocation.

    up: the ranks that are up; others take `start_s` first. broken: ranks that could not be had in this invocation.
    """
    for cell in cells:
        if cell in done or failures.get(cell, 0) >= tries or cell.ranks in broken:
            continue
        if expected_s(cell, done) * margin + (0.0 if cell.ranks == up else start_s) <= left_s:
            return cell
    return None
