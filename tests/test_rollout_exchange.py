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


def resolved(asked: str, dtype: str = "bfloat16", **sizes: int) -> tuple[World, Any]:
    config = SimpleNamespace(**({"experts": 64, "hidden_size": 2560, "experts_per_token": 8} | sizes))
    options = DeviceOptions("cuda", dtype=dtype, exchange=asked)
    return exchange.resolve(options, config, WORLD, prefill_tokens=512, rows=32)


def test_by_default_there_is_none_and_the_reason_says_what_could_be_had() -> None:
    world, choice = resolved("auto")
    assert (world.splits, choice.substrate) == (False, "none")
    assert choice.reason.startswith("collectives; --exchange deepep could be had")
    _, choice = resolved("auto", hidden_size=64)
    assert "--exchange symm could be had" in choice.reason
    assert "hidden size 64" in choice.reason


def test_what_is_asked_for_changes_the_program() -> None:
    world, choice = resolved("deepep")
    assert (world.splits, choice.substrate) == (True, "deepep")
    assert world.boundaries(4) == 5


@pytest.mark.parametrize(
    ("dtype", "sizes", "said"),
    [("float32", {}, "numbers of 4 bytes"), ("bfloat16", {"hidden_size": 96}, "hidden size 96"),
     ("bfloat16", {"experts_per_token": 16}, "top-16"), ("bfloat16", {"experts": 256}, "SMs of 132")],
)  # fmt: skip
def test_what_deep_ep_cannot_do_is_refused_before_ranks_start(dtype: str, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=rf"--exchange deepep: .*{said}") as caught:
        resolved("deepep", dtype, **sizes)
    assert "\n" not in str(caught.value)


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
