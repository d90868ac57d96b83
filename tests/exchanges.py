"""Substrates of the expert exchange for the contract suite, the cases it draws, and the dense reference.

A substrate is a builder that runs on each rank and leaves the exchange in `me.keep`. Experts are affine in a row, so
that the reference is one line and every error of routing, weighting or order shows.
"""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kernel.comm.exchange import pair
from kernel.comm.exchange.gloo import GlooWire
from kernel.comm.exchange.group import LatencyOverGroup, NormalOverGroup
from kernel.comm.exchange.shared import SharedWire
from kernel.comm.exchange.symm import SymmetricLatency
from kernel.device.compat import gather_into
from kernel.device.worker import Completion
from kernel.exchange.shape import Shape
from kernel.exchange.states import Place
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.ports import ExpertExchange, Received
    from tests.ranks import Me


@dataclass(frozen=True)
class Substrate:
    """One to test. ranks: of its world. tolerance: relative, of `dtype`. graphs: whether D can be captured."""

    name: str
    ranks: int
    experts: int = 8
    hidden: int = 24
    topk: int = 3
    dtype: str = "float32"
    tolerance: float = 1e-5
    device: str = "cpu"
    graphs: bool = False
    capacity: int = 1 << 20
    slow: bool = False

    def __str__(self) -> str:
        small = " in small slots" if self.capacity < 1 << 20 else ""
        return f"{self.name} of {self.ranks}{small}"

    @property
    def shape(self) -> Shape:
        kind = getattr(torch, self.dtype)
        return Shape(self.ranks, self.experts, self.hidden, self.topk, 64, 16, kind.itemsize)


SUBSTRATES = (
    Substrate("local", 1),
    Substrate("shm", 2),
    Substrate("shm", 4, hidden=25, dtype="bfloat16", tolerance=4e-2, slow=True),
    Substrate("shm", 4, capacity=4096, hidden=200),
    Substrate("gloo", 2),
    Substrate("gloo", 4, slow=True),
    Substrate("group", 2, hidden=25, dtype="bfloat16", tolerance=4e-2),
    Substrate("group", 4, slow=True),
    Substrate("symmetric", 2),
    Substrate("symmetric", 4, topk=5, dtype="bfloat16", tolerance=4e-2, slow=True),
)


DEEP_EP = Substrate("deepep", 2, 8, 2048, 3, "bfloat16", 4e-2, "cuda", graphs=True)
GPUS = (
    DEEP_EP,
    Substrate("nccl", 2, 16, 256, 4, "bfloat16", 4e-2, "cuda", graphs=True),
    Substrate("symm", 2, 16, 256, 4, "bfloat16", 4e-2, "cuda", graphs=True),
)
"""Substrates that need a GPU for each rank."""


def build(me: Me, substrate: Substrate, store: str) -> None:
    """Leave the exchange of this rank in `me.keep`."""
    torch.set_num_threads(1)
    kind = getattr(torch, substrate.dtype)
    match substrate.name:
        case "local":
            made = pair.local(substrate.shape, kind)
        case "shm":
            prefill, decode = (SharedWire(me.arena, phase, me.rank) for phase in (Phase.P, Phase.D))
            made = pair.over(substrate.shape, kind, prefill, decode)
        case "gloo":
            join(me, store)
            made = pair.over(substrate.shape, kind, GlooWire(Phase.P), GlooWire(Phase.D))
        case "deepep":
            from kernel.comm import deep_ep

            torch.cuda.set_device(me.rank)
            me.keep["streams"] = {phase: torch.cuda.Stream(me.rank) for phase in Phase}
            where = dist.FileStore(store, me.world.size)
            free = torch.cuda.mem_get_info(me.rank)[0]
            made = deep_ep.build(substrate.shape, where, me.rank, me.rank)
            me.keep["taken"] = free - torch.cuda.mem_get_info(me.rank)[0]
        case "group":  # what NCCL's is made of, with gloo's groups in the place of NCCL's
            join(me, store)
            prefills, decodes = GlooGroup(me.rank), GlooGroup(me.rank)
            made = pair.Exchange(
                NormalOverGroup(substrate.shape, prefills, kind, fetched),
                LatencyOverGroup(substrate.shape, decodes, kind, "cpu"),
            )
        case "symmetric":  # torch's symmetric memory, with its two operations done by gloo
            join(me, store)
            normal = NormalOverGroup(substrate.shape, GlooGroup(me.rank), kind, fetched)
            memory = GlooSymmetric(me.rank, substrate.shape)
            made = pair.Exchange(normal, SymmetricLatency(substrate.shape, memory, kind))
        case "nccl" | "symm":
            from kernel.comm.exchange.nccl import nccl
            from kernel.comm.exchange.symm import symm
            from kernel.comm.nccl import NcclWorld

            torch.cuda.set_device(me.rank)
            world = NcclWorld(me.world, me.rank, dist.FileStore(store, me.world.size), me.rank, max_ctas=8)
            world.warm((torch.bfloat16,))
            made = (nccl if substrate.name == "nccl" else symm)(substrate.shape, kind, world)
            me.keep["nccl"] = world
            # The phase's own streams, and not the default one, which waits for all others.
            me.keep["streams"] = {phase: torch.cuda.Stream() for phase in Phase}
            torch.cuda.set_stream(me.keep["streams"][Phase.P])
        case _:
            raise ValueError(substrate.name)
    me.keep["exchange"], me.keep["substrate"] = made, substrate


