"""One rank of bench/gpu/exchange.py."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from torch.distributed import FileStore

from bench.gpu.hazard_common import begin, end
from bench.gpu.streams import handed_over
from kernel.comm import deep_ep
from kernel.exchange.shape import Shape
from kernel.exchange.states import Place

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

POOL = 24
"""Different inputs of each phase."""
WARM = 20


class Rank:
    """The exchange of this rank, its streams, and inputs whose results are known."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.rank = config, config["rank"]
        torch.cuda.set_device(self.rank)
        self.shape = Shape(
            2, config["experts"], config["hidden"], config["topk"], config["prefill_rows"], config["decode_rows"]
        )
        store = FileStore(config["store"], 2)
        self.exchange = deep_ep.build(self.shape, store, self.rank, self.rank, num_sms=config["num_sms"])
        make: Any = torch.cuda.Stream
        self.p_stream, self.d_stream = make(priority=0), make(priority=-5)
        self.source = random.Random(1000 * config["seed"] + self.rank)
        self._numbers = torch.Generator(device="cuda").manual_seed(config["seed"] * 2 + self.rank)
        self.bad = torch.zeros(2, dtype=torch.int64, device="cuda")

    def inputs(self, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """rows, experts (some -1), weights, and what experts make of them."""
        n, k = self.source.choice([0, 1, most, self.source.randrange(most + 1)]), self.shape.topk
        rows = torch.randn((n, self.shape.hidden), generator=self._numbers, device="cuda").bfloat16()
        order = torch.rand((n, self.shape.experts), generator=self._numbers, device="cuda").argsort(1)
        experts = order[:, :k].contiguous()
        if self.source.random() < 0.3:
            experts[torch.rand(experts.shape, generator=self._numbers, device="cuda") < 0.3] = -1
        elif self.source.random() < 0.2:
            experts[:, 1:] = -1
            experts[:, 0] = self.source.randrange(self.shape.experts)
        weights = torch.rand((n, k), generator=self._numbers, device="cuda").bfloat16()
        return rows, experts, weights, affine(rows.float(), experts, weights.float(), 0)

    def results(self, received: Any) -> Tensor:
        """What this rank's experts make of rows that came."""
        first = self.rank * self.shape.local
        return affine(received.rows.float(), received.experts, received.weights.float(), first).bfloat16()

    def check(self, phase: int, found: Tensor, wanted: Tensor) -> None:
        """Count a wrong result, on the device."""
        off = (found.float() - wanted).abs() > 3e-2 * (4 + wanted.abs().amax(1, keepdim=True) if len(wanted) else 1)
        self.bad[phase] += (off.any() | ~torch.isfinite(found).all()).long()


def affine(x: Tensor, experts: Tensor, weights: Tensor, first: int) -> Tensor:
    """Weighted sum of experts x * (1 + e / 4) + 1, e = experts + first; -1 is none, and x there may be anything."""
    chosen = experts >= 0
    share = torch.where(chosen, weights, 0.0)
    scale = (share * (1 + 0.25 * (experts + first))).sum(1, keepdim=True)
    some = chosen.any(1, keepdim=True)
    return torch.where(some, x * scale + share.sum(1, keepdim=True), 0.0)


class Replay:
    """A graph of two layers of D over static inputs. work: what is done with what came."""

    def __init__(self, rank: Rank, work: Callable[[Any], Tensor]) -> None:
        shape = rank.shape
        self._rank, n = rank, shape.decode_rows
        self.rows = torch.zeros((n, shape.hidden), dtype=torch.bfloat16, device="cuda")
        self.experts = torch.full((n, shape.topk), -1, device="cuda")
        self.weights = torch.zeros((n, shape.topk), dtype=torch.bfloat16, device="cuda")
        low = rank.exchange.low_latency

        def body() -> list[Tensor]:
            found = []
            for layer in range(2):
                received = low.dispatch(Place(0, layer), self.rows, self.experts, self.weights)
                found.append(low.combine(Place(0, layer), work(received)))
            return found

        torch.cuda.synchronize()
        with torch.cuda.stream(rank.d_stream):
            body()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with low.capture("two layers") as self.hold, torch.cuda.graph(self.graph, stream=rank.d_stream):
                self.out = body()
        torch.cuda.synchronize()

    def fill(self, given: tuple[Tensor, ...]) -> None:
        """Other inputs, on D's stream."""
        n = given[0].shape[0]
        self.experts.fill_(-1)
        for static, fresh in zip((self.rows, self.experts, self.weights), given, strict=False):
            static[:n].copy_(fresh)

    def __call__(self) -> None:
        self._rank.exchange.low_latency.replayed(self.hold)
        self.graph.replay()


async def interleavings(rank: Rank) -> dict[str, Any]:
    """Every rank draws its own order of P's parts and D's replays, and its own pauses."""
    replay, source, normal = Replay(rank, rank.results), rank.source, rank.exchange.normal
    prefills = [rank.inputs(rank.shape.prefill_rows) for _ in range(POOL)]
    decodes = [rank.inputs(rank.shape.decode_rows) for _ in range(POOL)]
    torch.cuda.synchronize()
    began, last = time.monotonic(), {"p": 0, "d": 0}

    def decode(count: int) -> None:
        for _ in range(count):
            last["d"] += 1
            given = source.choice(decodes)
            with torch.cuda.stream(rank.d_stream):
                replay.fill(given)
                replay()
                for out in replay.out:
                    rank.check(1, out[: given[0].shape[0]], given[3])

    def pause() -> None:
        if source.random() < 0.2:
            time.sleep(source.random() * source.choice([1e-4, 3e-4, 2e-3]))

    for number in range(rank.config["count"]):
        places = sorted(source.randrange(4) for _ in range(2))
        given = source.choice(prefills)
        decode(places.count(0))
        pause()
        with torch.cuda.stream(rank.p_stream):
            pending = normal.notify(Place(number, 0), given[1])
        decode(places.count(1))
        await pending.event.wait()
        pause()
        normal.permit(pending)
        with torch.cuda.stream(rank.p_stream):
            received = normal.submit(pending, given[0], given[2])
        decode(places.count(2))
        with torch.cuda.stream(rank.p_stream):
            rank.check(0, normal.combine(Place(number, 0), rank.results(received)), given[3])
        decode(places.count(3))
        last["p"] += 1
    torch.cuda.synchronize()
    return {"count": last["p"], "replays": last["d"], "wrong": rank.bad.tolist(), "s": time.monotonic() - began}


def together(rank: Rank) -> dict[str, Any]:
    """Bare buffers: what each phase takes alone, and both."""
    normal, count = rank.exchange.normal, rank.config["iterations"]
    replay = Replay(rank, lambda received: received.rows)
    full = torch.Generator(device="cuda").manual_seed(7)
    shape = rank.shape
    rows = torch.randn((shape.prefill_rows, shape.hidden), device="cuda").bfloat16()
    experts = torch.rand((shape.prefill_rows, shape.experts), generator=full, device="cuda").argsort(1)
    experts = experts[:, : shape.topk].contiguous()
    weights = torch.rand((shape.prefill_rows, shape.topk), device="cuda")
    few = torch.rand((shape.decode_rows, shape.experts), generator=full, device="cuda").argsort(1)[:, : shape.topk]
    replay.fill((rows[: shape.decode_rows], few, weights[: shape.decode_rows].bfloat16()))
    layout = normal.buffer.get_dispatch_layout(experts, shape.experts)
    room = 2 * shape.prefill_rows

    def prefill() -> None:
        came = normal.buffer.dispatch(
            rows, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3], num_tokens_per_expert=layout[2],
            topk_idx=experts, topk_weights=weights, num_worst_tokens=room, config=normal.configs.dispatch,
        )  # fmt: skip
        normal.buffer.combine(came[0], came[4], config=normal.configs.combine)

    def both(
        p_stream: Any, d_stream: Any, replays: int, spans: list[Any] | None = None, through: Any = None
    ) -> float:
        """Microseconds an iteration: one of P, `replays` of D; either may be none (replays 0, p_stream None).

        spans: gets two events around each of D's replays. through: another stream, to which D hands them over.
        """
        first, ends = event(), [event(), event()]
        for number in range(-WARM, count):
            if number == 0:
                torch.cuda.synchronize()
                first.record(p_stream or d_stream)
                d_stream.wait_event(first)
            if p_stream is not None:
                with torch.cuda.stream(p_stream):
                    prefill()
            for _ in range(replays):
                with torch.cuda.stream(d_stream):
                    if spans is not None and number >= 0:
                        spans.append((event(), event()))
                        spans[-1][0].record(d_stream)
                    if through is None:
                        replay()
                    else:
                        handed_over(d_stream, through, replay, current=torch.cuda.stream, event=torch.cuda.Event)
                    if spans is not None and number >= 0:
                        spans[-1][1].record(d_stream)
        for one, stream in zip(ends, (p_stream or d_stream, d_stream), strict=True):
            one.record(stream)
        torch.cuda.synchronize()
        return 1e3 * max(first.elapsed_time(one) for one in ends) / count

    spans: dict[str, list[Any]] = {"once": [], "beside": [], "shared": []}
    # The stream on which DeepEP puts P's kernels, and would put D's if both phases had one buffer.
    communication = normal.buffer.get_comm_stream()
    p_alone = both(rank.p_stream, rank.d_stream, 0)
    d_alone = both(None, rank.d_stream, 1)
    replays = max(1, int(p_alone / d_alone))
    found = {
        "p_alone_us": p_alone,
        "d_alone_us": d_alone,
        "both_us": both(rank.p_stream, rank.d_stream, 1),
        "full_us": both(rank.p_stream, rank.d_stream, replays),
        "one_stream_us": both(rank.p_stream, rank.p_stream, 1),
        "shared_us": both(rank.p_stream, rank.d_stream, 1, through=communication),
        "replays": replays,
    }
    both(None, rank.d_stream, 1, spans["once"])
    both(rank.p_stream, rank.d_stream, replays, spans["beside"])
    both(rank.p_stream, rank.d_stream, replays, spans["shared"], communication)
    for name, pairs in spans.items():
        found[f"d_{name}_us"] = 1e3 * statistics.median(one.elapsed_time(other) for one, other in pairs)
    return found


