"""What a caller of the engine holds: sessions, turns in progress, and what they give."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel.errors import TurnstileError, UsageError
from kernel.inbox import Abort
from kernel.request import Request, SamplingParams, whole
from rollout import typed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Sequence

    from rollout.engine import Engine


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token and its log-probability under the distribution it was drawn from."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished turn. Times are monotonic nanoseconds. finish_reason: stop, length or abort.

    cached_tokens: prompt tokens whose KV was kept from earlier turns. token_ns: when each token was committed.
    """

    request: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    submitted_ns: int
    first_token_ns: int
    finished_ns: int
    token_ns: tuple[int, ...]


class Generation:
    """One turn: iterate over it for tokens as they come, await it for the whole; either, or both."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self.request = engine, request
        self._outputs: list[TokenOutput] = []
        self._stamps: list[int] = []
        self._cached = 0
        self._finish = ""
        self._finished_ns = 0
        self._error: TurnstileError | None = None
        self._grown, self._over = asyncio.Event(), asyncio.Event()
        self._submitted_ns = engine.now_ns()

    @property
    def ended(self) -> bool:
        """Whether its result, or its error, is there."""
        return bool(self._finish) or self._error is not None

    def abort(self) -> None:
        """End the turn; tokens drawn so far are its result. Nothing if it has ended."""
        if not self._finish and self._error is None:
            self._engine._send(Abort(self.request.id))

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        at = 0
        while True:
            while at < len(self._outputs):
                yield self._outputs[at]
                at += 1
            if self._error is not None:
                raise self._error
            if self._finish:
                return
            self._grown.clear()
            await self._grown.wait()

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._complete().__await__()

    async def _complete(self) -> Completion:
        await self._over.wait()  # not for each token: nobody looks at them yet
        if self._error is not None:
            raise self._error
        return Completion(
            request=self.request.id,
            tokens=tuple(output.token for output in self._outputs),
            logprobs=tuple(output.logprob for output in self._outputs),
            finish_reason=self._finish,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self._cached,
            submitted_ns=self._submitted_ns,
            first_token_ns=self._stamps[0] if self._stamps else self._finished_ns,
            finished_ns=self._finished_ns,
            token_ns=tuple(self._stamps),
        )

    def _take(self, token: int, logprob: float, finish: str, cached: int, stamp: int) -> None:
        if token >= 0:
            self._outputs.append(TokenOutput(token, logprob))
            self._stamps.append(stamp)
        self._cached = cached
        if finish:
            self._finish, self._finished_ns = finish, stamp
            self._over.set()
        self._grown.set()

    def _fail(self, error: TurnstileError) -> None:
        if not self._finish:
            self._error = error
            self._over.set()
            self._grown.set()


class Session:
    """Turns that share a context: each reuses the KV of the tokens it has in common with the one before."""

    def __init__(self, engine: Engine, number: int, replica: int) -> None:
        self._engine, self.id, self.replica = engine, number, replica
        self._turn: Generation | None = None
        self._closed = False

    def generate(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Generation:
        """Start a turn on the whole context `prompt` (token ids); returns at once.

        Raises UsageError when the prompt is empty, has ids outside the vocabulary, or does not fit the KV pool or the
        model's positions with its longest output; or while the session's last turn has not ended.
        """
        if self._turn is not None and not self._turn.ended:
            raise UsageError(f"session {self.id}: its last turn has not ended; await it, or open another session")
        if self._closed:
            raise UsageError(f"session {self.id} was closed: open another one")
        typed.check(params=params)
        if isinstance(prompt, str | Mapping) or not isinstance(prompt, Iterable):
            raise UsageError(f"prompt={prompt!r:.60}: must be a sequence of token ids")
        ids = tuple(whole(token, "token id") for token in prompt)
        self._turn = self._engine._submit(self, ids, params or SamplingParams())
        return self._turn

    async def close(self) -> None:
        """Abort the turn, if any, and drop the session's KV. Idempotent."""
        if not self._closed:
            self._closed = True
            self._engine._close_session(self)
