"""The worlds that `turnstile check` judges: the one asked for, else those of the default sizes that can be had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError
from kernel.exchange.choose import CHOICES, GPUS, NEEDS, Situation, choose, world_refuses
from kernel.topology import World

if TYPE_CHECKING:
    from collections.abc import Mapping

SIZES: Final = (2, 4)
"""Ranks of the worlds that a policy is searched on by default."""
RANKS: Final = 8
"""Of the order certificate."""
MOST: Final = 64
"""Ranks that a simulated world may have; certificates may have thousands."""
PROGRAM_OF: Final = {"none": "none", **dict.fromkeys(("split", *CHOICES[2:]), "split")}
"""What `--exchange` takes: every substrate has the same program."""


@dataclass(frozen=True, slots=True)
class Worlds:
    """searched: smallest first. certified: by the order certificate. left_out: default sizes, each with why not."""

    searched: tuple[World, ...]
    certified: World
    left_out: tuple[str, ...] = ()


def chosen(given: Mapping[str, Any]) -> Worlds:
    """The worlds for the arguments given. Raises UsageError for one that there cannot be, also under rollout."""
    if "world" in given:
        if given["world"] > MOST:
            raise UsageError(f"--world {given['world']}: at most {MOST} ranks are searched")
        world = _asked(given, given["world"])
        return Worlds((world,), world)
    sizes = (1,) if given.get("exchange") == "local" else SIZES
    found: list[World] = []
    refused: dict[int, UsageError] = {}
    for size in sizes:
        try:
            found.append(_asked(given, size))
        except UsageError as error:
            refused[size] = error
    if not found:
        # Of the sizes that the widths divide, where there are such: what is wrong there is what was meant.
        raise refused[next((size for size in sizes if _divided(given, size)), sizes[-1])]
    left = [f"{size} ranks: {error}" for size, error in refused.items()]
    if found[-1].size == 1:  # which needs no certificate: it has nobody to wait for
        return Worlds(tuple(found), found[-1], tuple(left))
    try:
        certified = _asked(given, RANKS)
    except UsageError as error:
        certified = found[-1]
        left.append(f"an order certificate of {RANKS} ranks (it is of {certified.size}): {error}")
    return Worlds(tuple(found), certified, tuple(left))


def refusal(world: World, asked: str = "split") -> str | None:
    """Why no rollout of any model can have `world` with the exchange that was asked for; None if one can.

    asked: a substrate, or `split`, which some substrate must do.
    """
    # A model of as many experts as it takes, on the device that the substrate is for, with everything installed.
    now = Situation(
        world,
        "cuda" if asked in GPUS else "cpu",
        packages=frozenset(name for names in NEEDS.values() for name in names),
        experts=2 * world.size,
    )
    if asked == "split":
        return world_refuses(now)
    try:
        choose(asked, now)
    except UsageError as error:
        return str(error).removeprefix(f"--exchange {asked}: ")
    return None


def _divided(given: Mapping[str, Any], size: int) -> bool:
    return all(width > 0 and size % width == 0 for flag in ("adp", "ep") if (width := given.get(flag)) is not None)


def _asked(given: Mapping[str, Any], size: int) -> World:
    """That of so many ranks. Raises UsageError, and so for an exchange that it cannot have."""
    least = next((n for n in range(2, size + 1) if size % n == 0), 1)
    asked = given.get("exchange", "none")
    world = World(
        size, given.get("adp", least), given.get("ep", size), given.get("gather", "cross"), given.get("route", "auto"),
        given.get("cut", "layer"), PROGRAM_OF[asked],
    )  # fmt: skip
    if asked != "none" and (why := refusal(world, asked)) is not None:
        raise UsageError(f"--exchange {asked}: {why}")
    return world
