"""Ranks of a tiny model in one process, as threads over in-memory collectives, and transformers as the oracle."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import models
from kernel.comm.exchange import pair
from kernel.device.cpu import TorchLayout
from kernel.device.worker import Completion
from kernel.driver import Driver
from kernel.exchange.shape import Shape
from kernel.program import Program
from kernel.request import Phase, Row, Sampled, SamplingParams
from kernel.step import Step
from kernel.topology import Role, World

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from torch import Tensor

T = TypeVar("T")
GREEDY = SamplingParams()
BLOCK_SIZE = 4
PATIENCE_S = 30.0


class Meeting:
    """Where the members of one group exchange tensors: everyone leaves theirs, then takes what all left."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self._barrier = threading.Barrier(len(members), timeout=PATIENCE_S)
        self._left: dict[int, tuple[object, Tensor]] = {}

    def abort(self) -> None:
        self._barrier.abort()

    def exchange(self, rank: int, what: object, x: Tensor) -> list[Tensor]:
        """All members' tensors; AssertionError where they do not call the same thing."""
        self._left[rank] = (what, x.clone())
        self._barrier.wait()
        found = [self._left[member] for member in self.members]
        self._barrier.wait()
        assert len({operation for operation, _ in found}) == 1, found
        return [tensor for _, tensor in found]


class FakeCollectives:
    """`kernel.ports.Collectives` of one rank."""

    def __init__(self, rank: int, meetings: dict[tuple[Role, tuple[int, ...]], Meeting], world: World) -> None:
        self._rank = rank
        self._mine = {role: meetings[role, world.members(role, rank)] for role in Role}
        self.everybody = meetings[Role.TP, world.members(Role.TP, rank)]

    def all_reduce(self, role: Role, x: Tensor) -> Tensor:
        return torch.stack(self._mine[role].exchange(self._rank, ("AR", x.shape), x)).sum(0)

    def all_gather(self, role: Role, x: Tensor, dim: int = 0) -> Tensor:
        return torch.cat(self._mine[role].exchange(self._rank, ("AG", dim, x.shape), x), dim=dim)

    def reduce_scatter(self, role: Role, x: Tensor, sizes: Sequence[int]) -> Tensor:
        meeting = self._mine[role]
        assert (sum(sizes), len(sizes)) == (x.shape[0], len(meeting.members))
        total = torch.stack(meeting.exchange(self._rank, ("RS", x.shape, tuple(sizes)), x)).sum(0)
        return total.split_with_sizes(list(sizes))[meeting.members.index(self._rank)]

    def close(self) -> None:
        pass


