"""The order certificate: whether all device queues allow one common order of collectives, and that order.

Nodes are collective instances, edges are 'before' in a device queue, an event edge, or a wait of the host. Acyclic
means that a common order exists: with room for what can be resident at once (`verify.order.residency`) every schedule
completes, since some unfinished instance is always at the head of all its queues. The topological index is the
certificate, which `verify.certificate` checks by itself. A ring of 'before' deadlocks every schedule.

    certify(from_program(World(8, 2, 8), layers=40))
    certify(from_record("runs/..."))
    certify(from_notation("r0: s:a.AR{0,1} s:b.AR{0,1}; r1: s:b.AR{0,1} s:a.AR{0,1}"))

After Kahn (1962) for the order; Kahn (1974), Siegel and Avrunin for why one order speaks for all schedules where each
rank has one host thread; the form of a counterexample, a short ring with the reason of each hop, is that of Elle.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from verify.blame import Certainty, Class, Verdict, minority, severity
from verify.order.cycle import cycle_verdict, shortest_ring
from verify.order.notation import from_notation
from verify.order.program import from_program, turnstile_steps
from verify.order.queues import Edge, End, Orders, absentees, sort
from verify.order.record import from_record
from verify.order.residency import Residency, residency
from verify.words import FIXES, ranks

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["Certificate", "Orders", "Result", "certify", "from_notation", "from_program", "from_record",
           "turnstile_steps"]  # fmt: skip

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Certificate:
    """A common order of all instances.

    orders: the queues that it is for. index: of each instance; it increases along every queue and every edge. scope:
    what it says, in words.
    """

    orders: Orders
    index: array[int]
    scope: str

    def order(self) -> list[int]:
        """The instances in the common order."""
        return sorted(range(len(self.index)), key=self.index.__getitem__)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it, with the queues that it is for, as JSON lines for `python -m verify.certificate`.

        {"certificate": 1, "scope": ..., "communicators": [[name, [member, ...]], ...], "open": [instance, ...],
         "absent": ..., "roles": true}
        {"communicator": 3, "instances": [n, ...], "sequence": [...], "index": [...]}      for each communicator
        {"rank": 0, "queue": "D", "calls": [n, ...]}                                       for each queue
        {"rank": 0, "before": n, "after": m, "reason": "host wait for D 3"}                for each edge

        Raises UsageError when the file cannot be written.
        """
        orders = self.orders
        head = {
            "certificate": FORMAT,
            "scope": self.scope,
            "communicators": [[str(each), list(each.members)] for each in orders.communicators],
            "open": sorted(orders.open),
            "roles": orders.roles,
        }
        mine: dict[int, list[int]] = {}
        for instance, comm in enumerate(orders.comm):
            mine.setdefault(comm, []).append(instance)
        try:
            with Path(path).open("w", encoding="utf-8") as out:
                out.write(json.dumps(head) + "\n")
                for comm, instances in sorted(mine.items()):
                    line = {
                        "communicator": comm,
                        "instances": instances,
                        "sequence": [orders.seq[each] for each in instances],
                        "index": [self.index[each] for each in instances],
                    }
                    out.write(json.dumps(line) + "\n")
                for queue in orders.queues:
                    line = {"rank": queue.rank, "queue": queue.name, "calls": queue.calls.tolist()}
                    out.write(json.dumps(line) + "\n")
                for edge in orders.edges:
                    told = {"rank": edge.rank, "before": edge.before, "after": edge.after, "reason": edge.reason}
                    out.write(json.dumps(told) + "\n")
        except OSError as error:
            raise UsageError(f"certificate {path}: {error.strerror}: choose another file") from None


@dataclass(frozen=True, eq=False)
class Result:
    """findings: worst first, empty where the orders are proved. certificate: the common order, where there is one.

    residency: what room it needs, None where there is no common order. scope: what was judged, in words.
    """

    findings: tuple[Verdict, ...]
    certificate: Certificate | None
    residency: Residency | None
    scope: str

    @property
    def verdict(self) -> Verdict:
        """The worst finding, or none."""
        return self.findings[0] if self.findings else Verdict(Class.NONE)

    @property
    def proved(self) -> bool:
        """A common order exists, it has no finding, and no schedule deadlocks with the room that was asked about."""
        return not self.findings and self.certificate is not None


