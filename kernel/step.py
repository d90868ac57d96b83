"""What a model sees of the world while one forward runs: boundaries, and collectives by the place they stand at.

A model names the *site* (`gather`, `scatter`, ...); which collectives run there, over which group and on whose stream
follows from `kernel.program` and from the plan's sizes. The step refuses a model that skips or reorders a site.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import ModelError
from kernel.program import Call, Op, Program, Site
from kernel.request import Phase
from kernel.topology import Role

if TYPE_CHECKING:
    from kernel.ports import Collectives, Event, Layout, Route, Tensor


class Suspend:
    """What model code may hand to its driver: a boundary, or work to wait for."""

    __slots__ = ("event", "index")

    def __init__(self, index: int = -1, event: Event[Any] | None = None) -> None:
        self.index, self.event = index, event

    def __await__(self) -> Generator[Suspend, Any, Any]:
        return (yield self)


Watch = Callable[[Call, bool], None]
"""Told of each collective as it starts (False) and finishes (True)."""


class _Passed:
    """No boundary here: awaiting it does not suspend."""

    def __await__(self) -> Generator[Suspend, Any, None]:
        return
        yield


_PASSED: Final = _Passed()


class Step:
    """One forward of one phase on one rank.

    rows: rows of each attention replica, as the plan says (P: exact token counts; D: the common bucket).
    live: rows of this replica that are real; D pads them to the bucket here, so that a model computes no padding.
    Shapes: `own` rows are [live, hidden]; `full` rows are those of all replicas, in an order that only `own` needs.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        rows: Sequence[int],
        live: int,
        collectives: Collectives,
        layout: Layout,
        route: Route | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.program, self.phase = program, program.phase
        self._world = world = program.world
        self._replica = world.replica(rank)
        self._rows, self._live = tuple(rows), live
        self._collectives, self._layout, self._route, self._watch = collectives, layout, route, watch
        self._next = 0
        self._cross = program.crosses

    @property
    def bucket(self) -> int:
        """Rows that the plan gives this replica: what D pads its rows to."""
        return self._rows[self._replica]

    @property
    def alone(self) -> bool:
        """Whether this forward has no collectives: under D nothing need lie between its layers then."""
        return not self.program.calls

    # -- what a model may await ---------------------------------------------------------------------------------

    def boundary(self, layer: int) -> Suspend:
        """The safe boundary before `embed` (0) or before `gather layer`: nothing behind it has been enqueued.

        Awaiting it may suspend P, never D.
        """
        return Suspend(index=layer * self._world.cuts)

    def inner(self, layer: int) -> Suspend | _Passed:
        """The safe boundary before `scatter layer`, in a world that cuts there; nothing in any other."""
        return Suspend(index=layer * self._world.cuts + 1) if self._world.cuts > 1 else _PASSED

    def ready(self, handle: Event[Any]) -> Suspend:
        """The value of `handle`, when it is there. A data-dependent boundary waits for its data here (P only)."""
        return Suspend(event=handle)

    # -- collectives, by site -----------------------------------------------------------------------------------

    def embed(self, partial: Tensor) -> Tensor:
        """Sum the vocabulary shards' embeddings of own rows: [live, hidden] -> [live, hidden]."""
        return self._run(Site.EMBED, -1, partial)

    def gather(self, layer: int, partial: Tensor) -> Tensor:
        """Sum own rows' attention parts and collect all replicas' rows: [live, hidden] -> [full, hidden]."""
        if self._world.adp > 1:
            if self.phase is Phase.P:
                start = sum(self._rows[: self._replica])
                partial = self._layout.place(partial, start, sum(self._rows))
            else:
                partial = self._layout.place(partial, 0, self._rows[self._replica])
        elif self.phase is Phase.D:
            partial = self._layout.place(partial, 0, self._rows[0])
        return self._run(Site.GATHER, layer, partial)

    def own(self, full: Tensor) -> Tensor:
        """This replica's rows out of `gather`'s result (a local copy): [full, hidden] -> [live, hidden]."""
        return self._layout.take(full, self._own_ranges())

    def scatter(self, layer: int, partial: Tensor) -> Tensor:
        """Sum the experts' parts and keep own rows: [full, hidden] -> [live, hidden]."""
        calls = self.program.at(Site.SCATTER, layer)
        result = self._run(Site.SCATTER, layer, partial)
        if any(call.op in (Op.REDUCE_SCATTER, Op.REDUCE_SCATTER_V) for call in calls):
            return self._layout.take(result, ((0, self._live),))
        return self._layout.take(result, self._own_ranges())

    def head(self, shard: Tensor) -> Tensor:
        """Collect the vocabulary shards of the sampled rows: [rows, vocab/a] -> [rows, vocab]."""
        return self._run(Site.HEAD, -1, shard)

    def replayed(self) -> None:
        """The whole program ran at once, inside one launch (a captured graph). Raises ModelError after a part of it."""
        if self._next:
            raise ModelError(f"{self.phase} forward replays its program after {self.program.calls[self._next - 1]} ran")
        self._next = len(self.program.calls)

    def finished(self) -> None:
        """Raise ModelError unless every collective of the program has run."""
        if self._next != len(self.program.calls):
            raise ModelError(
                f"{self.phase} forward ended before {self.program.calls[self._next]}:"
                " a model runs every site of its program, also with no rows"
            )

    # -- inside -------------------------------------------------------------------------------------------------

    def _own_ranges(self) -> list[tuple[int, int]]:
        if self._cross and self.phase is Phase.D:
            # [a, d, bucket/a] rows: reduce-scatter over ATP and gathers over ADP, then ATP, leave them shard-major.
            bucket, d, a = self._rows[self._replica], self._world.adp, self._world.atp
            part = bucket // a
            starts = [(t * d + self._replica) * part for t in range(a)]
            wanted = [max(0, min(part, self._live - t * part)) for t in range(a)]
            return [(start, start + n) for start, n in zip(starts, wanted, strict=True) if n]
        start = sum(self._rows[: self._replica]) if self._world.adp > 1 else 0
        return [(start, start + self._live)]

    def _run(self, site: Site, layer: int, x: Tensor) -> Tensor:
        for call in self.program.at(site, layer):
            expected = self.program.calls[self._next] if self._next < len(self.program.calls) else None
            if expected is not call:
                raise ModelError(f"{self.phase} forward runs {call} where the program has {expected or 'its end'}")
            self._next += 1
            if self._watch:
                self._watch(call, False)
            if call.routed and self._route is not None:
                x = self._route.run(call, lambda call=call, x=x: self._execute(call, x))  # type: ignore[misc]
            else:
                x = self._execute(call, x)
            if self._watch:
                self._watch(call, True)
        return x

    def _execute(self, call: Call, x: Tensor) -> Tensor:
        match call.op:
            case Op.ALL_REDUCE:
                return self._collectives.all_reduce(call.role, x)
            case Op.ALL_GATHER:
                return self._collectives.all_gather(call.role, x, dim=-1 if call.site is Site.HEAD else 0)
            case Op.REDUCE_SCATTER | Op.REDUCE_SCATTER_V:
                return self._collectives.reduce_scatter(call.role, x, self._shares(call))
            case _:
                raise ModelError(f"{call} needs an expert exchange, and this step has none")

    def _shares(self, call: Call) -> list[int]:
        """Row count of each member of a reduce-scatter."""
        members = self._world.members(call.role, self._world.leaders()[self._replica])
        if call.op is Op.REDUCE_SCATTER_V:
            return [self._rows[self._world.replica(member)] for member in members]
        bucket, a, d = self._rows[self._replica], self._world.atp, self._world.adp
        if call.site is Site.GATHER:
            return [bucket // a] * a
        if call.role is Role.TP:
            return [bucket // a] * len(members)
        if call.role is Role.ATP:
            return [d * bucket // a] * a
        return [bucket // a] * len(members)
