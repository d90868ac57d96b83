"""What DeepEP's kernels print when they time out: each line is an edge, a rank that waits for another one.

    DeepEP dispatch NVL receiver timeout, channel: 3, RDMA: 0, nvl: 1, src RDMA: 1, src nvl: 5, start: 0, end: 0
    DeepEP timeout check failed: rank = 3, thread = 0, value = 1024)          rank 3 waits in a barrier for peer 0
    DeepEP combine (scale-up wait) timeout, scale-out: 0/2, scale-up: 3/8, channel: 1, lane: 5, recv: 0, tail: 0

A rank of the internode kernels is (RDMA, nvl), node-major, with eight GPUs a node, as those kernels require. Lines that
do not name both sides are counted and said, and give a rank that is in a kernel, with nobody to wait for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import networkx as nx

from verify.events import Communicator, Confidence, Event, Kind, State
from verify.readers.attempts import present_lines, restarted
from verify.readers.found import Found
from verify.readers.lines import MOST, holds, named, rank_in, unusable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WHAT: Final = "DeepEP log"
NVL: Final = 8
"""GPUs of a node in the internode kernels (NUM_MAX_NVL_PEERS)."""
NEEDLES: Final = (b"DeepEP",)
_N = r"(\d{1,6})"
_LINE = re.compile(r"DeepEP(?:\[[^\]]{1,20}\])? [^\n]{0,80}?timeout")
_PHASE = re.compile(r"\b(dispatch|combine|notify|barrier)\b")
_NODE = re.compile(rf"(?<!src )(?<!dst )RDMA: {_N}, (?:nvl|NVL): {_N}")
_SOURCE = re.compile(rf"src RDMA: {_N}, src (?:nvl|NVL): {_N}")
_SOURCE_NVL = re.compile(rf"src (?:nvl|NVL): {_N}")
_SOURCE_LANE = re.compile(rf"src RDMA(?: lane)?: {_N}")
_TARGET_LANE = re.compile(rf"dst RDMA(?: lane)?: {_N}")
_BARRIER = re.compile(rf"timeout check failed: rank = {_N}, thread = {_N}")
_LOW_LATENCY = re.compile(rf"rank:? ?=? ?{_N}\b.{{0,80}}?src(?:_| )rank:? ?=? ?{_N}")
_SCALE = re.compile(rf"scale-out: {_N}/{_N}, scale-up: {_N}/{_N}(?:, channel: \d{{1,6}}, lane: {_N})?")
_RANK = re.compile(rf"\brank:? ?=? ?{_N}")


class DeepEPReader:
    """See the module."""

    name = "deepep"

    def recognises(self, path: Path, head: bytes) -> bool:
        """A text file with a timeout of DeepEP anywhere in it."""
        return holds(path, head, (b"DeepEP timeout", b"timeout, channel:", b"(scale-up wait) timeout"))

    def read(self, path: Path) -> Found:
        """The edges of one log. Raises UsageError for one without any."""
        return self.read_all([path])

    def read_all(self, paths: Sequence[Path]) -> Found:
        """Those of the logs of one job: a rank that others wait for may say in its own log that it is there."""
        edges: dict[tuple[int, int, str], None] = {}
        alone: dict[tuple[int, str], None] = {}
        nameless = 0
        for path in paths:
            lines = 0
            for _, line in present_lines(WHAT, path, NEEDLES):
                if lines >= MOST or not _LINE.search(line):
                    continue
                lines += 1
                phase = found[1] if (found := _PHASE.search(line)) else "barrier"
                waiter, peer = edge_of(line)
                waiter = rank_in(line, path) if waiter is None else waiter
                if waiter is None:
                    nameless += 1
                elif peer is None or peer == waiter:
                    alone[waiter, phase] = None
                else:
                    edges[waiter, peer, phase] = None
            if not lines and not restarted(path):
                raise unusable(WHAT, path, "no timeout of DeepEP in it", "give the stdout of the ranks")
        return _found(named(paths), list(edges), list(alone), nameless)


READER = DeepEPReader()


def edge_of(line: str) -> tuple[int | None, int | None]:
    """(rank that waits, rank that it waits for) of a line; None for a side that it does not name."""
    if found := _BARRIER.search(line):
        return int(found[1]), int(found[2])
    if found := _SCALE.search(line):
        _, _, up, ups, lane = found.groups()
        waiter = int(found[1]) * int(ups) + int(up)
        # In a wait of the scale-up domain the lane is the peer there; elsewhere it is a slot of the kernel's own.
        near = "scale-up" in line.partition("timeout")[0] and lane is not None and int(lane) < int(ups)
        return waiter, int(found[1]) * int(ups) + int(lane) if near and lane is not None else None
    if found := _NODE.search(line):
        node, gpu = int(found[1]), int(found[2])
        if gpu >= NVL:
            return None, None
        waiter = node * NVL + gpu
        if source := _SOURCE.search(line):
            return waiter, int(source[1]) * NVL + int(source[2]) if int(source[2]) < NVL else None
        if source := _SOURCE_LANE.search(line) or _TARGET_LANE.search(line):
            # Between nodes a GPU talks to the one of its own number.
            return waiter, int(source[1]) * NVL + gpu
        if source := _SOURCE_NVL.search(line):
            return waiter, node * NVL + int(source[1]) if int(source[1]) < NVL else None
        return waiter, None
    if found := _LOW_LATENCY.search(line):
        return int(found[1]), int(found[2])
    return (int(found[1]), None) if (found := _RANK.search(line)) else (None, None)


def _together(edges: Sequence[tuple[int, int, str]]) -> list[tuple[str, tuple[int, ...]]]:
    """Phase and ranks that wait in a ring within it: all of them are in that call, so that no order keeps them."""
    phases: dict[str, nx.DiGraph[int]] = {}
    for waiter, peer, phase in edges:
        phases.setdefault(phase, nx.DiGraph()).add_edge(waiter, peer)
    return sorted(
        (phase, tuple(sorted(ring)))
        for phase, graph in phases.items()
        for ring in nx.strongly_connected_components(graph)
        if len(ring) > 1
    )


def _found(source: str, edges: list[tuple[int, int, str]], alone: list[tuple[int, str]], nameless: int) -> Found:
    events = []
    together = _together(edges)
    for phase, members in together:
        events += [
            Event(
                rank,
                Kind.COLLECTIVE,
                phase,
                stream=f"DeepEP {phase} {members}",
                medium="deepep",
                communicator=Communicator(members, f"DeepEP {phase}"),
                sequence=0,
                state=State.STARTED,
            )
            for rank in members
        ]
    here = {(phase, rank): members for phase, members in together for rank in members}
    for waiter, peer, phase in sorted(edges):
        if (members_ := here.get((phase, waiter))) is not None and members_ == here.get((phase, peer)):
            continue
        events.append(
            Event(
                waiter,
                Kind.RECV,
                phase,
                # Its own queue: the channels of a kernel wait beside each other.
                stream=f"DeepEP {phase} {waiter}<-{peer}",
                medium="deepep",
                communicator=Communicator((min(waiter, peer), max(waiter, peer)), f"DeepEP {phase}"),
                peer=peer,
                sequence=0,
                state=State.STARTED,
            )
        )
    unknown = [f"{source}: how many calls of DeepEP came before is not in it"]
    lonely = sorted({rank for rank, _ in alone} - {waiter for waiter, _, _ in edges})
    events += [
        Event(
            rank,
            Kind.EXTERNAL,
            f"a DeepEP {phase} kernel",
            medium="deepep",
            state=State.STARTED,
            confidence=Confidence.INFERRED,
        )
        for rank, phase in sorted(alone)
        if rank in lonely
    ]
    if lonely:
        unknown.append(f"{source}: the lines of rank {', '.join(map(str, lonely[:8]))} do not say whom it waits for")
    if nameless:
        unknown.append(f"{source}: {nameless} lines name no rank")
    present = frozenset({waiter for waiter, _, _ in edges} | {rank for rank, _ in alone})
    expected = present | {peer for _, peer, _ in edges}
    return Found(
        source, events=tuple(events), present=present, expected=expected, unknown=tuple(unknown), overdue=present
    )  # fmt: skip
