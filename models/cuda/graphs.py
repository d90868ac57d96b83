"""Decode as captured CUDA graphs: one for each bucket, replayed at the same addresses whatever else the device does.

A graph holds a whole decode iteration, collectives included, from the slot table to the logits; a small second graph
for each bucket and way of drawing holds the sampler. Before a replay the inputs are copied into place and attention is
planned, both outside the graph. Prefill, and a decode that no graph fits, run the model as it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from kernel.errors import UsageError
from kernel.request import Phase, Row, SamplingParams
from models.cuda.inputs import DeviceSource, StaticInputs
from models.cuda.sampling import Way

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kernel.request import Sampled
    from kernel.step import Step
    from models.qwen3_moe import Qwen3Moe

T = TypeVar("T")
DRAWS: Final = MappingProxyType(
    {
        Way.GREEDY: SamplingParams(),
        Way.PLAIN: SamplingParams(temperature=1.0),
        Way.TRUNCATED: SamplingParams(temperature=1.0, top_k=5, top_p=0.9),
    }
)
"""A request that needs each way of drawing."""


class Graph(Protocol):
    """What `kernel.device.cuda_graph.CudaGraph` does."""

    ended: list[Callable[[], object]]

    def capture(self, body: Callable[[], T]) -> T:
        """Record what `body` enqueues; its result, whose tensors every replay fills."""

    def replay(self) -> None:
        """Enqueue what was recorded."""


class GraphDevice(Protocol):
    """What is needed of `kernel.device.cuda.CudaDevice`."""

    def graph(self, phase: Phase) -> Graph: ...
    def scope(self, phase: Phase) -> AbstractContextManager[None]: ...


@dataclass(slots=True)
class _Bucket:
    """One bucket: its inputs, the graph of the model, and for each way of drawing a graph with its result [rows, 2].

    hold: the graph's claim on D's expert exchange, where there is one.
    """

    inputs: StaticInputs
    graph: Graph
    hold: Any = None
    draws: dict[Way, tuple[Graph, Tensor]] = field(default_factory=dict)


class GraphedDecode:
    """A `kernel.ports.Model` around a `Qwen3Moe` on a device.

    buckets: the sizes that D is padded to. make_step: a step of a phase with the rows of each replica and this
    replica's live rows. enabled: False runs everything as it is. depth: the most blocks of a row that a graph of the
    *reference* attention reads; longer rows run without. replays, misses: decode iterations that ran as a graph, and
    those that could not.
    """

    def __init__(
        self,
        model: Qwen3Moe,
        device: GraphDevice,
        buckets: Sequence[int],
        make_step: Callable[[Phase, tuple[int, ...], int], Step],
        *,
        enabled: bool = True,
        depth: int = 64,
    ) -> None:
        if not isinstance(model.source, DeviceSource):
            raise UsageError("decode graphs need a model on a device: --device cuda, or graphs off")
        self._model, self._device, self._make_step = model, device, make_step
        self._source = model.source
        self._sizes = sorted(set(buckets), reverse=True)
        self._enabled, self._depth = enabled, depth
        self._buckets: dict[int, _Bucket] = {}
        self.layers = model.layers
        self.replays = self.misses = 0

    def reload(self, path: str) -> None:
        """See `kernel.ports.Model`. The new weights move into the old ones' memory, which the graphs read."""
        self._model.reload(path)

    def forward(self, step: Any, rows: Sequence[Row]) -> Coroutine[Any, Any, Sequence[Sampled | None]]:
        """See `kernel.ports.Model`."""
        if step.phase is Phase.P or not self._buckets:
            return self._model.forward(step, rows)
        bucket = self._buckets.get(step.bucket)
        if bucket is None or not bucket.inputs.fits(rows):
            self.misses += 1
            return self._model.forward(step, rows)
        return self._replay(bucket, step, rows)

    def warm(self, prefill_shapes: Sequence[int] = ()) -> None:
        """Run everything once and capture the graphs. All ranks call it alike: collectives run inside.

        prefill_shapes: token counts of prefill forwards, the same on every replica. Whatever is set up, compiled or
        allocated at first use is so afterwards. The phases' streams must be idle; synchronise the device afterwards.
        """
        ways = list(DRAWS.values())
        for tokens in prefill_shapes:
            self._eager(Phase.P, tokens, [self._row(tokens, ways[0])])
            if tokens >= len(ways):
                longest = tokens - len(ways) + 1
                rows = [self._row(longest if params is ways[0] else 1, params) for params in ways]
                self._eager(Phase.P, tokens, rows)
        if self._source.flash is not None and self._enabled:
            with self._device.scope(Phase.D):
                self._source.flash.reserve(max(self._sizes, default=1))
        for size in self._sizes:
            live = min(size, len(ways))
            self._eager(Phase.D, size, [self._row(0, params) for params in ways[:live]])
            if self._enabled:
                self._buckets[size] = self._capture(size)

    # -- inside -------------------------------------------------------------------------------------------------

    async def _replay(self, bucket: _Bucket, step: Step, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        way = bucket.inputs.fill(rows)
        step.replayed(bucket.hold)  # before the launch, which it may refuse
        bucket.graph.replay()
        self.replays += 1
        drawn: Tensor | None = None
        if rows:
            graph, drawn = bucket.draws[way]
            graph.replay()
        return self._source.outbox.post(drawn, [True] * len(rows))

    def _capture(self, size: int) -> _Bucket:
        """The graphs of one bucket, after the same work has run once without."""
        model, sizes = self._model, (size,) * self._model.world.adp

        def body() -> Tensor:
            inputs.open()
            step = self._make_step(Phase.D, sizes, size)
            logits = _whole(model.logits(step, inputs))
            step.finished()
            return logits

        with self._device.scope(Phase.D):
            # Made on the stream that fills them.
            inputs = StaticInputs(self._source, size, self._depth, model.scratch_block)
            inputs.fill(())
            first = body()
            for way in DRAWS:
                inputs.draw_all(first, way)
            del first
            # A second plan takes the way that all later ones take.
            inputs.fill(())
            bucket = _Bucket(inputs, self._device.graph(Phase.D))
            step = self._make_step(Phase.D, sizes, size)
            with step.capturing(f"D of {size} rows") as bucket.hold:
                logits = bucket.graph.capture(body)
            bucket.graph.ended.append(partial(step.dropped, bucket.hold))
            for way in DRAWS:
                graph = self._device.graph(Phase.D)
                bucket.draws[way] = (graph, graph.capture(partial(inputs.draw_all, logits, way)))
            # A graph's first launch brings it to the device.
            self._make_step(Phase.D, sizes, size).replayed(bucket.hold)
            bucket.graph.replay()
            for graph, _ in bucket.draws.values():
                graph.replay()
        return bucket

    def _row(self, tokens: int, params: SamplingParams) -> Row:
        """A row that touches scratch memory alone; no tokens: it feeds the scratch slot's."""
        model = self._model
        blocks = (model.scratch_block,) * (max(1, tokens) // model.pool.block_size + 1)
        return Row(model.scratch_slot, (0,) * tokens or None, 0, blocks, params)

    def _eager(self, phase: Phase, size: int, rows: Sequence[Row]) -> None:
        sizes = (size,) * self._model.world.adp
        step = self._make_step(phase, sizes, sum(row.fed for row in rows))
        with self._device.scope(phase):
            list(_whole(self._model.forward(step, rows)))
        step.finished()


def _whole(forward: Coroutine[Any, Any, T]) -> T:
    """Run model code to its end, through all its boundaries. What P awaits is waited for: nothing else runs yet."""
    try:
        while True:
            event = forward.send(None).event
            while event is not None and not event.done():
                time.sleep(0)
    except StopIteration as stop:
        return cast("T", stop.value)
