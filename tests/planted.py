"""Plant a mistake into the real kernel for a while: one function is replaced by a copy in which one line differs.

The copy is made from the source text, so that a refactoring which takes the line away shows as a failing assertion.
"""

from __future__ import annotations
import __future__

import asyncio
import dataclasses
import importlib
import inspect
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from kernel.gate import RankGate
from verify.sim.rendezvous import SimRendezvous
from verify.trial.watched import WatchedGate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True, slots=True)
class Change:
    """One line of one function. where: `module:Class.function`. line: the whole line, with its indentation. becomes:
    what stands in its place, indented like it. rank: the only rank that has it; None for all."""

    where: str
    line: str
    becomes: str
    rank: int | None = None


async def later(flights: Iterable[Any], work: Callable[..., Any], *args: Any) -> None:
    """Do it once these iterations have finished on the device."""
    for flight in flights:
        await asyncio.shield(flight.task)
    work(*args)


def rank_of(*things: Any) -> int:
    """The rank to which the first of these belongs that belongs to one."""
    for thing in things:
        if isinstance(thing, WatchedGate):
            return rank_of(thing._gate)
        if isinstance(thing, RankGate):
            return thing._rank.rank
        if isinstance(thing, SimRendezvous):
            return thing._rank
        rank = getattr(thing, "rank", None)
        if isinstance(rank, int):
            return rank
    raise AssertionError(f"none of {things} belongs to a rank")


NAMES = {"asyncio": asyncio, "replace": dataclasses.replace, "later": later, "rank_of": rank_of}
"""What planted lines may use besides the names of their module."""


@contextmanager
def planted(changes: Iterable[Change], **names: Any) -> Iterator[None]:
    """All of `changes` hold inside. names: what their lines may use besides NAMES."""
    of: dict[str, list[Change]] = {}
    for change in changes:
        of.setdefault(change.where, []).append(change)
    with ExitStack() as stack:
        for where, group in of.items():
            stack.enter_context(_replaced(where, group, {**NAMES, **names}))
        yield


@contextmanager
def _replaced(where: str, changes: list[Change], names: dict[str, Any]) -> Iterator[None]:
    module, _, path = where.partition(":")
    *classes, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in classes:
        owner = getattr(owner, each)
    original = vars(owner)[name]
    everywhere = [change for change in changes if change.rank is None]
    changed = mutated(original, everywhere, names)
    for rank in dict.fromkeys(change.rank for change in changes if change.rank is not None):
        mine = [change for change in changes if change.rank in (None, rank)]
        changed = _on_one(changed, mutated(original, mine, names), rank)
    setattr(owner, name, changed)
    try:
        yield
    finally:
        setattr(owner, name, original)


def mutated(function: Any, changes: Iterable[Change], names: dict[str, Any]) -> Any:
    """A copy of `function` with these lines changed; its file and line numbers stay what they were."""
    plain = inspect.unwrap(function)
    source, start = inspect.getsourcelines(plain)
    lines = [line.rstrip("\n") for line in source]
    new = list(lines)
    for change in changes:
        assert lines.count(change.line) == 1, f"{change.where} has {lines.count(change.line)} lines {change.line!r}"
        indent = change.line[: len(change.line) - len(change.line.lstrip())]
        new[lines.index(change.line)] = indent + change.becomes
    text = "\n" * (start - 2) + "if True:\n" + "\n".join(new)
    code = compile(text, plain.__code__.co_filename, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    made: dict[str, Any] = {}
    exec(code, {**plain.__globals__, **names}, made)
    copy = made[plain.__name__]
    copy.__qualname__ = plain.__qualname__
    return copy


def _on_one(original: Any, changed: Any, rank: int) -> Any:
    @wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (changed if rank_of(*args) == rank else original)(*args, **kwargs)

    return either
