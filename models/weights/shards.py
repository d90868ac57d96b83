"""Which part of a model one rank holds. Pure and torch-free.

Attention heads and the vocabulary are split over the ranks of a replica (attention TP, width a), experts over EP and
their columns over ETP (width m); a layer's plain MLP over all ranks. Rank r has attention-TP index r % a, EP index
r // m and ETP index r % m (`kernel.topology`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from models.config import DTYPES, DecoderConfig, Qwen3MoeConfig

if TYPE_CHECKING:
    from kernel.topology import World


@dataclass(frozen=True, slots=True)
class Span:
    """The indices start .. stop-1 of one dimension."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """As a Python slice."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model.

    leader: this rank has attention-TP index 0, and so adds what must be added once (residual, biases of o_proj).
    heads, kv_heads: attention heads (KV heads are replicated where the width is a multiple of their number). vocab:
    rows of embedding and LM head, equally many on each rank; those at or past `vocab_size` are padding. experts,
    columns: of sparse layers. dense: columns of a plain MLP.
    """

    leader: bool
    heads: Span
    kv_heads: Span
    vocab: Span
    experts: Span
    columns: Span
    dense: Span


def _part(count: int, parts: int, index: int) -> Span:
    width = count // parts
    return Span(index * width, (index + 1) * width)


def kv_span(kv_heads: int, parts: int, index: int) -> Span:
    """KV heads of attention-TP rank `index` of `parts`: an equal part, or one head that several ranks replicate."""
    if kv_heads >= parts:
        return _part(kv_heads, parts, index)
    head = index * kv_heads // parts
    return Span(head, head + 1)


def check_split(config: DecoderConfig, world: World) -> None:
    """Raise UsageError, with the numbers, unless `config` divides over `world`."""
    a, problems = world.atp, []
    if config.heads % a:
        problems.append(f"{config.heads} attention heads do not divide over attention TP {a}")
    if config.kv_heads % a and a % config.kv_heads:
        problems.append(f"{config.kv_heads} KV heads neither divide over attention TP {a} nor divide it")
    if isinstance(config, Qwen3MoeConfig):
        if config.experts % world.ep:
            problems.append(f"{config.experts} experts do not divide over EP {world.ep}")
        if config.expert_width % world.etp:
            problems.append(f"{config.expert_width} expert columns do not divide over expert TP {world.etp}")
        if config.dense_width % world.size:
            problems.append(f"{config.dense_width} dense MLP columns do not divide over TP {world.size}")
    if problems:
        asked = f"--world {world.size} --adp {world.adp} --ep {world.ep}"
        raise UsageError(f"{asked} cannot hold this model: {'; '.join(problems)}; choose other widths")


def shard(config: Qwen3MoeConfig, world: World, rank: int) -> Shard:
    """The part of `rank`. Raises UsageError where the model does not divide over the world."""
    check_split(config, world)
    a, m = world.atp, world.etp
    t = rank % a
    rows = -(-config.vocab_size // a)
    return Shard(
        leader=t == 0,
        heads=_part(config.heads, a, t),
        kv_heads=kv_span(config.kv_heads, a, t),
        vocab=Span(t * rows, (t + 1) * rows),
        experts=_part(config.experts, world.ep, rank // m),
        columns=_part(config.expert_width, m, rank % m),
        dense=_part(config.dense_width, world.size, rank),
    )


def kv_bytes_per_token(config: DecoderConfig, world: World, dtype: str = "float32") -> int:
    """Bytes of one token's keys and values on one rank, over all layers. Raises UsageError as `shard`."""
    check_split(config, world)
    return 2 * config.layers * len(kv_span(config.kv_heads, world.atp, 0)) * config.head_dim * DTYPES[dtype_name(dtype)]


def dtype_name(dtype: object) -> str:
    """`float32` or `bfloat16`, given that name or the torch.dtype. Raises UsageError on any other."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(f"dtype {name}: choose one of {', '.join(DTYPES)}")
    return name
