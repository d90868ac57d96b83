"""Ranks, operations and waits in plain words."""

from __future__ import annotations

import re
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from verify.events import Confidence, Kind
from verify.matching import DEVICE, NOBODY_KNOWS, Standing, queues_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import networkx as nx

    from verify.events import Event, Site
    from verify.matching import Host, Launch, Meeting, Seat, Situation

FIXES = {
    "exception": "Read the exception of that rank first; let a rank that fails tell the others before it leaves.",
    "mismatch": "Take the branch that leads to the call from data that all ranks share, or exchange it first.",
    "cycle": "Issue these calls in one order on all ranks, or take the host waits out from between them.",
    "missing": "Let every member make the call, with nothing to contribute if need be, instead of returning early.",
    "outside": "Not a collective bug: look at what the rank is blocked in, and give it a deadline.",
    "device_stall": "Look at that rank's device and link: its peers finished the operation.",
    "below": "Look below the order of calls: transport, launch queues, identity of the communicator.",
}


GONE = (
    "Look at why that rank left: its log, the exit code that its launcher saw, and, where it was killed, the kernel's"
    " log (dmesg) for the OOM killer."
)
"""What to do about a rank that left without a word."""
KILLED = ("SIG", "exit code ")
"""How the endings begin that others tell of a process."""
HELD = (
    "Let no rank make a call that others must come to while it holds what they wait for outside of calls: release the"
    " lock, or write or read, before the call."
)
"""What to do about a ring through a lock on a file, a pipe or a socket that a rank holds."""
LATE = (
    "Look at what that rank does: if it is only slow, wait, or let the others wait longer; if it never comes, let every"
    " member make the call, with nothing to contribute if need be."
)
"""What to do about a rank that may yet come."""


SLOW = (
    "If it is only slow, as with much data or a slow link, wait and look again: it is when the calls go on. Else look"
    " below the order of calls: transport, launch queues, identity of the communicator."
)
"""What to do about a call that all members are in, and that may yet end."""
THROUGH = (
    "Look at what the rank is blocked in, and give it a deadline; if it is through with its loop and waits for more to"
    " do, it left early: let every member make the call, with nothing to contribute if need be."
)
"""What to do about a rank that is blocked in a wait that may be its idle one."""
STACKS = (
    "Look again after a while, and add what is not here: stacks of all ranks (turnstile hang --pid on their host, or"
    " py-spy dump)."
)
"""The same where a record of everything is at hand."""
THREAD = (
    "Read the exception of that thread first: the call was its to make, perhaps; let a thread that fails end its"
    " process, or tell the one that waits for it."
)
"""What to do about a rank of which a thread ended by an exception."""
ALL_ALIKE = (
    "Let one side go the other way round, as every other rank: each {first} before it {second}, so that nobody comes to"
    " the other half; or make both at once, with batch_isend_irecv, or isend and irecv."
)
"""What to do about a ring of ranks that all send, or all receive, first."""
CHILD = (
    "Look at why its child ended; let whoever waits for a child's answer notice that it is gone: a deadline, its exit"
    " code, or the other end of the pipe closed in the parent."
)
"""What to do about a rank that waits beside a child that is gone."""
DECIDE = (
    "Look again after a while, and add what is not here: stacks of all ranks (turnstile hang --pid on their host, or"
    " py-spy dump), dumps of all ranks, or a record (turnstile.record.install) of the next run."
)
"""What to do where the evidence does not suffice."""
TAGS = "Send and receive with the same tag; where there are several, in the same order on both sides."
"""What to do about a send and a recv whose tags differ."""
CREATE = (
    "Create the same groups on all ranks, in one order and with the same members each: every rank calls new_group,"
    " members or not."
)
"""What to do about ranks that create different groups."""
LAUNCHER = (
    "Look at why the launcher ended: its exit code, what its terminal shows, and the kernel's log (dmesg) for the OOM"
    " killer. Finished turns are kept: go on with --resume."
)
"""What to do about a run whose launcher is gone."""
SENDER = "Look at which rank was to send: let every rank that may be the one tell the receiver when it will not."
"""What to do about a recv from anybody to which nobody sends."""


