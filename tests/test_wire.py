"""What ranks and engine say to each other arrives as it was said."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st

from kernel.replica import Output
from rollout.ranks import wire

OUTPUTS = st.builds(
    Output,
    request=st.integers(-1, 2**62),
    token=st.integers(-1, 2**31 - 1),
    logprob=st.floats(max_value=0.0, allow_nan=False),
    finish=st.sampled_from(["", "stop", "length", "abort", "weights", "policy"]),
    cached=st.integers(0, 2**31 - 1),
)


async def read(*packed: bytes) -> list[object]:
    reader = asyncio.StreamReader()
    for each in packed:
        reader.feed_data(each)
    reader.feed_eof()
    found = []
    while (message := await wire.read(reader)) is not None:
        found.append(message)
    return found


@given(st.lists(st.tuples(OUTPUTS, st.integers(0, 2**62)), max_size=5), st.dictionaries(st.text(), st.integers()))
def test_outputs_arrive_as_they_were_sent(outputs: list[tuple[Output, int]], message: dict[str, int]) -> None:
    found = asyncio.run(read(wire.pack(message), wire.pack_outputs(outputs), wire.pack(message)))
    sent = [(o.request, o.token, o.logprob, o.finish, o.cached, stamp) for o, stamp in outputs]
    assert found == [message, {"outputs": sent}, message]


def test_a_token_that_is_impossible_keeps_its_probability() -> None:
    (found,) = asyncio.run(read(wire.pack_outputs([(Output(1, 2, -math.inf), 3)])))
    assert found == {"outputs": [(1, 2, -math.inf, "", 0, 3)]}


def test_a_message_cut_short_is_the_end() -> None:
    assert asyncio.run(read(wire.pack({"ready": 1}), wire.pack_outputs([(Output(1, 2), 3)])[:-1])) == [{"ready": 1}]
