"""The collective program of prefill and of decode: for a world and an expert exchange, every collective in order.

This is the single source: models execute it, `verify` checks it, the documentation prints it. The sequences are those
of SGLang 0.5.15 for Qwen3-MoE (with 0.5.23's condition for the variable reduce-scatter), which the paper shares:
variable-length P uses an eager model-wide all-reduce, padded D reduce-scatters and all-gathers (paper section 2).

Sites, in the order of a forward of L layers:

    embed   gather 0   scatter 0   gather 1   ...   scatter L-1   head

`gather i` turns the attention's partial sums into the full rows of all replicas; `scatter i` turns the experts'
partial sums into a replica's own rows. Safe boundary 0 stands before `embed`, boundary i before `gather i`: a segment
[i, j) runs from boundary i to boundary j, and the last one to the end. So the attention of layer j is computed inside
[i, j), after that segment's last collective, where decode overlaps with it. In a world that cuts sublayers boundary 2i
stands before `gather i` and 2i+1 before `scatter i`, and decode overlaps with the experts in the same way.

With an expert exchange a layer has three sites:

    embed   gather 0   dispatch 0   scatter 0   gather 1   ...   scatter L-1   head

`gather i` sums the attention's parts, gives each rank of the replica its share of the rows and, in prefill, notifies
peers; `dispatch i` moves the rows to their experts; `scatter i` brings the sums back and, where several ranks share the
replica's attention, joins their rows. Boundary 0 stands before `embed` and boundary i+1 between `gather i` and
`dispatch i`: behind the notification, before any data (paper section 5), so there are L+1 of them. It is published when
the counts of all peers are there. In a world that cuts sublayers boundary 2i+1 stands there, and 2i+2 before
`scatter i`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from kernel.request import Phase
from kernel.topology import Role, World

if TYPE_CHECKING:
    from collections.abc import Iterator


class Op(StrEnum):
    """What a collective does."""

    ALL_REDUCE = "AR"
    ALL_GATHER = "AG"
    REDUCE_SCATTER = "RS"
    REDUCE_SCATTER_V = "RSv"
    NOTIFY = "notify"
    DISPATCH = "dispatch"
    COMBINE = "combine"


class Site(StrEnum):
    """Where in a forward it happens."""

    EMBED = "embed"
    GATHER = "gather"
    DISPATCH = "dispatch"
    SCATTER = "scatter"
    HEAD = "head"


EXCHANGING = (Op.NOTIFY, Op.DISPATCH, Op.COMBINE)
"""Operations of an expert exchange, which are never routed."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of one forward.

    index: its place among all collectives of the forward. layer: -1 outside the layers. role: canonical group.
    routed: it runs on D's launch stream (paper section 4, selective stream route).
    """

    index: int
    site: Site
    layer: int
    op: Op
    role: Role
    routed: bool = False

    def __str__(self) -> str:
        where = self.site if self.layer < 0 else f"{self.site} {self.layer}"
        return f"{self.op}[{self.role}]{' routed' if self.routed else ''} at {where}"


class Calls(tuple[Call, ...]):
    """Collectives that one phase enqueues together, in order; what follows from them is computed once."""

    @cached_property
    def shared(self) -> tuple[Call, ...]:
        """Those on D's launch stream when the phase is P."""
        return tuple(call for call in self if call.routed)

    @cached_property
    def own(self) -> tuple[Call, ...]:
        """Those on the phase's own stream."""
        return tuple(call for call in self if not call.routed)


Step = tuple[Op, Role]


def _layer(world: World, phase: Phase) -> tuple[list[Step], list[Step]]:
    """(gather, scatter) of one sparse layer, before roles of one member are dropped."""
    g, d, e, a = world.size, world.adp, world.ep, world.atp
    ar, ag, rs = Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER
    partial_experts: list[Step] = [(ar, Role.EP), (ar, Role.ETP)] if 1 < e < g else [(ar, Role.TP)]
    if d == 1:
        return [(ar, Role.TP)], partial_experts
    if a == 1 and e == g:
        gather: Step = (ar, Role.TP) if phase is Phase.P else (ag, Role.TP)
        return [gather], [(Op.REDUCE_SCATTER_V, Role.TP)]
    if phase is Phase.P:
        return [(ar, Role.TP)], partial_experts
    if world.gather == "cross":
        return [(rs, Role.ATP), (ag, Role.ADP), (ag, Role.ATP)], [(rs, Role.ATP), (rs, Role.ADP), (ag, Role.ATP)]
    return [(rs, Role.ATP), (ag, Role.TP)], [(rs, Role.TP), (ag, Role.ATP)]


def _exchange(phase: Phase) -> list[tuple[Site, Step]]:
    """One sparse layer with an expert exchange, before roles of one member are dropped."""
    split = [(Site.GATHER, (Op.NOTIFY, Role.EP))] if phase is Phase.P else []
    return [
        (Site.GATHER, (Op.REDUCE_SCATTER, Role.ATP)),
        *split,
        (Site.DISPATCH, (Op.DISPATCH, Role.EP)),
        (Site.SCATTER, (Op.COMBINE, Role.EP)),
        (Site.SCATTER, (Op.ALL_GATHER, Role.ATP)),
    ]


