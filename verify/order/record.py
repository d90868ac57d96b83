"""The queues of a run that was recorded: what each rank's host enqueued, as its ring tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from kernel.record import Kind, Recording, read_run
from kernel.request import Phase
from verify.blame import Class, Verdict
from verify.events import Communicator
from verify.order.queues import Builder, Orders, absentees
from verify.words import FIXES

if TYPE_CHECKING:
    import os

    from kernel.record import Event

RENDEZVOUS = "rendezvous"
"""The communicator of all ranks' exchanges, which hosts wait in."""


def from_record(run: str | os.PathLike[str] | Mapping[int, Recording], weights: tuple[int, int] = (1, 1)) -> Orders:
    """The queues of a run directory, or of its recordings by rank.

    A collective stands in the stream that it was put on, and a routed one in its own phase's as well. Rendezvous are
    instances in which hosts wait. Hosts' waits for D iterations and for P's device are edges. A graph's launch stands
    for its collectives; where its sequence numbers are lost they are left out, and the scope says so. An instance that
    a member may have called out of sight is `open`: before the oldest event that a ring has kept, or after the newest
    of one that was not closed. weights: room of a D and of a P kernel. Raises UsageError, one line, for a run without
    a usable ring, or rings of which none has a collective.
    """
    recordings = run if isinstance(run, Mapping) else read_run(run)
    reading = _Reading(recordings, weights)
    for rank in sorted(recordings):
        reading.rank(recordings[rank])
    return reading.finish()


class _Reading:
    def __init__(self, recordings: Mapping[int, Recording], weights: tuple[int, int]) -> None:
        self.builder = Builder(roles=True)
        self.recordings = recordings
        self.weights = dict(zip(Phase, weights, strict=True))
        everybody = {rank for each in recordings.values() for group in each.groups.values() for rank in group}
        self.everybody = Communicator(tuple(sorted(everybody | set(recordings))), RENDEZVOUS)
        self.seen: dict[tuple[int, int], tuple[int, int]] = {}
        """(rank, communicator) -> first and last sequence number in its ring."""
        self.skipped = 0

    def rank(self, recording: Recording) -> None:
        """Take one ring."""
        builder, rank = self.builder, recording.rank
        builder.rank(rank)
        for name in ("D", "P"):
            builder.queue(rank, name)
        submitted: dict[str, int] = {}
        label = ""
        next_of: dict[int, int] = {}
        for event in recording.events:
            match event.kind:
                case Kind.SUBMIT:
                    label = event.site
                case Kind.ENQUEUE:
                    call = (event.text, event.group, event.seq, event.a)
                    submitted[label] = self._call(recording, event, *call, next_of)
                case Kind.GRAPH_LAUNCH:
                    self._graph(recording, event, next_of)
                case Kind.EXCHANGE_ENTER:
                    comm = builder.communicator(self.everybody, 0)
                    self._saw(rank, comm, event.seq)
                    instance = builder.instance(comm, event.seq, event.text)
                    builder.orders.host.add(instance)
                    builder.enqueue(rank, ("host",), instance, label=event.text)
                    builder.wait(rank, instance, f"rendezvous {event.text}")
                case Kind.HOST_WAIT_LEAVE:
                    whole = event.text == "P device"
                    waited = builder.last(rank, "P") if whole else submitted.get(event.text)
                    if waited is not None:
                        builder.wait(rank, waited, f"host wait for {event.text}")

    def _graph(self, recording: Recording, event: Event, next_of: dict[int, int]) -> None:
        calls = recording.graph(event)
        self.skipped += not calls
        for op, group, size in calls:
            comm = self._communicator(recording, group, event.phase)
            known = next_of.get(comm, None if recording.dropped or recording.torn else 1)
            if known is None:
                self.skipped += 1
                continue
            self._call(recording, event, op, group, known, size, next_of)

    def _call(
        self, recording: Recording, event: Event, op: str, group: str, seq: int, size: int, next_of: dict[int, int]
    ) -> int:
        builder, rank = self.builder, recording.rank
        comm = self._communicator(recording, group, event.phase)
        next_of[comm] = seq + 1
        self._saw(rank, comm, seq)
        label = f"{op}[{size}]"
        instance = builder.instance(comm, seq, label)
        phase = str(event.phase) if event.phase is not None else event.stream
        # Event edges to and from the phase's own stream: it stands in both.
        names = (event.stream,) if event.stream == phase else (event.stream, phase)
        builder.enqueue(rank, names, instance, event.site, label)
        return instance

    def _communicator(self, recording: Recording, group: str, phase: Phase | None) -> int:
        members = recording.groups.get(group, (recording.rank,))
        return self.builder.communicator(Communicator(tuple(members), group), self.weights.get(phase or Phase.D, 1))

    def _saw(self, rank: int, comm: int, seq: int) -> None:
        first, last = self.seen.get((rank, comm), (seq, seq))
        self.seen[rank, comm] = (min(first, seq), max(last, seq))

    def finish(self) -> Orders:
        """The whole, with what of it is in sight."""
        orders = self.builder.finish()
        if not len(orders.comm):
            raise UsageError("no ring of this run has a collective: record more of it, with a larger ring")
        for instance, missing in absentees(orders).items():
            comm, seq = orders.comm[instance], orders.seq[instance]
            if all(self._out_of_sight(rank, comm, seq) for rank in missing):
                orders.open.add(instance)
        orders.found += self._members()
        orders.scope = self._scope(orders)
        return orders

    def _out_of_sight(self, rank: int, comm: int, seq: int) -> bool:
        recording = self.recordings.get(rank)
        if recording is None:
            return True
        span = self.seen.get((rank, comm))
        if recording.torn or recording.truncated:
            return True
        if span is None:
            return bool(recording.dropped) or recording.closed_ns is None
        return (bool(recording.dropped) and seq < span[0]) or (recording.closed_ns is None and seq > span[1])

    def _members(self) -> list[Verdict]:
        """Ranks that disagree about who is in a communicator."""
        found: list[Verdict] = []
        for rank, recording in sorted(self.recordings.items()):
            for name, members in recording.groups.items():
                for other in members:
                    theirs = self.recordings[other].groups.get(name) if other in self.recordings else members
                    if theirs != members:
                        sides = f"{list(members)} on rank {rank}", f"{list(theirs or ())} on rank {other}"
                        say = f"The members of {name} are {sides[0]}, but {sides[1]}."
                        found.append(Verdict(Class.MISMATCH, chain=sides, say=say, fix=FIXES["mismatch"]))
                        return found
        return found

    def _scope(self, orders: Orders) -> str:
        ranks = sorted(self.recordings)
        text = f"{len(ranks)} ranks as recorded: {len(orders.comm)} collectives and rendezvous, {orders.kernels} calls"
        cut = [rank for rank in ranks if self.recordings[rank].dropped]
        if cut:
            first = {rank: self.recordings[rank].dropped for rank in cut}
            told = ", ".join(f"rank {rank} from event {first[rank]} on" for rank in cut[:4])
            text += f"; older events are overwritten: {told}" + (f" and {len(cut) - 4} more" if len(cut) > 4 else "")
        if lost := [rank for rank in ranks if self.recordings[rank].torn or self.recordings[rank].truncated]:
            text += f"; the rings of ranks {lost} have unreadable events"
        if orders.open:
            text += f"; {len(orders.open)} are not whole in sight and are judged as far as they are seen"
        if self.skipped:
            text += f"; {self.skipped} graph launches or calls in them could not be numbered and are left out"
        absent = sorted(set(self.everybody.members) - set(ranks))
        return text + (f"; no ring of ranks {absent}" if absent else "")
