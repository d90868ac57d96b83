"""The order of what this rank enqueues: keys that must increase on each stream, and the rolling order hash.

Every collective has the key (round, phase, index), with D before P in a round; keys increase on each communication
stream. The hash folds, stream by stream, key, group role, operation and logical size, never a rank's own members or
splits, so equal hashes on all ranks mean the same order on every stream. Compared before a D launch, a divergence stops
the run on the CPU instead of hanging the devices.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kernel.errors import OrderViolation
from kernel.request import Phase
from kernel.views import digest, mix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.program import Call, Calls

_RANK_OF = {Phase.D: 0, Phase.P: 1}


@lru_cache(maxsize=4096)
def _signature(calls: tuple[Call, ...]) -> int:
    return digest([(call.index, str(call.op), str(call.role)) for call in calls])


class Order:
    """Keys and hashes of one rank, for the life of the process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._last: dict[Phase, tuple[int, int, int]] = {}
        self._hashes = dict.fromkeys(Phase, 0)
        self._signatures: dict[int, tuple[Calls, dict[Phase, int]]] = {}

    @property
    def hash(self) -> int:
        """Of everything enqueued so far."""
        return mix(*self._hashes.values())

    def enqueue(self, round_: int, phase: Phase, calls: Calls, sizes: Sequence[int]) -> None:
        """Note a submission: `calls` of `phase`, in order, with the plan's row counts `sizes`.

        Raises OrderViolation, naming rank, round and collective, when a key does not increase on its stream.
        """
        place = _RANK_OF[phase]
        for stream, mine in ((Phase.D, calls.shared), (phase, calls.own)):
            if not mine:
                continue
            last = self._last.get(stream, (-1, 0, 0))
            first = (round_, place, mine[0].index)
            if first <= last:
                before = "D" if last[1] == 0 else "P"
                raise OrderViolation(
                    f"rank {self.rank} round {round_} field order: {phase} collective {mine[0]} (key {first})"
                    f" enqueued on the {stream} stream after {before} key {last}: launch D before releasing P"
                )
            self._last[stream] = (round_, place, mine[-1].index)
            self._hashes[stream] = mix(self._hashes[stream], round_, place, self._sign(calls, stream, mine), *sizes)

    def _sign(self, calls: Calls, stream: Phase, mine: tuple[Call, ...]) -> int:
        """The signature of `mine`; `calls` is one object for each place of a program, so its identity finds it."""
        known = self._signatures.get(id(calls))
        if known is None or known[0] is not calls:
            known = self._signatures[id(calls)] = calls, {}
        if stream not in known[1]:
            known[1][stream] = _signature(mine)
        return known[1][stream]
