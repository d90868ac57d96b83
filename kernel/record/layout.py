"""The bytes of a ring file, format 1. Writer and reader share nothing else.

    preamble   64 bytes: magic, format, sizes, checksum, and the two numbers that change
    header     JSON: rank, pid, host, boot id, clock anchor, group table, meta (world, policy, versions, ...)
    strings    call sites and names, appended: u32 length, then UTF-8. Their ids count from 1; 0 is "".
    events     `capacity` slots of 72 bytes; the stamp of event n is n + 1, its slot is stamp % capacity

All numbers are little-endian. A slot starts and ends with its stamp: the first field written and the last one, so
that a reader tells a slot that is being overwritten from a whole one. Strings stay for the life of the file, so a ring
that has wrapped still names its call sites and the collectives of its graphs. A string that begins with `FORM` is a
form: the event that names it fills in its own numbers, or the labels of a long run would fill the table.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from kernel.request import Phase

MAGIC: Final = b"TURNRING"
FORMAT: Final = 1
MAX_CAPACITY: Final = 1 << 22
MAX_HEADER: Final = 1 << 22
ORPHANED: Final = "the launcher has ended"
"""How the exception ends by which a rank gives up that has lost its launcher."""
MAX_STRINGS: Final = 1 << 26
MAX_STRING: Final = 1 << 18
"""Bytes of one string; longer ones are cut."""

PREAMBLE: Final = struct.Struct("<8sHHIIIQ")
"""magic, format, event size, capacity, header bytes, string bytes, events offset: fixed when the file is made."""
CRC_AT: Final = 32
"""u32: CRC-32 of the preamble above and the header."""
USED_AT: Final = 40
"""u64: bytes of the string table that hold whole entries."""
CLOSED_AT: Final = 48
"""u64: monotonic nanoseconds of `close`, 0 before it."""
BEAT_AT: Final = 56
"""u64: monotonic nanoseconds at which a thread of the process last ran Python to say so; 0 where none does."""
HEADER_AT: Final = 64
WORD: Final = struct.Struct("<Q")
LENGTH: Final = struct.Struct("<I")

EVENT: Final = struct.Struct("<QQqqqQQIHBBQ")
"""stamp, time_ns, seq, round, epoch, a, b, site, group, kind, lane, stamp."""
KIND_AT: Final = 62
"""Offset of an event's kind in its slot."""
SIZES: Final = struct.Struct("<QQq8IIHBBQ")
"""An event of kind SIZES: stamp, time_ns, seq, 8 sizes, member, group, kind, how many, stamp."""

HOST: Final = "host"
"""The stream of events that no device stream carries."""

FORM: Final = "\x1f"
PLACES: Final = ("{round}", "{epoch}", "{a}", "{b}")

PHASE_BITS: Final[dict[str | None, int]] = {None: 0, Phase.D: 1, Phase.P: 2}
STREAM_BITS: Final[dict[str, int]] = {HOST: 0, "D": 4, "P": 8}
LANES: Final[dict[int, tuple[Phase | None, str]]] = {
    bits | stream: (None if phase is None else Phase(phase), role)
    for phase, bits in PHASE_BITS.items()
    for role, stream in STREAM_BITS.items()
}
"""What the lane byte of an event says: its phase, and the stream it was put on."""


