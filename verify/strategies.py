"""Hypothesis strategies for worlds, scenarios, schedules, devices, lateness, faults and policies. Needs hypothesis.

Everything shrinks towards the plain case: one small world, one short turn, no disturbance, nobody late, room for every
kernel, the oldest actor first. What is drawn prints as code that makes it again. Arguments are checked when a strategy
is made, not when it is drawn from.

    @given(scenarios(policies=just("fine")), schedules())
    def test_fine(scenario, schedule):
        assert attempt(scenario, choose=schedule.choose()).clean
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.inbox import Abort, EndSession, Entry, Flush, Pause, Resume, Submit
from kernel.request import Request, SamplingParams
from kernel.topology import GATHERS, ROUTES, World
from verify.faults import Fault, Lateness, Picks
from verify.mistakes import MISTAKES, Mistake
from verify.sim.kv import continuation
from verify.sim.world import WIDE
from verify.trial.scenario import VOCAB, Scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import DrawFn, SearchStrategy

SHIPPED = ("fine", "lean", "adaptive", "global_enqueue", "global_complete", "normal")
"""Policies that claim to be free of deadlocks, the simplest first."""


def worlds(
    min_size: int = 1, max_size: int = 4, *, gathers: Sequence[str] = ("cross",), routes: Sequence[str] = ("auto",)
) -> SearchStrategy[World]:
    """Worlds of so many ranks, with every width that divides them. Shrinks to few ranks, one replica, no experts apart.

    Raises UsageError for sizes below 1 or out of order, and unknown gathers and routes.
    """
    _ordered("worlds", 1, min_size, max_size)
    for known, given in ((GATHERS, gathers), (ROUTES, routes)):
        if not given or not set(given) <= set(known):
            raise UsageError(f"worlds: {tuple(given)}: choose from {', '.join(known)}")

    def of(size: int) -> SearchStrategy[World]:
        widths = st.sampled_from([width for width in range(1, size + 1) if size % width == 0])
        return st.builds(World, st.just(size), widths, widths, st.sampled_from(gathers), st.sampled_from(routes))

    return st.integers(min_size, max_size).flatmap(of)


def policies(max_span: int = 3) -> SearchStrategy[str]:
    """Specs of the shipped policies that claim to be free of deadlocks; `fine` and `lean` with spans up to this."""
    _ordered("policies", 1, max_span)
    spans = st.integers(1, max_span)
    spec = st.builds("{}:span={}".format, st.sampled_from(SHIPPED[:2]), spans) if max_span > 1 else st.nothing()
    return st.one_of(st.sampled_from(SHIPPED), spec)


def mistakes() -> SearchStrategy[Mistake]:
    """Policies with one planted mistake, see `verify.mistakes`."""
    return st.sampled_from(MISTAKES)


def params(max_output: int = 6) -> SearchStrategy[SamplingParams]:
    """Sampling parameters of a turn of up to `max_output` tokens; greedy where shrunk."""
    _ordered("params", 1, max_output)
    return st.builds(
        SamplingParams,
        max_tokens=st.integers(1, max_output),
        temperature=st.sampled_from((0.0, 1.0)),
        seed=st.integers(0, 3),
        ignore_eos=st.just(True),
    )


@st.composite
def _scenarios(
    draw: DrawFn,
    policies: SearchStrategy[str],
    worlds: SearchStrategy[World],
    segments: int,
    requests: int,
    prompt: int,
    output: int,
    rounds: int,
    disturbed: bool,
    late: bool,
) -> Scenario:
    world, policy = draw(worlds), draw(policies)
    submits = draw(_turns(world, requests, prompt, output, rounds))
    entries: list[tuple[int, Entry]] = list(submits)
    if disturbed:
        entries += draw(_disturbances([entry.request for _, entry in submits], rounds))
    entries.sort(key=lambda each: each[0])
    size = 4
    largest = max(-(-entry.request.longest // size) for _, entry in submits)
    lateness: tuple[tuple[int, int, int], ...] = ()
    if late:
        one = st.tuples(st.integers(0, world.size - 1), st.integers(0, len(entries) - 1), st.integers(0, 3))
        lateness = tuple(draw(st.lists(one, max_size=2)))
    return Scenario(
        world,
        policy,
        draw(st.integers(1, segments)),
        tuple(entries),
        lateness,
        prefill_tokens=draw(st.integers(1, 8)),
        rows=draw(st.integers(1, 4)),
        blocks=largest + draw(st.integers(0, 12)),
        block_size=size,
    )


@st.composite
def _turns(draw: DrawFn, world: World, most: int, prompt: int, output: int, rounds: int) -> list[tuple[int, Submit]]:
    """Turns, each of a session of its own, or of an earlier one, whose whole context its prompt goes on from."""
    made: list[tuple[int, Submit]] = []
    for number in range(draw(st.integers(1, most))):
        earlier = draw(st.sampled_from((None, *(entry.request for _, entry in made))))
        sampling = draw(params(output))
        fresh = tuple(range(100 * number, 100 * number + draw(st.integers(1, prompt))))
        if earlier is None:
            session, replica, whole = number, draw(st.integers(0, world.adp - 1)), fresh
        else:
            drawn = continuation(earlier.prompt, earlier.params, VOCAB)
            session, replica, whole = earlier.session, earlier.replica, (*earlier.prompt, *drawn, *fresh)
        if draw(st.booleans()):
            tokens = list(continuation(whole, sampling, VOCAB))
            sampling = replace(sampling, stop_token_ids=(draw(st.sampled_from(tokens)),))
        made.append((draw(st.integers(0, rounds)), Submit(Request(number, session, replica, whole, sampling))))
    return made


@st.composite
def _disturbances(draw: DrawFn, requests: list[Request], rounds: int) -> list[tuple[int, Entry]]:
    """Aborts, ends of sessions and flushes; a pause that ends."""
    one: SearchStrategy[Entry] = st.one_of(
        st.builds(Abort, st.sampled_from([request.id for request in requests])),
        st.builds(EndSession, st.sampled_from([request.session for request in requests])),
        st.builds(Flush),
    )
    made: list[tuple[int, Entry]] = draw(st.lists(st.tuples(st.integers(0, 2 * rounds), one), max_size=3))
    if draw(st.booleans()):
        start = draw(st.integers(0, 2 * rounds))
        made += [(start, Pause()), (start + draw(st.integers(0, 4)), Resume())]
    return made


def scenarios(
    *,
    policies: SearchStrategy[str] | None = None,
    worlds: SearchStrategy[World] | None = None,
    max_segments: int = 3,
    max_requests: int = 4,
    max_prompt: int = 12,
    max_output: int = 6,
    max_round: int = 8,
    disturbed: bool = True,
    late: bool = True,
) -> SearchStrategy[Scenario]:
    """What happens on a simulated world, see `verify.trial.scenario.Scenario`: sizes, and what arrives in which round.

    policies, worlds: to draw from. max_prompt: new tokens of a turn, which may take several epochs. max_round: in which
    a turn arrives at the latest. disturbed: with aborts, ends of sessions, flushes and a pause. late: with ranks that
    see some arrivals later. Every turn fits its KV pool, so every one must end. Raises UsageError for sizes below 1.
    """
    for name, value in (
        ("max_segments", max_segments), ("max_requests", max_requests), ("max_prompt", max_prompt),
        ("max_output", max_output),
    ):  # fmt: skip
        _ordered(f"scenarios: {name}", 1, value)
    _ordered("scenarios: max_round", 0, max_round)
    found: SearchStrategy[Scenario] = _scenarios(
        policies if policies is not None else _default_policies(),
        worlds if worlds is not None else _default_worlds(),
        max_segments, max_requests, max_prompt, max_output, max_round, disturbed, late,
    )  # fmt: skip
    return found


def devices(max_weight: int = 2, *, roomy: bool = True) -> SearchStrategy[dict[str, Any]]:
    """`capacity` and `weights` of a Scenario, for `dataclasses.replace`. Shrinks to room for everything.

    roomy: one kernel of D and one of P fit together, which is what a policy is proved for; else only the larger one
    must fit.
    """
    _ordered("devices", 1, max_weight)

    def of(weights: tuple[int, int]) -> SearchStrategy[dict[str, Any]]:
        least = sum(weights) if roomy else max(weights)
        capacity = st.one_of(st.just(WIDE), st.integers(least, least + 2))
        return st.fixed_dictionaries({"capacity": capacity, "weights": st.just(weights)})

    return st.tuples(st.integers(1, max_weight), st.integers(1, max_weight)).flatmap(of)


def launch_queues(max_depth: int = 4) -> SearchStrategy[dict[str, Any]]:
    """`depth` and `graphs` of a `verify.sim.world.SimWorld`. Shrinks to queues without an end."""
    _ordered("launch_queues", 1, max_depth)
    depth = st.one_of(st.none(), st.integers(1, max_depth))
    return st.fixed_dictionaries({"depth": depth, "graphs": st.booleans()})


def schedules(max_picks: int = 6, within: int = 400) -> SearchStrategy[Picks]:
    """Orders of steps, as the few choices among the first `within` that are not the oldest actor. Shrinks to none."""
    _ordered("schedules", 0, max_picks)
    _ordered("schedules", 1, within)
    picks = st.dictionaries(st.integers(0, within), st.integers(1, 7), max_size=max_picks)
    return picks.map(lambda drawn: Picks(tuple(sorted(drawn.items()))))


def skews(size: int, most_ns: int = 1_000_000, exchanges: int = 40) -> SearchStrategy[Lateness]:
    """How late each of `size` ranks comes to which of the first `exchanges`. Shrinks to nobody late."""
    for value in (size, most_ns, exchanges):
        _ordered("skews", 1, value)
    at = st.tuples(st.integers(0, size - 1), st.integers(0, exchanges - 1))
    drawn = st.dictionaries(at, st.integers(1, most_ns), max_size=6)
    return drawn.map(lambda found: Lateness(tuple((*key, late) for key, late in sorted(found.items()))))


def faults(size: int, exchanges: int = 12) -> SearchStrategy[Fault]:
    """One of `size` ranks dies, or stands still, before one of its first `exchanges`."""
    for value in (size, exchanges):
        _ordered("faults", 1, value)
    return st.builds(
        Fault, st.sampled_from(("dies", "stands")), st.integers(0, size - 1), st.integers(0, exchanges - 1)
    )


def _default_policies() -> SearchStrategy[str]:
    return policies()


def _default_worlds() -> SearchStrategy[World]:
    return worlds(min_size=1, max_size=4)


def _ordered(what: str, *sizes: int) -> None:
    if any(not isinstance(size, int) for size in sizes) or list(sizes) != sorted(sizes):
        raise UsageError(f"{what}: {' <= '.join(map(str, sizes))} does not hold")