def join(me: Me, store: str) -> None:
    """Be in gloo's default group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not dist.is_initialized():
        where = dist.FileStore(store, me.world.size)
        dist.init_process_group("gloo", store=where, rank=me.rank, world_size=me.world.size)


class GlooGroup:
    """`kernel.comm.exchange.group.Group`, with what NCCL demands of its arguments checked."""

    def __init__(self, rank: int) -> None:
        self.index, self.size, self.name = rank, dist.get_world_size(), "gloo"
        self._group = dist.new_group(backend="gloo")

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        assert (out.dim(), x.dim(), out.numel()) == (1, 1, self.size * x.numel())
        assert out.is_contiguous()
        assert x.is_contiguous()
        gather_into()(out, x, group=self._group)

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        assert out.is_contiguous()
        assert x.is_contiguous()
        if received or sent:
            assert (sum(received), sum(sent)) == (out.shape[0], x.shape[0])
            assert len(received) == len(sent) == self.size
        else:
            assert out.shape == x.shape
            assert x.shape[0] % self.size == 0
        dist.all_to_all_single(out, x, list(received) or None, list(sent) or None, group=self._group)


class GlooSymmetric:
    """`kernel.comm.exchange.symm.Symmetric` by gathering everything: what torch documents of its two operations."""

    def __init__(self, rank: int, shape: Shape) -> None:
        self.rank, self._shape = rank, shape
        self._group: Any = dist.new_group(backend="gloo")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, float("nan") if dtype.is_floating_point else -7, dtype=dtype)

    def spread(self, x: torch.Tensor, out: torch.Tensor, splits: torch.Tensor, out_splits: torch.Tensor) -> None:
        rows, counts, at = self._all(x), self._all(splits), 0
        for local in range(self._shape.local):
            expert_ = self.rank * self._shape.local + local
            for source in range(self._shape.ranks):
                start, count = int(counts[source][:expert_].sum()), int(counts[source][expert_])
                out[at : at + count] = rows[source][start : start + count]
                out_splits[:, local * self._shape.ranks + source] = torch.tensor([count, at])
                at += count

    def collect(self, x: torch.Tensor, out: torch.Tensor, splits: torch.Tensor, out_splits: torch.Tensor) -> None:
        rows, counts, at = self._all(x), self._all(splits), 0
        for number in range(self._shape.experts):
            owner, local = divmod(number, self._shape.local)
            count, start = counts[owner][:, local * self._shape.ranks + self.rank].tolist()
            out[at : at + count] = rows[owner][start : start + count]
            out_splits[:, number] = torch.tensor([count, at])
            at += count

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(x) for _ in range(self._shape.ranks)]
        dist.all_gather(found, x.contiguous(), group=self._group)
        return found


def fetched(counts: torch.Tensor) -> Completion[Any]:
    """The numbers, at once."""
    done: Completion[Any] = Completion()
    done.succeed(counts.tolist())
    return done


@dataclass(frozen=True)
class Case:
    """One operation of one phase. rows: of each rank. skew: see `drawn`. place: where it happens."""

    rows: tuple[int, ...]
    skew: str
    seed: int
    place: Place = field(default=Place(0, 0))


SKEWS = ("even", "one expert", "one rank", "padding", "duplicates")


def drawn(case: Case, substrate: Substrate, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, experts, weights) of a rank: on the CPU, the same wherever they are drawn."""
    shape, n = substrate.shape, case.rows[rank]
    source = torch.Generator().manual_seed(case.seed * 64 + rank)
    rows = torch.randn((n, shape.hidden), generator=source).to(getattr(torch, substrate.dtype))
    weights = torch.rand((n, shape.topk), generator=source).to(rows.dtype)
    experts = torch.rand((n, shape.experts), generator=source).argsort(1)[:, : shape.topk]
    match case.skew:
        case "one expert":  # every row goes to one expert, and nowhere else
            experts = torch.full_like(experts, -1)
            experts[:, 1] = case.seed % shape.experts
        case "one rank":  # several experts of one rank: the row travels once
            first = case.seed % shape.ranks * shape.local
            picks = torch.rand((n, shape.local), generator=source).argsort(1)[:, : shape.topk] + first
            experts = torch.full_like(experts, -1)
            experts[:, : picks.shape[1]] = picks
        case "padding":  # some rows, and some choices of others, are for nobody
            experts[torch.rand(n, generator=source) < 0.4] = -1
            experts[torch.rand(experts.shape, generator=source) < 0.3] = -1
        case "duplicates" if n:
            rows = rows[:1].expand(n, -1).contiguous()
    return rows, experts, weights


