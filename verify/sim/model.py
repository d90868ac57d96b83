"""`kernel.ports.Model` without tensors: a decoder's boundaries and sites, and kernels that take virtual time.

Its tokens depend on their context alone (`verify.sim.kv`), so they are the same under every policy and schedule.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel.errors import ModelError
from kernel.request import Phase, Row, Sampled
from verify.sim.kv import SimKV, draw

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from kernel.ports import Step
    from kernel.topology import World
    from verify.sim.device import SimDevice


@dataclass(frozen=True, slots=True)
class CostModel:
    """Nanoseconds of one layer on one rank; the defaults are of the size of the paper's eight-GPU runs, 42 layers.

    Attention takes `attention_ns` and `token_ns` for each own token and `pair_ns` for each pair of a fed token and a
    context token, both divided over the attention-TP ranks. Experts take `expert_ns[phase]` (small batches read all
    weights) and `row_ns` for each row of all replicas, divided over all ranks. `head_ns` once a forward. A collective
    takes `collective_ns` and `link_ns` for each row. contention: see `verify.sim.kernels.Chip`. rendezvous_ns: of an
    all-rank control phase.
    """

    attention_ns: int = 30_000
    token_ns: int = 2_000
    pair_ns: float = 0.5
    decode_expert_ns: int = 150_000
    prefill_expert_ns: int = 200_000
    row_ns: int = 8_000
    head_ns: int = 100_000
    collective_ns: int = 15_000
    link_ns: float = 50.0
    contention: float = 0.6
    rendezvous_ns: int = 50_000

    def attention(self, world: World, rows: Sequence[Row]) -> int:
        """One layer's attention of a replica's rows, on one rank."""
        tokens = sum(row.fed for row in rows)
        pairs = sum(row.fed * (row.start + (row.fed + 1) / 2) for row in rows)
        return self.attention_ns + round((tokens * self.token_ns + pairs * self.pair_ns) / world.atp)

    def experts(self, world: World, phase: Phase, rows: int) -> int:
        """One layer's experts for the rows of all replicas, on one rank."""
        floor = self.decode_expert_ns if phase is Phase.D else self.prefill_expert_ns
        return floor + rows * self.row_ns // world.size

    def collective(self, op: str, members: int, rows: int) -> int:
        """One collective, once all members are resident. An all-reduce moves its rows twice."""
        moved = rows * (2 if op == "all_reduce" else 1) * (members - 1) / members
        return self.collective_ns + round(moved * self.link_ns)


FREE = CostModel(0, 0, 0.0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)
"""Nothing takes time: the order of events alone."""


class SimModel:
    """One rank's shard of a decoder of `layers` sparse layers.

    cost: what its kernels take. kv: its pool. vocab: number of tokens. A tensor is a row count. Raises ModelError where
    row counts do not add up as they would in a real forward.
    """

    def __init__(
        self, world: World, device: SimDevice, layers: int, cost: CostModel, kv: SimKV, vocab: int = 32_000
    ) -> None:
        self.world, self.layers, self.vocab = world, layers, vocab
        self._device, self._cost, self._kv = device, cost, kv
        self._begun: weakref.WeakSet[Coroutine[Any, Any, list[Sampled | None]]] = weakref.WeakSet()

    def forward(self, step: Step, rows: Sequence[Row]) -> Coroutine[Any, Any, list[Sampled | None]]:
        """See the port."""
        forward = self._forward(step, rows)
        self._begun.add(forward)
        return forward

    def reload(self, path: str) -> None:
        """See the port. Its tokens depend on their context alone, whatever the weights."""

    def close(self) -> None:
        """Abandon forwards that a run which failed has left unfinished."""
        for forward in list(self._begun):
            forward.close()

    async def _forward(self, step: Step, rows: Sequence[Row]) -> list[Sampled | None]:
        phase, device, cost = step.phase, self._device, self._cost
        own = sum(row.fed for row in rows)
        await step.boundary(0)
        contexts = [self._kv.feed(phase, row) for row in rows]
        hidden = self._same(step.embed(own), own, "embed")
        attention = cost.attention(self.world, rows) if rows else 0
        for layer in range(self.layers):
            if rows:
                device.compute(f"{phase} attention {layer}", attention)
            if step.exchanges:
                hidden = self._same(await self._exchanged(step, layer, hidden), own, f"join {layer}")
                continue
            if layer:
                await step.boundary(layer)
            full = step.gather(layer, hidden)
            self._same(step.own(full), own, f"own {layer}")
            device.compute(f"{phase} experts {layer}", cost.experts(self.world, phase, full))
            await step.inner(layer)
            hidden = self._same(step.scatter(layer, full), own, f"scatter {layer}")
        sampled = sum(row.sample is not None for row in rows)
        self._same(step.head(sampled), sampled, "head")
        last = device.compute(f"{phase} head", cost.head_ns)
        for row in rows:
            self._kv.enqueued(phase, row, last)
        return [self._draw(row, context) for row, context in zip(rows, contexts, strict=True)]

    async def _exchanged(self, step: Step, layer: int, hidden: int) -> int:
        """One layer behind its attention, with an expert exchange."""
        mine = step.share(layer, hidden)
        step.notify(layer, mine)
        await step.notified(layer)
        came = step.dispatch(layer, mine, None)
        cost = self._cost.experts(self.world, step.phase, came.rows)
        self._device.compute(f"{step.phase} experts {layer}", cost)
        await step.inner(layer)
        back = self._same(step.combine(layer, came.rows), mine, f"combine {layer}")
        joined: int = step.join(layer, back)
        return joined

    def _draw(self, row: Row, context: int) -> Sampled | None:
        if row.sample is None:
            return None
        drawn = draw(context, row.sample, self.vocab)
        self._kv.slots[row.slot] = drawn.token
        return drawn

    @staticmethod
    def _same(rows: int, expected: int, where: str) -> int:
        if rows != expected:
            raise ModelError(f"{where} returned {rows} rows where {expected} are this replica's own")
        return rows