def certify(
    orders: Orders,
    capacity: int | Mapping[int, int] | None = None,
    *,
    issue_order: bool = False,
    budget: int = 400_000,
) -> Result:
    """Judge the order of all queues, and the room that it needs.

    capacity: of every device, or by rank; None judges a device with room and only says how much that is. issue_order:
    judge instead devices that run one kernel at a time in the order in which the host issued them; a finding that
    needs this, or too little capacity, is `conditional`. budget: steps of the exact searches for residency; where they
    do not suffice the finding is `undecided`. Linear in the calls, apart from those searches.
    """
    absent = absentees(orders)
    order, left = sort(orders)
    findings = [*orders.found, *_mismatches(orders), *_roles(orders)]
    certificate, room = None, None
    if len(order) == len(orders.comm):
        certificate = Certificate(orders, _index(order), orders.scope)
    else:
        findings += _cycle(orders, left)
    if certificate is not None and issue_order:
        devices = orders.device_queues()
        done, left = sort(orders, devices)
        if len(done) < len(order):
            hops, whole = shortest_ring(orders, left, devices)
            found = cycle_verdict(orders, hops, whole)
            findings.append(found.only_if("the device holds one communication kernel at a time, in order of issue"))
    elif certificate is not None:
        room = residency(orders, capacity, budget=budget)
        findings += [room.verdict] if room.verdict.cls is not Class.NONE else []
    late = _with_ends(orders, absent)
    if certificate is not None and absent and len(sort(late)[0]) < len(order):
        findings += _cycle(late, sort(late)[1])
    # A member that left by itself and is needed first explains more than what its peers do then.
    weighed = [(2 * severity(found), found) for found in findings]
    weighed += _missing(late, absent)
    if orders.racing:
        race = f"the threads of {ranks(orders.racing)} race for the order of their calls"
        weighed = [(rank, each.only_if(race)) for rank, each in weighed]
        weighed = weighed or [(0, Verdict(Class.NONE).undecided(race))]
        certificate = None
    sure = sorted(weighed, key=lambda each: (each[1].certainty is not Certainty.CERTAIN, each[0]))
    findings = [found for _, found in sure]
    return Result(tuple(findings), certificate, room, orders.scope)


def _index(order: list[int]) -> array[int]:
    index = array("i", bytes(4 * len(order)))
    for number, instance in enumerate(order):
        index[instance] = number
    return index


def _cycle(orders: Orders, left: list[int]) -> list[Verdict]:
    """A ring that holds whatever soft edges do; or one that needs them, undecided."""
    if any(edge.soft for edge in orders.edges):
        hard, remain = sort(orders, soft=False)
        if len(hard) == len(orders.comm):
            hops, whole = shortest_ring(orders, left)
            found = cycle_verdict(orders, hops, whole)
            return [found.undecided("a host waits for any of several streams, and which one ends first is open")]
        left = remain
    hops, whole = shortest_ring(orders, left, soft=False)
    return [cycle_verdict(orders, hops, whole)]


def _mismatches(orders: Orders) -> list[Verdict]:
    """Instances whose members call different things: the first of them."""
    if not orders.odd:
        return []
    first = min(each.instance for each in orders.odd)
    labels = {each.rank: each.label for each in orders.odd if each.instance == first}
    sides: dict[str, list[int]] = {}
    for rank in orders.ranks_of(first):
        sides.setdefault(labels.get(rank, orders.label[first]), []).append(rank)
    parts = [f"{side or 'no tag'} on {ranks(who)}" for side, who in sides.items()]
    odd = minority(sides.values())
    where = f"Call {orders.seq[first]} on {orders.communicators[orders.comm[first]]}"
    say = f"{where} pairs calls that differ: {', '.join(parts)}."
    say += f" The odd one is {ranks(odd)}." if odd else " No majority tells which side is wrong."
    return [Verdict(Class.MISMATCH, ranks=odd, chain=tuple(parts), say=say, fix=FIXES["mismatch"])]


