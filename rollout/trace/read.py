"""Reading a trace from its file, in whichever format it is.

Two formats are read, plain or gzip: the shape of this project's own trace (`rollout.trace.paper`) and Mooncake JSONL
with its multi-turn extension (`rollout.trace.mooncake`).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Final

from kernel import files as bounded
from kernel.errors import UsageError
from rollout.trace import mooncake, paper
from rollout.trace.trajectory import Line, Trace

LARGEST: Final = 1 << 30
"""Bytes of a trace, unpacked; the paper's has 300 thousand."""
LONGEST_LINE: Final = 64 << 20
PAPER_TRACE: Final = "paper"
"""The name of the trace that ships with the package."""


def read(source: str | Path) -> Trace:
    """The trace in `source`: a path, or `paper` for the trace that ships with the package.

    Raises UsageError when the file cannot be read, is empty, is in neither format, or has a malformed line (naming
    file, line and field).
    """
    if str(source) == PAPER_TRACE:
        name, data = "paper_replay_1265", (files("rollout") / "data" / "paper_replay_1265.jsonl").read_bytes()
        file = f"{name}.jsonl"
    else:
        path = Path(source)
        name, file = path.name.removesuffix(".gz").removesuffix(".jsonl"), str(source)
        try:
            data = bounded.read(path, LARGEST, pipe=True, waits=lambda what: _tell(f"--trace {source}: {what}"))
        except OSError as error:
            raise UsageError(f"--trace {source}: {error.strerror or error}; give a JSONL file or `paper`") from None
    lines = _lines(file, data)
    if not lines:
        raise UsageError(f"--trace {source}: the file holds no requests")
    first = lines[0]
    if "conversation_id" in first.record:
        kind, trajectories = "paper", paper.trajectories(lines)
    elif "input_length" in first.record:
        kind, trajectories = "mooncake", mooncake.trajectories(lines)
    else:
        raise UsageError(
            f"{file}:{first.at}: neither a paper-shaped line (field 'conversation_id') nor a Mooncake line"
            " (field 'input_length')"
        )
    return Trace(name, kind, hashlib.sha256(data).hexdigest(), trajectories)


def _tell(line: str) -> None:
    print("turnstile:", line, file=sys.stderr, flush=True)


def _lines(file: str, data: bytes) -> list[Line]:
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(LARGEST + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"{file}: broken gzip data ({error})") from None
    if len(data) > LARGEST:
        raise UsageError(f"{file}: more than {LARGEST >> 20:,} MiB when unpacked: give a part of it")
    return [_parse(file, number, raw) for number, raw in enumerate(data.split(b"\n"), 1) if raw.strip()]


def _parse(file: str, number: int, raw: bytes) -> Line:
    if len(raw) > LONGEST_LINE:
        raise UsageError(f"{file}:{number}: a line of more than {LONGEST_LINE >> 20} MiB: one request a line is needed")
    try:
        record = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}:{number}: not UTF-8 text (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{file}:{number}: not JSON ({error.msg} at column {error.colno})") from None
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{file}:{number}: not usable JSON ({error})") from None
    if not isinstance(record, dict):
        raise UsageError(f"{file}:{number}: not a JSON object: one object a line is needed")
    return Line(file, number, record)
