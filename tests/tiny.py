"""Ranks of a tiny model in one process, as threads over in-memory collectives, and transformers as the oracle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import models
from kernel.device.cpu import TorchLayout
from kernel.driver import Driver
from kernel.program import Program
from kernel.request import Phase, Row, Sampled, SamplingParams
from kernel.step import Step
from kernel.topology import Role, World

if TYPE_CHECKING:
    from collections.abc import Generator

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

    def all_reduce(self, role: Role, x: Tensor) -> Tensor:
        return torch.stack(self._mine[role].exchange(self._rank, ("AR", x.shape), x)).sum(0)

    def all_gather(self, role: Role, x: Tensor, dim: int = 0) -> Tensor:
        return torch.cat(self._mine[role].exchange(self._rank, ("AG", dim, x.shape), x), dim=dim)

    def reduce_scatter(self, role: Role, x: Tensor, sizes: Sequence[int]) -> Tensor:
        meeting = self._mine[role]
        assert sum(sizes) == x.shape[0] and len(sizes) == len(meeting.members)
        total = torch.stack(meeting.exchange(self._rank, ("RS", x.shape, tuple(sizes)), x)).sum(0)
        return total.split(list(sizes))[meeting.members.index(self._rank)]

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
        self, path: Path, world: World, *, blocks: int = 96, slots: int = 16, dtype: object = "float32", block_size: int = BLOCK_SIZE
    ) -> None:
        self.world, self.block_size = world, block_size
        self.models: list[Any] = [
            models.load(path, world, rank, blocks=blocks, block_size=block_size, slots=slots, dtype=dtype)
            for rank in range(world.size)
        ]
        layers = self.models[0].layers
        self.programs = {phase: Program(world.under(None), phase, layers) for phase in Phase}
        self._next_block = [1] * world.adp
        self._blocks, self.last_pause = blocks, -1

    # -- one forward --------------------------------------------------------------------------------------------

    def forward(
        self, phase: Phase, rows: Sequence[Sequence[Row]], bucket: int = 0, span: int = 1
    ) -> list[list[Sampled | None]]:
        """Run `rows` of each replica; the results of each replica, which all of its ranks must agree on."""
        fed = [sum(row.fed for row in each) for each in rows]
        sizes = fed if phase is Phase.P else [bucket or self.bucket(max(fed))] * self.world.adp
        meetings = {
            (role, group): Meeting(group) for role, groups in self.world.groups.items() for group in groups
        }

        def one(rank: int) -> list[Sampled | None]:
            replica = self.world.replica(rank)
            collectives = FakeCollectives(rank, meetings, self.world)
            step = Step(self.programs[phase], rank, sizes, fed[replica], collectives, TorchLayout())
            model = self.models[rank]
            driver: Driver[list[Sampled | None]] = Driver(model.forward(step, rows[replica]), step, scope)
            end = model.layers if phase is Phase.D else 0
            while not driver.advance(end):
                end += span
            assert driver.result is not None
            return driver.result

        results = together([partial(one, rank) for rank in range(self.world.size)], meetings.values())
        for rank, result in enumerate(results):
            assert result == results[self.world.leaders()[self.world.replica(rank)]], "ATP peers drew differently"
        return [results[leader] for leader in self.world.leaders()]

    def bucket(self, rows: int) -> int:
        """The smallest bucket that every ATP rank has an equal part of."""
        return max(1, -(-rows // self.world.atp)) * self.world.atp

    # -- requests -----------------------------------------------------------------------------------------------

    def admit(self, replica: int, prompt: Sequence[int], longest: int, params: SamplingParams = GREEDY) -> Context:
        """A request with blocks for `longest` tokens; blocks of different requests interleave."""
        taken = sum(self._next_block) + replica
        need = -(-longest // self.block_size)
        start = self._next_block[replica]
        self._next_block[replica] += need
        assert start + need <= self._blocks
        # Descending, so that a block's number says nothing about its place.
        return Context(taken % 16, replica, list(prompt), params, tuple(range(start + need - 1, start - 1, -1)))

    def prefill(self, contexts: Sequence[Context], cuts: Sequence[int] = (), start: int = 0) -> None:
        """Feed each context's tokens from `start` on, cut at the positions `cuts`; the last part draws a token."""
        edges = [start, *cuts]
        for number, begin in enumerate(edges):
            end = edges[number + 1] if number + 1 < len(edges) else None
            rows: list[list[Row]] = [[] for _ in range(self.world.adp)]
            sent: list[list[Context]] = [[] for _ in range(self.world.adp)]
            for one in contexts:
                part = tuple(one.tokens[begin:end])
                if part:
                    last = begin + len(part) == len(one.tokens)
                    rows[one.replica].append(Row(one.slot, part, begin, one.blocks, one.params if last else None))
                    sent[one.replica].append(one)
            self._keep(sent, self.forward(Phase.P, rows))

    def decode(self, contexts: Sequence[Context], bucket: int = 0) -> None:
        """One token of each context, fed from its slot."""
        rows: list[list[Row]] = [[] for _ in range(self.world.adp)]
        sent: list[list[Context]] = [[] for _ in range(self.world.adp)]
        for one in contexts:
            rows[one.replica].append(Row(one.slot, None, len(one.tokens) - 1, one.blocks, one.params))
            sent[one.replica].append(one)
        self._keep(sent, self.forward(Phase.D, rows, bucket))

    def _keep(self, sent: list[list[Context]], results: list[list[Sampled | None]]) -> None:
        for contexts, drawn in zip(sent, results, strict=True):
            for context, sampled in zip(contexts, drawn, strict=True):
                if sampled is not None:
                    context.tokens.append(sampled.token)
                    context.drawn.append(sampled)


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

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens, by transformers' own loop."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0)
        return list(out[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), vocab], teacher-forced."""
        return self.model(torch.tensor([list(tokens)])).logits[0].float()

    def check(self, context: Context, tolerance: float = 1e-4) -> None:
        """Each drawn token is the greedy one after what came before, with its log-probability."""
        first = len(context.tokens) - len(context.drawn)
        logits = self.logits(context.tokens)[first - 1 : -1]
        drawn = [sampled.token for sampled in context.drawn]
        assert logits.argmax(-1).tolist() == drawn == context.tokens[first:]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(drawn)[:, None])[:, 0]
        found = torch.tensor([sampled.logprob for sampled in context.drawn])
        worst = (expected - found).abs().max().item()
        assert worst < tolerance, f"log-probability off by {worst}"
