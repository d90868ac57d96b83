"""Messages between the engine and its ranks: a length, then JSON, over a stream socket that only they hold. What every
decode iteration sends, the outputs, are records of fixed size instead.

Engine to rank: the configuration, then inbox entries. A rank that does not own a request's replica gets a placeholder
that counts as an entry, so prompts travel only where they are used. Rank to engine: ready, outputs, failed.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kernel.errors import RankLost, TurnstileError
from kernel.inbox import Abort, EndSession, Entry, Flush, Pause, Resume, Stop, Submit, UpdateWeights, UsePolicy
from kernel.request import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.replica import Output

_LENGTH = struct.Struct("<I")
_LIMIT = 1 << 28
_OUTPUT = struct.Struct("<qidBiq")
_OUTPUTS = b"\x01"
"""Before such records; JSON begins with a brace."""
_FINISH = ("", "stop", "length", "abort", "weights", "policy")
_FINISHES = {name: number for number, name in enumerate(_FINISH)}

_KINDS: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (Abort, EndSession, Flush, Pause, Resume, Stop, UpdateWeights, UsePolicy)
}  # fmt: skip


def pack(message: dict[str, Any]) -> bytes:
    """One message, ready to be written."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def pack_outputs(outputs: Sequence[tuple[Output, int]]) -> bytes:
    """Outputs, each with the time at which it was committed, in monotonic nanoseconds, ready to be written.

    What is read is {"outputs": [(request, token, logprob, finish, cached, time)]}.
    """
    fields: list[Any] = []
    for (request, token, logprob, finish, cached), stamp in outputs:
        fields += (request, token, logprob, _FINISHES[finish], cached, stamp)
    body = _outputs_of(len(outputs)).pack(*fields)
    return _LENGTH.pack(1 + len(body)) + _OUTPUTS + body


@lru_cache(maxsize=256)
def _outputs_of(count: int) -> struct.Struct:
    return struct.Struct("<" + count * _OUTPUT.format[1:])


def _outputs(body: memoryview) -> list[tuple[int, int, float, str, int, int]]:
    return [
        (request, token, logprob, _FINISH[finish], cached, stamp)
        for request, token, logprob, finish, cached, stamp in _OUTPUT.iter_unpack(body)
    ]


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message, None at the end of the stream. Raises TurnstileError on a message that is too long."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > _LIMIT:
            raise TurnstileError(f"a control message of {length} bytes: the peer is not one of our ranks")
        body = await reader.readexactly(length)
        if body.startswith(_OUTPUTS):
            return {"outputs": _outputs(memoryview(body)[1:])}
        message: dict[str, Any] = json.loads(body)
    except (asyncio.IncompleteReadError, OSError):  # a host that is gone is a time-out
        return None
    return message


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """An inbox entry as a message."""
    if isinstance(entry, Submit):
        return {"entry": "Submit", **asdict(entry.request)}
    return {"entry": type(entry).__name__, **asdict(entry)}


def placeholder(entry: Submit) -> dict[str, Any]:
    """A Submit for ranks of other replicas: it only counts."""
    return {"entry": "Submit", "id": entry.request.id, "replica": entry.request.replica}


def entry_from_json(message: dict[str, Any]) -> Entry:
    """The inverse; a placeholder becomes a request without a prompt, which no rank of its replica ever sees."""
    kind = message.pop("entry")
    if kind != "Submit":
        entry: Entry = _KINDS[kind](**message)
        return entry
    params = message.get("params", {})
    params["stop_token_ids"] = tuple(params.get("stop_token_ids", ()))
    return Submit(
        Request(
            id=message["id"],
            session=message.get("session", -1),
            replica=message["replica"],
            prompt=tuple(message.get("prompt", ())),
            params=SamplingParams(**params),
        )
    )


def failure(rank: int, message: dict[str, Any]) -> TurnstileError:
    """The error that a rank's last message stands for."""
    if "lost" in message:
        return RankLost(message["lost"])
    import kernel.errors

    kind = getattr(kernel.errors, message.get("failed", ""), None)
    text = message.get("message", f"rank {rank} sent {message}")
    if "trace" in message:
        print(message["trace"], file=sys.stderr, end="")
    error = TurnstileError(text)
    if isinstance(kind, type) and issubclass(kind, TurnstileError):
        error = kind.__new__(kind)
        error.args = (text,)
    return error