def fix(cls: str, hosts: Iterable[Host]) -> str:
    """What to do about a verdict of a class on these hosts."""
    left = [host.event for host in hosts if host.event is not None and host.event.kind is Kind.EXIT]
    # How they left is a conclusion: nobody has seen them return, or raise.
    unseen = any(event.confidence is Confidence.INFERRED or event.operation.startswith(KILLED) for event in left)
    return GONE if unseen else FIXES[cls]


GUESSED = {"? store": "a key of the store", "? device": "its device", "? collective": "a collective"}
"""Waits of which only the stack tells, by the name of their channel -> what people call them."""


def ranks(numbers: Iterable[int]) -> str:
    """`rank 1`, `ranks 0, 1 and 2`; long lists are cut."""
    names = [str(number) for number in sorted(set(numbers))]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > 8:
        return f"ranks {', '.join(names[:6])} and {len(names) - 6} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}" if names else "nobody"


def seconds(value: float, digits: int = 0) -> str:
    """`3 s`; `under 1 s` of what would round to nothing, and of what is over already."""
    rounded = round(value, digits)
    return f"{rounded:.{digits}f} s" if rounded > 0 else f"under {10.0**-digits:g} s"


def number(meeting: Meeting) -> str:
    """`Call 2 on dp`, `Transfer 1 from rank 0 to rank 1`."""
    (kind, name, members), count = meeting.key
    if name in GUESSED:
        return f"What rank {members[1]} waits for ({GUESSED[name]}) from rank {members[0]}"
    if kind == "pair":
        return f"Transfer {count + 1} from rank {members[0]} to rank {members[1]}" + (f" on {name}" if name else "")
    return f"Call {count + 1} on {name or '{' + ','.join(map(str, members)) + '}'}"


def operation(meeting: Meeting) -> str:
    """`all_reduce (call 2 on dp)`, `transfer 1 from rank 0 to rank 1`."""
    if (guessed := GUESSED.get(meeting.key[0][1])) is not None:
        return guessed
    text = number(meeting)
    text = text[0].lower() + text[1:]
    if meeting.from_anybody:
        return "a recv from anybody" + (f" on {name}" if (name := meeting.key[0][1]) else "")
    if meeting.key[0][0] == "pair":
        return text
    calls = [call for _, (_, call) in sorted(meeting.arrived.items(), key=lambda each: each[0])]
    call = next((each for each in calls if each.operation), calls[0] if calls else None)
    return f"{call.name}{f'[{call.tag}]' if call.tag else ''} ({text})" if call is not None else text


def at(event: Event | None) -> str:
    """Where an event was called, if known."""
    return f" at {event.site}" if event is not None and event.site is not None else ""


def rows(call: Event) -> str:
    """`20 rows of rank 0 and 0 of rank 1`: what a rank knows to come in a dispatch."""
    members = call.communicator.members if call.communicator is not None else ()
    counts = call.splits or ()
    names = members if len(members) == len(counts) else range(len(counts))
    told = [f"{count} of rank {name}" for name, count in zip(names, counts, strict=True)]
    told[:1] = [each.replace(" of ", " rows of ") for each in told[:1]]
    if len(told) > 8:
        return f"{sum(counts)} rows of {len(told)} ranks"
    return " and ".join([", ".join(told[:-1]), told[-1]] if told[1:] else told)


def called(meeting: Meeting, seat: Seat) -> str:
    """What one member called."""
    call = meeting.arrived[seat][1]
    tag = f"[{call.tag}]" if call.tag else ""
    text = number(meeting)
    return f"rank {seat[0]} calls {call.name}{tag} as {text[0].lower()}{text[1:]}{at(call)}"


def waiters(meeting: Meeting) -> str:
    """Who waits in an operation."""
    open_ = [(seat, call) for seat, (launch, call) in sorted(meeting.arrived.items()) if not launch.done]
    verb = "waits" if len({seat[0] for seat, _ in open_}) == 1 else "wait"
    site = next((at(call) for _, call in open_ if call.site is not None), "")
    return f"{ranks(seat[0] for seat, _ in open_)} {verb} in {operation(meeting)}{site}"


