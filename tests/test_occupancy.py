"""The budget of SMs: what must be resident together fits, or is refused with the numbers and the knob."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.device import occupancy
from kernel.device.occupancy import SYMMETRIC_CTAS, Budget, Kernel, check, collectives, exchanges
from kernel.errors import UsageError
from kernel.exchange.shape import Shape
from kernel.exchange.sizes import residency
from kernel.request import Phase

KERNELS = st.lists(
    st.builds(Kernel, st.sampled_from(["AR", "AG", "dispatch"]), st.sampled_from(list(Phase)), st.integers(1, 140)),
    max_size=5,
)


@given(sms=st.sampled_from([24, 108, 132, 148]), kernels=KERNELS)
def test_it_fits_exactly_when_every_pair_of_the_two_streams_fits(sms: int, kernels: list[Kernel]) -> None:
    alone = [kernel.ctas for kernel in kernels]
    pairs = [d.ctas + p.ctas for d in kernels for p in kernels if d.stream is Phase.D and p.stream is Phase.P]
    worst = max([0, *alone, *pairs])
    if worst <= sms:
        assert check(sms, kernels).free == sms - worst
    else:
        with pytest.raises(UsageError, match=rf"need {worst} SMs of {sms}.*lower --max-ctas"):
            check(sms, kernels)


@pytest.mark.parametrize("over", [0, 1])
def test_the_last_sm_counts(over: int) -> None:
    with pytest.raises(UsageError, match="133 SMs of 132") if over else contextlib.nullcontext():
        check(132, [Kernel("AG", Phase.D, 100), Kernel("AR", Phase.P, 32 + over)])


def test_one_line_with_the_numbers_and_every_knob_once() -> None:
    exchange = Kernel("LL dispatch", Phase.D, 120, "--max-tokens")
    with pytest.raises(UsageError) as refused:
        check(132, [*collectives(None, 20, routed=True), exchange], where="rank 3: ")
    assert str(refused.value) == (
        "rank 3: kernels that must be resident together need 140 SMs of 132 (120 of LL dispatch + 20 of NCCL of P):"
        " lower --max-tokens or --max-ctas"
    )


def test_a_share_of_prefill_counts_whole_and_in_steps() -> None:
    both = collectives(16, 16, routed=True)
    assert check(132, both) == Budget(132, 16, 16)
    assert check(132, both, prefill_sms=64) == Budget(132, 16, 64)
    assert check(132, both, prefill_sms=65) == Budget(132, 16, 72)
    with pytest.raises(UsageError, match=r"136 SMs of 132 .*share.*: lower --max-ctas or --prefill-sms"):
        check(132, both, prefill_sms=120)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (4, "must be 8 to 124 of 132"),
        (128, "must be 8 to 124 of 132"),
        (24, "32 SMs of NCCL of P do not fit in prefill's 24: raise --prefill-sms or lower --max-ctas"),
    ],
)
def test_an_unusable_share_is_refused(share: int, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        check(132, collectives(None, None, routed=False), prefill_sms=share)


def test_routed_collectives_of_p_hold_room_on_d_s_stream_too() -> None:
    assert check(132, collectives(4, 30, routed=True)).decode == 30
    assert check(132, collectives(4, 30, routed=False)).decode == 4
    assert collectives(0, 0, routed=True) == []
    assert check(132, collectives(None, None, routed=False)) == Budget(132, occupancy.NCCL_CTAS, occupancy.NCCL_CTAS)


PAIRED = Shape(ranks=2, experts=64, hidden=2560, topk=8, prefill_rows=2048, decode_rows=64)


def sum_of(substrate: str, shape: Shape = PAIRED, *, nccl: int | None = None, num_sms: int = 20, **more: int) -> Budget:
    kernels = exchanges(substrate, shape, num_sms=num_sms, sms=132, nccl=nccl)
    return check(132, [*collectives(nccl, nccl, routed=True), *kernels], where="rank 1: ", **more)


def test_each_substrate_s_kernels_are_in_the_sum() -> None:
    assert sum_of("deepep") == Budget(132, 64, 32)
    assert sum_of("deepep", nccl=8) == Budget(132, 64, 20)
    assert sum_of("deepep", nccl=0, num_sms=2) == Budget(132, 64, 3), "its notification is the largest then"
    assert sum_of("symm") == Budget(132, SYMMETRIC_CTAS, 32)
    assert sum_of("nccl") == sum_of("local") == Budget(132, 32, 32)
    assert sum_of("nccl", nccl=17) == Budget(132, 32, 32), "a power of two, unlike its collectives"
    assert sum_of("nccl", nccl=16) == Budget(132, 16, 16)
    assert sum_of("symm", nccl=3) == Budget(132, SYMMETRIC_CTAS, 4)
    with pytest.raises(UsageError, match=r"64 of D's exchange over symmetric memory \+ 80 of prefill's share"):
        sum_of("symm", nccl=8, prefill_sms=80)


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({"experts": 128}, {}, "rank 1: kernels that must be resident together need 148 SMs of 132 (128 of D's"
         " low-latency exchange + 20 of P's exchange): lower the model's experts (or --exchange nccl) or"
         " --exchange-sms"),
        ({"decode_rows": 128}, {}, "148 SMs of 132 (128 of D's low-latency exchange + 20 of P's exchange): lower --rows"
         " or --exchange-sms"),
        ({}, {"num_sms": 70}, "134 SMs of 132 (64 of D's low-latency exchange + 70 of P's exchange): lower the"),
        ({}, {"prefill_sms": 16}, "rank 1: 20 SMs of P's exchange do not fit in prefill's 16: raise --prefill-sms or"
         " lower --exchange-sms"),
        ({}, {"prefill_sms": 72}, "136 SMs of 132 (64 of D's low-latency exchange + 72 of prefill's share)"),
    ],
)  # fmt: skip
def test_an_exchange_that_does_not_fit_is_refused_with_its_knob(
    changes: dict[str, int], more: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        sum_of("deepep", replace(PAIRED, **changes), nccl=8, **more)


@given(
    experts=st.integers(1, 300).map(lambda n: 2 * n),
    rows=st.integers(1, 160),
    num_sms=st.integers(1, 60).map(lambda n: 2 * n),
    nccl=st.integers(1, 64),
)
def test_what_keeps_deep_ep_s_own_rule_fits_unless_nccl_of_both_phases_is_more(
    experts: int, rows: int, num_sms: int, nccl: int
) -> None:
    """The rule adds up what one stream runs one after the other, and counts NCCL once, which each phase has."""
    shape = Shape(ranks=2, experts=experts, hidden=2560, topk=1, prefill_rows=64, decode_rows=rows)
    rule = residency(shape, sms=132, num_sms=num_sms, nccl=nccl)
    if rule.free >= 0 and 2 * nccl <= 132:
        found = sum_of("deepep", shape, nccl=nccl, num_sms=num_sms)
        assert found.free >= min(rule.free, 132 - 2 * nccl)
