"""What `--exchange` comes to before ranks are started: by default none, and DeepEP only where its rules allow it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from kernel.errors import UsageError
from kernel.exchange.shape import Shape
from kernel.topology import World
from rollout.device import DeviceOptions
from rollout.ranks import exchange

WORLD = World(2, 2, 2)


@pytest.fixture(autouse=True)
def _everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_installed", lambda _: True)


def resolved(
    asked: str, dtype: str = "bfloat16", max_ctas: int | None = None, world: World = WORLD, **sizes: int
) -> tuple[World, Any]:
    config = SimpleNamespace(**({"experts": 64, "hidden_size": 2560, "experts_per_token": 8} | sizes))
    options = DeviceOptions("cuda", dtype=dtype, exchange=asked, max_ctas=max_ctas)
    return exchange.resolve(options, config, world, prefill_tokens=512, rows=32)


def test_by_default_there_is_none_and_the_reason_says_what_could_be_had() -> None:
    world, choice = resolved("auto")
    assert (world.splits, choice.substrate) == (False, "none")
    assert choice.reason.startswith("collectives; --exchange deepep could be had")
    _, choice = resolved("auto", hidden_size=64)
    assert "--exchange nccl could be had" in choice.reason
    assert "hidden size 64" in choice.reason
    assert "no symm: torch's exchange over symmetric memory takes 16 experts a rank at most, not 32" in choice.reason
    _, choice = resolved("auto", hidden_size=64, experts=32)
    assert "--exchange symm could be had" in choice.reason


def test_what_is_asked_for_changes_the_program() -> None:
    world, choice = resolved("deepep")
    assert (world.splits, choice.substrate) == (True, "deepep")
    assert world.boundaries(4) == 5


@pytest.mark.parametrize(
    ("dtype", "sizes", "said"),
    [("float32", {}, "numbers of 4 bytes"), ("bfloat16", {"hidden_size": 96}, "hidden size 96"),
     ("bfloat16", {"experts_per_token": 16}, "top-16"), ("bfloat16", {"experts": 256}, "SMs of 132"),
     ("bfloat16", {"experts": 112}, r"135 SMs of 132 \(112 of .* \+ 0 of NCCL\): lower --exchange-sms, or take")],
)  # fmt: skip
def test_what_deep_ep_cannot_do_is_refused_before_ranks_start(dtype: str, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=rf"--exchange deepep: .*{said}") as caught:
        resolved("deepep", dtype, **sizes)
    assert "\n" not in str(caught.value)


def test_fewer_ctas_of_nccl_make_room_for_more_experts_where_there_are_collectives_beside() -> None:
    """Of replicas of one rank each, an exchange leaves no collective at all."""
    of_two = World(4, 2, 4)
    with pytest.raises(UsageError, match=r"153 SMs of 132 \(96 of .* 32 of NCCL\): lower --exchange-sms or --max-ctas"):
        resolved("deepep", experts=96, world=of_two)
    assert resolved("deepep", experts=96, max_ctas=8, world=of_two)[1].substrate == "deepep"
    assert resolved("deepep", experts=96)[1].substrate == "deepep"


def test_rows_are_the_knob_where_they_ask_for_more_than_the_experts() -> None:
    config = SimpleNamespace(experts=64, hidden_size=2560, experts_per_token=8)
    options = DeviceOptions("cuda", dtype="bfloat16", exchange="deepep")
    with pytest.raises(UsageError, match=r"151 SMs .*: lower --rows or --exchange-sms$"):
        exchange.resolve(options, config, WORLD, prefill_tokens=512, rows=128)


@pytest.mark.parametrize("other", ["auto", "none", "nccl", "symm"])
def test_sms_of_deep_ep_are_for_deep_ep(other: str) -> None:
    with pytest.raises(UsageError, match="--exchange-sms 20 is for --exchange deepep"):
        DeviceOptions("cuda", exchange=other, exchange_sms=20)


def test_symmetric_memory_with_more_experts_than_its_kernel_has_warps_is_refused_before_ranks_start() -> None:
    with pytest.raises(UsageError, match=r"--exchange symm: .* takes 16 experts a rank at most, not 32: choose nccl"):
        resolved("symm")
    assert resolved("symm", experts=32)[1].substrate == "symm"


async def test_while_groups_are_made_with_all_peers_the_loop_goes_on() -> None:
    """Else a rank whose peer has stopped seems to have stopped too: its heart beats on the loop."""
    shape, turned = Shape(2, 8, 16, 2, 64, 16), threading.Event()

    class Link:
        rendezvous: Any

        async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
            return [payload, payload]

    link: Any = Link()
    link.rendezvous = SimpleNamespace(exchange=link.exchange)
    link.exchange = lambda *what: what if turned.wait(20) else "the loop was held"
    wanted = {"substrate": "gloo", "shape": asdict(shape)}
    config = {"exchange": wanted, "device": {"device": "cpu", "dtype": "float32"}}
    building = asyncio.create_task(exchange.build(config, 0, link))
    while not building.done():
        await asyncio.sleep(0.01)
        turned.set()
    assert await building == ("gloo", shape, "float32")
