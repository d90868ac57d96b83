"""The text form of a program: what every rank does, in one line.

    r0: !dp.AR{0,1} s1:ep.RS[4B]{0,1} wait(s1); r1: !dp.AR{0,1} exit

One part for each rank (`r0:`) or thread of a rank (`r0/a:`), separated by `;`, calls in host order:

    [!][stream:][comm.]OP[tag]{ranks}   a collective; `!` = the host blocks until it is done. OP is capitals and digits.
                                        Without `comm.` the members name the communicator; without `stream:` it is
                                        queued on the communicator's own stream
    send>k  recv<k                      point to point, with the same prefixes and tag; own stream `pp01` for ranks 0, 1
    G(send>1 recv<2)                    one launch of several; `!` and `stream:` may stand before it
    wait(s)  wait(*)  any(s,t)          the host waits for a stream, for all of the rank's, for any one of several
    ext(x)                              blocked outside collectives, in x
    exit  exit(x)                       the thread leaves here; with x, by that exception

`any(..)` and `exit(x)` are additions to the notation of the corpus in tests/data/hangs.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from verify.events import Communicator, Event, Kind, Lane, Program, Site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME = r"[A-Za-z_][\w-]*"
_MEMBERS = r"\{[\d,\s]*\}"
_STREAM = rf"(?:{_NAME}|{_MEMBERS})"
_TAG = r"(?:\[(?P<tag>[^\[\]{}();]*)\])?"
_BEFORE = rf"(?P<wait>!)?(?:(?P<stream>{_STREAM}):)?"
_LABEL = re.compile(rf"r(?P<rank>\d+)(?:/(?P<thread>{_NAME}))?\s*:")
_GROUP = re.compile(rf"{_BEFORE}G\(")
_CALL = re.compile(
    rf"{_BEFORE}(?:(?P<comm>{_NAME})\.)?"
    rf"(?:(?P<way>send>|recv<)(?P<peer>\d+){_TAG}|"
    rf"(?P<op>[A-Z][A-Z0-9]*){_TAG.replace('tag', 'size')}(?P<members>{_MEMBERS}))"
)
_WAIT = re.compile(rf"(?P<how>wait|any)\((?P<streams>\*|{_STREAM}(?:,{_STREAM})*)\)")
_STOP = re.compile(r"(?P<how>ext|exit)(?:\((?P<what>[^()\[\]{};]*)\))?")
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s;]+")


class NotationError(UsageError):
    """Text that is not a program. rank: the part it stands in, None before the first. column: from 1."""

    def __init__(self, what: str, rank: int | None, column: int) -> None:
        super().__init__(f"{'before any rank' if rank is None else f'rank {rank}'}, column {column}: {what}")
        self.rank, self.column = rank, column


def parse_program(text: str, site: Callable[[int], Site] | None = None) -> Program:
    """The program that `text` writes down. Raises NotationError, one line naming rank and column.

    site: where in a file a character of the text stands; events say it then.
    """
    return _Parser(text, site).program()


def format_program(program: Program) -> str:
    """The text of a program; parsing it gives an equal program, for all that the notation can say."""
    return "; ".join(f"{lane}: {' '.join(map(format_event, lane.events))}".rstrip() for lane in program.lanes)


def format_event(event: Event) -> str:
    """The text of one event; what the notation has no place for (sites, sizes, states) is left out."""
    before = ("!" if event.blocking else "") + _prefix(event)
    tag = f"[{event.tag}]" if event.tag else ""
    comm = f"{event.communicator.name}." if event.communicator is not None and event.communicator.name else ""
    match event.kind:
        case Kind.COLLECTIVE:
            members = ",".join(map(str, event.communicator.members)) if event.communicator is not None else ""
            return f"{before}{comm}{event.operation}{tag}{{{members}}}"
        case Kind.SEND:
            return f"{before}{comm}send>{event.peer}{tag}"
        case Kind.RECV:
            return f"{before}{comm}recv<{event.peer}{tag}"
        case Kind.GROUP:
            return f"{before}G({' '.join(map(format_event, event.parts))})"
        case Kind.WAIT:
            return f"{'any' if event.any_of else 'wait'}({','.join(event.streams)})"
        case Kind.EXTERNAL:
            return f"ext({event.operation})"
        case Kind.EXIT:
            return f"exit({event.operation})" if event.operation else "exit"


def _prefix(event: Event) -> str:
    return f"{event.stream}:" if event.stream and event.stream != event.default_stream else ""


def _tight(stream: str) -> str:
    return re.sub(r"\s", "", stream)


class _Parser:
    """One pass over the text; `at` is where it stands."""

    def __init__(self, text: str, site: Callable[[int], Site] | None = None) -> None:
        self.text, self.at, self.site = text, 0, site
        self.rank: int | None = None
        self.thread = ""
        self.communicators: dict[tuple[str, str], Communicator] = {}
        """One object for each that the text names: they are compared often, and may be large."""
        self.named: list[tuple[int, int, int]] = []
        """(a rank named as member or peer, the rank that names it, where)"""

    def program(self) -> Program:
        lanes: list[Lane] = []
        while self._skip() < len(self.text):
            if self.text[self.at] == ";":
                self.at += 1
                continue
            begin = self.at
            label = self._take(_LABEL)
            if label is None:
                raise self._error(f"expected a rank such as `r0:`, found `{self._word()}`")
            self.rank, self.thread = int(label["rank"]), label["thread"] or ""
            if any((lane.rank, lane.thread) == (self.rank, self.thread) for lane in lanes):
                raise self._error("this rank has a part already; name its threads, as in `r0/a:`", begin)
            lanes.append(Lane(self.rank, self.thread, tuple(self._events())))
        if not lanes:
            raise self._error("no rank at all; write `r0: <calls>; r1: <calls>`")
        have = {lane.rank for lane in lanes}
        for member, rank, where in self.named:
            if member not in have:
                missing = f"rank {member} has no part; write `r{member}:` if it does nothing"
                raise NotationError(missing, rank, where + 1)
        return Program(tuple(lanes))

    def _events(self) -> Iterator[Event]:
        while self._skip() < len(self.text) and self.text[self.at] != ";":
            begin = self.at
            event = self._event()
            yield replace(event, site=self.site(begin)) if self.site is not None else event

    def _event(self) -> Event:
        assert self.rank is not None
        begin = self.at
        if found := self._take(_WAIT):
            streams = tuple(map(_tight, re.findall(rf"\*|{_STREAM}", found["streams"])))
            if len(streams) > 1 and found["how"] == "wait":
                raise self._error("wait takes one stream or *; any(..) takes several", begin)
            return Event(self.rank, Kind.WAIT, "", self.thread, streams=streams, any_of=found["how"] == "any")
        if found := self._take(_GROUP):
            return self._group(found)
        if found := self._take(_CALL):
            return self._call(found)
        if found := self._take(_STOP):
            what = (found["what"] or "").strip()
            if found["how"] == "ext" and not what:
                raise self._error("ext needs a name, as in ext(zmq)", begin)
            return Event(self.rank, Kind.EXTERNAL if found["how"] == "ext" else Kind.EXIT, what, self.thread)
        calls = "[!][stream:][comm.]OP[tag]{ranks}, send>k, recv<k, G(..), wait(s), any(s,t), ext(x) or exit"
        raise self._error(f"cannot read `{self._word()}`; a call is {calls}")

    def _group(self, found: re.Match[str]) -> Event:
        assert self.rank is not None
        begin, parts = found.start(), []
        while self._skip() < len(self.text) and self.text[self.at] not in ");":
            inner, call = self.at, self._take(_CALL)
            if call is None or call["way"] is None or call["wait"]:
                raise self._error(f"a group holds sends and recvs, without `!`, found `{self._word(inner)}`", inner)
            part = self._call(call)
            outer = "" if call["stream"] else _tight(found["stream"] or "")
            parts.append(replace(part, stream=outer) if outer and outer != part.default_stream else part)
        if self.text[self.at : self.at + 1] != ")" or not parts:
            closed = self.text[self.at : self.at + 1] == ")"
            raise self._error("an empty group" if closed else "a group without its `)`", begin)
        self.at += 1
        return Event(self.rank, Kind.GROUP, "G", self.thread, parts=tuple(parts), blocking=bool(found["wait"]))

    def _call(self, found: re.Match[str]) -> Event:
        assert self.rank is not None
        comm = found["comm"] or ""
        if found["way"]:
            peer = int(found["peer"])
            self.named.append((peer, self.rank, found.start()))
            kind = Kind.SEND if found["way"] == "send>" else Kind.RECV
            members = tuple(sorted({self.rank, peer}))
            named = Communicator(members, comm) if comm else None
            event = Event(self.rank, kind, kind.value, self.thread, communicator=named, peer=peer)
        else:
            ranks = [each.strip() for each in found["members"][1:-1].split(",")]
            if not all(ranks) or len(set(map(int, ranks))) < len(ranks) or self.rank not in map(int, ranks):
                why = f"the members {found['members']} must be ranks, each once, and include rank {self.rank}"
                raise self._error(why, found.start("members"))
            members = tuple(sorted(map(int, ranks)))
            all_of = self.communicators.setdefault((found["members"], comm), Communicator(members, comm))
            self.named += [(member, self.rank, found.start("members")) for member in members]
            event = Event(self.rank, Kind.COLLECTIVE, found["op"], self.thread, communicator=all_of)
        stream = _tight(found["stream"] or "")
        stream = "" if stream == event.default_stream else stream
        tag = (found["tag"] if found["way"] else found["size"]) or ""
        return replace(event, stream=stream, tag=tag, blocking=bool(found["wait"]))

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match here, up to the end of a word."""
        found = pattern.match(self.text, self.at)
        if found is None:
            return None
        after = self.text[found.end() : found.end() + 1]
        if pattern not in (_LABEL, _GROUP) and after and after not in ";)" and not after.isspace():
            return None
        self.at = found.end()
        return found

    def _skip(self) -> int:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.at

    def _word(self, at: int | None = None) -> str:
        found = _WORD.match(self.text, self.at if at is None else at)
        return found[0] if found else "the end"

    def _error(self, what: str, at: int | None = None) -> NotationError:
        return NotationError(what, self.rank, (self.at if at is None else at) + 1)
