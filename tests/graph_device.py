"""A device without a device: graphs that run their body again, and what else `GraphedDecode` asks of one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kernel.device.cpu import TorchLayout
from kernel.program import Program
from kernel.request import Phase
from kernel.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kernel.ports import Collectives
    from kernel.topology import World

T = TypeVar("T")


class FakeGraph:
    """Replaying runs the body again and leaves its result where the captured one was, as addresses of a graph stay."""

    def __init__(self) -> None:
        self.body: Callable[[], Any] | None = None
        self.result: Any = None
        self.replays = 0
        self.ended: list[Callable[[], object]] = []

    def capture(self, body: Callable[[], T]) -> T:
        assert self.body is None
        self.body = body
        self.result = body()
        # A capture records and does not run: whatever a test finds must come from a replay.
        self.result.fill_(-1)
        return self.result  # type: ignore[no-any-return]

    def replay(self) -> None:
        assert self.body is not None
        self.replays += 1
        self.result.copy_(self.body())


class FakeDevice:
    """Makes fake graphs."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def graph(self, phase: Phase) -> FakeGraph:
        assert phase is Phase.D
        self.graphs.append(FakeGraph())
        return self.graphs[-1]

    @contextmanager
    def scope(self, phase: Phase) -> Generator[None]:
        with torch.inference_mode():
            yield


def step_maker(
    world: World, layers: int, rank: int = 0, collectives: Collectives | None = None, exchange: Any = None
) -> Callable[[Phase, tuple[int, ...], int], Step]:
    """What makes a rank's steps."""
    programs = {phase: Program(world.under(None), phase, layers) for phase in Phase}
    nobody: Any = collectives

    def make(phase: Phase, sizes: tuple[int, ...], live: int) -> Step:
        mine = {"normal": exchange.normal, "low_latency": exchange.low_latency} if exchange is not None else {}
        return Step(programs[phase], rank, sizes, live, nobody, TorchLayout(), **mine)

    return make
