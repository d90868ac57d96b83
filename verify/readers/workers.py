"""Many dumps decoded by several processes: as many as there are processors for, none where the job is small.

A worker is this interpreter again, with the same import path, that reads names of files from its standard input and
writes what they hold to its standard output; it never runs the program that asked. Where processes cannot be started,
or one dies, the dumps are decoded here.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO, Final

from verify.readers.flight_recorder import Decoder
from verify.readers.found import Damaged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from verify.readers.calls import Dump

WORTH: Final = 8 << 20
"""Bytes of dumps from which on workers pay for their start."""
WORKERS: Final = 16
CHUNK: Final = 32
"""Files that a worker is given at a time. Their dumps share what repeats."""
BOOT: Final = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from verify.readers.workers import serve;"
    " serve(sys.stdin.buffer, sys.stdout.buffer)"
)

Result = list["Dump | Damaged"]


def decode_all(paths: Sequence[Path], workers: int | None = None) -> Result:
    """The dump of each path, or how it is damaged. Raises UsageError for one that is unsafe, too large or no dump.

    workers: processes besides this one; None: what the machine and the size of the files suggest.
    """
    chunks = [paths[at : at + CHUNK] for at in range(0, len(paths), CHUNK)]
    results: dict[int, Result] = {}
    many = min(_worth(paths) if workers is None else workers, len(chunks))
    if many > 0:
        _spread(chunks, results, many)
    done: Result = []
    for at, chunk in enumerate(chunks):
        done += results.pop(at) if at in results else decode_chunk(chunk)
    return done


def _worth(paths: Sequence[Path]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2 or len(paths) < 2 * CHUNK or not sys.executable:
        return 0
    size = 0
    for path in paths:
        with suppress(OSError):
            size += path.stat().st_size
    return min(cores, WORKERS) if size >= WORTH else 0


def decode_chunk(paths: Sequence[Path]) -> Result:
    """A few dumps, in this process."""
    decoder, found = Decoder(), Result()
    for path in paths:
        try:
            found.append(decoder.decode(path))
        except Damaged as error:
            found.append(error)
    return found


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """The life of a worker: chunks of paths in; results, or the UsageError of one of them, out."""
    from kernel.errors import UsageError

    while True:
        try:
            paths = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Result | UsageError = decode_chunk(paths)
        except UsageError as error:
            answer = error
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _spread(chunks: Sequence[Sequence[Path]], results: dict[int, Result], many: int) -> None:
    """Have workers decode the chunks; those that none of them could do are missing in `results`."""
    todo: SimpleQueue[int] = SimpleQueue()
    for at in range(len(chunks)):
        todo.put(at)
    failed: dict[int, Exception] = {}
    processes: list[subprocess.Popen[bytes]] = []
    threads: list[Thread] = []
    try:
        for _ in range(many):
            with suppress(OSError, ValueError):
                command = [sys.executable, "-c", BOOT]
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                )
        for process in processes:
            threads.append(Thread(target=_feed, args=(process, chunks, todo, results, failed), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[min(failed)]


def _feed(
    process: subprocess.Popen[bytes], chunks: Sequence[Sequence[Path]], todo: SimpleQueue[int],
    results: dict[int, Result], failed: dict[int, Exception],
) -> None:  # fmt: skip
    """Give one worker chunks until none is left, it dies, or a file cannot be used."""
    from kernel.errors import UsageError

    assert process.stdin is not None
    assert process.stdout is not None
    # A worker that dies, or says what cannot be understood, leaves its chunk to be done here.
    with suppress(OSError, EOFError, pickle.UnpicklingError, ImportError, AttributeError):
        process.stdin.write(pickle.dumps(sys.path))
        while not failed:
            try:
                at = todo.get_nowait()
            except Empty:
                return
            process.stdin.write(pickle.dumps([*chunks[at]]))
            process.stdin.flush()
            answer = pickle.load(process.stdout)
            if isinstance(answer, UsageError):
                failed[at] = answer
                return
            results[at] = answer
