"""What DeepEP's kernels can do, checked before they are built: each refusal says which rule is broken, and the knob.

Limits are those of the wheel that pyproject.toml names. Its normal path takes one host of 2, 4 or 8 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError, VersionMismatch
from kernel.exchange.sizes import DEEP_EP_RANKS, residency, rows_ask

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.exchange.shape import Shape

HIDDEN: Final = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Row sizes that low-latency kernels are compiled for."""
TOPK: Final = 11
ROWS: Final = 1024
"""Rows of a rank in a low-latency operation: more would not fit into the tags of its messages."""
ROW_BYTES: Final = 16384
"""About: a row of the normal path passes through shared memory."""
SMS: Final = 132
"""Of an H100 or H200; a rank checks again with its own GPU's."""
NUM_SMS: Final = 20
"""Of P's kernels, by default: two SMs a channel."""
NAMESPACE: Final = 128
"""Queue pairs of one peer."""


@dataclass(frozen=True, slots=True)
class QueuePairs:
    """Queue pairs [start, stop) of each peer that one phase may use. namespace: the buffer whose pairs they are."""

    owner: str
    start: int
    stop: int
    namespace: str

    def __str__(self) -> str:
        return f"{self.owner} [{self.start}, {self.stop}) of {self.namespace}"


def queue_pairs(shape: Shape, num_sms: int, *, hosts: int = 1) -> tuple[QueuePairs, QueuePairs]:
    """(P's, D's). Kernels number them from 0: P's by SM, D's by local expert.

    On one host each phase's buffer is a namespace of its own (P's moves data over NVLink and uses none). Across hosts
    all buffers of a process share NVSHMEM's pairs, and the two intervals collide: `check_queue_pairs` says so.
    """
    names = ("P's buffer", "D's buffer") if hosts == 1 else ("NVSHMEM", "NVSHMEM")
    return QueuePairs("P", 0, num_sms, names[0]), QueuePairs("D", 0, shape.local, names[1])


def check_queue_pairs(intervals: Sequence[QueuePairs]) -> None:
    """Raise UsageError unless all intervals lie in their namespace and those of one namespace are disjoint."""
    for each in intervals:
        if not 0 <= each.start < each.stop <= NAMESPACE:
            raise UsageError(
                f"queue pairs {each}: they must lie in [0, {NAMESPACE}): lower --exchange-sms (P) or spread the experts"
                " over more ranks (D)"
            )
    for number, one in enumerate(intervals):
        for other in intervals[number + 1 :]:
            if one.namespace == other.namespace and one.start < other.stop and other.start < one.stop:
                raise UsageError(
                    f"queue pairs {one} and {other} overlap: one phase would advance the other's transport; stock"
                    " DeepEP numbers both from 0, so run the two phases on one host, or choose --exchange nccl"
                )


def check(shape: Shape, *, num_sms: int, sms: int, nccl: int = 0, queue_depth: int = 1024, hosts: int = 1) -> None:
    """Raise UsageError for the first rule of DeepEP that `shape` breaks.

    num_sms: SMs of P's kernels. sms: of the GPU. nccl: CTAs of NCCL's largest collective beside them. queue_depth:
    NVSHMEM_QP_DEPTH. hosts: of the world.
    """
    for broken, what, instead in _rules(shape, num_sms, queue_depth, hosts):
        if broken:
            raise UsageError(f"DeepEP cannot exchange {what}: {instead}; or choose --exchange nccl")
    check_queue_pairs(queue_pairs(shape, num_sms, hosts=hosts))
    residency(shape, sms=sms, num_sms=num_sms, nccl=nccl).check(rows=rows_ask(shape, sms))


def _rules(shape: Shape, num_sms: int, depth: int, hosts: int) -> Iterable[tuple[bool, str, str]]:
    rows, hidden = shape.decode_rows, shape.hidden
    yield hosts > 1, f"over {hosts} hosts with two buffers", "its buffers with RDMA memory are one to a process"
    yield (
        shape.ranks not in DEEP_EP_RANKS,
        f"between {shape.ranks} ranks of one host",
        "its normal path is built for 2, 4 or 8: change --world",
    )
    yield (
        hidden not in HIDDEN,
        f"rows of hidden size {hidden}",
        f"its low-latency kernels are built for {', '.join(map(str, HIDDEN))}: take another model",
    )
    yield shape.topk > TOPK, f"top-{shape.topk} rows", f"it takes at most {TOPK} experts a row: take another model"
    yield (
        shape.fp8 and hidden % 512 != 0,
        f"FP8 rows of hidden size {hidden}",
        "their scales are packed by 512: send BF16",
    )
    yield (
        rows > ROWS,
        f"{rows} decode rows a rank",
        f"its message tags count to {ROWS}: lower the rows of a replica or the draft tokens",
    )
    yield (
        shape.ranks * rows % 4 != 0,
        f"{rows} decode rows from each of {shape.ranks} ranks",
        "their product must be a multiple of 4: change the rows of a replica",
    )
    yield (
        depth < 2 * (rows + 1),
        f"{rows} decode rows a rank with NVSHMEM_QP_DEPTH={depth}",
        f"it needs 2 x (rows + 1) = {2 * (rows + 1)}: lower --rows",
    )
    yield (
        shape.row_bytes % 32 != 0 or shape.row_bytes > ROW_BYTES,
        f"rows of {shape.row_bytes} bytes",
        f"its normal path takes multiples of 32 up to {ROW_BYTES}: take another model or 16-bit numbers",
    )
    yield (
        shape.itemsize != 2,
        f"numbers of {shape.itemsize} bytes",
        "low-latency rows are BF16 (or FP8 made of it): choose --dtype bfloat16",
    )
    odd = num_sms < 2 or num_sms % 2 != 0
    yield odd, f"over {num_sms} SMs", "a channel is two of them: choose an even --exchange-sms"


def check_versions(host: tuple[int, int, int], device: tuple[int, int, int], user: str) -> None:
    """Raise VersionMismatch unless NVSHMEM's library `host` serves device code that `user` was built with.

    NVSHMEM's rule: equal major numbers, and the device's minor number at most the host's.
    """
    if host[0] != device[0] or device[1] > host[1]:
        raise VersionMismatch(
            f"NVSHMEM {_dotted(host)} cannot serve {user}, whose device code is of {_dotted(device)}: equal major"
            f" versions are needed, and a library at least as new; install nvidia-nvshmem-cu13 {device[0]}.{device[1]}"
            " or newer"
        )


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
