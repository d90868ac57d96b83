"""How sure a finding is, as far as the evidence goes: one rule each, by the class it is about, in the order of blame.

A doubt gives the verdict that is left of the one it is asked about, or None where it has nothing against it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from verify import words
from verify.blame import Certainty, Class, Verdict, awaited
from verify.hang.advice import advised
from verify.hang.damage import its_ring_is_damaged, told
from verify.hang.held import ring_through_holders
from verify.hang.idling import idles
from verify.hang.late import (
    dumps_and_stacks_are_of_two_moments,
    evidence_of,
    it_may_only_be_slow,
    its_transfers_are_not_seen,
    nothing_shows_it_is_late,
)
from verify.hang.moving import (
    a_call_of_it_may_let_it_go,
    another_thread_may_call,
    it_waits_for_itself,
    its_wait_may_end,
    stacks_contradict_it,
)
from verify.hang.stacks import At
from verify.matching import NOBODY_KNOWS, Standing
from verify.readers.found import ENDED_ITS_RECORD, UNNAMED_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.hang.case import Case
    from verify.matching import Meeting

    Doubt = Callable[[Case], Verdict | None]


def weighed(case: Case) -> Verdict:
    """The verdict with the certainty that the evidence allows."""
    verdict = case.verdict
    undecided = verdict.certainty is Certainty.UNDECIDED
    # Of a missing member, the reason why it is undecided; of nothing wrong, whether that can be said.
    if (verdict.cls is Class.MISSING and not undecided) or (verdict.cls is Class.NONE and undecided):
        doubts: tuple[Doubt, ...] = ()
    else:
        doubts = DOUBTS.get(verdict.cls, ())
    verdict = next((left for doubt in doubts if (left := doubt(case)) is not None), verdict)
    for condition in CONDITIONS:
        verdict = condition(replace(case, verdict=verdict)) or verdict
    if verdict.certainty is Certainty.UNDECIDED:
        # What is not decided blames nobody, and what to do about it is to find out.
        verdict = replace(verdict, ranks=())
    return advised(verdict, case)


# -- a member that never arrived, and of which nothing is known ------------------------------------------------------


def its_call_may_be_lost(case: Case) -> Verdict | None:
    """A ring or dump that has lost the calls of a group."""
    lost = sorted(node[1] for node in case.graph if node[0] == "host" and node[2] == NOBODY_KNOWS)
    what = evidence_of(case.found, lost)
    why = f"the {what} of {words.ranks(lost)} holds no call of that group, and may have lost it"
    if damaged := [told(each) for each in case.found.damaged if each.newest and each.rank in lost]:
        why = f"the {' and the '.join(damaged[:3])}, and what is lost of it may be that call"
    return _undecided(case.verdict, why) if lost else None


def its_dump_is_absent(case: Case) -> Verdict | None:
    """It may have made the call."""
    return _undecided(case.verdict, f"{_nothing(case)} from {words.ranks(case.absent)}") if case.absent else None


def it_may_yet_come(case: Case) -> Verdict | None:
    """A rank that moved a moment ago."""
    early = {host.rank for host in case.hosts(Standing.UNKNOWN)} & case.found.lively
    return _undecided(case.verdict, f"{words.ranks(early)} moved a moment ago and may yet come") if early else None


# -- a device that stalls, or everybody in one call ------------------------------------------------------------------


def it_may_go_on(case: Case) -> Verdict | None:
    """A call that is open takes its time."""
    lively = case.found.lively
    why = f"{words.ranks(lively)} moved a moment ago, so that nothing may be stuck"
    return _undecided(case.verdict, why) if lively else None


def its_members_are_not_known(case: Case) -> Verdict | None:
    """Calls of a group of which the evidence knows one rank only, by that rank's calls: who else is in it, and waits
    elsewhere, it does not tell. Where several ranks wait so, each may lack another one: a ring, perhaps.
    """
    alone: dict[int, Meeting] = {}
    for meeting in case.situation.meetings.values():
        ranks = {seat[0] for seat in meeting.seats}
        if meeting.key[0].kind == "collective" and len(ranks) == 1 and any(
            not launch.done for launch, _ in meeting.arrived.values()
        ):  # fmt: skip
            alone.setdefault(next(iter(ranks)), meeting)
    if not alone or any(rank in case.found.whole for rank in alone):
        return None
    guessed = {str(each.communicator) for each in case.found.loose}
    if len(case.everybody) < 2 and not any(meeting.key[0].name in guessed for meeting in alone.values()):
        return None  # a job of one rank, as its dump says: one rank's log does not
    told = "; ".join(f"rank {rank} waits in {words.operation(meeting)}" for rank, meeting in sorted(alone.items())[:3])
    more = "which others belong to that group is" if len(alone) == 1 else "which others belong to these groups is"
    why = f"{told}; {more} not in the evidence"
    if len(alone) > 1:
        why += f": if each of {words.ranks(alone)} belongs to the group in which another one waits, they wait in a ring"
    return replace(case.verdict, cls=Class.NONE, chain=(), fix=words.DECIDE).undecided(why)


def its_members_are_inferred(case: Case) -> Verdict | None:
    """Everybody who left a dump is in one call; but nothing lists the members of its group, and there may be others."""
    open_ = [
        meeting for meeting in case.situation.meetings.values()
        if meeting.key[0].name in case.found.inferred
        and any(not launch.done and launch.rank not in case.found.whole for launch, _ in meeting.arrived.values())
    ]  # fmt: skip
    if not open_:
        return None
    # Each rank may wait in one of several groups: the first that all who are known of have come to is told.
    meeting = min(open_, key=lambda each: each.key)
    left = "the only one that left a dump" if len(case.found.present) == 1 else "as all that left dumps do"
    why = (
        f"{words.waiters(meeting)}, {left}; who else belongs to {meeting.key[0].name} is not in dumps of gloo, and"
        " whoever left none may be elsewhere"
    )
    return replace(case.verdict, cls=Class.NONE, chain=(), fix=words.DECIDE).undecided(why)


def not_every_wait_is_recorded(case: Case) -> Verdict | None:
    """Calls that all members are in may wait for something that the evidence does not show."""
    verdict, ranks = case.verdict, set(case.open_ranks)
    if ranks and ranks <= case.found.whole:
        return None
    blind = "".join(f": {line}" for line in case.found.unknown if "graph replays" in line)
    alike = verdict.say.partition(": not a fault")[0]
    say = f"Undecided: {alike[0].lower()}{alike[1:]}, so that what keeps them is not in this evidence{blind}."
    return replace(verdict, certainty=Certainty.UNDECIDED, condition="not every wait is recorded", say=say)


def an_absent_member_may_keep_it(case: Case) -> Verdict | None:
    """A member of which nothing is known may not have finished it either, and be what keeps the others."""
    open_ = [
        {seat[0] for seat in meeting.seats}
        for meeting in case.situation.meetings.values()
        if any(not launch.done and launch.rank in case.verdict.ranks for launch, _ in meeting.arrived.values())
    ]
    absent = set().union(*open_).intersection(case.absent)
    if not absent or not case.verdict.ranks:
        return None
    if any(not members - absent - set(case.verdict.ranks) for members in open_):
        # That a peer has finished is then what nobody has seen.
        return _undecided(case.verdict, f"{_nothing(case)} from {words.ranks(absent)}")
    has = "has" if len(absent) == 1 else "have"
    why = f"{words.ranks(absent)}, of which there is {_nothing(case)}, {has} finished it"
    return case.verdict.only_if(why)


# -- nothing wrong: no all-clear where not everything was seen -------------------------------------------------------


def a_dump_is_absent(case: Case) -> Verdict | None:
    """Whoever left none may be what the others wait for."""
    idle = words.ranks(case.found.present) if case.found.present else ""
    why = f"{_nothing(case)} from {words.ranks(case.absent)}" + f", nothing open on {idle}" * bool(idle)
    return case.verdict.undecided(why) if case.absent else None


def a_wait_is_unknown(case: Case) -> Verdict | None:
    """A rank waits for something, or may."""
    waiting = case.hosts(Standing.UNKNOWN)
    if not waiting:
        return None
    who = {host.rank for host in waiting}
    verb = "waits" if len(who) == 1 else "wait"
    calls = [place for rank in sorted(who) if (place := case.where.get(rank)) is not None and place.at is At.COLLECTIVE]
    if len(calls) == len(who):
        # A call that no dump or record shows, as a recv on gloo.
        lines = "; ".join(dict.fromkeys(f"{place.what} at {place.site}" for place in calls[:2]))
        return case.verdict.undecided(f"{words.ranks(who)} {verb} in {lines}, and for whom is not in the evidence")
    where = words.at(waiting[0].event)
    return case.verdict.undecided(f"what {words.ranks(who)} {verb} for{where} is not in the evidence")


def a_rank_is_gone(case: Case) -> Verdict | None:
    """It left by an exception or was killed, and no call waits for it."""
    lost = case.hosts(Standing.RAISED)
    return _open(case, f"no call is open that waits for {words.standing(lost[0])}") if lost else None


def a_stack_shows_no_wait(case: Case) -> Verdict | None:
    """Ranks that left a stack and no record of calls."""
    only = sorted(set(case.where) - case.found.present)
    why = f"of {words.ranks(only)} there is a stack only, which does not show a wait"
    return case.verdict.undecided(why) if only else None


def the_evidence_is_doubtful(case: Case) -> Verdict | None:
    """As its reader says, or since some have finished what a member has not made, by its own evidence."""
    why = case.found.doubt or _ahead(case)
    return case.verdict.undecided(why) if why else None


def ranks_do_something_else(case: Case) -> Verdict | None:
    """They live on without a wait: in code of their own, or in a collective that torch makes below the record."""
    idle = case.found.idle
    why = f"no call is open, and what {words.ranks(idle)} {'does' if len(idle) == 1 else 'do'} is not in the record"
    return _open(case, why) if idle else None


def no_call_is_in_it(case: Case) -> Verdict | None:
    """Evidence of nothing."""
    if any(event.calls for event in case.found.events):
        return None
    what = "no call, and stacks alone do not show that calls meet" if case.found.stacks else "no call and no stack"
    if case.found.present and not case.found.stacks:
        what += f" of {words.ranks(case.found.present)}: none was made, or none that is recorded"
    return case.verdict.undecided(f"the evidence holds {what}")


def calls_failed(case: Case) -> Verdict | None:
    """Nobody waits, but not everything completed."""
    say = f"No alarm: nobody waits for another rank. Not all calls completed: {_failed(case)}."
    return replace(case.verdict, say=say) if _failed(case) else None


DOUBTS: Final[dict[Class, tuple[Doubt, ...]]] = {
    Class.MISSING: (its_call_may_be_lost, its_dump_is_absent, it_may_yet_come),
    Class.DEVICE_STALL: (it_may_go_on, an_absent_member_may_keep_it),
    Class.BELOW: (it_may_go_on, its_members_are_not_known, its_members_are_inferred, not_every_wait_is_recorded),
    Class.NONE: (
        a_dump_is_absent, a_wait_is_unknown, a_rank_is_gone, a_stack_shows_no_wait, the_evidence_is_doubtful,
        ranks_do_something_else, no_call_is_in_it, its_transfers_are_not_seen, calls_failed,
    ),
}  # fmt: skip
"""The first that has something against the verdict counts."""


# -- whether anybody needs what is wrong -----------------------------------------------------------------------------


def nobody_waits(case: Case) -> Verdict | None:
    """Blocked outside of calls, of which none is open: perhaps the job has nothing to do, or a rank is in a collective
    that torch makes below the record.
    """
    verdict, graph = case.verdict, case.graph
    if verdict.cls is not Class.OUTSIDE or verdict.certainty is not Certainty.CERTAIN:
        return None
    if any(node[0] == "host" and graph.in_degree(node) for node in graph):
        return None
    each: dict[str, list[int]] = {}
    for host in case.hosts(Standing.OUTSIDE):
        what = f"{host.event.operation}{words.at(host.event)}" if host.event is not None else "code of its own"
        each.setdefault(what, []).append(host.rank)
    told = [f"{words.ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in {what}" for what, ranks in each.items()]
    who = "outside of calls, " + ", ".join(told[:3]) + f" and {len(told) - 3} places more" * (len(told) > 3)
    inside = [p for rank, p in case.where.items() if p.at is At.COLLECTIVE and rank not in case.known]
    if inside:
        call = f"rank {inside[0].rank} is in {inside[0].what} at {inside[0].spot}, which the record does not show"
        return Verdict(Class.NONE).undecided(f"{call}, nor who else must come; {who}")
    if not any(event.calls for event in case.found.events):
        # Stacks show neither what is open nor what other threads wait for.
        return Verdict(Class.NONE).undecided(f"no stack stands in a call; {who}")
    none = "no call that is open lacks a member" if case.open_ranks else "no call is open"
    return Verdict(Class.NONE).undecided(f"{none}, so nobody waits for another; {who}")


def nobody_needs_it(case: Case) -> Verdict | None:
    """No thread waits for the calls that are open, as their records show.

    Such a call is on threads or queues of its own, and keeps nobody before its host asks for it.
    """
    verdict, idle = case.verdict, case.open_ranks
    missing = verdict.cls in (Class.MISSING, Class.OUTSIDE)
    if not missing and verdict.cls not in (Class.BELOW, Class.DEVICE_STALL):
        return None
    if verdict.certainty is not Certainty.CERTAIN or not idle or not case.found.whole.issuperset(idle):
        return None
    if any(not missing or (node[0] == "host" and node[1] in verdict.ranks) for node in awaited(case.graph)):
        return None
    needs, has = ("needs", "it has") if len(idle) == 1 else ("need", "they have")
    mine = f"no thread of {words.ranks(idle)} waits for what {has} open"
    if not missing:
        return Verdict(Class.NONE).undecided(f"no call that is open lacks a member, and {mine}")
    if moving := case.found.lively & {*idle, *verdict.ranks}:
        return _undecided(verdict, f"{words.ranks(moving)} moved a moment ago, and {mine}")
    return verdict.only_if(f"{words.ranks(idle)} {needs} what {has} open: {NO_WAIT}")


NO_WAIT: Final = "its record shows no wait for it; torch may wait below that, as in DDP's backward(), or it polls"


def it_may_be_late(case: Case) -> Verdict | None:
    """A rank that is missing may be running: never and not yet look alike."""
    verdict = case.verdict
    if verdict.cls is not Class.MISSING or verdict.certainty is Certainty.UNDECIDED:
        return None
    loose = {host.rank for host in case.hosts(Standing.ELSEWHERE)} & case.found.idle
    late = loose & set(verdict.ranks)
    if not late:
        return None
    condition = f"{words.ranks(late)} {'does' if len(late) == 1 else 'do'} not come after all"
    if verdict.condition:
        condition = f"{verdict.condition}, and {condition}"
    return replace(
        verdict, certainty=Certainty.CONDITIONAL, condition=condition, fix=words.LATE, say=verdict.plain
    )  # fmt: skip


def it_may_be_through(case: Case) -> Verdict | None:
    """A rank that waits for an event, a queue or the clock may have left its loop: then that is the fault."""
    verdict = case.verdict
    if verdict.cls is not Class.OUTSIDE or verdict.certainty is Certainty.UNDECIDED:
        return None
    waits = any(rank in case.where and idles(case.where[rank].what) for rank in verdict.ranks)
    return replace(verdict, fix=words.THROUGH) if waits else None


def it_is_of_different_moments(case: Case) -> Verdict | None:
    """Some have finished what cannot end without a member that, by its own evidence, has not made it."""
    verdict = case.verdict
    if verdict.certainty is Certainty.UNDECIDED or verdict.cls not in OF_ONE_MOMENT:
        return None
    why = _ahead(case, joint=True)
    return _undecided(verdict, f"{why}: this evidence is of different moments, or of different runs") if why else None


OF_ONE_MOMENT: Final = frozenset({Class.CYCLE, Class.MISSING, Class.OUTSIDE, Class.DEVICE_STALL, Class.BELOW})
"""Findings that rest on where all ranks stand at one moment."""

def it_may_have_gone_on(case: Case) -> Verdict | None:
    """A rank whose log has a traceback last, or nearly, and a dump or lines that it may have written after it."""
    verdict = case.verdict
    if verdict.cls is not Class.EXCEPTION or not (ranks := set(verdict.ranks) & case.found.undated):
        return None
    whose = "it" if len(ranks) == 1 else "them"
    why = f"a log has the same of an exception that was caught, and other evidence of {whose} may be later"
    return verdict.only_if(f"{words.ranks(ranks)} did not go on after that: {why}")


def they_may_be_of_two_jobs(case: Case) -> Verdict | None:
    """Whatever is found where ranks of two jobs are taken for those of one."""
    verdict, why = case.verdict, case.found.mixed
    if not why or verdict.certainty is Certainty.UNDECIDED:
        return None
    told = f"the dumps are of one job, whose hosts' clocks differ: {why}"
    return verdict.undecided(f"nobody waits, if {told}") if verdict.cls is Class.NONE else verdict.only_if(told)


def its_calls_may_be_of_several_groups(case: Case) -> Verdict | None:
    """Calls of a log that names no group are counted as those of one, to which all ranks belong: nothing says so."""
    verdict = case.verdict
    known = (*OF_ONE_MOMENT, Class.MISMATCH, Class.EXCEPTION)
    if verdict.cls not in known or verdict.certainty is Certainty.UNDECIDED:
        return None
    if not any(UNNAMED_GROUP in line for line in (verdict.say, *verdict.chain)):
        return None
    if verdict.cls in (Class.MISMATCH, Class.DEVICE_STALL):
        return verdict.only_if("these calls are of one group, which the log does not say")
    belong = f"{words.ranks(verdict.ranks)} {'belongs' if len(verdict.ranks) == 1 else 'belong'}"
    return verdict.only_if(f"{belong} to the group of these calls, which the log does not say")


CONDITIONS: Final[tuple[Doubt, ...]] = (
    its_ring_is_damaged,
    it_may_have_gone_on,
    it_is_of_different_moments,
    stacks_contradict_it,
    another_thread_may_call,
    dumps_and_stacks_are_of_two_moments,
    nobody_waits,
    nobody_needs_it,
    ring_through_holders,
    its_wait_may_end,
    it_may_be_late,
    a_call_of_it_may_let_it_go,
    it_may_be_through,
    it_waits_for_itself,
    nothing_shows_it_is_late,
    it_may_only_be_slow,
    they_may_be_of_two_jobs,
    its_calls_may_be_of_several_groups,
)
"""Each is asked, in this order, about what the ones before it left."""


# -- what they share -------------------------------------------------------------------------------------------------


def _nothing(case: Case) -> str:
    """What an absent rank has not left, by what the others have."""
    found = case.found
    if found.stacks and not any(event.calls for event in found.events):
        return "no stack"
    if any(ENDED_ITS_RECORD in line for line in found.unknown):
        return "only a record that was ended"
    return "no record" if found.whole and found.present <= found.whole else "no dump"


def _failed(case: Case) -> str:
    """The newest call that raised an exception on some ranks, and which; "" where none did."""
    broken = [meeting for meeting in case.situation.meetings.values() if meeting.failures()]
    return f"of {words.operation(broken[-1])}, {words.failure(broken[-1])}" if broken else ""


def _open(case: Case, why: str) -> Verdict:
    """Undecided, though nobody waits; with what went wrong before, which may be the reason."""
    return case.verdict.undecided(f"{why}; {failed}" if (failed := _failed(case)) else why)


def _undecided(verdict: Verdict, why: str) -> Verdict:
    known = f": {verdict.chain[0]}" if verdict.chain else ""
    return replace(verdict, certainty=Certainty.UNDECIDED, condition=why, say=f"Undecided, because {why}{known}.")


def _ahead(case: Case, joint: bool = False) -> str:
    """A call that some have finished and that a member has not made, as far as its own evidence goes.

    joint: only where that cannot be. On gloo a call that raised an exception looks finished in a dump.
    """
    found = case.found
    for meeting in case.situation.meetings.values():
        if joint and (meeting.failures() or not meeting.ended_for_all):
            continue
        done = [seat[0] for seat, (launch, _) in meeting.arrived.items() if launch.done]
        lacking = [seat[0] for seat in meeting.seats if seat not in meeting.arrived]
        late = [r for r in lacking if r in found.present and (r, meeting.key[0].name) not in found.unsure]
        if done and late and meeting.key[0].kind == "collective":
            what = f"{words.ranks(done)} finished {words.operation(meeting)}"
            if meeting.failures():
                what = f"of {words.operation(meeting)}, {words.failure(meeting)}"
                return f"{what}; {words.ranks(late)} did not call it or called it later"
            return f"{what}, which {words.ranks(late)} did not call or called later"
    return ""
