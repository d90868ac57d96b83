"""Bytes and SMs that DeepEP's two paths take, from the layout of their buffers. Pure; checked against its own hints.

Low latency: a buffer is two halves, so that one operation may start while peers still read the one before; each half
holds what this rank sends and what it receives. A rank receives up to `rows` rows for each expert of each peer, that is
experts x rows messages in all (local experts x ranks x rows). A dispatch message is a 16-byte header (the row's index
at its source) and either 16-bit numbers or 8-bit ones with a 32-bit scale for each 128; a combine message holds 16-bit
numbers, and for each 128 of them two 16-bit ones (the range of its compressed format). What is sent: a dispatch keeps
one message a row, a combine one for each that came.

Normal on one host: each channel (two SMs) has a ring of `chunk` slots from each peer, and a slot holds everything that
may travel with a row: the row, its source, and 128 places each for chosen experts (64-bit), their weights and scales
(32-bit). Beside the rings stand five words of head, tail and prefix for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError

if TYPE_CHECKING:
    from kernel.exchange.shape import Shape

MIB: Final = 1 << 20
LINE: Final = 128
"""Bytes that buffers are aligned to."""
GROUP: Final = 128
"""Numbers that share a scale."""
HEADER: Final = 16
PLACES: Final = 128
"""Places for chosen experts, weights and scales that travel with a row."""
SOURCE: Final = 8
"""Bytes that say where a row comes from."""
PEERS: Final = 8
"""Ranks of one host."""
DEEP_EP_RANKS: Final = (2, 4, PEERS)
"""Of one host, for which its normal path is built."""
WORKSPACE: Final = 32 * MIB
"""Of every buffer, beside what the formulas give."""
GRANULE: Final = 512 * MIB
"""By which NVSHMEM's symmetric heap grows: its default, and what DeepEP asks for (NVSHMEM_CUMEM_GRANULARITY)."""
PAGE: Final = 2 * MIB
"""What the driver gives a GPU's memory in."""


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def low_latency_bytes(shape: Shape) -> int:
    """Symmetric memory of D's buffer on one rank."""
    groups = shape.hidden // GROUP
    plain, quantised = 2 * shape.hidden, shape.hidden + 4 * groups
    dispatch = HEADER + max(plain, quantised)
    combine = plain + 4 * groups
    arriving = shape.experts * shape.decode_rows
    sent = max(shape.decode_rows * dispatch, arriving * combine)
    received = arriving * max(dispatch, combine)
    signals = _up(4 * shape.experts, LINE)
    total = 2 * (sent + received + signals)
    return total - total % LINE + LINE  # its hint always adds a line


