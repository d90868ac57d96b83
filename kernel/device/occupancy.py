"""Do the kernels that must be resident together fit on the GPU? Pure arithmetic on SMs.

A kernel that waits for its peers (a collective, an expert exchange) holds its SMs until they have come. On one stream
one kernel runs at a time; so at most one of D's stream and one of P's stream wait at once, each of which may be the
largest of its stream. When their sum exceeds the GPU, each may keep the other out on different ranks: that is the
conditional deadlock that `verify` calls `certainty conditional`. Kernels that compute end by themselves and need no
room, unless P's have a share of their own (a green context).

A CTA is counted as one SM: communication kernels have up to 1,024 threads and most of an SM's shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from kernel.exchange.sizes import low_latency_ctas, notify_ctas, rows_ask
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.exchange.shape import Shape

NCCL_CTAS: Final = 32
"""CTAs that NCCL may use for one collective when nobody limits it (ncclConfig_t.maxCTAs of NCCL 2.28 on one node)."""
GREEN_STEP: Final = 8
"""Green contexts on compute capability 9.0 and later come in multiples of so many SMs, and at least as many."""

SYMMETRIC_CTAS: Final = 64
"""Most CTAs of torch's all-to-all over symmetric memory between the GPUs of one host (2.9 to 2.13)."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One that waits for its peers. stream: whose launch stream it runs on, D also for routed ones of P."""

    name: str
    stream: Phase
    ctas: int
    knob: str = "--max-ctas"
    """What makes it smaller."""


@dataclass(frozen=True, slots=True)
class Budget:
    """SMs in the worst case: `decode` and `prefill` held at once, of `sms`."""

    sms: int
    decode: int
    prefill: int

    @property
    def free(self) -> int:
        """SMs that the worst case leaves."""
        return self.sms - self.decode - self.prefill


def collectives(decode: int | None, prefill: int | None, *, routed: bool) -> list[Kernel]:
    """The collectives of both phases by their CTAs (None: not limited; 0: there are none). routed: P's also on D's."""
    sizes = {phase: NCCL_CTAS if n is None else n for phase, n in ((Phase.D, decode), (Phase.P, prefill))}
    found = [Kernel(f"NCCL of {phase}", phase, ctas) for phase, ctas in sizes.items()]
    if routed:
        found.append(Kernel("routed NCCL of P", Phase.D, sizes[Phase.P]))
    return [kernel for kernel in found if kernel.ctas]


def exchanges(substrate: str, shape: Shape, *, num_sms: int, sms: int, nccl: int | None = None) -> list[Kernel]:
    """The kernels of an expert exchange on a GPU of `sms` SMs. num_sms: of P's, for DeepEP. nccl: as of `collectives`.

    NCCL's all-to-all takes a power of two of CTAs, the next one above what its collectives may. DeepEP runs P's kernels
    on a stream of its own, and ours waits for counts on another; but P's stream stands before what it handed over, so
    they count as P's. That stream is in no green context: a share of prefill's bounds them only because what does not
    fit in it is refused.
    """
    rows = 1 << ((NCCL_CTAS if nccl is None else nccl) - 1).bit_length()
    if substrate == "nccl":
        return [Kernel(f"{phase}'s exchange over NCCL", phase, rows) for phase in Phase]
    if substrate == "symm":
        knob = "D's by --exchange nccl"
        return [
            Kernel("D's exchange over symmetric memory", Phase.D, min(SYMMETRIC_CTAS, sms), knob),
            Kernel("P's exchange over NCCL", Phase.P, rows),
        ]
    if substrate != "deepep":
        return []
    decode = low_latency_ctas(shape.experts, sms, shape.decode_rows)
    knob = "--rows" if rows_ask(shape, sms) else "the model's experts (or --exchange nccl)"
    return [
        Kernel("D's low-latency exchange", Phase.D, decode, knob),
        Kernel("P's exchange", Phase.P, num_sms, "--exchange-sms"),
        Kernel("P's notification", Phase.P, notify_ctas(shape.ranks), "--world"),
    ]


def check(sms: int, kernels: Iterable[Kernel], *, prefill_sms: int | None = None, where: str = "") -> Budget:
    """The budget of a GPU with `sms` SMs, where P's kernels have `prefill_sms` of them for themselves (None: all).

    Raises UsageError, with the numbers and the knob, when the worst case does not fit.
    """
    kernels = list(kernels)
    if prefill_sms is not None and not GREEN_STEP <= prefill_sms <= sms - GREEN_STEP:
        raise UsageError(
            f"{where}--prefill-sms {prefill_sms}: prefill's share must be {GREEN_STEP} to {sms - GREEN_STEP} of"
            f" {sms} SMs"
        )
    held = {phase: _largest(kernels, phase) for phase in (Phase.D, Phase.P)}
    decode, prefill = held[Phase.D], held[Phase.P]
    if prefill_sms is not None:
        if prefill.ctas > prefill_sms:
            raise UsageError(
                f"{where}{prefill.ctas} SMs of {prefill.name} do not fit in prefill's {prefill_sms}: raise"
                f" --prefill-sms or lower {prefill.knob}"
            )
        share = -(-prefill_sms // GREEN_STEP) * GREEN_STEP
        prefill = Kernel("prefill's share", Phase.P, share, "--prefill-sms")
    budget = Budget(sms, decode.ctas, prefill.ctas)
    if budget.free < 0:
        both = [kernel for kernel in (decode, prefill) if kernel.ctas]
        raise UsageError(
            f"{where}kernels that must be resident together need {decode.ctas + prefill.ctas} SMs of {sms}"
            f" ({' + '.join(f'{kernel.ctas} of {kernel.name}' for kernel in both)}):"
            f" lower {' or '.join(dict.fromkeys(kernel.knob for kernel in both))}"
        )
    return budget


def _largest(kernels: list[Kernel], phase: Phase) -> Kernel:
    mine = [kernel for kernel in kernels if kernel.stream is phase]
    return max(mine, key=lambda kernel: kernel.ctas, default=Kernel("nothing", phase, 0))
