"""The black box of each rank: what it did, in order, readable from outside while it hangs and after it died."""

from kernel.record.follow import Look, RingFollower
from kernel.record.layout import HOST, Kind
from kernel.record.reader import Event, Recording, read, read_run
from kernel.record.writer import GraphCall, NullRecorder, Recorder, ring_path

__all__ = [
    "HOST",
    "Event",
    "GraphCall",
    "Kind",
    "Look",
    "NullRecorder",
    "Recorder",
    "Recording",
    "RingFollower",
    "read",
    "read_run",
    "ring_path",
]
