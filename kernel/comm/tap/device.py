"""Wrappers of what synchronises host and device, and of CUDA graphs: a capture lists its calls, a launch names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from kernel.record.foreign import EDGES, Captured, graph_text
from kernel.record.layout import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.comm.tap.notes import Channel, Known, Note, Notes
    from kernel.comm.tap.patches import Patches
    from kernel.comm.tap.watch import Watch
    from kernel.record.foreign import Call


class Graph:
    """A graph that was captured, or is being. calls: in order; channels: what their numbers are counted on."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.branches = {stream: 0}
        self.calls: list[Captured] = []
        self.channels: dict[Channel, int] = {}
        self.groups: list[Known] = []
        self.text = 0
        self.launches = 0


class Device:
    """Notes waits for CUDA devices, and graphs. Where there is no CUDA, nothing of it is ever called."""

    def __init__(self, notes: Notes, watch: Watch) -> None:
        self.notes, self.watch, self.local = notes, watch, notes.local
        self.off = False
        self._streams: dict[int, str] = {}
        self._capturing: Graph | None = None
        """The graph that this process captures: CUDA allows one at a time in most modes, and so do we."""
        self._graphs: WeakKeyDictionary[Any, Graph] = WeakKeyDictionary()
        self._events: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()
        self._edges = False

    def put(self, patches: Patches) -> None:
        """Wrap torch.cuda's functions and classes."""
        cuda = torch.cuda
        patches.function(cuda, "synchronize", self._synchronize)
        for name, wrap in (
            ("synchronize", self._stream_synchronize),
            ("wait_event", self._edge),
            ("wait_stream", self._edge),
        ):
            patches.method(cuda.Stream, name, wrap)
        for name, wrap in (("record", self._records), ("synchronize", self._event_synchronize), ("wait", self._edge)):
            patches.method(cuda.Event, name, wrap)
        for name, wrap in (("capture_begin", self._begin), ("capture_end", self._end), ("replay", self._replay)):
            patches.method(cuda.CUDAGraph, name, wrap)

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self._capturing is not None

    # -- streams --------------------------------------------------------------------------------------------------

    def stream(self, stream: Any = None) -> str:
        """The name of a stream in this record, of the current one if none is given."""
        handle = (torch.cuda.current_stream() if stream is None else stream).cuda_stream
        name = self._streams.get(handle)
        if name is None:
            number = len(self._streams) + 1
            name = self._streams[handle] = f"stream {number}" if handle else "the default stream"
        return name

    def launched(self, note: Note) -> None:
        """A call was put on a stream: learn when it is over."""
        if not note.on_host and note.call.stream and not note.call.asynchronous:
            self.watch.mark(note)

    def joined(self, note: Note) -> None:
        """The current stream waits for a call, and so does what is put there from now on."""
        if note.call.stream and note.call.asynchronous:
            text = self.notes.recorder.site(self.stream())
            self.notes.event(Kind.JOINED, epoch=self.notes.thread(), a=note.number, b=text)
            self.watch.mark(note)

    # -- waits ----------------------------------------------------------------------------------------------------

    def _waiting(self, original: Any, args: Any, named: Any, what: Callable[[], tuple[str, int]]) -> Any:
        number = text = None
        try:
            if not self.off:
                where, before = what()
                text = self.notes.recorder.site(where)
                site = self.notes.site()[0]
                number = self.notes.event(Kind.SYNC, epoch=self.notes.thread(), a=before, b=text, site=site)
        except Exception as error:
            self.notes.broken("a wait for the device", error)
        result = original(*args, **named)
        if number is not None and text is not None:
            # After an exception the device is broken, and the wait stays open.
            self.notes.event(Kind.SYNCED, epoch=self.notes.thread(), a=number, b=text)
        return result

    def _synchronize(self, original: Any) -> Callable[..., Any]:
        return lambda *args, **named: self._waiting(original, args, named, lambda: ("device", 0))

    def _stream_synchronize(self, original: Any) -> Callable[..., Any]:
        return lambda *args, **named: self._waiting(original, args, named, lambda: (self.stream(args[0]), 0))

    def _event_synchronize(self, original: Any) -> Callable[..., Any]:
        return lambda *args, **named: self._waiting(
            original, args, named, lambda: self._events.get(args[0], ("an event recorded elsewhere", 0))
        )

    def _records(self, original: Any) -> Callable[..., Any]:
        def record(event: Any, *args: Any, **named: Any) -> Any:
            result = original(event, *args, **named)
            try:
                if not self.off and not self.watch.mine:
                    given = args[0] if args else named.get("stream")
                    self._events[event] = (self.stream(given), self.notes.newest)
            except Exception as error:
                self.notes.broken("an event", error)
            return result

        return record

    def _edge(self, original: Any) -> Callable[..., Any]:
        def edge(*args: Any, **named: Any) -> Any:
            if not self._edges and not self.off:
                self._edges = True
                self.notes.say(Kind.MARK, EDGES)
            return original(*args, **named)

        return edge

    # -- graphs ---------------------------------------------------------------------------------------------------

    def captures(self, known: Known, call: Call, taken: int, given: int) -> bool:
        """Whether a call becomes part of a graph instead of being made; it is listed there then."""
        graph = self._capturing
        if graph is None or not torch.cuda.is_current_stream_capturing():
            return False
        branch = graph.branches.setdefault(call.stream, len(graph.branches))
        if call.asynchronous:
            branch = graph.branches.setdefault(f"{call.stream} {len(graph.calls)}", len(graph.branches))
        channel = self.notes.channel(known, call)
        if channel not in graph.channels:
            graph.groups.append(known)
        graph.channels[channel] = graph.channels.get(channel, 0) + 1
        graph.calls.append(self.notes.captured(known, call, taken, given, branch))
        return True

    def _begin(self, original: Any) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **named: Any) -> Any:
            # Nobody may ask for events of this device while a capture is on.
            with self.watch.paused():
                result = original(graph, *args, **named)
                self.watch.capturing = True
            try:
                if not self.off:
                    self._capturing = Graph(self.stream())
            except Exception as error:
                self.notes.broken("a capture", error)
            return result

        return capture_begin

    def _end(self, original: Any) -> Callable[..., Any]:
        def capture_end(graph: Any, *args: Any, **named: Any) -> Any:
            mine, self._capturing = self._capturing, None
            try:
                result = original(graph, *args, **named)
            finally:
                self.watch.capturing = False
            try:
                if mine is not None and not self.off:
                    mine.text = self.notes.recorder.site(graph_text(mine.calls))
                    site = self.notes.site()[0]
                    self.notes.event(Kind.GRAPH_CAPTURE, epoch=self.notes.thread(), b=mine.text, site=site)
                    self._graphs[graph] = mine
            except Exception as error:
                self.notes.broken("a capture", error)
            return result

        return capture_end

    def _replay(self, original: Any) -> Callable[..., Any]:
        def replay(graph: Any, *args: Any, **named: Any) -> Any:
            number = None
            try:
                mine = None if self.off else self._graphs.get(graph)
                if mine is not None and mine.calls:
                    number = self._launch(mine)
            except Exception as error:
                self.notes.broken("a graph launch", error)
            result = original(graph, *args, **named)
            if number is not None:
                self.watch.launch(number)
            return result

        return replay

    def _launch(self, graph: Graph) -> int:
        graph.launches += 1
        bases = self.notes.bases(graph.channels, graph.groups)
        self.notes.recorder.sizes(0, graph.launches, bases, Kind.BASES)
        stream = self.notes.recorder.site(self.stream())
        site = self.notes.site()[0]
        number = self.notes.event(
            Kind.REPLAY, seq=graph.launches, round_=stream, epoch=self.notes.thread(), b=graph.text, site=site
        )
        self.notes.newest = number + 1
        return number