def expert(x: torch.Tensor, index: torch.Tensor | int) -> torch.Tensor:
    """The result of expert `index`, global, for rows x."""
    return x * (1 + 0.25 * torch.as_tensor(index, device=x.device).to(x.dtype).unsqueeze(-1)) + 1


def reference(case: Case, substrate: Substrate, rank: int) -> torch.Tensor:
    """What the exchange and all experts make of a rank's rows, in float64."""
    rows, experts, weights = drawn(case, substrate, rank)
    total = torch.zeros_like(rows, dtype=torch.float64)
    for k in range(experts.shape[1]):
        part = expert(rows.double(), experts[:, k]) * weights[:, k : k + 1].double()
        total += torch.where(experts[:, k : k + 1] >= 0, part, 0)
    return total


def computed(received: Received, shape: Shape, rank: int) -> torch.Tensor:
    """What this rank's experts make of the rows that came."""
    total = torch.zeros_like(received.rows, dtype=torch.float32)
    for k in range(received.experts.shape[1]):
        local = received.experts[:, k]
        mine = expert(received.rows.float(), local + rank * shape.local) * received.weights[:, k : k + 1].float()
        total += torch.where((local >= 0).unsqueeze(1), mine, torch.zeros_like(mine))
    return total.to(received.rows.dtype)


def verdict(me: Me, case: Case, result: torch.Tensor) -> str:
    """"" if `result` is what the reference says."""
    substrate: Substrate = me.keep["substrate"]
    wanted = reference(case, substrate, me.rank)
    found = result.double().cpu()
    if found.shape != wanted.shape:
        return f"rank {me.rank} {case}: shape {list(found.shape)}, not {list(wanted.shape)}"
    scale = max(1.0, float(wanted.abs().max()) if wanted.numel() else 1.0)
    wrong = float((found - wanted).abs().max()) / scale if wanted.numel() else 0.0
    return "" if wrong <= substrate.tolerance else f"rank {me.rank} {case}: off by {wrong:.2g}"


def stream_of(me: Me, phase: Phase) -> Any:
    """What makes the phase's stream current, on a GPU."""
    streams = me.keep.get("streams")
    return nullcontext() if streams is None else torch.cuda.stream(streams[phase])


def on_device(me: Me, case: Case) -> list[torch.Tensor]:
    substrate: Substrate = me.keep["substrate"]
    return [each.to(substrate.device) for each in drawn(case, substrate, me.rank)]


async def prefill(me: Me, case: Case, *, exact: bool = True) -> str:
    """One operation of P; "" or what was wrong."""
    exchange: ExpertExchange = me.keep["exchange"]
    substrate: Substrate = me.keep["substrate"]
    normal = exchange.normal
    with stream_of(me, Phase.P):
        rows, experts, weights = on_device(me, case)
        pending = normal.notify(case.place, experts)
    await pending.event.wait()
    if (told := list(normal.arriving(pending))) != (wanted := coming(me, case)):
        return f"rank {me.rank} {case}: told of {told} rows, not {wanted}"
    normal.permit(pending)
    with stream_of(me, Phase.P):
        received = normal.submit(pending, rows, weights)
        if exact and (wrong := _inexact(me, case, received)):
            return wrong
        return verdict(me, case, normal.combine(case.place, computed(received, substrate.shape, me.rank)))


