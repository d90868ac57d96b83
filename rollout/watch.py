"""The launcher's side of `--live-check`: starts the watcher process, tells it what to follow, and acts on its report.

The run does not wait for the watcher but at its start and between two policies, until it has seen which rings are old.
Should the watcher end, the run goes on without it, and one line says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

from kernel.errors import HangFound
from rollout.ranks.nursery import search_path
from rollout.report import files as report_files

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

GRACE_S: Final = 20.0
"""For the watcher's last look. It is killed after that."""

REPORTS: Final = ("hang.txt", "hang.json")


class Watch:
    """Watches the runs of a campaign. out: its directory, where `hang.txt` and `hang.json` are left with a report.

    enabled: off, nothing is started and every method does nothing. abort: end the engine with HangFound when a fault
    is certain, instead of printing the report on standard error.
    """

    def __init__(self, out: Path, *, enabled: bool, abort: bool) -> None:
        self._out, self._enabled, self._abort = out, enabled, abort
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._engine: Any = None
        self._policy = ""

    async def __aenter__(self) -> Self:
        for name in REPORTS:
            (self._out / name).unlink(missing_ok=True)  # of the part of the run that is gone on with
        if self._enabled:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "verify.live.watch",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
                env={**os.environ, "PYTHONPATH": search_path()},
                start_new_session=True,  # Ctrl-C is the launcher's to handle
            )  # fmt: skip
            self._reader = asyncio.create_task(self._listen(self._process), name="live check")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, reader = self._process, self._reader
        if process is None or reader is None:
            return
        self._engine = None
        failed = error is not None and not isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        try:
            with suppress(OSError, RuntimeError):
                self._send({"end": failed})
            async with asyncio.timeout(GRACE_S):
                await asyncio.shield(reader)
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                process.kill()  # nothing that it could still say is of use
            await process.wait()
            reader.cancel()

    def attach(self, engine: Any) -> None:
        """The engine to end, with `abort`."""
        self._engine = engine

    async def follow(self, folder: Path, policy: str) -> None:
        """Watch the rings that the ranks will write into this directory; returns when the watcher is ready to."""
        process, reader = self._process, self._reader
        self._policy = policy
        if process is None or reader is None or reader.done():
            return
        self._ready.clear()
        with suppress(OSError, RuntimeError):
            self._send({"watch": str(folder)})
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ready, reader}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said = json.loads(line)
            if "ready" in said:
                self._ready.set()
            elif "report" in said:
                self._report(said)
            else:
                print(f"turnstile: the live check has ended ({said.get('trouble')}); the run goes on", file=sys.stderr)
        if self._engine is not None and await process.wait() < 0:
            print("turnstile: the live check was killed; the run goes on without it", file=sys.stderr)

    def _report(self, said: dict[str, Any]) -> None:
        from verify import words

        diagnosis = said["diagnosis"]
        report = f"{said['report']}\npolicy    {self._policy}"
        report_files.write(self._out / "hang.txt", report.encode() + b"\n")
        report_files.write_json(self._out / "hang.json", {**diagnosis, "run": said["run"], "monotonic_ns": said["ns"]})
        # Calls that differ may complete; whoever waits in a ring, or for one that has ended, waits for ever.
        if self._abort and self._engine is not None and diagnosis["class"] != "mismatch":
            blamed = f" ({words.ranks(diagnosis['ranks'])})" if diagnosis["ranks"] else ""
            print(f"turnstile: {diagnosis['say']}", file=sys.stderr, flush=True)
            self._engine.abort(
                HangFound(
                    f"the run hangs under {self._policy}, a certain {diagnosis['class']}{blamed}, and was ended:"
                    f" {self._out / 'hang.txt'} says more; finished turns are kept, go on with"
                    f" --out {self._out} --resume"
                )
            )
        else:
            print(report, file=sys.stderr, flush=True)
