"""Scenarios a step smaller than a given one, and how a scenario is explored."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kernel.errors import UsageError
from kernel.inbox import Abort, EndSession, Submit
from kernel.sched import registry
from verify.explore.counterexample import Case
from verify.sim.world import WIDE
from verify.trial.enact import run
from verify.trial.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.inbox import Entry
    from kernel.topology import World
    from verify.explore.token import Token
    from verify.trial.enact import MakePolicy
    from verify.trial.monitor import Bound


def case_of(
    scenario: Scenario, make_policy: MakePolicy = registry.create, bound: Bound | None = None, **options: Any
) -> Case[Scenario]:
    """A scenario of the real rank and a policy, to be explained.

    Arguments: see `verify.trial.enact.run`. options: of the world besides, such as depth and graphs; tokens keep them
    and the bound, so they must be plain.
    """
    extra = {name: value for name, value in {"bound": bound, **options}.items() if value is not None}

    def program(one: Scenario) -> Callable[..., Any]:
        return partial(run, one, make_policy, bound=bound, **options)

    def plain(one: Scenario) -> dict[str, Any]:
        return {**one.to_dict(), **({"with": extra} if extra else {})}

    return Case(scenario, program, str, plain, smaller)


def case_of_token(token: Token, make_policy: MakePolicy = registry.create) -> Case[Scenario]:
    """The case that a token of `case_of` is of. Raises UsageError where its scenario is none."""
    fields = dict(token.scenario)
    extra = fields.pop("with", {})
    scenario = Scenario.from_dict(fields)
    if not isinstance(extra, dict) or not all(isinstance(name, str) for name in extra):
        raise UsageError("--replay: the token does not say with what it ran; check again to get a new one")
    return case_of(scenario, make_policy, extra.pop("bound", None), **extra)


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Fewer ranks, more room on the device, fewer segments, entries, iterations, tokens, and no late ranks."""
    for changes in _changes(scenario):
        try:
            yield replace(scenario, **{"name": "", **changes})
        except UsageError:
            continue


def _changes(scenario: Scenario) -> Iterator[dict[str, Any]]:
    for world in _worlds(scenario.world):
        entries = tuple((at, _moved(entry, world.adp)) for at, entry in scenario.entries)
        late = tuple(each for each in scenario.late if each[0] < world.size)
        yield {"world": world, "entries": entries, "late": late}
    if scenario.capacity < WIDE:
        yield {"capacity": WIDE}
        if scenario.weights != (1, 1):
            yield {"weights": (1, 1), "capacity": max(1, scenario.capacity // max(scenario.weights))}
    if scenario.late:
        yield {"late": ()}
    if scenario.segments > 1:
        yield {"segments": 1}
        yield {"segments": scenario.segments - 1}
    count = len(scenario.entries)
    if count > 3:
        yield {"entries": _without(scenario, range(count // 2, count)), "late": ()}
    for number in reversed(range(count)):
        yield {"entries": _without(scenario, {number}), "late": ()}
    entries = scenario.entries
    for number, (at, entry) in enumerate(entries):
        if isinstance(entry, Submit):
            for shorter in _shorter(entry):
                yield {"entries": (*entries[:number], (at, shorter), *entries[number + 1 :])}
    for number, (at, entry) in enumerate(entries):
        earliest = entries[number - 1][0] if number else 0
        if at > earliest:
            yield {"entries": (*entries[:number], (earliest, entry), *entries[number + 1 :])}


def _worlds(world: World) -> Iterator[World]:
    """Fewer ranks, then fewer replicas."""
    for size in range(2, world.size + 1):
        for adp in range(1, min(size, world.adp) + 1):
            for ep in dict.fromkeys((1, min(size, world.ep))):
                if size % adp == 0 and size % ep == 0 and (size, -adp) < (world.size, -world.adp) and size < world.size:
                    yield replace(world, size=size, adp=adp, ep=ep)


def _moved(entry: Entry, replicas: int) -> Entry:
    if isinstance(entry, Submit):
        return Submit(replace(entry.request, replica=entry.request.replica % replicas))
    return entry


def _without(scenario: Scenario, numbers: Any) -> tuple[tuple[int, Entry], ...]:
    """The entries without some, and without those that name a request or a session that is gone."""
    left = [each for number, each in enumerate(scenario.entries) if number not in numbers]
    requests = {entry.request.id for _, entry in left if isinstance(entry, Submit)}
    sessions = {entry.request.session for _, entry in left if isinstance(entry, Submit)}
    return tuple(
        (at, entry) for at, entry in left
        if not (isinstance(entry, Abort) and entry.request not in requests)
        and not (isinstance(entry, EndSession) and entry.session not in sessions)
    )  # fmt: skip


def _shorter(entry: Submit) -> Iterator[Submit]:
    request = entry.request
    if request.params.max_tokens > 1:
        for most in dict.fromkeys((1, 2, request.params.max_tokens - 1)):
            if most < request.params.max_tokens:
                yield Submit(replace(request, params=replace(request.params, max_tokens=most)))
    if len(request.prompt) > 1:
        yield Submit(replace(request, prompt=request.prompt[:1]))
