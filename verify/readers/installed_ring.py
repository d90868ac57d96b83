"""One ring of an installed record, event by event: its calls, how far each got, and what each thread waits in."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kernel.record import Kind
from kernel.record.foreign import (
    BROKEN,
    EDGES,
    HOST_MEDIA,
    LEAVES,
    OVER,
    REFUSED,
    UNINSTALLED,
    Call,
    call_of,
    captured_of,
    groups_of,
    threads_of,
)
from verify.events import ANYBODY, Communicator, Confidence, Event, Site, State, pair_stream
from verify.events import Kind as What
from verify.readers.found import waits_for_nothing
from verify.readers.installed_call import UNCOUNTED, Item
from verify.readers.lines import brief

if TYPE_CHECKING:
    from kernel.record import Event as Entry
    from kernel.record import Recording
    from kernel.record.foreign import Group

KEEP: Final = 20_000
"""Finished calls of a rank that are kept, the newest ones; unfinished ones always are."""
FOREIGN: Final = "Dummy-"
"""How Python calls threads that it has not started."""
STORE: Final = "store: "
"""How a wait for a key of a store begins, as `Life` writes it."""
DTYPES: Final = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble", "float8_e4m3fn": "Float8_e4m3fn", "float8_e5m2": "Float8_e5m2",
}  # fmt: skip
"""As Flight Recorder names them."""
DECIDED: Final = "it decided last: "
_SITE: Final = re.compile(r"(?P<file>.+?):(?P<line>\d{1,9}) (?P<function>.*)", re.DOTALL)


@dataclass(eq=False)
class Ring:
    """See the module. recording: of the reading taken last; `take` goes on with a later one."""

    recording: Recording
    items: list[Item] = field(default_factory=list)
    items_by_number: dict[int, Item] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)
    """Thread -> number of the call that it waits for."""
    raised: dict[int, Entry] = field(default_factory=dict)
    """Thread -> the exception that ended it."""

    def __post_init__(self) -> None:
        recording = self.recording
        self.rank = recording.rank
        self.groups: dict[int, Group] = {}
        self.threads: dict[int, str] = {}
        size = recording.meta.get("size")
        self.everybody = set(range(size)) if isinstance(size, int) and 0 < size <= 1 << 20 else {self.rank}
        self.newest: Entry | None = None
        self.uninstalled = False
        self.leaves: Entry | None = None
        """The exit code or message by which the main thread leaves, unless it went on after that."""
        self.moved: dict[int, int] = {}
        """Thread -> time of its newest event."""
        self.over: set[int] = set()
        """Threads that have ended."""
        self._strings = 0
        self._troubles: list[str] = []
        self._parts: dict[tuple[Kind, int, int], list[int]] = {}
        self._launches: dict[int, list[Item]] = {}
        self._syncs: dict[int, Entry] = {}
        self._hosts: dict[int, list[Entry]] = {}
        self._sites: dict[str, Site | None] = {}
        self._comms: dict[tuple[int, str], Communicator] = {}
        self._edges, self._broken, self._lost, self._decision = False, False, 0, ""
        self._refusal = ""
        """Of the newest call that the backend refused."""
        self._last_sites: dict[int, str] = {}
        self.take(recording)

    def take(self, recording: Recording) -> None:
        """Take the events of a reading, all of them new (`kernel.record.RingFollower`)."""
        self.recording = recording
        if len(recording.strings) > self._strings:
            new, self._strings = recording.strings[self._strings :], len(recording.strings)
            self.threads |= threads_of(new)
            for number, group in groups_of(new).items():
                self.groups[number] = group
                self.everybody.update(group.ranks or ())
        for entry in recording.events:
            self._take(entry)
            self.moved[entry.epoch] = entry.time_ns
        if recording.events:
            self.newest = recording.events[-1]

    def forget(self, keep: int) -> None:
        """Drop finished calls but the newest `keep` of each channel."""
        kept: Counter[tuple[object, ...]] = Counter()
        items: list[Item] = []
        for item in reversed(self.items):
            channel = (item.group.number, item.call.peer, item.call.op if item.call.peer is not None else "")
            if item.done:
                kept[channel] += 1
            if not item.done or kept[channel] <= keep:
                items.append(item)
        if len(items) == len(self.items):
            return
        self.items = items[::-1]
        numbers = {item.number for item in items}
        self.items_by_number = {n: item for n, item in self.items_by_number.items() if n in numbers}
        self._launches = {number: mine for number, mine in self._launches.items() if number in numbers}

    @property
    def whole(self) -> bool:
        """Whether everything that can wait is in it, as far as can be told."""
        recording = self.recording
        tied = self._edges and any(not item.done and item.medium not in HOST_MEDIA for item in self.items)
        nameless = any(item.group.ranks is None for item in self.items if not item.done)
        cut = recording.torn or recording.truncated or self.uninstalled
        return not (cut or self._broken or self._lost or tied or nameless)

    # -- one by one -----------------------------------------------------------------------------------------------

    def _take(self, entry: Entry) -> None:
        thread = entry.epoch
        if entry.site:
            self._last_sites[thread] = entry.site
        if thread == 0 and entry.kind in (Kind.DECISION, Kind.CALL, Kind.REPLAY):
            self.leaves = entry if entry.kind is Kind.DECISION and entry.text.startswith(LEAVES) else None
        match entry.kind:
            case Kind.INPUTS | Kind.OUTPUTS | Kind.BASES:
                part = self._parts.setdefault((entry.kind, _group(entry), entry.seq), [])
                if entry.a == len(part):
                    part += map(int, entry.text.split(","))
            case Kind.CALL:
                self._call(entry)
            case Kind.REPLAY:
                self._replay(entry)
            case Kind.CALL_DONE:
                self._done(entry)
            case Kind.CALL_WAIT:
                self.waits[thread] = entry.a
            case Kind.CALL_WAITED:
                if self.waits.get(thread) == entry.a:
                    del self.waits[thread]
            case Kind.SYNC:
                self._syncs[thread] = entry
            case Kind.SYNCED:
                if (sync := self._syncs.pop(thread, None)) is not None:
                    for item in self._behind(sync):
                        item.done = True
            case Kind.JOINED:
                self._joined(entry)
            case Kind.TOGETHER:
                for item in reversed(self.items):
                    if item.number < entry.a:
                        break
                    if item.thread == thread:
                        item.together = entry.a
            case Kind.HOST_WAIT_ENTER:
                self._hosts.setdefault(thread, []).append(entry)
            case Kind.HOST_WAIT_LEAVE:
                if open_ := self._hosts.get(thread):
                    open_.pop()
            case Kind.EXCEPTION:
                self.raised[thread] = entry
            case Kind.DECISION if not entry.text.startswith(LEAVES):
                self._decision = f"{DECIDED}{entry.text[:200]}" + (f" (at {entry.site})" if entry.site else "")
            case Kind.MARK:
                self._edges |= entry.text == EDGES
                self.uninstalled |= entry.text == UNINSTALLED
                if entry.text == OVER and thread and thread not in self.raised:
                    self.over.add(thread)
                if entry.text.startswith(BROKEN):
                    self._broken = True
                    self._troubles.append(entry.text[:300])
            case _:
                pass

    def _call(self, entry: Entry) -> None:
        call, group = call_of(entry.text), self.groups.get(_group(entry))
        if call is None or group is None:
            self._lost += 1
            return
        ins = self._parts.pop((Kind.INPUTS, group.number, entry.seq), None)
        outs = self._parts.pop((Kind.OUTPUTS, group.number, entry.seq), None)
        self._add(
            Item(
                entry.number, entry.epoch, call, group, max(0, entry.seq - 1), _sizes(call.ins, entry.a, ins),
                _sizes(call.outs, entry.round, outs), call.stream, entry.site, entry.time_ns,
            )
        )  # fmt: skip

    def _replay(self, entry: Entry) -> None:
        captured = captured_of(entry.text)
        firsts = self._parts.pop((Kind.BASES, 0, entry.seq), None)
        strings = self.recording.strings
        stream = strings[entry.round] if 0 <= entry.round < len(strings) else ""
        if captured is None or firsts is None:
            self._lost += 1
            return
        counts: dict[tuple[object, ...], int] = {}
        for place, each in enumerate(captured):
            call = call_of(strings[each.call]) if each.call < len(strings) else None
            group = self.groups.get(each.group)
            if call is None or group is None:
                self._lost += 1
                continue
            tag = call.tag if call.medium in HOST_MEDIA else ""
            channel = (group.number,) if call.peer is None else (group.number, call.op, call.peer, tag)
            number = list({**counts, channel: 0}).index(channel)
            if number >= len(firsts):
                self._lost += 1
                continue
            sequence = counts.get(channel, firsts[number])
            counts[channel] = sequence + 1
            branch = stream if not each.branch else f"branch {each.branch} of graph launch {entry.number}"
            item = Item(
                entry.number, entry.epoch, call._replace(asynchronous=False), group, max(0, sequence - 1),
                _sizes(call.ins, each.taken, None), _sizes(call.outs, each.given, None), branch, entry.site,
                entry.time_ns, place,
            )  # fmt: skip
            self._add(item)
            self._launches.setdefault(entry.number, []).append(item)

    def _add(self, item: Item) -> None:
        self.items.append(item)
        self.items_by_number.setdefault(item.number, item)

    def _done(self, entry: Entry) -> None:
        one = self.items_by_number.get(entry.a)
        if entry.text.startswith(REFUSED):
            if one is not None:
                self._refused(one, entry.text.removeprefix(REFUSED))
            return
        for item in self._launches.get(entry.a) or ([] if one is None else [one]):
            item.done, item.failed, item.source = True, entry.text, entry.seq
        for thread, number in list(self.waits.items()):
            if number == entry.a:
                del self.waits[thread]

    def _refused(self, one: Item, why: str) -> None:
        """Take a call out that was never made: what its channel counted after it meets as one less."""
        self.items.remove(one)
        del self.items_by_number[one.number]
        for thread in [thread for thread, number in self.waits.items() if number == one.number]:
            del self.waits[thread]
        channel = _channel(one)
        for item in self.items:
            if item.number > one.number and _channel(item) == channel and item.sequence > one.sequence:
                item.sequence -= 1
        at = f" at {one.site}" if one.site else ""
        self._refusal = f"its {one.call.via or one.call.op}{at} was refused, and sent nothing: {brief(why)}"

    def _behind(self, sync: Entry) -> list[Item]:
        """What a wait for the device waits for."""
        found = []
        for item in self.items:
            if item.done or item.medium in HOST_MEDIA or item.number > sync.number:
                continue
            if sync.a and item.number >= sync.a:
                continue
            stream = "" if item.call.asynchronous else item.stream
            if sync.text == "device" or sync.text in (stream, *item.also):
                found.append(item)
        return found

    def _joined(self, entry: Entry) -> None:
        item = self.items_by_number.get(entry.a)
        if item is None:
            return
        # Only as long as nothing else stands between: an event edge holds for what comes after it.
        later = [each for each in self.items if each.number > item.number]
        if not any(entry.text in (each.stream, *each.also) and not each.done for each in later):
            item.also = (*item.also, entry.text)

    # -- as events ------------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """The calls, in the order in which the host made them."""
        waited = set(self.waits.values())
        anonymous = {(item.group.number, item.call.tag) for item in self.items if item.call.peer == -1}
        found: list[Event] = []
        excess = sum(item.done for item in self.items) - KEEP
        groups: dict[int, list[Event]] = {}
        for item in self.items:
            if item.done and excess > 0:
                excess -= 1
                continue
            event = self._event(item, item.number in waited, (item.group.number, item.call.tag) in anonymous)
            if event is None:
                continue
            if item.together is not None and not item.done:
                groups.setdefault(item.together, []).append(event)
                if len(groups[item.together]) > 1:
                    continue
                found.append(event)  # replaced below, when all parts are known
            else:
                found.append(event)
        for parts in groups.values():
            if len(parts) > 1:
                first = next(place for place, event in enumerate(found) if event is parts[0])
                found[first] = Event(
                    self.rank, What.GROUP, thread=parts[0].thread, parts=tuple(parts), site=parts[0].site,
                    state=parts[0].state,
                )  # fmt: skip
        return found

    def _event(self, item: Item, waited: bool, anonymous: bool) -> Event | None:
        call, group = item.call, item.group
        peer = call.peer if call.peer != -1 else item.source
        kind = What.COLLECTIVE if call.peer is None else What.SEND if call.op == "send" else What.RECV
        if kind is not What.COLLECTIVE and peer == -1:
            return None  # from nobody knows whom; `standing` tells the wait for it
        on_host = call.medium in HOST_MEDIA
        if kind is What.COLLECTIVE:
            stream = item.own if on_host else f"{group.name}'s own queue" if call.asynchronous else item.stream
        else:
            stream = item.own if on_host else f"{group.name} {pair_stream(self.rank, peer or 0)}"
        ours = (item.own,) if stream != item.own else ()
        uneven = call.op in UNCOUNTED
        return Event(
            self.rank,
            kind,
            call.op if kind is What.COLLECTIVE else "",
            thread=self._thread(item.thread),
            stream=stream,
            also=tuple(dict.fromkeys((*item.also, *ours))),
            medium=call.medium,
            communicator=self._communicator(group, call),
            peer=peer if kind is not What.COLLECTIVE else None,
            sequence=None if anonymous and kind is What.RECV else item.sequence,
            tag=(call.tag if call.peer is None else "") or (call.reduce if call.reduce != "SUM" else ""),
            sizes=None if uneven else item.outputs if kind is What.RECV else item.sizes,
            outputs=item.outputs if kind is What.COLLECTIVE else None,
            dtype=DTYPES.get(call.dtype, call.dtype) or None,
            root=call.root,
            splits=tuple(size for (size,) in item.sizes) if call.op == "all_to_all" and item.sizes else None,
            blocking=False,
            site=self.site(item.site),
            state=State.COMPLETED if item.done else State.SCHEDULED,
            failed=item.failed if item.done else "",
        )

    def host_wait(self, thread: int) -> Entry | None:
        """What a thread waits in that is no call: its device, a key of a store."""
        if (sync := self._syncs.get(thread)) is not None:
            return sync
        return self._hosts[thread][-1] if self._hosts.get(thread) else None

    def standing(self) -> list[Event]:
        """Where the threads stand, the main thread last; nothing for that one where it waits for nothing here."""
        found: list[Event] = []
        threads = {*self.waits, *self._syncs, *self._hosts, *self.raised, *(item.thread for item in self.items)}
        gone = {self._thread(thread) for thread in self.over} - {self._thread(thread) for thread in threads - self.over}
        found += [Event(self.rank, What.EXIT, thread=name, state=State.COMPLETED) for name in sorted(gone) if name]
        for thread in sorted(threads - self.over, reverse=True):
            name = self._thread(thread)
            if (raised := self.raised.get(thread)) is not None and thread not in self.waits:
                site = self.site(raised.site)
                found.append(
                    Event(self.rank, What.EXIT, raised.text, thread=name, site=site, state=State.COMPLETED)
                )
            elif (number := self.waits.get(thread)) is not None:
                found += self._waits_for(number, name)
            elif (sync := self._syncs.get(thread)) is not None:
                items = self._behind(sync)
                streams = tuple(item.own for item in items)
                what = f"a wait for {sync.text if sync.text != 'device' else 'its device'}, where no call is open"
                kind = What.WAIT if streams else What.EXTERNAL
                found.append(self._open(sync, kind, "" if streams else what, name, streams))
            elif open_ := self._hosts.get(thread):
                found.append(self._open(open_[-1], What.EXTERNAL, open_[-1].text, name))
            elif name and all(item.medium in HOST_MEDIA for item in self.items if item.thread == thread):
                found.append(waits_for_nothing(self.rank, name))
        return found

    def _open(self, entry: Entry, kind: What, what: str, thread: str, streams: tuple[str, ...] = ()) -> Event:
        site = self.site(entry.site)
        return Event(self.rank, kind, what, thread=thread, streams=streams, site=site, state=State.STARTED)

    def _waits_for(self, number: int, thread: str) -> list[Event]:
        item = self.items_by_number.get(number)
        if item is None:
            return [Event(self.rank, What.WAIT, thread=thread, state=State.STARTED, confidence=Confidence.INFERRED)]
        site = self.site(item.site)
        if item.call.peer == -1:
            return self._anybody(item, thread)
        return [Event(self.rank, What.WAIT, thread=thread, streams=(item.own,), site=site, state=State.STARTED)]

    def _anybody(self, item: Item, thread: str) -> list[Event]:
        """A recv from anybody: one from each member, of which any will do."""
        site = self.site(item.site)
        calls = [
            Event(
                self.rank, What.RECV, thread=thread, stream=f"{ANYBODY} {peer}", medium=item.medium,
                communicator=self._communicator(item.group, item.call), peer=peer, site=site, state=State.SCHEDULED,
                confidence=Confidence.INFERRED,
            )
            for peer in item.group.ranks or ()
            if peer != self.rank
        ]  # fmt: skip
        streams = tuple(call.stream for call in calls)
        wait = Event(self.rank, What.WAIT, thread=thread, streams=streams, any_of=True, site=site, state=State.STARTED)
        return [*calls, wait]

    # -- names ----------------------------------------------------------------------------------------------------

    def site(self, text: str) -> Site | None:
        """A call site, from its text."""
        if text not in self._sites:
            found = _SITE.fullmatch(text)
            self._sites[text] = Site(found["file"], int(found["line"]), found["function"]) if found else None
        return self._sites[text]

    def last_site(self) -> Site | None:
        """Where the main thread last did anything that the record shows."""
        return self.site(self._last_sites.get(0, ""))

    def called(self, thread: int) -> str:
        """The name of a thread, to begin a sentence about it with; nothing for the main one."""
        return f"thread {name} " if (name := self._thread(thread)) else ""

    def _thread(self, number: int) -> str:
        name = "" if number == 0 else self.threads.get(number, f"thread {number}")
        # No thread of Python's: one of autograd's, which works while the main thread waits for it.
        return "" if name.startswith(FOREIGN) else name

    def _communicator(self, group: Group, call: Call) -> Communicator:
        tag = call.tag if call.peer is not None and call.medium in HOST_MEDIA and call.tag != "0" else ""
        known = self._comms.get((group.number, tag))
        if known is None:
            name = f"{group.name} tag {tag}" if tag else group.name
            known = self._comms[group.number, tag] = Communicator(group.ranks or (self.rank,), name)
        return known

    @property
    def unknown(self) -> list[str]:
        """What it cannot tell, a line each."""
        recording, found = self.recording, list(self._troubles)
        if recording.dropped:
            found.append(f"{recording.dropped} older events are overwritten")
        if recording.torn or recording.truncated:
            cut = ", and the file is cut off" if recording.truncated else ""
            found.append(f"{recording.torn} events cannot be read{cut}")
        if self._lost:
            found.append(f"{self._lost} calls or graph launches cannot be read")
        if self.newest is None:
            found.append("its ring is empty")
        return found

    @property
    def remarks(self) -> list[str]:
        """What helps whoever looks at the rank."""
        return [text for text in (self._decision, self._refusal) if text]

    @property
    def decision(self) -> str:
        """The last one."""
        return self._decision.removeprefix(DECIDED)


def _channel(item: Item) -> tuple[object, ...]:
    """What a call is counted on, as its rank does."""
    call, group = item.call, item.group.number
    if call.peer is None:
        return (group,)
    return (group, call.op, call.peer, call.tag if call.medium in HOST_MEDIA else "")


def _group(entry: Entry) -> int:
    """The number of its group; the header of such a ring lists none."""
    text = entry.group.removeprefix("?")
    return int(text) if text.isdigit() else 0


def _sizes(count: int, total: int, each: list[int] | None) -> tuple[tuple[int, ...], ...] | None:
    """Sizes of `count` tensors that have `total` elements, all alike unless `each` is there."""
    if each is not None and len(each) == count:
        return tuple((size,) for size in each)
    return tuple(((total // count,),) * count) if count else None
