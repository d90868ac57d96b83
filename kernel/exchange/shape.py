"""What all ranks of an expert exchange must agree on, and what every substrate requires of it. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kernel.errors import PeersDiffer, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of an expert exchange.

    ranks: peers, each with experts/ranks of `experts` experts, in rank order. hidden: elements of a row of `itemsize`
    bytes. topk: experts that a row chooses. prefill_rows: most rows that a rank dispatches in one layer of P.
    decode_rows: rows of a rank in every D operation, draft tokens included; it fixes D's layout. fp8: D sends rows as
    8-bit floats with scales.
    Raises UsageError, naming the rule, for sizes that no substrate can do.
    """

    ranks: int
    experts: int
    hidden: int
    topk: int
    prefill_rows: int
    decode_rows: int
    itemsize: int = 2
    fp8: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "experts", "hidden", "topk", "prefill_rows", "decode_rows", "itemsize"):
            if getattr(self, name) < 1:
                raise UsageError(f"expert exchange with {name}={getattr(self, name)}: at least 1 is needed")
        if self.experts % self.ranks:
            raise UsageError(
                f"expert exchange of {self.experts} experts over {self.ranks} ranks: each rank must hold equally many;"
                " choose --world so that it divides the number of experts"
            )
        if self.topk > self.experts:
            raise UsageError(f"expert exchange: a row chooses {self.topk} of {self.experts} experts")

    @property
    def local(self) -> int:
        """Experts of one rank."""
        return self.experts // self.ranks

    @property
    def row_bytes(self) -> int:
        """Of one row, unquantised."""
        return self.hidden * self.itemsize

    def owner(self, expert: int) -> int:
        """The rank that holds `expert`."""
        return expert // self.local

    def encode(self) -> bytes:
        """For the exchange in which ranks compare their shapes."""
        return json.dumps(asdict(self)).encode()


def agree(rank: int, mine: Shape, all_ranks: Sequence[bytes]) -> None:
    """Raise PeersDiffer, naming rank and field, unless every rank sent `mine` (as `Shape.encode` wrote it)."""
    if len(all_ranks) != mine.ranks:
        raise PeersDiffer(
            f"rank {rank} builds an expert exchange of {mine.ranks} ranks, and {len(all_ranks)} answered: give all"
            " ranks the same world"
        )
    for peer, blob in enumerate(all_ranks):
        theirs = json.loads(blob)
        for name, value in asdict(mine).items():
            if theirs.get(name) != value:
                raise PeersDiffer(
                    f"rank {rank} builds an expert exchange with {name}={value}, rank {peer} with"
                    f" {name}={theirs.get(name)}: start all ranks with the same model and options"
                )
