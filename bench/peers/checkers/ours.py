"""Our own explorer on the same protocol: the seam that the comparison calls, as a process like any other runner."""

from __future__ import annotations

from typing import Any

from bench.peers.checkers.cell import Answer, read


def ours(n: int, segments: int, iterations: int, variant: str) -> dict[str, Any]:
    """Explore `n` ranks x `segments` of P x `iterations` of D; `variant` is one of protocol.VARIANTS.

    Returns the fields of cell.Answer: `verdict` (proved, deadlock or unfinished), `executions` (up to the first
    deadlock), `seconds` (imports left out), `scope` (for which schedules a proof holds), and `says` if there is more
    to say. It may run for as long as it likes: the caller ends the process.
    """
    raise NotImplementedError("our explorer is not connected yet")


def main() -> None:
    """Answer the question on the command line; its bound and limit are not for us."""
    cell = read()
    try:
        answer = Answer(**ours(cell.ranks, cell.segments, cell.iterations, cell.variant))
    except NotImplementedError as reason:
        answer = Answer("skipped", 0, 0.0, "", str(reason))
    answer.print()


if __name__ == "__main__":
    main()
