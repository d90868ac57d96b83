"""A scenario: everything that one execution of the real rank and a policy depends on, apart from the schedule.

Arrivals are told by round, not by time, and each rank puts them into its own inbox when it computes the plan of that
round: whatever the schedule, every rank sees the same entries in the same rounds. A scenario prints in one line and
goes through JSON, so that a counterexample can be kept.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel import inbox as entries_of
from kernel.errors import UsageError
from kernel.inbox import Abort, EndSession, Entry, Submit
from kernel.request import Request, SamplingParams
from kernel.sched.policy import Limits
from kernel.topology import World
from verify.sim.world import WIDE
from verify.trial.findings import one_line

if TYPE_CHECKING:
    from kernel.inbox import Inbox
    from kernel.sched.policy import Plan

VOCAB = 32_000
"""Tokens that the simulated model draws from."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens on a simulated world.

    world: the ranks, and the route. policy: a spec as in `--policy`. segments: layers of the model, which are the safe
    boundaries of an epoch (two each, where the world cuts inside layers). entries: (round, inbox entry) in the order in
    which every rank receives them; Stop follows by itself. late: (rank, number of the entry from 0, rounds): that rank
    sees that entry, and those after it, so many rounds later. capacity, weights: of each device, see
    `verify.sim.world`. prefill_tokens, rows, blocks, block_size: see `verify.sim.simulation`. name: of its family
    member. Raises UsageError for sizes below 1, rounds that decrease, requests that cannot fit, and entries of ranks
    and requests that do not exist.
    """

    world: World
    policy: str
    segments: int
    entries: tuple[tuple[int, Entry], ...] = ()
    late: tuple[tuple[int, int, int], ...] = ()
    capacity: int = WIDE
    weights: tuple[int, int] = (1, 1)
    prefill_tokens: int = 4
    rows: int = 4
    blocks: int = 16
    block_size: int = 4
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("segments", "prefill_tokens", "rows", "blocks", "block_size", "capacity"):
            if getattr(self, field) < 1:
                raise UsageError(f"scenario {self.name}: {field}={getattr(self, field)}, must be at least 1")
        rounds = [round_ for round_, _ in self.entries]
        if rounds != sorted(rounds) or any(round_ < 0 for round_ in rounds):
            raise UsageError(f"scenario {self.name}: the rounds of its entries must not decrease: {rounds}")
        for rank, entry, rounds_ in self.late:
            if not (0 <= rank < self.world.size and 0 <= entry < len(self.entries) and rounds_ >= 0):
                raise UsageError(f"scenario {self.name}: late={rank, entry, rounds_} names no rank or entry of it")
        ids = [request.id for request in self.requests]
        if len(set(ids)) != len(ids):
            raise UsageError(f"scenario {self.name}: request ids {ids} are not unique")
        for request in self.requests:
            if not 0 <= request.replica < self.world.adp or not request.prompt:
                raise UsageError(f"scenario {self.name}: request {request.id} has no prompt or no replica")
            if -(-request.longest // self.block_size) > self.blocks:
                raise UsageError(f"scenario {self.name}: request {request.id} does not fit {self.blocks} KV blocks")

    @property
    def requests(self) -> tuple[Request, ...]:
        """All turns that are submitted, in order."""
        return tuple(entry.request for _, entry in self.entries if isinstance(entry, Submit))

    @property
    def limits(self) -> Limits:
        """What plans respect."""
        return Limits(
            size=self.world.size,
            replicas=self.world.adp,
            boundaries=self.world.boundaries(self.segments),
            prefill_tokens=self.prefill_tokens,
            rows=self.rows,
            granule=self.world.atp,
        )

    @property
    def longest(self) -> int:
        """Rounds that any policy which makes progress stays below, by far."""
        per_token = self.limits.boundaries + 4
        work = sum(r.params.max_tokens + len(r.prompt) * per_token + 8 for r in self.requests)
        return 4 * work + max((r for r, _ in self.entries), default=0) + sum(n for *_, n in self.late) + 64

    def may_abort(self, request: Request) -> bool:
        """Whether an entry asks for the end of this turn."""
        return any(
            (isinstance(entry, Abort) and entry.request == request.id)
            or (isinstance(entry, EndSession) and entry.session == request.session)
            for _, entry in self.entries
        )

    def __str__(self) -> str:
        parts = [f"{self.policy} on {self.world}, {self.segments} segment{'s'[: self.segments > 1]}"]
        if self.capacity != WIDE:
            parts.append(f"capacity {self.capacity} weights {self.weights[0]}+{self.weights[1]}")
        parts.append(f"prefill {self.prefill_tokens} rows {self.rows} KV {self.blocks}x{self.block_size}")
        parts.append("; ".join(f"{round_}: {_words(entry)}" for round_, entry in self.entries) or "no entries")
        parts += [f"rank {rank} sees entry {entry} {rounds} rounds later" for rank, entry, rounds in self.late]
        return one_line(f"{self.name}: {', '.join(parts)}" if self.name else ", ".join(parts))

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it; `from_dict` is the inverse."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["world"] = dataclasses.asdict(self.world)
        for name, usual in (("cut", "layer"), ("exchange", "none")):
            if plain["world"][name] == usual:
                del plain["world"][name]  # keeps tokens short, and those of before it valid
        plain["entries"] = [[round_, type(entry).__name__, dataclasses.asdict(entry)] for round_, entry in self.entries]
        plain["late"] = [list(each) for each in self.late]
        plain["weights"] = list(self.weights)
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Scenario:
        """The scenario that `to_dict` wrote. Raises UsageError for anything else."""
        try:
            fields = dict(plain)
            fields["world"] = World(**fields["world"])
            fields["entries"] = tuple((int(round_), _entry(kind, of)) for round_, kind, of in fields["entries"])
            fields["late"] = tuple((int(rank), int(at), int(rounds)) for rank, at, rounds in fields["late"])
            d, p = fields["weights"]
            fields["weights"] = int(d), int(p)
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"not a scenario: {type(error).__name__}: {error}") from error


def _words(entry: Entry) -> str:
    if isinstance(entry, Submit):
        r = entry.request
        return f"request {r.id} of session {r.session} on replica {r.replica}, {len(r.prompt)}+{r.params.max_tokens}"
    values = [str(getattr(entry, field.name)) for field in dataclasses.fields(entry)]
    return " ".join([type(entry).__name__, *values])


_ENTRIES = {
    name: getattr(entries_of, name)
    for name in ("Submit", "Abort", "EndSession", "Flush", "Pause", "Resume", "UsePolicy", "UpdateWeights", "Stop")
}


def _entry(kind: str, of: dict[str, Any]) -> Entry:
    if kind == "Submit":
        request = dict(of["request"])
        params = dict(request["params"])
        params["stop_token_ids"] = tuple(params["stop_token_ids"])
        request["params"], request["prompt"] = SamplingParams(**params), tuple(request["prompt"])
        return Submit(Request(**request))
    entry: Entry = _ENTRIES[kind](**of)
    return entry


class Feeder:
    """Puts a scenario's entries into one rank's inbox, in the rounds in which they are due there.

    Called by that rank alone, before (None) and after a round's plan. When the plan is idle the next entries are
    due at once, and all later ones are so many rounds earlier; Stop follows the last one.
    """

    def __init__(self, scenario: Scenario, rank: int, inbox: Inbox) -> None:
        self._entries, self._inbox = scenario.entries, inbox
        self._rounds = -1
        self._given = 0
        self._due: list[int] = []
        late = 0
        for number, (round_, _) in enumerate(scenario.entries):
            late = max([late, *(rounds for r, at, rounds in scenario.late if (r, at) == (rank, number))])
            self._due.append(round_ + late)
        self.stopped_in = -1

    def __call__(self, plan: Plan | None) -> None:
        """Give what is due."""
        if plan is None:
            self._rounds += 1
            self._give()
        elif plan.idle:
            self._idle(plan)

    def _give(self) -> None:
        while self._given < len(self._entries) and self._due[self._given] <= self._rounds:
            self._put()

    def _put(self) -> None:
        self._inbox.put(self._entries[self._given][1])
        self._given += 1

    def _idle(self, plan: Plan) -> None:
        seen = plan.inbox
        if seen < len(self._entries):
            # What all ranks have seen so far decides what is next, so the shift is the same everywhere.
            self._rounds = max(self._rounds, self._entries[seen][0])
            self._give()
            if self._inbox.length <= seen and self._given < len(self._entries):
                self._put()
        elif self.stopped_in < 0:
            self.stopped_in = plan.round
            self._inbox.put(entries_of.Stop())
