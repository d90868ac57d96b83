"""What stacks tell by themselves, without a record or a dump: where everybody stands, and who alone stands elsewhere.

A stack shows neither the group of a call nor which call of it this is. So nothing is certain from stacks alone. But
where all ranks stand in one call at one line, and the others are gone or blocked outside of all calls, those keep them
waiting, if they are members at all; the verdict says so. Everything else is undecided, with what would decide it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import networkx as nx

from verify import words
from verify.blame import Certainty, Class, Verdict, absent
from verify.events import Kind
from verify.hang.idling import may_need_a_call
from verify.hang.stacks import INSIDE, At, places_of
from verify.matching import Standing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.hang.case import Case
    from verify.hang.stacks import Place
    from verify.matching import Situation
    from verify.readers.found import Found

NEEDED: Final = "a record (turnstile.record.install) or Flight Recorder dumps of these ranks would"
ELSEWHERE: Final = {
    At.STORE: "waits for a key of the store", At.DEVICE: "waits for its device", At.RUNNING: "runs",
}  # fmt: skip


def odd_one_out(found: Found, everybody: Sequence[int]) -> Verdict | None:
    """The verdict of stacks alone; None where there is other evidence of calls, or no stack."""
    if any(event.calls for event in found.events) or not found.stacks:
        return None
    where = places_of(replace(found, lively=frozenset()))
    gone = sorted({event.rank for event in found.events if event.kind is Kind.EXIT and not event.thread})
    unseen = sorted(set(everybody) - set(where) - set(gone))
    calling = {rank: place for rank, place in where.items() if place.at in INSIDE and rank not in gone}
    if unseen or not calling:
        return None
    others = {rank: place for rank, place in where.items() if rank not in calling and rank not in gone}
    names = {(place.what, place.site) for place in calling.values()}
    if not others and not gone:
        why = f"{_standing(calling)}{_alone(calling)}; whether these calls meet, stacks do not show: {NEEDED}"
        return Verdict(Class.NONE).undecided(why)
    if len(names) > 1:
        more = f"; {_elsewhere(others)}" if others else f"; {words.ranks(gone)} left" if gone else ""
        why = f"{_standing(calling)}{more}{_alone(calling)}; which group each call is of, stacks do not show: {NEEDED}"
        return Verdict(Class.NONE).undecided(why)
    call = next(iter(calling.values()))
    waiting = f"{words.ranks(calling).capitalize()} wait{'s' * (len(calling) == 1)} in {call.what} at {call.spot}"
    if gone:
        left = f"{words.ranks(gone)}, which {'has' if len(gone) == 1 else 'have'} left"
        blames = _blames(Class.MISSING, gone, f"{waiting} for {left}.", (f"{words.ranks(gone)} left",))
        condition = blames.condition.partition(", and ")[0]
        return replace(blames, fix=words.GONE, condition=condition)
    loose = {rank: place for rank, place in others.items() if place.at is not At.OUTSIDE}
    if loose:
        why = f"{waiting[0].lower()}{waiting[1:]}, and {_elsewhere(others)}, on the way to that call perhaps"
        return Verdict(Class.NONE).undecided(f"{why}: look again; {NEEDED} tell")
    soft = {rank: place for rank, place in others.items() if may_need_a_call(place.what)}
    firm = {rank: place for rank, place in others.items() if rank not in soft}
    if not firm and len({(place.what, place.site) for place in soft.values()}) > 1:
        each = f"{_elsewhere(others)}, and each may wait there for a call that it made"
        why = f"{waiting[0].lower()}{waiting[1:]}, {each}"
        return Verdict(Class.NONE).undecided(f"{why}: which of them has not made it, stacks do not show: {NEEDED}")
    blamed = firm or soft
    chain = tuple(f"{place.who} is blocked in {place.what} at {place.spot}" for place in blamed.values())
    blocked = "; ".join(chain[:2])
    verdict = _blames(Class.OUTSIDE, sorted(blamed), f"{waiting}, while {blocked}, outside of all calls.", chain)
    if firm and soft:
        verdict = replace(verdict, chain=(*chain, *map(_perhaps, soft.values())))
    elif soft:
        verdict = verdict.only_if(f"{words.ranks(soft)} {MADE[len(soft) > 1]}")
        verdict = replace(verdict, say=verdict.plain)
    return verdict


def who_may_wait_for_a_call(case: Case) -> Verdict | None:
    """Of several ranks outside of calls: those of whose calls nothing is known, and that may wait for one which they
    have made, are not blamed beside others that do not.
    """
    verdict, found = case.verdict, case.found
    if verdict.cls not in (Class.MISSING, Class.OUTSIDE) or len(verdict.ranks) < 2:
        return None
    soft = {
        rank: place for rank in verdict.ranks
        if rank not in found.present and (place := case.where.get(rank)) is not None
        and place.at is At.OUTSIDE and may_need_a_call(place.what)
    }  # fmt: skip
    firm = [host for host in case.situation.hosts if host.rank in verdict.ranks and host.rank not in soft]
    firm = [host for host in firm if ("host", host.rank, host.thread) in case.graph and not host.thread]
    if not soft or not firm:
        return None
    cls = Class.OUTSIDE if all(host.standing is Standing.OUTSIDE for host in firm) else Class.MISSING
    left = absent(cls, firm, case.graph)
    return replace(left, certainty=verdict.certainty, chain=(*left.chain, *map(_perhaps, soft.values())))


MADE: Final = ("does not wait there for a call that it made", "do not wait there for a call that they made")


def _perhaps(place: Place) -> str:
    """Of a rank that is not blamed."""
    return f"{place.who} waits in {place.what} at {place.spot}, for such a call as well perhaps"


def for_a_key(situation: Situation, graph: nx.DiGraph[Any], loose: dict[int, Place]) -> Verdict | None:
    """Of hosts that wait for a key of a store, which any other rank may set: the rank that alone could, and does not.

    Ranks that wait in turn for the one that waits cannot. Of the others, those that left will not; of those that are
    still there, only a single one can be named.
    """
    for rank, place in loose.items():
        if place.at is not At.STORE or ("host", rank, "") not in graph:
            continue
        reached = nx.descendants(graph, ("host", rank, "")) - {("host", rank, "")}
        roots = [graph.nodes[node]["host"] for node in reached if node[0] == "host" and not graph.out_degree(node)]
        if not roots or any(host.standing is Standing.UNKNOWN for host in roots):
            continue
        left = [host for host in roots if host.standing in (Standing.EXITED, Standing.RAISED)]
        blamed = roots if len(roots) == 1 else left if len(left) == len(roots) else []
        if not blamed:
            continue
        cls = Class.MISSING
        if any(host.standing is Standing.RAISED for host in blamed):
            cls = Class.EXCEPTION
        elif any(host.standing is Standing.OUTSIDE for host in blamed):
            cls = Class.OUTSIDE
        ranks = sorted({host.rank for host in blamed})
        lines = tuple(words.standing(host).replace(" has not called it", " has not set it") for host in blamed)
        key = f"a key of the store ({place.what})"
        say = f"Rank {rank} waits at {place.spot} for {key}, which nobody else can set but {lines[0]}."
        return Verdict(
            cls, Certainty.CONDITIONAL, ranks=tuple(ranks), chain=lines, say=say, fix=words.fix(cls.value, blamed),
            condition=f"what rank {rank} waits for is up to another rank of the job",
        )  # fmt: skip
    return None


def _blames(cls: Class, ranks: Sequence[int], say: str, chain: tuple[str, ...]) -> Verdict:
    belong, do = ("is a member", "does") if len(ranks) == 1 else ("are members", "do")
    return Verdict(
        cls, Certainty.CONDITIONAL, ranks=tuple(ranks), chain=chain, say=say, fix=words.FIXES[cls.value],
        condition=f"{words.ranks(ranks)} {belong} of that call, which stacks do not show, and {do} not come any more",
    )  # fmt: skip


def _standing(calling: dict[int, Place]) -> str:
    lines: dict[str, list[int]] = {}
    for rank, place in calling.items():
        thread = f", in thread {place.thread}" * bool(place.thread)
        lines.setdefault(f"in {place.what} at {place.spot}{thread}", []).append(rank)
    told = [f"{words.ranks(ranks)} {'stands' if len(ranks) == 1 else 'stand'} {line}" for line, ranks in lines.items()]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} places more" if len(told) > 3 else "")


def _alone(calling: dict[int, Place]) -> str:
    """The one rank that stands apart where all others stand at one place. It may be right: where a call ends for one
    member alone, as a broadcast with another root, the odd one is among those that still wait.
    """
    lines: dict[tuple[str, object], list[int]] = {}
    for rank, place in calling.items():
        lines.setdefault((place.what, place.site), []).append(rank)
    few, most = sorted(lines.values(), key=len)[:: len(lines) - 1] if len(lines) == 2 else ([], [])
    return f"; rank {few[0]} alone may be ahead of the others, or behind" if len(few) == 1 < len(most) else ""


def _elsewhere(others: dict[int, Place]) -> str:
    told = []
    for place in list(others.values())[:3]:
        what = ELSEWHERE.get(place.at, "stands")
        inside = f" in {place.what}" if place.at is At.OUTSIDE else ""
        told.append(f"{place.who} {what}{inside} at {place.spot}")
    return ", ".join(told)