class Kind(IntEnum):
    """What happened, and what `a` and `b` hold. `text` means that b is the id of a string (`Recorder.site`)."""

    ENQUEUE = 1
    """The host put a collective on a stream. a: logical size, the same on all members; text: operation, as "AR"."""
    START = 2
    """That collective (same group and seq) started on the device. a, text as before."""
    FINISH = 3
    """It finished on the device. a, text as before."""
    SIZES = 4
    """Rows that each member sends this rank in a collective with uneven parts; written by `Recorder.sizes`. Before its
    START, and before its ENQUEUE too unless the segment holds it that the counts arrive in."""
    SUBMIT = 10
    """The host enqueued a D iteration (a: bucket, b: this rank's rows) or a P segment (boundaries [a, b))."""
    WORK_START = 11
    """It started on the device. a, b as before."""
    WORK_FINISH = 12
    """It finished on the device. a, b as before."""
    GRAPH_CAPTURE = 20
    """A graph was captured. text: its collectives (`Recorder.graph`), which its launches refer to."""
    GRAPH_LAUNCH = 21
    """A graph was launched. text as before; a: launches of it so far."""
    EXCHANGE_ENTER = 30
    """This rank arrived at an all-rank rendezvous. seq: how many there were; text: its tag."""
    EXCHANGE_LEAVE = 31
    """All ranks have arrived. seq, text as before."""
    BOUNDARY = 40
    """P stands at boundary a."""
    PERMIT = 41
    """P was permitted the segment [a, b)."""
    PLAN = 42
    """The plan of this round. a: digest; b: D's common bucket (0: no D); epoch: the one it activates, or -1."""
    PROMOTE = 43
    """The results of an epoch became decodable. a: how many."""
    NO_WORK = 44
    """The matched no-work call of a rank that has nothing to do in this phase."""
    HOST_WAIT_ENTER = 50
    """The host waits. text: who owns what it waits for, as "rank 2" or "event of P e3 [4,8)"."""
    HOST_WAIT_LEAVE = 51
    """The wait is over. text as before."""
    TOKEN = 60
    """A token was committed. a: request; b: token id."""
    EXCEPTION = 61
    """Something was raised. text: its type and message."""
    MARK = 62
    """A remark. text: what."""

    # What `turnstile.record.install` writes, of programs that are not ours. In these, and in every other event of such
    # a ring, epoch is the number of the thread; `kernel.record.foreign` says how the texts read.
    CALL = 70
    """A call of torch.distributed, before it is made. seq: its number in its channel; text: `foreign.Call`; a: elements
    that go in; round: elements that come out."""
    CALL_DONE = 71
    """It is over. a: number of its CALL or REPLAY; text: why it failed, or "". seq: rank that it came from, or -1."""
    INPUTS = 72
    """Elements of each input, or for each member, where they differ; before its CALL. Laid out as SIZES."""
    OUTPUTS = 73
    """The same of outputs."""
    CALL_WAIT = 74
    """The host waits for a call. a: number of its CALL."""
    CALL_WAITED = 75
    """It goes on. a as before. Whether the call is over, CALL_DONE says."""
    SYNC = 76
    """The host waits for its device. text: stream, or "device"; a: what was enqueued before this event only, 0: all."""
    SYNCED = 77
    """Everything that was enqueued there before SYNC is over. text as before; a: number of SYNC."""
    TOGETHER = 78
    """The calls since event a of this thread were launched as one."""
    DECISION = 79
    """Something that this rank decided by itself. text: what."""
    REPLAY = 80
    """A CUDA graph was launched. text: `foreign.graph_text`; round: id of the stream's name; seq: launches so far."""
    BASES = 82
    """Numbers of the first calls of a REPLAY, before it, one for each channel in order of appearance. As SIZES."""
    JOINED = 81
    """What is enqueued from now on in a stream comes after a call. a: number of its CALL; text: the stream."""


TEXTS: Final = frozenset(
    {
        Kind.ENQUEUE,
        Kind.START,
        Kind.FINISH,
        Kind.GRAPH_CAPTURE,
        Kind.GRAPH_LAUNCH,
        Kind.EXCHANGE_ENTER,
        Kind.EXCHANGE_LEAVE,
        Kind.HOST_WAIT_ENTER,
        Kind.HOST_WAIT_LEAVE,
        Kind.EXCEPTION,
        Kind.MARK,
        Kind.CALL,
        Kind.CALL_DONE,
        Kind.SYNC,
        Kind.SYNCED,
        Kind.DECISION,
        Kind.REPLAY,
        Kind.JOINED,
    }
)
"""Kinds whose b is the id of a string."""
LISTS: Final = frozenset({Kind.SIZES, Kind.INPUTS, Kind.OUTPUTS, Kind.BASES})
"""Kinds that are laid out as `SIZES`."""
