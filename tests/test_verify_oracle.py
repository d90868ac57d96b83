"""The verdict on programs against explicit-state search over all interleavings, written apart from it.

The search moves one host, or starts or finishes one launch, at a time; it knows streams, room on the device, who meets
whom and nothing of graphs. Its answer is whether a program can, must or cannot end with something unfinished.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import programs
from verify.events import Event, Kind, Program
from verify.notation import format_program, parse_program
from verify.waitgraph import Certainty, Class, diagnose_program

if TYPE_CHECKING:
    from collections.abc import Iterator

Ident = tuple[int, int]
"""A launch: its lane and its place there."""
World = tuple[tuple[int, ...], tuple[tuple[Ident, ...], ...], frozenset[Ident], frozenset[Ident], tuple[object, ...]]
"""(next event of each lane, launches issued on each rank, started, finished, what each lane waits for)"""

DEAD, FINE = "dead", "fine"


class Search:
    """All ends of a program. Raises OverflowError beyond `limit` states."""

    def __init__(self, program: Program, exclusive: bool, limit: int = 60_000) -> None:
        self.lanes, self.exclusive, self.limit = program.lanes, exclusive, limit
        self.ranks = sorted({lane.rank for lane in program.lanes})

    def event(self, ident: Ident) -> Event:
        return self.lanes[ident[0]].events[ident[1]]

    def ends(self) -> set[str]:
        at, waits = tuple(0 for _ in self.lanes), tuple(None for _ in self.lanes)
        start: World = (at, tuple(() for _ in self.ranks), frozenset(), frozenset(), waits)
        seen, todo, ends = {start}, [start], set()
        while todo:
            world = todo.pop()
            after = list(self.moves(world))
            if not after:
                ends.add(self.verdict(world))
            for each in after:
                if each not in seen:
                    seen.add(each)
                    todo.append(each)
            if len(seen) > self.limit:
                raise OverflowError
        return ends

    def verdict(self, world: World) -> str:
        at, issued, _, finished, waits = world
        hosts = all(
            self.free(waits[n], finished)
            and (at[n] == len(lane.events) or lane.events[at[n]].kind is Kind.EXIT)
            for n, lane in enumerate(self.lanes)
        )  # fmt: skip
        return FINE if hosts and all(ident in finished for each in issued for ident in each) else DEAD

    def free(self, wait: object, finished: frozenset[Ident]) -> bool:
        """A wait is a tuple of sets of launches: one of the sets has to be finished."""
        return wait is None or any(one <= finished for one in wait)  # type: ignore[attr-defined]

    def resources(self, event: Event) -> set[str]:
        needed = {call.stream or call.default_stream for call in event.calls}
        device = self.exclusive and not all(call.operation in ("INIT", "FIN") for call in event.calls)
        return needed | ({"DEVICE"} if device else set())

    def moves(self, world: World) -> Iterator[World]:
        at, issued, started, finished, waits = world
        for n, lane in enumerate(self.lanes):
            if at[n] == len(lane.events) or not self.free(waits[n], finished):
                continue
            event, mine = lane.events[at[n]], self.ranks.index(lane.rank)
            if event.kind in (Kind.EXIT, Kind.EXTERNAL):
                continue
            issued_, wait = issued, None
            if event.kind is Kind.WAIT:
                wait = self.wait(event, issued[mine])
            else:
                issued_ = (*issued[:mine], (*issued[mine], (n, at[n])), *issued[mine + 1 :])
                wait = (frozenset({(n, at[n])}),) if event.blocking else None
            yield (
                (*at[:n], at[n] + 1, *at[n + 1 :]), issued_, started, finished, (*waits[:n], wait, *waits[n + 1 :])
            )  # fmt: skip
        partners = self.partners(issued)
        for each in issued:
            for place, ident in enumerate(each):
                mine_ = self.resources(self.event(ident))
                ahead = [one for one in each[:place] if one not in finished and mine_ & self.resources(self.event(one))]
                if ident not in started and not ahead:
                    yield at, issued, started | {ident}, finished, waits
                elif ident in started and ident not in finished and self.ready(ident, partners, started):
                    yield at, issued, started, finished | {ident}, waits

    def wait(self, event: Event, launches: tuple[Ident, ...]) -> tuple[frozenset[Ident], ...]:
        on = {
            name: frozenset(one for one in launches if name == "*" or name in self.resources(self.event(one)))
            for name in event.streams
        }
        return tuple(on.values()) if event.any_of else (frozenset().union(*on.values()),)

    def partners(self, issued: tuple[tuple[Ident, ...], ...]) -> dict[Ident, set[Ident] | None]:
        """Whom each launch meets; None where somebody is not there yet, or does not agree."""
        tables: dict[object, dict[object, tuple[Ident, Event]]] = {}
        calls: Counter[object] = Counter()
        for each in issued:
            for ident in each:
                for call in self.event(ident).calls:
                    comm = call.communicator.name if call.communicator else ""
                    if call.kind is Kind.COLLECTIVE:
                        assert call.communicator is not None
                        on: object = (comm, call.communicator.members)
                    else:
                        ends = (call.rank, call.peer) if call.kind is Kind.SEND else (call.peer, call.rank)
                        on = (comm, "from", *ends)
                    number = calls[on, call.rank, call.kind]
                    calls[on, call.rank, call.kind] += 1
                    tables.setdefault((on, number), {})[call.rank, call.kind] = (ident, call)
        found: dict[Ident, set[Ident] | None] = {ident: set() for each in issued for ident in each}
        for there in tables.values():
            calls_ = [call for _, call in there.values()]
            size = len(calls_[0].communicator.members) if calls_[0].kind is Kind.COLLECTIVE else 2  # type: ignore[union-attr]
            alike = len({call.tag for call in calls_}) == 1
            if calls_[0].kind is Kind.COLLECTIVE:
                alike = alike and len({call.operation for call in calls_}) == 1
            for ident, _ in there.values():
                known = found[ident]
                whole = len(there) == size and alike
                found[ident] = None if known is None or not whole else known | {one for one, _ in there.values()}
        return found

    def ready(self, ident: Ident, partners: dict[Ident, set[Ident] | None], started: frozenset[Ident]) -> bool:
        seen, todo = {ident}, [ident]
        while todo:
            one = todo.pop()
            others = partners[one]
            if one not in started or others is None:
                return False
            todo += others - seen
            seen |= others
        return True


def search(program: Program, exclusive: bool) -> set[str]:
    try:
        return Search(program, exclusive).ends()
    except OverflowError:
        assume(False)
        raise


def agree(program: Program) -> None:
    roomy, tight = search(program, exclusive=False), search(program, exclusive=True)
    text = format_program(program)
    for exclusive in (False, True):
        verdict = diagnose_program(program, exclusive)
        if roomy == {DEAD}:
            expected = (True, Certainty.CERTAIN)
        elif roomy == {DEAD, FINE} or (exclusive and DEAD in tight):
            expected = (True, Certainty.CONDITIONAL)
        else:
            expected = (False, Certainty.CERTAIN)
        assert (verdict.cls is not Class.NONE, verdict.certainty) == expected, (text, exclusive, roomy, tight, verdict)
        assert (verdict.cls is Class.NONE) == (not verdict.chain), text
        assert verdict.cls not in (Class.DEVICE_STALL, Class.BELOW), "a program has no cause outside of itself"
        if verdict.certainty is Certainty.CONDITIONAL and roomy == {FINE}:
            assert verdict.cls is Class.CYCLE, "that the device is small can only close a ring"


@given(programs.arbitrary())
def test_small_programs_have_the_verdict_of_explicit_search(program: Program) -> None:
    agree(program)


@settings(max_examples=20)
@given(programs.arbitrary(most=2), programs.arbitrary(most=2))
def test_threads_that_race_have_the_verdict_of_explicit_search(one: Program, other: Program) -> None:
    """Two threads a rank, sharing streams, communicators and the device."""
    first, second = (
        re.sub(r"r(\d):", rf"r\1/{name}:", format_program(each)) for name, each in (("a", one), ("b", other))
    )
    agree(parse_program(f"{first}; {second}"))


@given(st.data(), st.integers(2, 4))
def test_a_small_device_deadlocks_exactly_if_there_is_a_rainbow_cycle(data: st.DataObject, ranks: int) -> None:
    """The one-slot rule: a cycle of 'before on a device' with a different device for each edge."""
    pairs = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=2)) for _ in range(data.draw(st.integers(2, 4)))]
    orders = [data.draw(st.permutations([n for n, who in enumerate(pairs) if rank in who])) for rank in range(ranks)]
    lanes = [
        [programs.collective(sorted(pairs[n]), f"c{n}", stream=f"s{n}")[rank] for n in order]
        for rank, order in enumerate(orders)
    ]
    before = {(one, two, rank) for rank, order in enumerate(orders) for one, two in itertools.combinations(order, 2)}
    rainbow = any(
        all((one, two, device) in before for one, two, device in zip(ring, (*ring[1:], ring[0]), devices, strict=True))
        for size in range(2, min(ranks, len(pairs)) + 1)
        for ring in itertools.permutations(range(len(pairs)), size)
        for devices in itertools.permutations(range(ranks), size)
    )
    program = programs.program(lanes)
    assert diagnose_program(program).cls is Class.NONE
    verdict = diagnose_program(program, exclusive_device=True)
    assert (verdict.cls, verdict.certainty) == (
        (Class.CYCLE, Certainty.CONDITIONAL) if rainbow else (Class.NONE, Certainty.CERTAIN)
    )


@pytest.mark.parametrize(
    ("text", "roomy", "tight"),
    [
        ("r0: s0:a.AR{0,1} s1:b.AR{0,1}; r1: s1:b.AR{0,1} s0:a.AR{0,1}", {FINE}, {DEAD}),
        ("r0: s:a.AR{0,1} s:b.AR{0,1}; r1: s:b.AR{0,1} s:a.AR{0,1}", {DEAD}, {DEAD}),
        ("r0: !AR{0,1}; r1: !AR{0,1}", {FINE}, {FINE}),
        ("r0/x: !s0:a.AR{0,1}; r0/y: !s1:b.AR{0,1}; r1: !s0:a.AR{0,1} !s1:b.AR{0,1}", {FINE}, {FINE, DEAD}),
        ("r0/x: !a.AR[1]{0,1}; r0/y: !a.AR[2]{0,1}; r1: !a.AR[1]{0,1} !a.AR[2]{0,1}", {FINE, DEAD}, {FINE, DEAD}),
    ],
)
def test_the_search_itself(text: str, roomy: set[str], tight: set[str]) -> None:
    program = parse_program(text)
    assert (search(program, exclusive=False), search(program, exclusive=True)) == (roomy, tight)
    agree(program)
