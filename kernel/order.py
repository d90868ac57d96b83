"""The order of what this rank enqueues: keys that must increase on each stream, and the rolling order hash.

Every collective has the key (round, phase, index), with D before P in a round; keys increase on each communication
stream. The hash folds key, group role, operation and logical size, never a rank's own members or splits, so equal
hashes on all ranks mean the same order everywhere. Compared before a D launch, a divergence stops the run on the CPU
instead of hanging the devices.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kernel.errors import OrderViolation
from kernel.request import Phase
from kernel.views import digest, fold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.program import Call

_RANK_OF = {Phase.D: 0, Phase.P: 1}


@lru_cache(maxsize=4096)
def _signature(calls: tuple[Call, ...]) -> int:
    return digest([(call.index, str(call.op), str(call.role), call.routed) for call in calls])


class Order:
    """Keys and hash of one rank, for the life of the process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.hash = 0
        self._last: dict[Phase, tuple[int, int, int]] = {}

    def enqueue(self, round_: int, phase: Phase, calls: tuple[Call, ...], sizes: Sequence[int]) -> None:
        """Note a submission: `calls` of `phase`, in order, with the plan's row counts `sizes`.

        Raises OrderViolation, naming rank, round and collective, when a key does not increase on its stream.
        """
        for stream in Phase:
            mine = [call for call in calls if (Phase.D if call.routed else phase) is stream]
            if not mine:
                continue
            last = self._last.get(stream, (-1, 0, 0))
            first = (round_, _RANK_OF[phase], mine[0].index)
            if first <= last:
                before = "D" if last[1] == 0 else "P"
                raise OrderViolation(
                    f"rank {self.rank} round {round_} field order: {phase} collective {mine[0]} (key {first})"
                    f" enqueued on the {stream} stream after {before} key {last}: launch D before releasing P"
                )
            self._last[stream] = (round_, _RANK_OF[phase], mine[-1].index)
        self.hash = fold(self.hash, round_, _RANK_OF[phase], _signature(calls), *sizes)