class MeetingWire:
    """`kernel.comm.exchange.wire.Wire` of one rank, over a meeting of all."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self.meeting = rank, len(meeting.members), meeting

    def announce(self, counts: Sequence[int], label: str) -> Completion[Any]:
        told = self.meeting.exchange(self.rank, label, torch.tensor(counts))
        done: Completion[Any] = Completion()
        done.succeed([each.tolist() for each in told])
        return done

    def move(self, messages: Tensor, matrix: Sequence[Sequence[int]], label: str) -> Tensor:
        parts = []
        for row, all_of in zip(matrix, self.meeting.exchange(self.rank, (label, str(matrix)), messages), strict=True):
            start = sum(row[: self.rank])
            parts.append(all_of[start : start + row[self.rank]])
        return torch.cat(parts)

    def gather(self, messages: Tensor, label: str) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, (label, messages.shape), messages))

    def close(self) -> None:
        pass


@contextmanager
def scope() -> Generator[None]:
    """What a device enters around model code."""
    with torch.inference_mode():
        yield


@dataclass
class Context:
    """One request of a `Team`, as the kernel would keep it."""

    slot: int
    replica: int
    tokens: list[int]
    params: SamplingParams = GREEDY
    blocks: tuple[int, ...] = ()
    drawn: list[Sampled] = field(default_factory=list)


class Team:
    """All ranks of `world` on the checkpoint `path`; a forward runs on every rank at once."""

    def __init__(
        self,
        path: Path,
        world: World,
        *,
        blocks: int = 96,
        slots: int = 16,
        dtype: object = "float32",
        block_size: int = BLOCK_SIZE,
        compiled: bool = False,
    ) -> None:
        self.world, self.block_size = world, block_size
        self.models: list[Any] = [
            models.load(
                path, world, rank, blocks=blocks, block_size=block_size, slots=slots, dtype=dtype, compiled=compiled
            )
            for rank in range(world.size)
        ]
        layers = self.models[0].layers
        self.programs = {phase: Program(world.under(None), phase, layers) for phase in Phase}
        self._exchanges: dict[int, tuple[Any, list[MeetingWire]]] = {}
        self._next_block, self._next_slot = [1] * world.adp, [0] * world.adp
        self._blocks = blocks

    # -- one forward --------------------------------------------------------------------------------------------

    def forward(
        self, phase: Phase, rows: Sequence[Sequence[Row]], bucket: int = 0, span: int = 1
    ) -> list[list[Sampled | None]]:
        """Run `rows` of each replica; the results of each replica, which all of its ranks must agree on."""
        fed = [sum(row.fed for row in each) for each in rows]
        sizes = fed if phase is Phase.P else [bucket or self.bucket(max(fed))] * self.world.adp
        meetings = {(role, group): Meeting(group) for role, groups in self.world.groups.items() for group in groups}

        def one(rank: int) -> list[Sampled | None]:
            replica = self.world.replica(rank)
            driver = self.driver(phase, rank, rows[replica], sizes, FakeCollectives(rank, meetings, self.world))
            end = self.programs[phase].boundaries if phase is Phase.D else 0
            ended = driver.advance(end)
            while not ended:
                waiting, end = driver.waiting, end + span * (driver.waiting is None)
                ended = driver.advance(end) if waiting is None else driver.resume(None, end)
            assert driver.result is not None
            return driver.result

        results = together([partial(one, rank) for rank in range(self.world.size)], meetings.values())
        for rank, result in enumerate(results):
            assert result == results[self.world.leaders()[self.world.replica(rank)]], "ATP peers drew differently"
        return [results[leader] for leader in self.world.leaders()]

    def driver(
        self,
        phase: Phase,
        rank: int,
        rows: Sequence[Row],
        sizes: Sequence[int] = (),
        collectives: FakeCollectives | None = None,
    ) -> Driver[list[Sampled | None]]:
        """One rank's forward, not yet begun. A world of one rank needs no sizes and no collectives."""
        fed = sum(row.fed for row in rows)
        nobody: Any = collectives
        exchange = self.exchange(rank, collectives)
        step = Step(
            self.programs[phase],
            rank,
            sizes or [fed],
            fed,
            nobody,
            TorchLayout(),
            normal=exchange.normal if exchange and phase is Phase.P else None,
            low_latency=exchange.low_latency if exchange and phase is Phase.D else None,
        )
        return Driver(self.models[rank].forward(step, rows), step, scope)

    def exchange(self, rank: int, collectives: FakeCollectives | None) -> Any:
        """One rank's expert exchange, where there is one: the same for all forwards, over the meetings of this one."""
        if not self.world.splits:
            return None
        if rank not in self._exchanges:
            model: Any = self.models[rank]
            model = getattr(model, "_model", model)
            config, size = model.config, self.world.size
            shape = Shape(size, config.experts, config.hidden_size, config.experts_per_token, 1 << 12, 64)
            wires = [MeetingWire(rank, Meeting(tuple(range(size)))) for _ in Phase]
            self._exchanges[rank] = pair.over(shape, model.weights.norm.dtype, *wires), wires
        made, wires = self._exchanges[rank]
        if collectives is not None:
            for wire in wires:
                wire.meeting = collectives.everybody
        return made

    def bucket(self, rows: int) -> int:
        """The smallest bucket that every ATP rank has an equal part of."""
        return max(1, -(-rows // self.world.atp)) * self.world.atp

    # -- requests -----------------------------------------------------------------------------------------------

    def admit(self, replica: int, prompt: Sequence[int], longest: int, params: SamplingParams = GREEDY) -> Context:
        """A request with a slot and blocks of its own, for `longest` tokens."""
        first, need = self._next_block[replica], -(-longest // self.block_size)
        slot, self._next_slot[replica] = self._next_slot[replica], self._next_slot[replica] + 1
        self._next_block[replica] += need
        assert first + need <= self._blocks, "the pool is too small for this test"
        # Descending, so that a block's number says nothing about its place; block 0 is what padding reads.
        return Context(slot, replica, list(prompt), params, tuple(range(first + need - 1, first - 1, -1)))

    def prefill(self, contexts: Sequence[Context], cuts: Sequence[int] = (), start: int = 0, span: int = 1) -> None:
        """Feed each context's tokens from `start` on, cut at the positions `cuts`; the last part draws a token."""
        whole = {id(one): len(one.tokens) for one in contexts}
        for begin, end in pairwise((start, *cuts, max(whole.values()))):
            rows: list[list[Row]] = [[] for _ in range(self.world.adp)]
            sent: list[list[Context]] = [[] for _ in range(self.world.adp)]
            for one in contexts:
                part = tuple(one.tokens[begin : min(end, whole[id(one)])])
                if part:
                    last = begin + len(part) == whole[id(one)]
                    rows[one.replica].append(Row(one.slot, part, begin, one.blocks, one.params if last else None))
                    sent[one.replica].append(one)
            self._keep_all(sent, self.forward(Phase.P, rows, span=span))

    def decode(self, contexts: Sequence[Context], bucket: int = 0) -> None:
        """One token of each context, fed from its slot."""
        rows: list[list[Row]] = [[] for _ in range(self.world.adp)]
        sent: list[list[Context]] = [[] for _ in range(self.world.adp)]
        for one in contexts:
            rows[one.replica].append(Row(one.slot, None, len(one.tokens) - 1, one.blocks, one.params))
            sent[one.replica].append(one)
        self._keep_all(sent, self.forward(Phase.D, rows, bucket))

    def keep(self, contexts: Sequence[Context], drawn: Sequence[Sampled | None]) -> None:
        """Append what a forward drew."""
        for context, sampled in zip(contexts, drawn, strict=True):
            if sampled is not None:
                context.tokens.append(sampled.token)
                context.drawn.append(sampled)

    def _keep_all(self, sent: list[list[Context]], results: list[list[Sampled | None]]) -> None:
        for contexts, drawn in zip(sent, results, strict=True):
            self.keep(contexts, drawn)


def together(works: Sequence[Callable[[], T]], meetings: Any) -> list[T]:
    """Run all works at once; the first error, if any, ends them all."""

    def guarded(work: Callable[[], T]) -> T:
        torch.set_num_threads(1)
        try:
            return work()
        except BaseException:
            for meeting in meetings:
                meeting.abort()
            raise

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(guarded, work) for work in works]
        errors = [error for future in futures if (error := future.exception()) is not None]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return [future.result() for future in futures]


class Oracle:
    """transformers on the same checkpoint."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens, by transformers' own loop."""
        ids = torch.tensor([list(prompt)])
        seen = torch.ones_like(ids)
        out = self.model.generate(ids, attention_mask=seen, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return list(out[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def logits(self, context: Context) -> Tensor:
        """[drawn tokens, vocab] that each drawn token came from, teacher-forced over prompt and output."""
        logits: Tensor = self.model(torch.tensor([context.tokens])).logits[0].float()
        return logits[-len(context.drawn) - 1 : -1]

    def logprobs(self, context: Context) -> Tensor:
        """[drawn tokens] log-probabilities at temperature 1."""
        drawn = torch.tensor([sampled.token for sampled in context.drawn])
        return self.logits(context).log_softmax(-1).gather(1, drawn[:, None])[:, 0]

    def check(self, context: Context, tolerance: float = 1e-4) -> None:
        """Each drawn token is the greedy one after what came before, with its log-probability."""
        drawn = [sampled.token for sampled in context.drawn]
        assert drawn == context.tokens[-len(drawn) :] == self.logits(context).argmax(-1).tolist()
        found = torch.tensor([sampled.logprob for sampled in context.drawn])
        worst = (self.logprobs(context) - found).abs().max().item()
        assert worst < tolerance, f"log-probability off by {worst}"
