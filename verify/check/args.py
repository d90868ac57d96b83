"""The arguments of `turnstile check`, and what they select. Loads nothing but the standard library and the kernel."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from kernel.topology import CUTS, GATHERS, ROUTES, World
from verify.check.worlds import PROGRAM_OF, RANKS, SIZES, chosen
from verify.command import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

SEGMENTS: Final = (1, 2, 3)
ROUNDS: Final = 3
BUDGET: Final = 400
LAYERS: Final = 40
"""Of the order certificate: layers of the model, one D iteration more."""
WIDE: Final = 1 << 30
"""Room for every kernel: `verify.sim.world.WIDE`, without loading it."""
LARGEST: Final = {"segments": 64, "rounds": 64, "depth": 65_536, "budget": 1_000_000, "layers": 512, "bound": 65_536}
"""Of the other flags: beyond it a check would take hours, or mean nothing."""
WORDS: Final = ("span", "epoch", "backlog")
EXIT_CODES: Final = (
    "Exit codes: 0 proved, 1 refuted, 2 unusable input, 3 inconclusive, 130 interrupted. With 2 and 130 there is one"
    " line on standard error and nothing on standard output, also with --json."
)
MEANT: Final = {"program": {"capacity"}, "run": {"capacity"}}
"""Flags that mean something for what is no policy."""
WHAT: Final = {"program": "a file of programs", "run": "a recorded run"}


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked, checked.

    target: a policy, a file or a directory; "" with replay. worlds: to search, smallest first; left_out: what is judged
    by default and cannot be with these arguments, each with why. segments: numbers of
    safe boundaries, each a scope. capacity: of a device, None for room for every kernel. layers: of the order
    certificate, None for no certificate; certified: its world.
    """

    name: str
    target: str
    worlds: tuple[World, ...]
    left_out: tuple[str, ...]
    segments: tuple[int, ...]
    rounds: int
    capacity: int | None
    depth: int | None
    bound: int | str | None
    budget: int
    layers: int | None
    certified: World
    replay: str
    json: bool

    @property
    def kind(self) -> str:
        """What is checked: `replay`, `policy`, `program` or `run`."""
        if self.replay:
            return "replay"
        path = Path(self.target)
        if path.is_dir():
            return "run"
        # A policy from a file may have a name that ends in anything; a program is a file, or was meant as one.
        return "program" if (path.is_file() and path.suffix != ".py") or path.suffix == ".txt" else "policy"


def parser(name: str) -> Parser:
    """The parser of the command."""
    made = Parser(
        prog=f"turnstile {name}",
        description="Prove a scheduling policy, a program of collectives or a recorded run; or show how it hangs.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog=EXIT_CODES,
    )
    made.add_argument(
        "target",
        nargs="?",
        metavar="POLICY|PROGRAM.txt|RUN-DIRECTORY",
        help="a policy's name, `name:key=value,...` or path/file.py:Class; a text file of programs; what a run left",
    )
    ranks = made.add_argument_group("ranks")
    ranks.add_argument(
        "--world", type=int, metavar="N", help=f"number of ranks (default: {' and '.join(map(str, SIZES))})"
    )
    ranks.add_argument("--adp", type=int, metavar="N", help="attention replicas (default: 2 where it divides)")
    ranks.add_argument("--ep", type=int, metavar="N", help="ranks that hold different experts (default: all)")
    ranks.add_argument("--gather", choices=GATHERS, help="how decode collects all replicas' rows (default: cross)")
    ranks.add_argument(
        "--route", choices=ROUTES, help="prefill collectives on decode's stream (default: auto, what the policy wants)"
    )
    ranks.add_argument(
        "--cut", choices=CUTS, help="where prefill stops: between layers, or inside them too (default: layer)"
    )
    ranks.add_argument(
        "--exchange",
        choices=tuple(PROGRAM_OF),
        help="rows reach experts by an expert exchange, P's dispatch split behind its notification (default: none)",
    )
    scope = made.add_argument_group("scope of the search")
    scope.add_argument("--segments", metavar="N|N-M", help="safe boundaries of an epoch (default: 1-3)")
    scope.add_argument("--rounds", type=int, metavar="N", help=f"decode iterations of a turn (default: {ROUNDS})")
    scope.add_argument("--capacity", type=int, metavar="N", help="collectives a device holds at once (default: all)")
    scope.add_argument("--depth", type=int, metavar="N", help="launches that fit into a device's queue (default: all)")
    scope.add_argument(
        "--bound", metavar="span|epoch|backlog|N", help="judge this wait of decode instead of what the policy claims"
    )
    scope.add_argument("--budget", type=int, metavar="N", help=f"executions of a scenario (default: {BUDGET})")
    scope.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help=f"of the order certificate (default: {LAYERS}, of {RANKS} ranks; with --world only where it is given)",
    )
    made.add_argument("--replay", metavar="TOKEN", help="run the schedule of a counterexample again")
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return made


