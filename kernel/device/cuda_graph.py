"""One captured CUDA graph of a phase: stable addresses, replayed on the stream that it was captured for."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class CudaGraph:
    """A graph of `stream`'s work. pool: memory shared with other graphs of the same stream; None for a pool of its own.

    Graphs that share a pool may overwrite each other's results: read one's before the next is replayed. Everything that
    the graph reads or writes must outlive it. Its communicators cannot be closed while it exists: `reset` it first.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any = None) -> None:
        self._stream, self._shared = stream, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        self.ended: list[Callable[[], object]] = []
        """Called once it is gone: by those whose memory it holds pointers into."""

    def capture(self, body: Callable[[], T]) -> T:
        """Run `body` once with the stream capturing: nothing runs on the device; its result has the graph's addresses.

        Whatever `body` uses must have run before (modules loaded, communicators warm). It must enqueue on the current
        stream only, or on streams that fork from it and join it again, and must neither wait nor copy from pageable
        memory. Other threads may go on using the GPU. Raises what `body` raised, and UsageError for a second capture.
        """
        if self._graph is not None:
            raise UsageError("a graph is captured once: make another one")
        graph = torch.cuda.CUDAGraph()
        failure: BaseException | None = None
        # Blocks that other streams still use cannot be taken during capture, and what runs would be waited for later.
        torch.cuda.synchronize(self._stream.device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._shared, capture_error_mode="thread_local")
            try:
                result = body()
            except BaseException as error:
                failure = error
            try:
                with warnings.catch_warnings():
                    if failure is not None:
                        warnings.simplefilter("ignore")  # that nothing was captured
                    graph.capture_end()
            except RuntimeError as error:
                # A body that failed has often broken the capture too: what it said itself is the better message.
                failure = failure or error
        if failure is not None:
            raise failure
        self._graph, self._result = graph, result
        return result

    def replay(self) -> None:
        """Launch the graph on its stream."""
        assert self._graph is not None, "a graph is replayed before it was captured"
        with torch.cuda.stream(self._stream):
            self._graph.replay()

    @property
    def captured(self) -> bool:
        """Whether there is something to replay."""
        return self._graph is not None

    @property
    def pool(self) -> Any:
        """The graph's memory pool, for the next graph of the same stream."""
        if self._graph is not None:
            return self._graph.pool()
        return self._shared

    def reset(self) -> None:
        """Drop the graph and its result. Idempotent; one that is running just now ends first."""
        graph, self._graph, self._result = self._graph, None, None
        if graph is not None:
            graph.reset()
            for tell in self.ended:
                tell()
