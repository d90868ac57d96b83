"""World(size, adp, ep, gather, route, cut) and its named process groups. Pure; paper section 2.

Notation: g = size, d = adp, e = ep; attention tensor parallelism a = g/d, expert tensor parallelism m = g/e.
A rank r sits in attention replica r // a with attention-TP index r % a.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from kernel.errors import UsageError
from kernel.request import whole


class Role(StrEnum):
    """What a process group is for. The members follow from the world; see `World.groups`."""

    TP = "TP"
    """All ranks."""
    ATP = "ATP"
    """The a consecutive ranks of one attention replica."""
    ADP = "ADP"
    """The d ranks of equal attention-TP index, one a replica (the paper's {0,2}, {1,3})."""
    EP = "EP"
    """The e ranks that hold different experts (stride m)."""
    ETP = "ETP"
    """The m consecutive ranks that share an expert's columns."""


GATHERS = ("flat", "cross")
ROUTES = ("auto", "paper", "all", "none")
CUTS = ("layer", "sublayer")
EXCHANGES = ("none", "split")
_MOST_TOLD = 4096
"""Widths up to this are told of as ones that fit."""


@dataclass(frozen=True)
class World:
    """How `size` ranks are divided.

    size: ranks g. adp: attention replicas d. ep: expert-parallel width e. gather: how decode collects the rows of all
    replicas, `flat` (one all-gather over all ranks) or `cross` (the paper's Figure 2). route: which prefill
    collectives run on decode's launch stream (`kernel.program`): `paper` the full-TP all-reduce, `all` the whole
    registered set, `none` nothing, `auto` what the policy wants (`paper`, except under `unordered`). cut: where prefill
    has safe boundaries: `layer` one before each layer's first collectives (the paper's), `sublayer` another one before
    those behind its experts, so that decode can pass either half of a layer's computation. exchange: how rows reach
    experts of other ranks: `none` by the collectives above, `split` by an expert exchange whose P dispatch is split
    behind its notification (`kernel.exchange`; with adp above 1, as each rank has all rows otherwise).
    Raises UsageError when a width does not divide the size.
    """

    size: int = 1
    adp: int = 1
    ep: int = 1
    gather: str = "cross"
    route: str = "auto"
    cut: str = "layer"
    exchange: str = "none"

    def __post_init__(self) -> None:
        for name in ("size", "adp", "ep"):
            object.__setattr__(self, name, whole(getattr(self, name), name))
        if self.size < 1:
            raise UsageError(f"--world {self.size}: a world has at least one rank")
        for flag, width in (("--adp", self.adp), ("--ep", self.ep)):
            if width < 1 or self.size % width:
                fits = [n for n in range(1, min(self.size, _MOST_TOLD) + 1) if self.size % n == 0]
                raise UsageError(f"{flag} {width} does not divide --world {self.size}: choose one of {fits}")
        if self.gather not in GATHERS:
            raise UsageError(f"--gather {self.gather}: choose one of {', '.join(GATHERS)}")
        if self.route not in ROUTES:
            raise UsageError(f"--route {self.route}: choose one of {', '.join(ROUTES)}")
        if self.cut not in CUTS:
            raise UsageError(f"--cut {self.cut}: choose one of {', '.join(CUTS)}")
        if self.exchange not in EXCHANGES:
            raise UsageError(f"exchange {self.exchange!r}: choose one of {', '.join(EXCHANGES)}")

    @property
    def atp(self) -> int:
        """Ranks that share one replica's attention, a = g/d."""
        return self.size // self.adp

    @property
    def etp(self) -> int:
        """Ranks that share one expert, m = g/e."""
        return self.size // self.ep

    @property
    def cuts(self) -> int:
        """Safe boundaries of one layer of prefill."""
        return 1 + CUTS.index(self.cut)

    @property
    def splits(self) -> bool:
        """Whether rows travel by an expert exchange."""
        return self.exchange == "split" and (self.adp > 1 or self.size == 1)

    def boundaries(self, layers: int) -> int:
        """Safe boundaries of a prefill of `layers` layers, 0 .. boundaries-1; see `kernel.program`."""
        return layers * self.cuts + self.splits

    def layers(self, boundaries: int) -> int:
        """The inverse of `boundaries`."""
        return (boundaries - self.splits) // self.cuts

    @cached_property
    def groups(self) -> dict[Role, tuple[tuple[int, ...], ...]]:
        """Each role's partition of the ranks, in rank order."""
        g, a, m = self.size, self.atp, self.etp
        return {
            Role.TP: (tuple(range(g)),),
            Role.ATP: tuple(tuple(range(k, k + a)) for k in range(0, g, a)),
            Role.ADP: tuple(tuple(range(t, g, a)) for t in range(a)),
            Role.EP: tuple(tuple(range(t, g, m)) for t in range(m)),
            Role.ETP: tuple(tuple(range(k, k + m)) for k in range(0, g, m)),
        }

    def members(self, role: Role, rank: int) -> tuple[int, ...]:
        """The group of `role` that `rank` belongs to."""
        return self._group_of[role, rank]

    @cached_property
    def _group_of(self) -> dict[tuple[Role, int], tuple[int, ...]]:
        return {(role, rank): group for role, groups in self.groups.items() for group in groups for rank in group}

    def under(self, route: str | None) -> World:
        """This world with `auto` resolved: to `route`, a policy's wish, or else to `paper`."""
        return replace(self, route=route or "paper") if self.route == "auto" else self

    def canonical(self, role: Role) -> Role:
        """The role whose communicator `role` uses.

        Roles with equal partitions are one communicator, as in SGLang, where a sub-group of full width *is* the TP
        group: two roles with the same members would otherwise be two sequences to order.
        """
        return next(other for other in Role if self.groups[other] == self.groups[role])

    def replica(self, rank: int) -> int:
        """The attention replica that `rank` belongs to."""
        return rank // self.atp

    def leaders(self) -> tuple[int, ...]:
        """The first rank of each replica: those that report tokens."""
        return tuple(range(0, self.size, self.atp))

    def __str__(self) -> str:
        cut = "" if self.cut == "layer" else f" cut={self.cut}"
        exchange = " exchange" if self.splits else ""
        return f"g{self.size} adp{self.adp} ep{self.ep} {self.gather} route={self.route}{cut}{exchange}"
