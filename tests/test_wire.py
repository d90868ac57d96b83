"""What ranks and engine say to each other arrives as it was said."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.inbox import Submit
from kernel.replica import Output
from kernel.request import Request, SamplingParams
from rollout.ranks import wire

OUTPUTS = st.builds(
    Output,
    request=st.integers(-1, 2**62),
    token=st.integers(-1, 2**31 - 1),
    logprob=st.floats(max_value=0.0, allow_nan=False),
    finish=st.sampled_from(["", "stop", "length", "abort", "weights", "policy"]),
    cached=st.integers(0, 2**31 - 1),
)


NUMBERS = st.one_of(st.integers(), st.floats(), st.integers(2**62, 2**65), st.sampled_from([-(2**63), 2**64, 10**400]))


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


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("max_tokens", "temperature", "top_p", "top_k", "seed"), NUMBERS),
            "stop_token_ids": st.one_of(st.none(), st.text(), NUMBERS, st.lists(NUMBERS, max_size=2)),
            "ignore_eos": st.one_of(st.booleans(), st.none(), st.text()),
        },
    )
)
def test_whatever_is_asked_for_is_refused_at_once_or_arrives(asked: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**asked)
    except UsageError:
        return
    sent = Submit(Request(1, 2, 0, (3,), params))
    (found,) = asyncio.run(read(wire.pack(wire.entry_to_json(sent))))
    assert isinstance(found, dict)
    assert wire.entry_from_json(found) == sent
    np.array([params.max_tokens, params.top_k, *params.stop_token_ids], np.int64)
    np.array([params.temperature, params.top_p], np.float64)