def failure(meeting: Meeting) -> str:
    """Where a call raised an exception, and which."""
    failed = meeting.failures()
    told: dict[str, list[int]] = {}
    for rank, call in failed.items():
        told.setdefault(f"{at(call)}: {brief(call.failed)}", []).append(rank)
    return "; ".join(f"it failed on {ranks(numbers)}{what}" for what, numbers in list(told.items())[:2])


def thread(host: Host) -> str:
    """`rank 1 (thread saver)`, `the main thread of rank 1`."""
    return f"rank {host.rank} (thread {host.thread})" if host.thread else f"the main thread of rank {host.rank}"


def ring(say: str) -> str:
    """That ranks wait in a ring, as a clause, from the sentence that says so and how."""
    found = re.search(r"[Rr]anks? [^:]*? (?:wait in a ring|waits for itself)", say)
    return found[0][0].lower() + found[0][1:] if found is not None else "there is a ring of waits"


def brief(exception: str) -> str:
    """The beginning of an exception's text, on one line."""
    return shorten(exception, 200, placeholder=" ...") if len(exception) > 200 else exception


def standing(host: Host) -> str:
    """A host that waits for nobody."""
    return standings([host])


def standings(hosts: Sequence[Host]) -> str:
    """Hosts that wait for nobody and stand alike, in the words for the first."""
    host, numbers = hosts[0], {host.rank for host in hosts}
    event = host.event
    name = ranks(numbers)
    if len(hosts) == 1 and host.thread.strip(NOBODY_KNOWS) and host.standing is not Standing.EXITED:
        name += f" (thread {host.thread})"
    has, is_, does = ("has", "is", "does") if len(numbers) == 1 else ("have", "are", "do")
    what = event.operation if event is not None else ""
    match host.standing:
        case Standing.RAISED:
            return f"{name}, which left by {brief(what)}{at(event)}"
        case Standing.EXITED:
            return f"{name}, which {has} left{at(event)}"
        case Standing.OUTSIDE:
            return f"{name}, which {is_} blocked outside collectives, in {what}{at(event)}"
        case Standing.FINISHED:
            return f"{name}, which {is_} at {'its' if has == 'has' else 'the'} end and {does} not call it"
        case Standing.UNKNOWN:
            return f"{name}, of which it is not known what {'it does' if has == 'has' else 'they do'}"
    return f"{name}, which {has} not called it"


def sites(meeting: Meeting) -> dict[str, list[int]]:
    """Call site -> the ranks that called from there."""
    sides: dict[str, list[int]] = {}
    for seat, (_, call) in sorted(meeting.arrived.items()):
        sides.setdefault(f"{call.name} at {call.site}", []).append(seat[0])
    return sides


def other_sites(meetings: Iterable[Meeting]) -> list[Meeting]:
    """Open collectives whose members came from different lines, though one of these lines met itself elsewhere.

    A line that always meets another one is how rank-dependent code looks, and no fault; nor are lines that met before
    and completed.
    """
    whole: list[tuple[Meeting, list[Site]]] = []
    for meeting in meetings:
        found = [call.site for _, call in meeting.arrived.values() if call.site is not None]
        if len(found) == len(meeting.seats) > 1 and meeting.key[0][0] == "collective":
            whole.append((meeting, found))
    alone = {(meeting.key[0], found[0]) for meeting, found in whole if len(set(found)) == 1}
    ended = {id(meeting) for meeting, _ in whole if all(launch.done for launch, _ in meeting.arrived.values())}
    met = {(meeting.key[0], frozenset(found)) for meeting, found in whole if id(meeting) in ended}
    return [
        meeting
        for meeting, found in whole
        if len(set(found)) > 1
        and id(meeting) not in ended
        and (meeting.key[0], frozenset(found)) not in met
        and any((meeting.key[0], site) in alone for site in found)
    ]


