"""The budget of SMs: what must be resident together fits, or is refused with the numbers and the knob."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.device import occupancy
from kernel.device.occupancy import Budget, Kernel, check, collectives
from kernel.errors import UsageError
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
