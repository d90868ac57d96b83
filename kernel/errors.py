"""Every error a person can meet, and when it is raised.

    TurnstileError
    ├── UsageError               unusable input: exit code 2
    │   ├── PackageMissing       a package that the chosen expert exchange needs is not installed
    │   ├── VersionMismatch      a package's version does not fit the others
    │   └── PeersDiffer          ranks built an expert exchange of different shapes
    ├── ProtocolError            the turnstile's rules were broken (rank, epoch, boundary)
    │   ├── StaleEpoch           an epoch older than the newest one was named
    │   ├── DuplicateEpoch       an epoch was activated while it, or another one, is open
    │   ├── MissingProducer      a boundary or a permit for an epoch that nobody publishes
    │   ├── NonMonotoneBoundary  a boundary at or below one already reached
    │   └── BeyondPermit         a boundary past the permitted endpoint
    ├── Divergence               ranks computed different plans, orders or tokens (rank, round, field)
    ├── OrderViolation           a collective was enqueued out of key order
    ├── PolicyError              a policy's own code raised (rank, round, file and line)
    ├── ModelError               model code awaited, skipped or reordered something it must not
    ├── ExchangeError            an expert exchange was used against its states (rank, epoch, layer)
    │   ├── DispatchPending      a second P dispatch while one is pending on the buffer
    │   ├── NotNotified          data submitted before the notification, or before its counts are there
    │   ├── NotPermitted         data submitted before the turnstile's permit
    │   ├── NotDispatched        a combine without a dispatch
    │   ├── BufferRetired        a buffer used after an operation was abandoned on it, before the quiescent point
    │   ├── NotQuiescent         a retired buffer cleaned while something of it is in flight
    │   ├── RowLimit             more rows than the exchange was built for
    │   ├── RowsChanged          another row limit than the one that fixes the buffer's layout
    │   ├── OddGraph             an odd number of low-latency operations in a graph, or between two replays
    │   └── StillHeld            state destroyed while a phase or a captured graph can reach it
    ├── LeaseExpired             a prefill result outlived the request that asked for it
    ├── HangFound                the live check found that the run hangs, and ended it
    ├── DeviceFault              a GPU ran out of memory, or reported an error (rank, phase, submission)
    └── RankLost                 a peer ended, or the run was aborted, while we waited for it

Each message is one line: what, where (rank, epoch, boundary, file and line) and what to do.
"""

from __future__ import annotations


class TurnstileError(Exception):
    """Base of all errors of this package."""


class UsageError(TurnstileError):
    """Input that cannot be used; the command ends with exit code 2."""


class PackageMissing(UsageError):
    """A package that the chosen expert exchange needs is not installed."""


class VersionMismatch(UsageError):
    """A package's version does not fit the others."""


class PeersDiffer(UsageError):
    """Ranks built an expert exchange of different shapes."""


class HangFound(TurnstileError):
    """The run hangs for certain, and was ended for that."""


class ProtocolError(TurnstileError):
    """A turnstile rule was broken.

    The message always names rank, epoch and boundary, so that logs of several ranks can be compared.
    """

    def __init__(self, what: str, *, rank: int, epoch: int, boundary: int) -> None:
        super().__init__(f"{what} (rank {rank}, epoch {epoch}, boundary {boundary})")
        self.rank, self.epoch, self.boundary = rank, epoch, boundary


class StaleEpoch(ProtocolError):
    """An epoch older than the newest one was named."""


class DuplicateEpoch(ProtocolError):
    """An epoch was activated while it, or another one, is open."""


class MissingProducer(ProtocolError):
    """A boundary or a permit for an epoch that nobody publishes."""


class NonMonotoneBoundary(ProtocolError):
    """A boundary at or below one already reached."""


class BeyondPermit(ProtocolError):
    """A boundary past the permitted endpoint."""


class Divergence(TurnstileError):
    """Ranks disagree about something that all of them must compute alike."""

    def __init__(self, ranks: tuple[int, ...], round_: int, field: str, detail: str) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(
            f"ranks diverged: rank {names} differs in {field} at round {round_}: {detail};"
            " a policy must derive its plan from the shared views and memory alone"
        )
        self.ranks, self.round, self.field = ranks, round_, field


class OrderViolation(TurnstileError):
    """A collective was enqueued with a key that does not increase on its stream."""


class PolicyError(TurnstileError):
    """A policy's own code raised."""


class ModelError(TurnstileError):
    """Model code awaited, skipped or reordered something it must not."""


class ExchangeError(TurnstileError):
    """An expert exchange was used against its states.

    The message always names rank, epoch (of D: its round, as `unit` says) and layer, and says what to do.
    """

    def __init__(
        self, what: str, *, rank: int, epoch: int, layer: int, instead: str, unit: str = "epoch"
    ) -> None:
        super().__init__(f"{what} (rank {rank}, {unit} {epoch}, layer {layer}): {instead}")
        self.rank, self.epoch, self.layer = rank, epoch, layer


class DispatchPending(ExchangeError):
    """A second P dispatch while one is pending on the buffer."""


class NotNotified(ExchangeError):
    """Data submitted before the notification, or before its counts are there."""


class NotPermitted(ExchangeError):
    """Data submitted before the turnstile's permit."""


class NotDispatched(ExchangeError):
    """A combine without a dispatch."""


class BufferRetired(ExchangeError):
    """A buffer used after an operation was abandoned on it, before the quiescent point."""


class NotQuiescent(ExchangeError):
    """A retired buffer cleaned while something of it is in flight."""


class RowLimit(ExchangeError):
    """More rows than the exchange was built for."""


class RowsChanged(ExchangeError):
    """Another row limit than the one that fixes the buffer's layout."""


class OddGraph(ExchangeError):
    """An odd number of low-latency operations in a graph, or between two replays."""


class StillHeld(ExchangeError):
    """State destroyed while a phase or a captured graph can reach it."""


class LeaseExpired(TurnstileError):
    """A prefill result outlived the request that asked for it."""


class DeviceFault(TurnstileError):
    """A GPU ran out of memory, or reported an error; the message names rank, phase and submission."""


class RankLost(TurnstileError):
    """A peer ended, or the run was aborted, while this rank waited for it."""


def shown(value: object) -> str:
    """A value in a message of one line, however long it is."""
    try:
        text = repr(value)
    except Exception:  # of a class of the caller's, or of more digits than Python writes
        return f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def said(error: BaseException) -> str:
    """What somebody's exception says, in one line that every file and terminal takes; "" where it cannot be told."""
    try:
        text = str(error)
    except BaseException:  # a __str__ of a policy's own may do anything
        return ""
    return " ".join(text.encode(errors="backslashreplace").decode().split())
