"""The scenarios of a scope: what arrives when, so that each way in which P and D can meet is met once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kernel.inbox import Abort, EndSession, Entry, Pause, Resume, Submit
from kernel.request import Request, SamplingParams
from verify.sim.kv import continuation
from verify.sim.world import WIDE
from verify.trial.scenario import VOCAB, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.topology import World

START = 3
"""The round in which the requests of round 0 decode first, at the earliest: seen, admitted, finished, promoted."""

TELLING = ("P meets D after 1", "a prompt of three epochs", "endless arrivals")
"""Names of the members that show most of what a policy decides."""

_FED = 4
"""Tokens of a replica in one epoch."""


def family(
    world: World,
    policy: str,
    segments: int,
    rounds: int,
    *,
    capacity: int = WIDE,
    weights: tuple[int, int] = (1, 1),
    meetings: int = 4,
    arrivals: int = 0,
) -> tuple[Scenario, ...]:
    """What `turnstile check` runs for a scope; each member has a name.

    rounds: D iterations of the turns that decode. meetings: in how many of the first rounds with D a prompt arrives, a
    scenario each. arrivals: requests of the endless scenario, one a round; 0 for enough to exceed a bound of one epoch
    or of 4 segments.
    """
    base = Scenario(world, policy, segments, capacity=capacity, weights=weights, prefill_tokens=_FED)
    replicas = range(world.adp)
    decoding = [_submit(replica, replica, out=rounds + 1) for replica in replicas]
    more = world.adp

    def named(name: str, *entries: tuple[int, Entry], **changes: object) -> Scenario:
        ordered = tuple(sorted(entries, key=lambda each: each[0]))
        return replace(base, name=name, entries=ordered, **changes)  # type: ignore[arg-type]

    start = _at(0, decoding)
    prompt = _submit(more, more % world.adp, out=2)
    found = [named("P before D", *start)]
    found += [named(f"P meets D after {n}", *start, (START + n, prompt)) for n in range(min(meetings, max(1, rounds)))]
    if world.adp > 1:
        found += [
            named("idle replicas", (0, decoding[0])),
            named("P beside D of another replica", (0, decoding[0]), (START, _submit(more, world.adp - 1, out=2))),
        ]
    later = _submit(more + 1, (more + 1) % world.adp, out=2)
    long = _submit(more, more % world.adp, prompt=3 * _FED - 1, out=2)
    found += [
        named("a second epoch during the first", *start, (START, prompt), (START + 1, later)),
        named("a prompt of three epochs", *start, (START, long)),
        named("abort of a prefill", *start, (START, long), (START + 3, Abort(more))),
        named("abort of a decoding turn", *start, (START, prompt), (START + 2, Abort(0))),
        named("end of sessions", *start, (START, long), (START + 2, EndSession(more)), (START + 3, EndSession(0))),
        named("pause in P", *start, (START, long), (START + 1, Pause()), (START + 2, Resume())),
        named("a turn that stops early", *start, (START, _stopping(prompt, 3, 8))),
        named("a pool just large enough", *_at(0, _turns(world, rounds)), blocks=-(-(_FED + rounds + 2) // 4), rows=2),
        named("a rank sees arrivals late", *start, (START, prompt), late=((world.size - 1, more, 2),)),
        named("endless arrivals", *start, *_stream(more, arrivals or max(8, rounds), world.adp)),
    ]
    return tuple(found)


def _submit(number: int, replica: int, *, prompt: int = _FED - 1, out: int, session: int = -1) -> Submit:
    tokens = tuple(range(100 * number, 100 * number + prompt))
    params = SamplingParams(max_tokens=out, ignore_eos=True)
    return Submit(Request(number, session if session >= 0 else number, replica, tokens, params))


def _stopping(entry: Submit, after: int, out: int) -> Entry:
    """The same turn, longer, with a stop token that it draws as its `after`-th one."""
    request = entry.request
    drawn = list(continuation(request.prompt, replace(request.params, max_tokens=after), VOCAB))
    params = replace(request.params, max_tokens=out, stop_token_ids=(drawn[-1],))
    return Submit(replace(request, params=params))


def _at(round_: int, entries: Iterable[Entry]) -> list[tuple[int, Entry]]:
    return [(round_, entry) for entry in entries]


def _turns(world: World, rounds: int) -> list[Submit]:
    """Two sessions on each replica, of which the pool holds one at a time."""
    return [_submit(number, number % world.adp, prompt=_FED, out=rounds + 1) for number in range(2 * world.adp)]


def _stream(first: int, count: int, replicas: int) -> list[tuple[int, Entry]]:
    """A request in each round; they end with the token that their prefill draws, and so never decode."""
    return [(START + n, _submit(first + n, (first + n) % replicas, out=1)) for n in range(count)]