def coming(me: Me, case: Case) -> list[int]:
    """Rows of each rank that chose an expert here."""
    substrate: Substrate = me.keep["substrate"]
    mine = [drawn(case, substrate, rank)[1] for rank in range(substrate.ranks)]
    local = substrate.shape.local
    return [int(((each >= 0) & (each // local == me.rank)).any(1).sum()) for each in mine]


def _inexact(me: Me, case: Case, received: Received) -> str:
    """"" if exactly the rows came that chose an expert here, in order of ranks and rows."""
    substrate: Substrate = me.keep["substrate"]
    shape, came = substrate.shape, []
    for rank in range(shape.ranks):
        rows, experts, _ = drawn(case, substrate, rank)
        mine = ((experts >= 0) & (experts // shape.local == me.rank)).any(1)
        came.append(rows[mine])
    wanted = torch.cat(came)
    if received.rows.shape != wanted.shape:
        return f"rank {me.rank} {case}: {list(received.rows.shape)} came, not {list(wanted.shape)}"
    same = torch.equal(received.rows.cpu(), wanted)
    return "" if same else f"rank {me.rank} {case}: other rows came, or in another order"


def decode(me: Me, case: Case) -> str:
    """One operation of D; "" or what was wrong."""
    exchange: ExpertExchange = me.keep["exchange"]
    substrate: Substrate = me.keep["substrate"]
    low = exchange.low_latency
    with stream_of(me, Phase.D):
        received = low.dispatch(case.place, *on_device(me, case))
        return verdict(me, case, low.combine(case.place, computed(received, substrate.shape, me.rank)))


async def both(me: Me, prefills: Sequence[Case], decodes: Sequence[Case]) -> str:
    """P's operations and D's at the same time, D's on a thread of their own, as phases have in the CPU world."""
    found: list[str] = []

    def decoding() -> None:
        try:
            if "streams" in me.keep:
                torch.cuda.set_device(me.rank)
                torch.cuda.set_stream(me.keep["streams"][Phase.D])
            found.extend(decode(me, case) for case in decodes)
        except BaseException as error:
            found.append(f"rank {me.rank} D: {error!r}")

    thread = threading.Thread(target=decoding)
    thread.start()
    try:
        for case in prefills:
            found.append(await prefill(me, case))
    finally:
        thread.join(60)
    return "; ".join(filter(None, found))


async def replays(me: Me, prefills: Sequence[Case], decodes: Sequence[Case]) -> str:
    """D as a captured graph of two layers, replayed with other inputs before each operation of P."""
    exchange: ExpertExchange = me.keep["exchange"]
    substrate: Substrate = me.keep["substrate"]
    stream, low, most = me.keep["streams"][Phase.D], exchange.low_latency, substrate.shape.decode_rows
    inputs = [each.clone() for each in on_device(me, Case((most,) * 4, "even", 1))]
    results: list[torch.Tensor] = []

    def layers() -> None:
        results.clear()
        for layer in range(2):
            received = low.dispatch(Place(0, layer), *inputs)
            results.append(low.combine(Place(0, layer), computed(received, substrate.shape, me.rank)))

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with low.capture("D of the test") as hold, torch.cuda.graph(graph, stream=stream):
            layers()
    found = []
    for number, case in enumerate(decodes):
        mine = on_device(me, case)
        with torch.cuda.stream(stream):
            for static, fresh in zip(inputs, mine, strict=True):
                static.fill_(-1)
                static[: fresh.shape[0]] = fresh
            low.replayed(hold)
            graph.replay()
        if number < len(prefills):
            found.append(await prefill(me, prefills[number]))
        stream.synchronize()
        found += [verdict(me, case, result[: case.rows[me.rank]]) for result in results]
    torch.cuda.synchronize()
    graph.reset()
    low.dropped(hold)
    return "; ".join(filter(None, found))


def raised(call: Any, *args: Any) -> str:
    """The name of what a call raises."""
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__
    return "nothing"
