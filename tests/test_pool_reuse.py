"""A pool that holds little more than one turn, and a session whose next turn asks for what is kept of its last one."""

from __future__ import annotations

import pytest

from kernel.inbox import Submit
from kernel.request import Request, SamplingParams
from kernel.topology import World
from verify.enact import attempt
from verify.scenario import Scenario


@pytest.mark.xfail(strict=True, reason="a plan admits two turns of which the pool holds one: kept blocks count twice")
def test_a_turn_of_a_waiting_session_is_not_promised_blocks_twice() -> None:
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    submits = [
        (0, Submit(Request(1, 0, 0, (0, 1, 2, 2686, 100), once))),
        (0, Submit(Request(2, 2, 0, (200,), once))),
        (1, Submit(Request(0, 0, 0, (0, 1, 2), once))),
    ]
    scenario = Scenario(World(), "fine", 1, tuple(submits), prefill_tokens=2, rows=2, blocks=2, block_size=4)
    outcome = attempt(scenario)
    assert outcome.clean, outcome.findings
