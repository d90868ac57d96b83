"""Collectives of a world of one rank: each is the identity. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.ports import Tensor
    from kernel.topology import Role


class LocalCollectives:
    """`kernel.ports.Collectives` where every group has one member. Results are the arguments themselves."""

    def all_reduce(self, role: Role, x: Tensor) -> Tensor:
        """x."""
        return x

    def all_gather(self, role: Role, x: Tensor, dim: int = 0) -> Tensor:
        """x."""
        return x

    def reduce_scatter(self, role: Role, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x. Raises UsageError unless `sizes` is one number."""
        if len(sizes) != 1:
            raise UsageError(f"reduce_scatter over {role} with sizes {list(sizes)} in a world of one rank: give one")
        return x

    def close(self) -> None:
        """Nothing to release."""