def _roles(orders: Orders) -> list[Verdict]:
    """An instance that does not stand in the same streams on all of its members: a route taken on some ranks only."""
    if not orders.roles:
        return []
    for number, places in enumerate(orders.shapes):
        streams: dict[int, set[str]] = {}
        for place in places:
            streams.setdefault(orders.queues[place].rank, set()).add(orders.queues[place].name)
        sides: dict[str, list[int]] = {}
        for rank, names in streams.items():
            sides.setdefault(" and ".join(sorted(names)), []).append(rank)
        if len(sides) > 1:
            odd = minority(sides.values())
            parts = tuple(f"in the queue of {side} on {ranks(who)}" for side, who in sides.items())
            say = f"{orders.name(orders.shape.index(number))} stands {', '.join(parts)}: its stream must be the same"
            fix = "Route a collective on all of its members or on none: decide it in the shared plan."
            return [Verdict(Class.RULE, ranks=odd, chain=parts, say=f"{say} on all members.", fix=fix)]
    return []


def _with_ends(orders: Orders, absent: Mapping[int, tuple[int, ...]]) -> Orders:
    """The same, where a call that a member never makes would come after everything that its host waits for."""
    edges = [
        Edge(before, instance, rank, "its host waits, and does not call it before")
        for instance, missing in absent.items()
        for rank in missing
        for before in dict.fromkeys(orders.waits.get(rank, ()))
    ]
    return replace(orders, edges=[*orders.edges, *edges]) if edges else orders


def _missing(orders: Orders, absent: Mapping[int, tuple[int, ...]]) -> list[tuple[int, Verdict]]:
    """Calls that some members never make, by how those ranks end; with each finding's place in the order of blame."""
    if not absent:
        return [
            (2 * severity(Verdict(end.cls)), Verdict(end.cls, ranks=(rank,), say=f"Rank {rank}, {end.text}."))
            for rank, end in sorted(orders.ends.items())
            if end.cls is Class.OUTSIDE
        ]
    blocked = {instance: len(missing) for instance, missing in absent.items()}
    for each in orders.odd:
        blocked[each.instance] = blocked.get(each.instance, 0) + 1
    _, left = sort(orders, blocked=blocked)
    # Those that nothing else keeps: the others may only lack what is stuck behind them.
    active = [instance for instance in absent if left[instance] == blocked[instance]]
    by_end: dict[tuple[Class, str], dict[int, int]] = {}
    for instance in active or absent:
        for rank in absent[instance]:
            end = orders.ends.get(rank, End(Class.MISSING, "which does not call it"))
            by_end.setdefault((end.cls, end.text), {}).setdefault(rank, instance)
    found = []
    for (cls, text), who in by_end.items():
        lines = tuple(
            f"{ranks(orders.ranks_of(instance))} need rank {rank} in {orders.name(instance)}"
            for rank, instance in sorted(who.items())
        )
        say = f"{lines[0][0].upper()}{lines[0][1:]}, {text}."
        left_first = bool(active) and any(rank in orders.ends for rank in who) and cls is not Class.OUTSIDE
        cls = cls if active or cls is Class.OUTSIDE else Class.MISSING
        place = 2 * severity(Verdict(cls)) if cls is Class.EXCEPTION or not left_first else 1
        found.append((place, Verdict(cls, ranks=tuple(sorted(who)), chain=lines, say=say, fix=FIXES[cls.value])))
    return found


def summary(result: Result) -> str:
    """One line."""
    if not result.proved:
        return result.verdict.say
    room = f" {result.residency.say}" if result.residency is not None else ""
    return f"A common order exists. Scope: {result.scope}.{room}"