def parse(name: str, arguments: Sequence[str]) -> Options:
    """The options of the command. Raises UsageError (and SystemExit for --help)."""
    made = parser(name)
    given = made.given(arguments)
    target, replay = given.get("target", ""), given.get("replay")
    if replay is None and not target:
        what = "name a policy, a file or a run, or give --replay"
        raise UsageError(f"nothing to check: {what}; see `{made.prog} --help`")
    if replay is not None and (target or given.keys() - {"replay", "json"}):
        extra = target or f"--{min(given.keys() - {'replay', 'json'})}"
        raise UsageError(f"--replay takes everything from its token: leave out {extra}")
    if replay == "":
        raise UsageError("--replay: the token is empty; it is what stands behind --replay in a counterexample")
    for flag in ("rounds", "capacity", "depth", "budget", "layers"):
        if given.get(flag) is not None and given[flag] < 1:
            raise UsageError(f"--{flag} {given[flag]}: must be at least 1")
    for flag in LARGEST.keys() & given.keys() - {"segments", "bound"}:
        _fits(flag, given[flag])
    if given.get("capacity", 1) >= WIDE:
        raise UsageError(f"--capacity {given['capacity']}: less than {WIDE}; leave it out for room for every kernel")
    worlds = chosen(given)
    only = "world" in given or worlds.searched[-1].size == 1
    options = Options(
        name=name,
        target=target,
        worlds=worlds.searched,
        left_out=worlds.left_out,
        segments=_segments(given["segments"]) if "segments" in given else SEGMENTS,
        rounds=given.get("rounds", ROUNDS),
        capacity=given.get("capacity"),
        depth=given.get("depth"),
        bound=_bound(given["bound"]) if "bound" in given else None,
        budget=given.get("budget", BUDGET),
        layers=given.get("layers", None if only else LAYERS),
        certified=worlds.certified,
        replay=replay or "",
        json=given.get("json", False),
    )
    extra = given.keys() - {"target", "replay", "json"} - MEANT.get(options.kind, given.keys())
    if extra:
        raise UsageError(f"--{min(extra)} means nothing for {WHAT[options.kind]} ({target}): leave it out")
    return options


def _fits(flag: str, value: int) -> None:
    if value > LARGEST[flag]:
        raise UsageError(f"--{flag} {value}: at most {LARGEST[flag]}")


def _segments(text: str) -> tuple[int, ...]:
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text.strip())
    if found is None:
        raise UsageError(f"--segments {text}: a number such as 2, or a range such as 1-3")
    first, last = (int(each[-6:]) if len(each.lstrip("0")) < 7 else 10**6 for each in (found[1], found[2] or found[1]))
    if last > LARGEST["segments"]:
        raise UsageError(f"--segments {text[:40]}: at most {LARGEST['segments']}")
    if not 1 <= first <= last:
        raise UsageError(f"--segments {text}: from 1 on, the smaller number first")
    return tuple(range(first, last + 1))


def _bound(text: str) -> int | str:
    if text in WORDS:
        return text
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise UsageError(f"--bound {text[:40]}: {', '.join(WORDS)}, or a number of segments from 1 on, of nine digits")
    _fits("bound", int(text))
    return int(text)
