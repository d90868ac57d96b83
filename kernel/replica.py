"""The requests of one attention replica on one rank: waiting, prefilling, decoding, finishing. Pure; paper section 6.

All attention-TP peers of a replica hold the same state, since every change follows from the plan, from committed tokens
or from inbox entries that a plan made effective. Results reach it with a constant lag: at the end of round j the tokens
of the D iteration of round j-1 are committed, never "whatever is ready".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kernel.errors import Divergence
from kernel.request import Request, Row, Sampled, State
from kernel.sched.policy import Chunk, Waiting
from kernel.views import WAITING, mix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.cache import KVCache


class Output(NamedTuple):
    """What a replica tells the outside of one request, from its leader.

    token, logprob: a committed token (token -1: none). finish: "" or why the request ended (stop, length, abort).
    cached: prompt tokens that were not computed again.
    """

    request: int
    token: int = -1
    logprob: float = 0.0
    finish: str = ""
    cached: int = 0


@dataclass(slots=True)
class Turn:
    """One request's state. written: leading tokens whose KV is submitted. flying: D iterations in flight with it."""

    request: Request
    state: State = State.WAITING
    slot: int = -1
    blocks: tuple[int, ...] = ()
    cached: int = 0
    written: int = 0
    tokens: list[int] = field(default_factory=list)
    flying: int = 0
    drop: bool = False
    longest: int = field(init=False)
    """Its most output tokens: `ready` asks twice a round."""

    def __post_init__(self) -> None:
        self.longest = self.request.params.max_tokens

    @property
    def missing(self) -> int:
        """Prompt tokens still to be fed, for a turn that holds its lease."""
        return len(self.request.prompt) - self.written