async def split(rank: Rank) -> dict[str, Any]:
    """P through the port, one operation after the other."""
    normal, shape = rank.exchange.normal, rank.shape
    rows = torch.randn((shape.prefill_rows, shape.hidden), device="cuda").bfloat16()
    experts = torch.rand((shape.prefill_rows, shape.experts), device="cuda").argsort(1)[:, : shape.topk].contiguous()
    weights = torch.rand((shape.prefill_rows, shape.topk), device="cuda").bfloat16()
    torch.cuda.synchronize()
    whole, counts = [], []
    for number in range(-WARM, rank.config["iterations"]):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.cuda.stream(rank.p_stream):
            pending = normal.notify(Place(number, 0), experts)
        await pending.event.wait()
        there = time.perf_counter()
        normal.permit(pending)
        with torch.cuda.stream(rank.p_stream):
            received = normal.submit(pending, rows, weights)
            normal.combine(Place(number, 0), received.rows)
        torch.cuda.synchronize()
        if number >= 0:
            whole.append(1e6 * (time.perf_counter() - start))
            counts.append(1e6 * (there - start))
    return {"p_us": statistics.median(whole), "counts_us": statistics.median(counts)}


def in_flight(rank: Rank) -> dict[str, Any]:
    """Past the port, which refuses it: a second dispatch, and a third, before the first one's combine."""
    buffer, shape, wrong = rank.exchange.low_latency.buffer, rank.shape, 0
    for _ in range(50):
        given, held, hooks = [], [], []
        while len(given) < 3:
            drawn = rank.inputs(shape.decode_rows)
            given += [drawn] if len(drawn[0]) else []
        for rows, experts, _, _ in given:
            # Sent, not received yet: the buffer has two halves, and a third operation takes the first one's.
            came, counts, handle, _, hook = buffer.low_latency_dispatch(
                rows, experts, shape.decode_rows, shape.experts, use_fp8=False, return_recv_hook=True
            )
            held.append((came, counts, handle))
            hooks.append(hook)
        for hook in hooks:
            hook()
        for (_, experts, weights, wanted), (came, counts, handle) in zip(given, held, strict=True):
            places = torch.arange(came.shape[1], device="cuda").unsqueeze(0)
            taken = torch.where(
                places < counts.unsqueeze(1), torch.arange(shape.local, device="cuda").unsqueeze(1), -1
            ).view(-1, 1)
            made = affine(came.view(-1, shape.hidden).float(), taken, torch.ones_like(taken).float(),
                          rank.rank * shape.local).bfloat16()  # fmt: skip
            total, _, hook = buffer.low_latency_combine(
                made.view(came.shape), experts, weights.float(), handle, return_recv_hook=True
            )
            hook()
            rank.check(1, total, wanted)
        wrong = int(rank.bad[1])
    return {"wrong": wrong}


def event() -> Any:
    """One that tells time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def main() -> None:
    """The experiment that the configuration names."""
    config = begin()
    rank = Rank(config)
    match config["experiment"]:
        case "interleavings":
            found = asyncio.run(interleavings(rank))
        case "together":
            found = together(rank)
        case "split":
            found = asyncio.run(split(rank))
        case _:
            found = in_flight(rank)
    end(found)


if __name__ == "__main__":
    main()
