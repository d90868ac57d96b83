"""What a host thread stands in, by its stack: a collective, a wait for the device, a key of a store, or outside.

A stack shows where a thread is, not which communicator it uses nor which call of it this is. So a collective found here
has no members: whoever has other evidence of the rank (a dump, a record) joins the two by rank and operation.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from verify.events import Confidence, Event, Kind, State

if TYPE_CHECKING:
    from verify.events import Site
    from verify.readers.found import Stack

_C10D: Final = re.compile(r"torch[/\\]distributed[/\\](?:distributed_c10d|_functional_collectives|nn[/\\]functional)\b")
_LIBRARY: Final = re.compile(
    r"(?:^|[/\\])(?:site-packages|dist-packages|lib[/\\]python3[.\d]*|kernel[/\\]comm[/\\]tap|torch|asyncio|concurrent|multiprocessing)[/\\]"
    r"|^<|^(?:threading|queue|selectors|socket|ssl|subprocess|runpy|contextlib|functools|codecs|typing)\.py$"
    r"|\.so(?:\.[\d.]+)?$"
)
_COLLECTIVES: Final = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_object": "all_gather",
    "all_gather_coalesced": "all_gather",
    "_all_gather_base": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_object_list": "broadcast",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "reduce": "reduce",
    "gather": "gather",
    "gather_object": "gather",
    "scatter": "scatter",
    "scatter_object_list": "scatter",
    "new_group": "INIT",
    "split_group": "INIT",
    "init_process_group": "INIT",
    "destroy_process_group": "FIN",
}
"""Functions of torch.distributed -> words of the event model."""
_PAIRS: Final = {"send": Kind.SEND, "recv": Kind.RECV, "isend": Kind.SEND, "irecv": Kind.RECV}
_DEVICE_WAITS: Final = frozenset({"synchronize", "Event.synchronize", "Stream.synchronize"})
_NATIVE_DEVICE_WAITS: Final = re.compile(
    r"cuda(?:Stream|Device|Event)Synchronize|cu(?:Stream|Ctx|Event)Synchronize|THPVariable_(?:item|tolist)"
    r"|_local_scalar_dense"
)
_STORE: Final = re.compile(
    r"(?:^|[.:_ ])(?:TCPStore|PrefixStore|FileStore|HashStore)[.:]|store_based_barrier|_store_based"
)
_OUTSIDE: Final = re.compile(
    r"(?:^|\.)(?:sleep|read|readline|readlines|readinto|recv|recv_into|recvfrom|recv_multipart|send_multipart|accept"
    r"|connect|select|poll|open|acquire|join|wait|wait_for|get|put|communicate|urlopen|send|sendall|flock|fsync)$"
)


def stands_in(stack: Stack) -> Event | None:
    """What the thread is in, as an open event of its rank; None where the rank is unknown or the stack is empty.

    COLLECTIVE, SEND, RECV: a blocking call of torch.distributed, without members. WAIT for all streams: the host waits
    for the device. EXTERNAL: blocked in `operation`: a store, a lock, a file, a socket, or simply the function that
    it stands in. site: the innermost frame that is no library's. Everything is INFERRED: a stack is one moment.
    """
    if stack.rank is None or not stack.frames:
        return None
    site = own_frame(stack)
    kind, operation, streams = _standing(stack.frames)
    return Event(
        stack.rank,
        kind,
        operation,
        thread="" if stack.thread == "MainThread" else stack.thread,
        blocking=kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV),
        streams=streams,
        site=site,
        state=State.STARTED,
        confidence=Confidence.INFERRED,
    )


def own_frame(stack: Stack) -> Site | None:
    """The innermost frame outside libraries, else the innermost one."""
    for frame in stack.frames:
        if frame.line and not _LIBRARY.search(frame.file):
            return frame
    return stack.frames[0] if stack.frames else None


def _standing(frames: tuple[Site, ...]) -> tuple[Kind, str, tuple[str, ...]]:
    store = ""
    for frame in frames:
        function = frame.function.rsplit(".", 1)[-1]
        if _C10D.search(frame.file):
            # A group is made, and a store's barrier passed, inside calls that name themselves further out.
            if function in _COLLECTIVES:
                return Kind.COLLECTIVE, _COLLECTIVES[function], ()
            if function in _PAIRS:
                return _PAIRS[function], "", ()
            store = store or (function if _STORE.search(frame.function) else "")
        elif _STORE.search(frame.function):
            store = store or frame.function
        elif _NATIVE_DEVICE_WAITS.search(frame.function) or (
            frame.function in _DEVICE_WAITS and "cuda" in frame.file.replace("\\", "/").split("/")
        ):
            return Kind.WAIT, "", ("*",)
    if store:
        return Kind.EXTERNAL, f"store wait ({store})", ()
    native = next((frame for frame in frames if not frame.line and _OUTSIDE.search(frame.function)), None)
    if native is not None:
        return Kind.EXTERNAL, native.function, ()
    for frame in frames:
        if _OUTSIDE.search(frame.function):
            return Kind.EXTERNAL, frame.function, ()
        if not _LIBRARY.search(frame.file):
            return Kind.EXTERNAL, frame.function, ()
    return Kind.EXTERNAL, frames[0].function, ()
