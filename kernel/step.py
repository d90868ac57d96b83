"""What a model sees of the world while one forward runs: boundaries, and collectives by the place they stand at.

A model names the *site* (`gather`, `scatter`, ...); which collectives run there, over which group and on whose stream
follows from `kernel.program` and from the plan's sizes. The step refuses a model that skips or reorders a site.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kernel.errors import ModelError
from kernel.exchange.states import Place
from kernel.program import Call, Op, Program, Site
from kernel.request import Phase
from kernel.topology import Role

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kernel.ports import (
        Collectives,
        Event,
        Layout,
        LowLatencyExchange,
        NormalExchange,
        Pending,
        Received,
        Route,
        Tensor,
    )

R = TypeVar("R")


class Suspend:
    """What model code may hand to its driver: a boundary, or work to wait for."""

    __slots__ = ("event", "index")

    def __init__(self, index: int = -1, event: Event[Any] | None = None) -> None:
        self.index, self.event = index, event

    def __await__(self) -> Generator[Suspend, Any, Any]:
        return (yield self)


Watch = Callable[[Call, bool], None]
"""Told of each collective as it starts (False) and finishes (True)."""

Splits = Callable[[Call, Sequence[int]], None]
"""Told of the rows that will come here from each member in a dispatch, once they are known."""


class _Passed:
    """No boundary here: awaiting it does not suspend."""

    def __await__(self) -> Generator[Suspend, Any, None]:
        return
        yield


_PASSED: Final = _Passed()


class _Notified:
    """The boundary behind a notification: the counts first, then the permit, which lets the data go."""

    __slots__ = ("_counted", "_index", "_normal", "_pending")

    def __init__(
        self, index: int, normal: NormalExchange | None, pending: Pending | None, counted: Callable[[], None]
    ) -> None:
        self._index, self._normal, self._pending, self._counted = index, normal, pending, counted

    def __await__(self) -> Generator[Suspend, Any, None]:
        if self._pending is not None:
            yield Suspend(event=self._pending.event)
            self._counted()
        yield Suspend(index=self._index)
        if self._normal is not None and self._pending is not None:
            self._normal.permit(self._pending)


class Step:
    """One forward of one phase on one rank.

    rows: rows of each attention replica, as the plan says (P: exact token counts; D: the common bucket).
    live: rows of this replica that are real; D pads them to the bucket here, so that a model computes no padding.
    normal, low_latency: the phase's expert exchange. number: P's epoch or D's round, for messages.
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
        *,
        normal: NormalExchange | None = None,
        low_latency: LowLatencyExchange | None = None,
        number: int = -1,
        splits: Splits | None = None,
    ) -> None:
        self.program, self.phase = program, program.phase
        self._world = world = program.world
        self._replica, self._rank = world.replica(rank), rank
        self._rows, self._live = tuple(rows), live
        self._collectives, self._layout, self._route, self._watch = collectives, layout, route, watch
        self._normal, self._low_latency, self._number, self._splits = normal, low_latency, number, splits
        self._pending: Pending | None = None
        self._chosen: Tensor = None
        self._share, self._mine = _part(self._rows[self._replica], live, world.atp, rank % world.atp)
        self._next = 0
        self._cross = program.crosses

    @property
    def bucket(self) -> int:
        """Rows that the plan gives this replica: what D pads its rows to."""
        return self._rows[self._replica]

    @property
    def alone(self) -> bool:
        """Whether this forward has no collectives: under D nothing need lie between its layers then."""
        return not self.program.calls and not self.exchanges

    @property
    def exchanges(self) -> bool:
        """Whether rows reach their experts by an exchange: `share` to `join` replace `gather` to `scatter`."""
        return self._world.splits

    # -- what a model may await ---------------------------------------------------------------------------------

    def boundary(self, layer: int) -> Suspend:
        """The safe boundary before `embed` (0) or before `gather layer`: nothing behind it has been enqueued.

        Awaiting it may suspend P, never D.
        """
        return Suspend(index=layer * self._world.cuts)

    def inner(self, layer: int) -> Suspend | _Passed:
        """The safe boundary before `scatter layer`, in a world that cuts there; nothing in any other."""
        cuts = self._world.cuts
        return Suspend(index=layer * cuts + 1 + self._world.splits) if cuts > 1 else _PASSED

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

    # -- an expert exchange, in this order in each layer -------------------------------------------------------

    def share(self, layer: int, partial: Tensor) -> Tensor:
        """Sum own rows' attention parts and keep this rank's share of them: [live, hidden] -> [mine, hidden].

        The ranks of a replica take equal shares one after the other, the last of which may have fewer real rows.
        """
        a = self._world.atp
        if a == 1:
            return partial
        padded = self._layout.place(partial, 0, a * self._share)
        for call in self.program.at(Site.GATHER, layer):
            if call.op is Op.REDUCE_SCATTER:
                padded = self._one(call, padded, [self._share] * a)
        return self._layout.take(padded, ((0, self._mine),))

    def part(self, own: Tensor) -> Tensor:
        """This rank's share of something that there is for each own row: [live, ...] -> [mine, ...]."""
        if self._world.atp == 1:
            return own
        start = min(self._live, (self._rank % self._world.atp) * self._share)
        return self._layout.take(own, ((start, start + self._mine),))

    def notify(self, layer: int, experts: Tensor) -> None:
        """Tell the ranks of the chosen experts [mine, k] what will come. P's counts travel from now on."""
        self._chosen = experts
        if self.phase is Phase.P:
            if (call := self._call(Site.GATHER, layer, Op.NOTIFY)) is not None:
                self._begin(call)  # it ends when the counts are there
            self._pending = self._p_exchange().notify(Place(self._number, layer), experts)

    def notified(self, layer: int) -> _Notified:
        """The safe boundary between `notify` and `dispatch`, where the counts are known and no data has been submitted.

        Awaiting it may suspend P, never D.
        """

        pending = self._pending

        def counted() -> None:
            if (call := self._call(Site.GATHER, layer, Op.NOTIFY)) is not None:
                self._end(call)
            following = self._call(Site.DISPATCH, layer, Op.DISPATCH)
            if self._splits is not None and following is not None:
                self._splits(following, self._p_exchange().arriving(pending))

        return _Notified(layer * self._world.cuts + 1, self._normal, pending, counted)

    def dispatch(self, layer: int, rows: Tensor, weights: Tensor) -> Received:
        """Send rows [mine, hidden], with the experts named in `notify` and their weights [mine, k]; what came here."""
        experts = self._chosen
        if self.phase is Phase.P:
            normal, pending = self._p_exchange(), self._pending
            if pending is None:
                raise ModelError(f"P forward dispatches in layer {layer} without step.notify({layer}, experts)")
            return self._exchanging(
                Site.DISPATCH, layer, Op.DISPATCH, lambda: normal.submit(pending, rows, weights)
            )
        low, place = self._d_exchange(), Place(self._number, layer)
        return self._exchanging(
            Site.DISPATCH, layer, Op.DISPATCH, lambda: low.dispatch(place, rows, experts, weights)
        )

    def combine(self, layer: int, results: Tensor) -> Tensor:
        """Bring back what experts made of received rows; own share's sums [mine, hidden]."""
        exchange: NormalExchange | LowLatencyExchange
        exchange = self._p_exchange() if self.phase is Phase.P else self._d_exchange()
        self._pending, place = None, Place(self._number, layer)
        return self._exchanging(Site.SCATTER, layer, Op.COMBINE, lambda: exchange.combine(place, results))

    def join(self, layer: int, share: Tensor) -> Tensor:
        """Collect the shares of all ranks of this replica: [mine, hidden] -> [live, hidden]."""
        if self._world.atp == 1:
            return share
        padded = self._layout.place(share, 0, self._share)
        for call in self.program.at(Site.SCATTER, layer):
            if call.op is Op.ALL_GATHER:
                padded = self._one(call, padded)
        return self._layout.take(padded, ((0, self._live),))

    def head(self, shard: Tensor) -> Tensor:
        """Collect the vocabulary shards of the sampled rows: [rows, vocab/a] -> [rows, vocab]."""
        return self._run(Site.HEAD, -1, shard)

    def capturing(self, name: str) -> AbstractContextManager[Any]:
        """Around the capture of a graph of one whole forward; gives what `replayed` and `dropped` name it by."""
        return nullcontext() if self._low_latency is None else self._low_latency.capture(name)

    def replayed(self, hold: Any = None) -> None:
        """The whole program runs at once, in the one launch that follows (of a captured graph).

        Raises ModelError after a part of it; OddGraph and StillHeld where the expert exchange forbids the launch.
        """
        if self._next:
            raise ModelError(f"{self.phase} forward replays its program after {self.program.calls[self._next - 1]} ran")
        self._next = len(self.program.calls)
        if hold is not None:
            self._d_exchange().replayed(hold)

    def dropped(self, hold: Any) -> None:
        """A captured graph is gone. Idempotent."""
        if hold is not None:
            self._d_exchange().dropped(hold)

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
            x = self._one(call, x)
        return x

    def _one(self, call: Call, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        self._begin(call)
        if call.routed and self._route is not None:
            x = self._route.run(call, lambda: self._execute(call, x, sizes))
        else:
            x = self._execute(call, x, sizes)
        self._end(call)
        return x

    def _begin(self, call: Call) -> None:
        expected = self.program.calls[self._next] if self._next < len(self.program.calls) else None
        if expected is not call:
            raise ModelError(f"{self.phase} forward runs {call} where the program has {expected or 'its end'}")
        self._next += 1
        if self._watch:
            self._watch(call, False)

    def _end(self, call: Call) -> None:
        if self._watch:
            self._watch(call, True)

    def _exchanging(self, site: Site, layer: int, op: Op, work: Callable[[], R]) -> R:
        """Run one operation of the expert exchange, which is no collective in a world of one rank."""
        call = self._call(site, layer, op)
        if call is None:
            return work()
        self._begin(call)
        result = work()
        self._end(call)
        return result

    def _call(self, site: Site, layer: int, op: Op) -> Call | None:
        """That operation of the program; None in a world of one rank."""
        return next((call for call in self.program.at(site, layer) if call.op is op), None)

    def _p_exchange(self) -> NormalExchange:
        if self._normal is None:
            raise ModelError(f"{self.phase} forward needs P's expert exchange, and this step has none")
        return self._normal

    def _d_exchange(self) -> LowLatencyExchange:
        if self._low_latency is None:
            raise ModelError(f"{self.phase} forward needs D's expert exchange, and this step has none")
        return self._low_latency

    def _execute(self, call: Call, x: Tensor, sizes: Sequence[int] | None) -> Tensor:
        match call.op:
            case Op.ALL_REDUCE:
                return self._collectives.all_reduce(call.role, x)
            case Op.ALL_GATHER:
                return self._collectives.all_gather(call.role, x, dim=-1 if call.site is Site.HEAD else 0)
            case Op.REDUCE_SCATTER | Op.REDUCE_SCATTER_V:
                return self._collectives.reduce_scatter(call.role, x, sizes or self._shares(call))
            case _:
                raise ModelError(f"{call} is run by step.notify, step.dispatch and step.combine, not as a collective")

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


def _part(rows: int, live: int, ranks: int, index: int) -> tuple[int, int]:
    """(rows of each rank's share, how many of them are real on rank `index` of a replica) of `rows`, `live` real."""
    share = -(-rows // ranks)
    return share, max(0, min(share, live - index * share))
