"""Which worlds `turnstile check` judges: none that a rollout refuses, and none in silence that was not asked for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kernel.errors import UsageError
from kernel.exchange.choose import GPUS
from kernel.topology import World
from rollout import cli
from rollout.device import DeviceOptions
from rollout.ranks import exchange
from turnstile import explore
from verify.check.worlds import chosen

DIVIDED = [
    (size, adp, ep)
    for size in (1, 2, 3, 4, 6, 8)
    for adp in range(1, size + 1)
    for ep in range(1, size + 1)
    if size % adp == size % ep == 0
]


def rollout_refuses(asked: str, world: World) -> bool:
    """With a model that any number of ranks may share, and everything installed."""
    config = SimpleNamespace(experts=2 * world.size, hidden_size=2560, experts_per_token=2)
    device = "cuda" if asked in GPUS else "cpu"
    options = DeviceOptions(device, dtype="bfloat16", exchange=asked)
    try:
        found, _ = exchange.resolve(options, config, world, prefill_tokens=512, rows=24)
    except UsageError:
        return True
    assert found.splits
    return False


@pytest.mark.parametrize("asked", ["local", "shm", *GPUS])
def test_it_refuses_what_rollout_refuses(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_installed", lambda _: True)
    wanted = {shape: rollout_refuses(asked, World(*shape)) for shape in DIVIDED}
    for (size, adp, ep), refused in wanted.items():
        arguments = {"world": size, "adp": adp, "ep": ep, "exchange": asked}
        if refused:
            with pytest.raises(UsageError, match=rf"^--exchange {asked}: "):
                chosen(arguments)
            continue
        worlds = chosen(arguments)
        assert worlds.searched == (World(size, adp, ep, exchange="split"),)
        assert worlds.searched[0].splits
        assert not worlds.left_out
    assert set(wanted.values()) == {True, False}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("split --adp 1 --world 2", "with --adp 1 every rank has all rows already: choose --adp above 1"),
        ("split --adp 1", "with --adp 1 every rank has all rows already: choose --adp above 1"),
        ("split --ep 1 --world 2", "choose --ep 2, not 1"),
        ("split --ep 2 --world 4", "choose --ep 4, not 2"),
        ("local --world 2", "it is for one rank"),
        ("deepep --world 3", "2, 4 or 8 ranks, not 3"),
        ("nccl --world 1", "choose local, or none"),
    ],
)
def test_a_world_that_no_rollout_has_is_refused_in_one_line(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["check", "fine", "--exchange", *arguments.split()])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"turnstile: --exchange {arguments.split()[0]}: ")
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "searched", "certified", "left"),
    [
        ({}, (2, 4), 8, 0),
        ({"exchange": "split"}, (2, 4), 8, 0),
        ({"exchange": "split", "ep": 2}, (2,), 2, 2),
        ({"exchange": "split", "adp": 4}, (4,), 8, 1),
        ({"exchange": "local"}, (1,), 1, 0),
        ({"adp": 4}, (4,), 8, 1),
        ({"ep": 1}, (2, 4), 8, 0),
    ],
    ids=str,
)
def test_worlds_of_its_own_choice_are_those_that_there_can_be(
    arguments: dict[str, Any], searched: tuple[int, ...], certified: int, left: int
) -> None:
    worlds = chosen(arguments)
    assert tuple(world.size for world in worlds.searched) == searched
    assert (worlds.certified.size, len(worlds.left_out)) == (certified, left)
    for world in (*worlds.searched, worlds.certified):
        assert world.splits == ("exchange" in arguments)


def test_it_says_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["check", "normal", "--exchange", "split", "--ep", "2", "--segments", "1", "--rounds", "1"]
    assert cli.main(asked) == 0
    out = capsys.readouterr().out
    assert "left out         4 ranks: --exchange split: experts must be spread over all ranks" in out
    assert "left out         an order certificate of 8 ranks (it is of 2): " in out
    assert "normal on g2 adp2 ep2 cross route=paper exchange, 1 segment" in out
    assert cli.main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [each.partition(":")[0] for each in answer["left_out"]] == [
        "4 ranks",
        "an order certificate of 8 ranks (it is of 2)",
    ]
    assert answer["certificate"]["ranks"] == 2


def test_a_test_explores_no_world_without_the_exchange_it_names() -> None:
    with pytest.raises(UsageError, match=r"exchange='split': with --adp 1 every rank has all rows already"):
        explore("normal", world=World(2, 1, 2, exchange="split"))
