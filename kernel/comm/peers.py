"""Small objects from every rank to every rank, while communication is being built: over torch's store."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch._C._distributed_c10d import PrefixStore

from kernel.errors import RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT_S: Final = 120.0


class Peers:
    """The ranks of a world, each of which makes the same calls. store: used under a prefix of its own, `name`.

    The store outlives them. Every rank makes as many of one name, and the second of them reads nothing of the first.
    """

    def __init__(self, store: Store, rank: int, size: int, name: str, timeout_s: float = _TIMEOUT_S) -> None:
        made = store.add(f"{name} made by {rank}", 1)
        self._store: Any = PrefixStore(f"{name} {made}/", store)
        self.rank, self.size, self._name = rank, size, name
        self._timeout = timedelta(seconds=timeout_s)
        self._calls = 0

    def all_gather(self, what: str, value: Any) -> list[Any]:
        """Everybody's value (None, int, str, or bytes), in rank order. Raises RankLost when a peer does not come."""
        self._calls += 1
        key = f"{self._calls} {what}"
        self._store.set(f"{key} {self.rank}", _encoded(value))
        found = []
        for rank in range(self.size):
            try:
                self._store.wait([f"{key} {rank}"], self._timeout)
                found.append(_decoded(self._store.get(f"{key} {rank}")))
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise RankLost(
                    f"rank {rank} did not come to {what} of {self._name}, which rank {self.rank} builds: {reason}"
                ) from None
        return found

    # -- as mpi4py spells it: DeepEP takes a communicator of that kind in place of a process group ------------------

    def Get_rank(self) -> int:
        """This rank."""
        return self.rank

    def Get_size(self) -> int:
        """How many there are."""
        return self.size

    def allgather(self, value: Any) -> list[Any]:
        """As `all_gather`."""
        return self.all_gather("a buffer", value)


def _encoded(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return json.dumps({"bytes": base64.b64encode(value).decode(), "mutable": isinstance(value, bytearray)})
    return json.dumps({"value": value})


def _decoded(text: bytes) -> Any:
    found = json.loads(text)
    if "bytes" not in found:
        return found["value"]
    data = base64.b64decode(found["bytes"])
    return bytearray(data) if found["mutable"] else data