def normal_bytes(row_bytes: int, ranks: int, *, num_sms: int = 20, chunk: int = 256) -> int:
    """NVLink memory of P's buffer on one rank. chunk: most rows that wait in one ring."""
    rings = num_sms // 2 * min(ranks, PEERS)
    hosts = max(1, ranks // PEERS)
    words = 4 * (2 * hosts + 3)
    slot = row_bytes + SOURCE + PLACES * (8 + 4 + 4)
    return _up(rings * (words + chunk * slot), LINE)


def symmetric_rows(shape: Shape) -> tuple[int, int]:
    """Rows of each buffer of D's exchange over torch's symmetric memory: (own ones to send, those that may come).

    A row travels once to each expert that it chose.
    """
    here = shape.ranks * shape.decode_rows * min(shape.topk, shape.local)
    return shape.decode_rows * shape.topk, here


def heap_bytes(symmetric: int) -> int:
    """GPU memory behind `symmetric` bytes of NVSHMEM's heap: whole granules, and one that NVSHMEM has for itself.

    A bound: what is small enough may lie in NVSHMEM's own granule, of which it uses 256 MiB or more.
    """
    return GRANULE + _up(symmetric, GRANULE)


def mailbox_bytes(ranks: int) -> int:
    """Symmetric memory of the counts of P's notifications: two words of each rank."""
    return 2 * 8 * ranks


def exchange_bytes(substrate: str, shape: Shape, *, num_sms: int = 20) -> int:
    """GPU memory of one rank that an exchange keeps while it exists, over all that other substrates have anyway.

    num_sms: of P's kernels, for DeepEP. What an operation returns comes from the allocator, like activations.
    """
    if substrate == "symm":
        words = 8 * 5 * shape.experts
        return heap_bytes(2 * sum(symmetric_rows(shape)) * shape.row_bytes + words)
    if substrate != "deepep":
        return 0
    buffers = footprint(shape, num_sms=num_sms)
    heap = heap_bytes(buffers.low_latency + mailbox_bytes(shape.ranks))
    return heap + _up(buffers.normal + LINE, PAGE) + 2 * WORKSPACE


def low_latency_ctas(experts: int, sms: int, rows: int = 0) -> int:
    """CTAs (each fills an SM) of the larger of D's kernels. rows: own rows of an operation.

    Dispatch and combine spread all experts evenly over the SMs; a combine then adds up one row in each of min(rows,
    SMs) CTAs.
    """
    each = -(-experts // sms)
    return max(-(-experts // each), min(rows, sms))


def rows_ask(shape: Shape, sms: int) -> bool:
    """Whether D's kernels take more CTAs for its rows than the experts alone would."""
    return low_latency_ctas(shape.experts, sms, shape.decode_rows) > low_latency_ctas(shape.experts, sms)


def notify_ctas(ranks: int) -> int:
    """CTAs of the kernel that opens each of P's dispatches: one for the counts, and one for each rank's rows."""
    return 1 + min(ranks, PEERS)


@dataclass(frozen=True, slots=True)
class Residency:
    """SMs that kernels which wait for peers may hold at once on one GPU.

    They are launched cooperatively and cannot share an SM. When rank 0 holds P's and waits for rank 1's P, while rank 1
    holds D's and waits for rank 0's D, nothing ends unless both phases fit side by side.
    """

    sms: int
    low_latency: int
    normal: int
    notify: int
    nccl: int

    @property
    def used(self) -> int:
        """All of them together."""
        return self.low_latency + self.normal + self.notify + self.nccl

    @property
    def free(self) -> int:
        """SMs left to everything else; below 0 a deadlock is possible."""
        return self.sms - self.used

    def check(self, *, rows: bool = False) -> None:
        """Raise UsageError, with the sum and the knobs, unless they fit. rows: those of D ask for more than experts."""
        if self.free >= 0:
            return
        knobs = ["--rows"] * rows + ["--exchange-sms"] + ["--max-ctas"] * (self.nccl > 0)
        model = "" if rows else ", or take a model whose experts divide into fewer low-latency CTAs"
        raise UsageError(
            f"expert exchanges of P and D that must be resident together need {self.used} SMs of {self.sms}"
            f" ({self.low_latency} of D's low-latency kernels + {self.normal} of P + {self.notify} of its notification"
            f" + {self.nccl} of NCCL): lower {' or '.join(knobs)}{model}"
        )


def residency(shape: Shape, *, sms: int, num_sms: int, nccl: int = 0) -> Residency:
    """The rule: low-latency CTAs + P's SMs + (1 + ranks) of its notification + NCCL's CTAs <= SMs."""
    low_latency = low_latency_ctas(shape.experts, sms, shape.decode_rows)
    return Residency(sms, low_latency, num_sms, notify_ctas(shape.ranks), nccl)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Communication memory of one rank, in bytes; the same whether one phase or both are active."""

    normal: int
    low_latency: int

    @property
    def total(self) -> int:
        """Payload of both, without the 32 MiB of workspace that each buffer adds."""
        return self.normal + self.low_latency


def footprint(shape: Shape, *, num_sms: int = 20, chunk: int = 256) -> Footprint:
    """What DeepEP reserves for `shape`."""
    return Footprint(
        normal_bytes(shape.row_bytes, shape.ranks, num_sms=num_sms, chunk=chunk), low_latency_bytes(shape)
    )