def chain(situation: Situation, graph: nx.DiGraph[Any], nodes: Sequence[Any]) -> list[str]:
    """A cycle of the wait-for graph, a line for each rank in it. nodes: actor, operation, actor, ..."""
    actors = [node for node in nodes if node[0] != "op"]
    hops = [(nodes[n], nodes[n + 1], actors[(n // 2 + 1) % len(actors)]) for n in range(0, len(nodes), 2)]
    if len({graph.nodes[actor]["rank"] for actor in actors}) > 1:
        # A launch behind the rank's own launch is no news: follow a queue to where another rank is needed.
        while graph.nodes[hops[-1][0]]["rank"] == graph.nodes[hops[0][0]]["rank"]:
            hops.append(hops.pop(0))
        merged: list[tuple[Any, Any, Any]] = []
        for actor, op, needs in hops:
            if merged and graph.nodes[merged[-1][0]]["rank"] == graph.nodes[actor]["rank"]:
                merged[-1] = (merged[-1][0], op, needs)
            else:
                merged.append((actor, op, needs))
        hops = merged
    first = min(range(len(hops)), key=lambda n: graph.nodes[hops[n][0]]["rank"])
    return [clause(situation, graph, *hop) for hop in (*hops[first:], *hops[:first])]


def clause(situation: Situation, graph: nx.DiGraph[Any], actor: Any, op: Any, needs: Any) -> str:
    """For what an actor of the wait-for graph waits, in an operation that lacks another one, as a clause."""
    mine, theirs = graph.nodes[actor], graph.nodes[needs]
    meeting: Meeting = graph.nodes[op]["meeting"]
    if needs[0] == "queue":
        why = f"rank {theirs['rank']}, whose own call waits in a queue"
    else:
        host: Host = theirs["host"]
        never = host.ahead is not None and not host.ahead[meeting.key[0]]
        why = f"rank {theirs['rank']}, which {'does not call it' if never else 'has not called it yet'}"
    if actor[0] == "queue":
        launch: Launch = mine["launch"]
        behind = f"{operation(meeting)} {_where(situation, launch, meeting)}"
        return f"on rank {launch.rank} {_own(launch)}{at(launch.event)} is queued behind {behind}, which needs {why}"
    host = mine["host"]
    name = f"rank {host.rank}" + (f" (thread {host.thread})" if host.thread else "")
    if meeting.from_anybody:
        return f"{name} waits in {operation(meeting)}{at(host.event)}, and {nobody_of(senders(graph, actor))} has sent"
    if host.event is not None and host.event.kind is Kind.WAIT:
        made = "" if at(host.event) else _made(meeting, host.rank)
        return f"{name} waits on the host{at(host.event)} for {operation(meeting)}{made}, which needs {why}"
    if host.waits and meeting not in host.waits[0].meetings:
        return f"{name} waits in {_own(host.waits[0])}{at(host.event)}, behind {operation(meeting)}, which needs {why}"
    return f"{name} waits in {operation(meeting)}{at(host.event)} for {why}"


def _made(meeting: Meeting, rank: int) -> str:
    """Where a rank has called an operation that its host waits for elsewhere, if that is known."""
    calls = [call for seat, (_, call) in meeting.arrived.items() if seat[0] == rank and call.site is not None]
    return f", called{at(calls[0])}" if calls else ""


def senders(graph: nx.DiGraph[Any], host: Any) -> list[int]:
    """The ranks that may send what a host takes from anybody."""
    meetings = [graph.nodes[op]["meeting"] for op in graph.successors(host)]
    return sorted({meeting.key[0][2][0] for meeting in meetings if meeting.from_anybody})


def nobody_of(numbers: Sequence[int]) -> str:
    """`none of ranks 0 and 2`, `no rank 1`."""
    return f"none of {ranks(numbers)}" if len(numbers) > 1 else f"not even {ranks(numbers)}"


def _own(launch: Launch) -> str:
    return " with ".join(map(operation, launch.meetings))


def _where(situation: Situation, launch: Launch, ahead: Meeting) -> str:
    other = next((one for one, _ in ahead.arrived.values() if one.rank == launch.rank), None)
    shared = set(launch.event.queues) & set(other.event.queues if other is not None else ())
    if not shared and DEVICE in queues_of(launch.event, situation.exclusive):
        return "on the device"
    return f"on stream {min(shared)}" if shared else "in the queue"
