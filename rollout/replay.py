"""Closed-loop replay: turn k+1 of a trajectory is released its recorded wait after turn k completed (paper section 7).

Output lengths are the recorded ones (end-of-sequence ids do not end a turn), so every policy does the same work; the
context of a turn holds the tokens that were really generated. One row is appended to the sink as each turn finishes.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from kernel import files
from kernel.errors import TurnstileError, UsageError
from kernel.request import SamplingParams
from rollout.trace.shape import new_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from pathlib import Path

    from rollout.trace.trajectory import Trajectory, Turn


class Completion(Protocol):
    """A finished request, as the engine reports it. Times in monotonic ns."""

    @property
    def request(self) -> int: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def submitted_ns(self) -> int: ...
    @property
    def finished_ns(self) -> int: ...
    @property
    def token_ns(self) -> tuple[int, ...]: ...


class Generation(Protocol):
    """A request in flight."""

    def __await__(self) -> Generator[Any, Any, Completion]: ...
    def abort(self) -> None: ...


class Session(Protocol):
    """One trajectory's place in the engine: its turns reuse each other's KV."""

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Generation: ...
    async def close(self) -> None: ...


class Engine(Protocol):
    """The part of `rollout.engine.Engine` that a replay needs."""

    def session(self) -> Session: ...
    def now_ns(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One finished turn: a line of requests.jsonl. Times are ns since the replay of this policy and repeat began.

    released_ns: the driver released the turn. submitted_ns: the engine had it. token_ns: when each token was out.
    cached_tokens: prompt tokens whose KV was reused. asked_tokens: the recorded output length. tokens: what was
    generated, from which the context of the next turn can be made again.
    """

    policy: str
    repeat: int
    trajectory: str
    turn: int
    request: int
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    asked_tokens: int
    output_tokens: int
    finish_reason: str
    wait_ms: float
    released_ns: int
    submitted_ns: int
    finished_ns: int
    token_ns: tuple[int, ...]
    tokens: tuple[int, ...] = ()

    @property
    def failed(self) -> bool:
        """The turn ended before its recorded length."""
        return self.output_tokens != self.asked_tokens

    def to_json(self) -> str:
        """One line, without its newline."""
        return json.dumps(asdict(self), separators=(",", ":"))


_WORDS: Final = ("policy", "trajectory", "finish_reason")
_KINDS: Final[dict[str, Any]] = {
    each.name: str if each.name in _WORDS else (int, float) if each.name == "wait_ms" else int
    for each in fields(Row)
    if each.name not in ("token_ns", "tokens")
}


class Sink:
    """Writes requests.jsonl: one write a row, unbuffered, so that the file is whole whenever the run ends.

    append: keep what is there; otherwise it is written anew.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        anew = 0 if append else os.O_TRUNC
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | anew | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def __call__(self, row: Row) -> None:
        """Append one row. Raises TurnstileError when the file system refuses it."""
        line = row.to_json().encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            raise TurnstileError(
                f"{self._path} cannot be written ({error.strerror}): make room on its disk, then go on with"
                f" --out {self._path.parent} --resume"
            ) from None

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a requests.jsonl. Raises UsageError naming file and line."""
    try:
        opened = os.fdopen(files.open_regular(path), "rb")
    except OSError as error:
        raise UsageError(f"{path}: it cannot be read ({error.strerror}): put the run's own back") from None
    with opened as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode())
                if not isinstance(record, dict):
                    raise TypeError("it must be a JSON object")
                lists = {name: tuple(record[name]) for name in ("token_ns", "tokens") if name in record}
                row = Row(**(record | lists))
                for name, kinds in _KINDS.items():
                    if not isinstance(getattr(row, name), kinds):
                        raise TypeError(f"{name} is {getattr(row, name)!r}"[:80])
                if not all(type(number) is int for number in (*row.token_ns, *row.tokens)):
                    raise TypeError("token_ns and tokens hold integers")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UsageError(f"{path}:{number}: not a row of requests.jsonl ({error})") from None
            yield row


async def replay(
    engine: Engine,
    trajectories: Sequence[Trajectory],
    *,
    policy: str,
    vocabulary: int,
    seed: int = 0,
    repeat: int = 0,
    max_concurrency: int | None = None,
    done: Callable[[Row], None],
    kept: Mapping[str, Sequence[Row]] = MappingProxyType({}),
    since_ns: int = 0,
) -> None:
    """Replay all trajectories, calling `done` as each turn finishes; returns when the last one has.

    vocabulary: token ids are drawn below it. max_concurrency: trajectories in progress at once (None: all), and so the
    most requests in flight. A turn that ends early ends its trajectory and leaves a row that says so. Cancelled, it
    aborts what is in flight; an error of the engine ends all trajectories and is raised. kept: rows of the first turns
    of trajectories (by id) of which these are done. since_ns: when, by the times of these rows, the replay goes on.
    """
    places = asyncio.Semaphore(max_concurrency or max(1, len(trajectories)))
    start = engine.now_ns()

    async def follow(trajectory: Trajectory) -> None:
        async with AsyncExitStack() as stack:
            # A first turn's wait is an arrival, counted from the start: it takes no place while it waits.
            before = kept.get(trajectory.id, ())
            ended_ns = before[-1].finished_ns if before else 0
            due = start - since_ns + ended_ns + _ns(trajectory.turns[len(before)].wait_ms)
            await _until(engine, due)
            await stack.enter_async_context(places)
            session = engine.session()
            stack.push_async_callback(session.close)
            context: tuple[int, ...] = ()
            for index, turn in enumerate(trajectory.turns):
                await _until(engine, due)
                context += new_tokens(seed, trajectory.id, index, turn.new_tokens, vocabulary)
                if index < len(before):
                    context += before[index].tokens
                    continue
                released = engine.now_ns()
                completion = await _generate(session, context, turn)
                context += completion.tokens
                if index + 1 < len(trajectory.turns):
                    due = completion.finished_ns + _ns(trajectory.turns[index + 1].wait_ms)
                row = _row(completion, policy, repeat, trajectory.id, index, turn, released, start)
                done(row)
                if row.failed:
                    return

    async with asyncio.TaskGroup() as group:
        for trajectory in trajectories:
            group.create_task(follow(trajectory), name=f"trajectory {trajectory.id}")


async def _until(engine: Engine, due: int) -> None:
    # The loop's clock and the engine's may differ by a tick: sleep again rather than release a turn early.
    while (left := due - engine.now_ns()) > 0:  # noqa: ASYNC110 (there is no event but the time)
        await asyncio.sleep(left / 1e9)


async def _generate(session: Session, context: tuple[int, ...], turn: Turn) -> Completion:
    generation = session.generate(context, SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True))
    try:
        return await generation
    except asyncio.CancelledError:
        generation.abort()
        raise


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


def _row(
    completion: Completion,
    policy: str,
    repeat: int,
    trajectory: str,
    index: int,
    turn: Turn,
    released: int,
    start: int,
) -> Row:
    return Row(
        policy=policy,
        repeat=repeat,
        trajectory=trajectory,
        turn=index,
        request=completion.request,
        prompt_tokens=completion.prompt_tokens,
        new_tokens=turn.new_tokens,
        cached_tokens=completion.cached_tokens,
        asked_tokens=turn.output_tokens,
        output_tokens=len(completion.tokens),
        finish_reason=completion.finish_reason,
        wait_ms=turn.wait_ms,
        released_ns=released - start,
        submitted_ns=completion.submitted_ns - start,
        finished_ns=completion.finished_ns - start,
        token_ns=tuple(moment - start for moment in completion.token_ns),
        tokens=completion.tokens,
    )