class Replica:
    """Requests, slots and KV of one attention replica.

    rank: for messages. rows: slots. emit: told of tokens and ends; only the replica's leader passes one on.
    """

    def __init__(self, rank: int, replica: int, rows: int, cache: KVCache, emit: Callable[[Output], None]) -> None:
        self.rank, self.index, self.cache = rank, replica, cache
        self._emit = emit
        self._slots = list(range(rows - 1, -1, -1))
        self._turns: dict[int, Turn] = {}
        self._waiting: list[Turn] = []
        self._partial: list[Turn] = []
        self._running: list[Turn] = []
        self._prefill: list[Turn] = []
        self.paused = False
        self.tokens_hash = 0

    # -- what a view reports ------------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        """Rows of the slot table that no turn holds."""
        return len(self._slots)

    @property
    def queued(self) -> int:
        """Turns that wait for prefill, the parts of long prompts included."""
        return len(self._waiting) + len(self._partial)

    @property
    def empty(self) -> bool:
        """Whether no turn is left."""
        return not self._turns

    def ready(self) -> list[Turn]:
        """Turns that can decode in the next round: not known to have ended, not at their longest output."""
        if self.paused:
            return []
        return [t for t in self._running if len(t.tokens) + t.flying < t.longest]

    def promotable(self, sampled: Sequence[Sampled | None]) -> int:
        """Turns of the epoch at hand that will decode once promoted. It only looks: peers may see the end later."""
        pairs = zip(self._prefill, sampled, strict=True)
        return sum(
            1 for t, drawn in pairs if t.state is State.PREFILL and drawn and not self._finish(t, drawn.token, 1)
        )

    def waiting(self) -> tuple[Waiting, ...]:
        """The first requests in order of service: parts of long prompts first, then first come, first served."""
        if not self._waiting and not self._partial:
            return ()
        views = [Waiting(t.request.id, t.missing, 0) for t in self._partial[:WAITING]]
        seen: set[int] = set()
        for turn in self._waiting:
            if len(views) >= WAITING:
                break
            request = turn.request
            if request.session in seen or not self.cache.idle(request.session):
                continue
            seen.add(request.session)
            cached = self.cache.cached(request.session, request.prompt)
            views.append(Waiting(request.id, len(request.prompt) - cached, self.cache.need(request.longest)))
        return tuple(views)

    # -- inbox --------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a turn."""
        turn = Turn(request)
        self._turns[request.id] = turn
        self._waiting.append(turn)

    def abort(self, request: int) -> None:
        """End a turn now; its blocks are reused only after all submitted work that can touch them has drained."""
        turn = self._turns.get(request)
        if turn is None or turn.state in (State.FINISHED, State.CANCELLED):
            return
        self._emit(Output(request, finish="abort", cached=turn.cached))
        was, turn.state = turn.state, State.CANCELLED
        if was is State.WAITING:
            holder = self._partial if turn.blocks else self._waiting
            holder.remove(turn)
            self._retire(turn)
        elif was is State.RUNNING:
            self._running.remove(turn)
            self._retire(turn)

    def end_session(self, session: int) -> None:
        """Abort the session's turns and drop its KV, as soon as nothing can write it any more."""
        for turn in [t for t in self._turns.values() if t.request.session == session]:
            turn.drop = True
            self.abort(turn.request.id)
        self.cache.forget(session)

    def abort_all(self) -> None:
        """Abort every turn."""
        for request in list(self._turns):
            self.abort(request)

    # -- prefill ------------------------------------------------------------------------------------------------

    def begin(self, chunks: Sequence[Chunk], round_: int) -> list[Row]:
        """Take the leases of an epoch's chunks and give its rows. Raises Divergence where the plan does not fit."""
        turns = [self._admitted(chunk, round_) for chunk in chunks]
        fresh = [turn for turn in turns if not turn.blocks]
        leases = self.cache.reserve(
            [(t.request.id, t.request.session, t.request.prompt, t.request.longest) for t in fresh]
        )
        for turn, lease in zip(fresh, leases, strict=True):
            turn.blocks, turn.cached, turn.written = lease.blocks, lease.cached, lease.cached
            turn.slot = self._slots.pop()
            self._waiting.remove(turn)
        rows = []
        for chunk, turn in zip(chunks, turns, strict=True):
            if turn.missing < chunk.tokens or (turn.missing == chunk.tokens) is not chunk.last:
                raise Divergence(
                    (self.rank,), round_, "prefill", f"the plan feeds {chunk}, which is missing {turn.missing} here"
                )
            if turn in self._partial:
                self._partial.remove(turn)
            start, end = turn.written, turn.written + chunk.tokens
            sample = turn.request.params if chunk.last else None
            rows.append(Row(turn.slot, turn.request.prompt[start:end], start, turn.blocks, sample, turn.request.id))
            turn.state, turn.written = State.PREFILL, end
            self._prefill.append(turn)
        return rows

    def promote(self, sampled: Sequence[Sampled | None]) -> None:
        """All ranks have completed the epoch: commit its first tokens. Turns decode, end, or wait for their next part.

        A cancelled turn gives its blocks back only now, when the work that writes them has drained everywhere.
        Raises LeaseExpired when a result's blocks are no longer its request's.
        """
        turns, self._prefill = self._prefill, []
        for turn, drawn in zip(turns, sampled, strict=True):
            if turn.state is not State.PREFILL:
                self._retire(turn)
                continue
            self.cache.lease(turn.request.id)
            if drawn is None:
                turn.state = State.WAITING
                self._partial.append(turn)
                continue
            turn.state = State.RUNNING
            self._running.append(turn)
            self._commit(turn, drawn)
            if turn.state is State.FINISHED:
                self._retire(turn)

    # -- decode -------------------------------------------------------------------------------------------------

    def launch(self, round_: int, planned: int) -> list[tuple[Turn, Row]]:
        """The rows of this round's D iteration. Raises Divergence unless there are as many as planned."""
        turns = self.ready()
        if len(turns) != planned:
            raise Divergence((self.rank,), round_, "decode", f"{planned} rows planned, {len(turns)} ready here")
        rows = []
        for turn in turns:
            rows.append((turn, Row(turn.slot, None, turn.written, turn.blocks, turn.request.params, turn.request.id)))
            turn.written += 1
            turn.flying += 1
        return rows

    def harvest(self, turns: Sequence[Turn], sampled: Sequence[Sampled | None]) -> None:
        """Commit one finished D iteration, in row order. Tokens of turns that have ended meanwhile are dropped."""
        for turn, drawn in zip(turns, sampled, strict=True):
            turn.flying -= 1
            if turn.state is State.RUNNING and drawn is not None:
                self._commit(turn, drawn)
            if turn.state is not State.RUNNING:  # it has ended
                self._retire(turn)

    # -- inside -------------------------------------------------------------------------------------------------

    def _admitted(self, chunk: Chunk, round_: int) -> Turn:
        turn = self._turns.get(chunk.request)
        if turn is None or turn.state is not State.WAITING:
            have = "unknown" if turn is None else turn.state
            raise Divergence((self.rank,), round_, "prefill", f"the plan feeds request {chunk.request}, {have} here")
        return turn

    @staticmethod
    def _finish(turn: Turn, token: int, length: int) -> str:
        """Why the turn ends with `token` as its `length`-th one, or ""."""
        params = turn.request.params
        if token in params.stop_token_ids:
            return "stop"
        return "length" if length >= params.max_tokens else ""

    def _commit(self, turn: Turn, drawn: Sampled) -> None:
        token, logprob = drawn
        request, tokens = turn.request.id, turn.tokens
        tokens.append(token)
        self.tokens_hash = mix(self.tokens_hash, request, token)
        finish = self._finish(turn, token, len(tokens))
        self._emit(Output(request, token, logprob, finish, turn.cached))
        if finish:
            self._running.remove(turn)
            turn.state = State.FINISHED

    def _retire(self, turn: Turn) -> None:
        """Give slot and blocks back once no submitted work can touch them."""
        if turn.flying:
            return
        del self._turns[turn.request.id]
        if not turn.blocks:
            return
        self._slots.append(turn.slot)
        context = [*turn.request.prompt, *turn.tokens]
        # The last sampled token has no KV yet (a surplus iteration may have written it, which proves nothing).
        known = max(0, min(turn.written, len(context) - 1 if turn.tokens else len(context)))
        self.cache.release(turn.request.id, context[:known])
        if turn.drop:
            self.cache.forget(turn.request.session)