@dataclass(frozen=True)
class Program:
    """All collectives of one forward of `layers` sparse layers of a phase."""

    world: World
    phase: Phase
    layers: int

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise UsageError(f"a model of {self.layers} layers has no boundaries; at least one layer is needed")

    @cached_property
    def calls(self) -> Calls:
        """Every collective, in the order in which the host enqueues it."""
        return Calls(
            Call(index, site, layer, op, role, self._routed(op, role))
            for index, (site, layer, op, role) in enumerate(self._steps())
        )

    @cached_property
    def crosses(self) -> bool:
        """Whether rows are gathered over replicas of one shard first, which leaves them shard-major."""
        return any(call.role is Role.ADP for call in self.at(Site.GATHER, 0))

    @property
    def boundaries(self) -> int:
        """Safe boundaries 0 .. boundaries-1; a permit of this value lets the epoch end."""
        return self.world.boundaries(self.layers)

    def at(self, site: Site, layer: int = -1) -> tuple[Call, ...]:
        """The collectives of one site."""
        return self._sites.get((site, layer), ())

    def segment(self, start: int, end: int) -> Calls:
        """The collectives of segment [start, end): from boundary `start` to boundary `end`, or to the end."""
        known = self._segments.get((start, end))
        if known is None:
            known = Calls(call for call in self.calls if start <= self._boundary_before(call) < end)
            self._segments[start, end] = known
        return known

    def counts(self, start: int, end: int) -> bool:
        """Whether segment [start, end) notifies peers, and so stands at its end only when their counts are there."""
        first = -(-start // self.world.cuts)
        last = min(self.layers, -(-end // self.world.cuts))
        return self.phase is Phase.P and self.world.splits and first < last

    @cached_property
    def routes(self) -> bool:
        """Whether any of its collectives runs on D's launch stream."""
        return bool(self.calls.shared)

    @property
    def registered(self) -> tuple[Call, ...]:
        """P's collectives whose members share at least two ranks with a D collective on another communicator."""
        return tuple(call for call in self.calls if self._crosses(call.role))

    def _boundary_before(self, call: Call) -> int:
        cuts = self.world.cuts
        match call.site:
            case Site.EMBED:
                return 0
            case Site.HEAD:
                return self.boundaries - 1
            case Site.DISPATCH:
                return call.layer * cuts + 1
            case Site.SCATTER:
                return call.layer * cuts + cuts - 1 + self.world.splits
        return call.layer * cuts

    @cached_property
    def _segments(self) -> dict[tuple[int, int], Calls]:
        return {}

    @cached_property
    def _sites(self) -> dict[tuple[Site, int], tuple[Call, ...]]:
        sites: dict[tuple[Site, int], tuple[Call, ...]] = {}
        for call in self.calls:
            key = (call.site, call.layer)
            sites[key] = (*sites.get(key, ()), call)
        return sites

    def _steps(self) -> Iterator[tuple[Site, int, Op, Role]]:
        plain: list[tuple[Site, int, Step]] = [(Site.EMBED, -1, (Op.ALL_REDUCE, Role.ATP))]
        for layer in range(self.layers):
            if self.world.splits:
                plain += [(site, layer, step) for site, step in _exchange(self.phase)]
                continue
            gather, scatter = _layer(self.world, self.phase)
            plain += [(Site.GATHER, layer, step) for step in gather]
            plain += [(Site.SCATTER, layer, step) for step in scatter]
        plain.append((Site.HEAD, -1, (Op.ALL_GATHER, Role.ATP)))
        for site, layer, (op, role) in plain:
            canonical = self.world.canonical(role)
            if len(self.world.groups[canonical][0]) > 1:
                yield site, layer, op, canonical

    def _routed(self, op: Op, role: Role) -> bool:
        # DeepEP's kernels are never routed: its two phases get SM budgets instead (paper section 5).
        if self.phase is not Phase.P or self.world.route == "none" or op in EXCHANGING:
            return False
        if self.world.route in ("paper", "auto"):
            return op is Op.ALL_REDUCE and role is Role.TP
        return self._crosses(role)

    def _crosses(self, role: Role) -> bool:
        if self.phase is not Phase.P:
            return False
        groups = self.world.groups
        decode = {r for _, _, _, r in Program(self.world, Phase.D, 1)._steps()}
        return any(
            len(set(mine) & set(theirs)) >= 2 for other in decode for mine in groups[role] for theirs in groups[other]
        )


def collects(world: World, phase: Phase) -> bool:
    """Whether `phase` has collectives at all, besides the operations of an expert exchange."""
    return any(call.op not in EXCHANGING for call in Program(world, phase, layers=1).calls)
