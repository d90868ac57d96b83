"""Row counts of the members of a collective. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.topology import Role


def check_parts(role: Role, rows: int, sizes: Sequence[int], members: int) -> None:
    """Raise UsageError unless `sizes` gives each member of a reduce-scatter its part of `rows`."""
    if len(sizes) != members or sum(sizes) != rows:
        raise UsageError(
            f"reduce_scatter over {role} of {rows} rows with sizes {list(sizes)}: give one size for each of"
            f" {members} members, {rows} in total"
        )
