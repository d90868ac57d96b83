"""What users of a simulated world do: trajectories of turns, each released its wait after the one before completed.

A closed loop, as agents are: the next prompt is the whole context so far (prompt and generated tokens) and new tokens
(paper section 2). Everything happens in virtual time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kernel.inbox import EndSession, Entry, Inbox, Stop, Submit
from kernel.request import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.replica import Output
    from verify.sim.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SimTurn:
    """prompt: new tokens. params: its output. wait_ns: from the completion of the turn before (or from the start)."""

    prompt: tuple[int, ...]
    params: SamplingParams
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one session. replica: the attention replica that owns it; -1 chooses by session."""

    session: int
    turns: tuple[SimTurn, ...]
    replica: int = -1


@dataclass(slots=True)
class TurnResult:
    """released, first, done: virtual nanoseconds (-1: never) of submission, first and last token."""

    request: Request
    turn: int
    released_ns: int
    first_ns: int = -1
    done_ns: int = -1
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    cached: int = 0


class Place(Protocol):
    """A rank's inbox and its loop."""

    def call_soon(self, callback: Callable[..., object], *args: object) -> object: ...


class _Release:
    """A turn whose wait is over."""

    def __init__(self, users: Users, trajectory: Trajectory, turn: int, context: tuple[int, ...]) -> None:
        self._users, self._trajectory, self._turn, self._context = users, trajectory, turn, context

    def __str__(self) -> str:
        return f"session {self._trajectory.session} turn {self._turn}"

    def act(self) -> None:
        self._users.submit(self._trajectory, self._turn, self._context)


class _Send:
    """An entry from outside at a given time."""

    def __init__(self, users: Users, entry: Entry) -> None:
        self._users, self._entry = users, entry

    def __str__(self) -> str:
        return type(self._entry).__name__

    def act(self) -> None:
        self._users.send(self._entry)


class Users:
    """Feeds every rank's inbox in one order, and follows the outputs of the replicas' leaders.

    places: (loop, inbox) of each rank. replicas: their number. extra: further entries by virtual time, such as Abort,
    Pause and Resume. A trajectory whose turn is aborted ends. When all have ended, Stop follows.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        places: Sequence[tuple[Place, Inbox]],
        replicas: int,
        trajectories: Sequence[Trajectory],
        extra: Sequence[tuple[int, Entry]] = (),
    ) -> None:
        self._scheduler, self._places, self._replicas = scheduler, places, replicas
        self._open = {trajectory.session: trajectory for trajectory in trajectories}
        self.results: dict[int, TurnResult] = {}
        for trajectory in trajectories:
            self._later(trajectory, 0, ())
        for at_ns, entry in extra:
            scheduler.alarm(at_ns, _Send(self, entry))
        if not trajectories:
            self.send(Stop())

    def send(self, entry: Entry) -> None:
        """Give an entry to every rank; all receive entries in the same order."""
        if isinstance(entry, EndSession):
            self._end(entry.session)
        for loop, inbox in self._places:
            loop.call_soon(inbox.put, entry)

    def submit(self, trajectory: Trajectory, turn: int, context: tuple[int, ...]) -> None:
        """Release a turn."""
        if trajectory.session not in self._open:
            return
        now = self._scheduler.now_ns
        each = trajectory.turns[turn]
        replica = trajectory.replica if trajectory.replica >= 0 else trajectory.session % self._replicas
        request = Request(len(self.results), trajectory.session, replica, (*context, *each.prompt), each.params)
        self.results[request.id] = TurnResult(request, turn, now)
        self.send(Submit(request))

    def output(self, output: Output) -> None:
        """A leader tells of a token or an end."""
        result = self.results.get(output.request)
        if result is None or result.finish:
            return
        now = self._scheduler.now_ns
        result.cached = output.cached
        if output.token >= 0:
            if not result.tokens:
                result.first_ns = now
            result.tokens.append(output.token)
        if output.finish:
            result.finish, result.done_ns = output.finish, now
            trajectory = self._open.get(result.request.session)
            if trajectory is None:
                return
            if output.finish == "abort" or result.turn + 1 == len(trajectory.turns):
                self._end(result.request.session)
            else:
                self._later(trajectory, result.turn + 1, (*result.request.prompt, *result.tokens))

    # -- inside -------------------------------------------------------------------------------------------------

    def _later(self, trajectory: Trajectory, turn: int, context: tuple[int, ...]) -> None:
        at = self._scheduler.now_ns + trajectory.turns[turn].wait_ns
        self._scheduler.alarm(at, _Release(self, trajectory, turn, context))

    def _end(self, session: int) -> None:
        if self._open.pop(session, None) is not None and not self._open:
            self.send(Stop())


def trajectories(
    count: int,
    turns: int,
    *,
    seed: int = 0,
    prompt: tuple[int, int] = (8, 64),
    output: tuple[int, int] = (1, 24),
    wait_ns: tuple[int, int] = (0, 50_000_000),
    vocab: int = 32_000,
) -> list[Trajectory]:
    """Random trajectories of up to `turns` turns: token counts and waits uniform in the given ranges."""
    draws = random.Random(f"trajectories {seed}")
    made = []
    for session in range(count):
        parts = []
        for _ in range(draws.randint(1, turns)):
            tokens = tuple(draws.randrange(vocab) for _ in range(draws.randint(*prompt)))
            params = SamplingParams(max_tokens=draws.randint(*output), ignore_eos=True)
            parts.append(SimTurn(tokens, params, draws.randint(*wait_ns)))
        made.append(Trajectory(session, tuple(parts)))
    return made

