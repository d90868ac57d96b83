"""The engine on GPUs: the CPU world's tokens, quiet after its warm-up, and faults in one line; and how a rank warms up.

Tests marked `gpu` need one GPU, or two where they say so.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kernel.device.cpu import CpuDevice  # noqa: E402
from kernel.driver import Driver  # noqa: E402
from kernel.errors import DeviceFault, RankLost, UsageError  # noqa: E402
from kernel.exchange.shape import Shape  # noqa: E402
from kernel.request import Phase, Row, SamplingParams  # noqa: E402
from kernel.sched.policy import Limits  # noqa: E402
from kernel.topology import World  # noqa: E402
from models.tiny import write_checkpoint  # noqa: E402
from rollout.device import DeviceOptions  # noqa: E402
from rollout.engine import Engine  # noqa: E402
from rollout.ranks import cuda_rank  # noqa: E402
from rollout.ranks.links import Communicators  # noqa: E402
from rollout.replay import read_rows  # noqa: E402
from tests.commands import rollout  # noqa: E402
from tests.engines import trajectories  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernel.device.occupancy import Kernel
    from rollout.ranks.nursery import Nursery

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
REFERENCE = DeviceOptions("cuda", dtype="float32", attention="reference")
EAGER = DeviceOptions("cuda", dtype="float32", attention="reference", graphs=False)
TOLERANCE = 1e-4


def needs(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(count > GPUS, reason=f"needs {count} GPUs, and {GPUS} are here")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path)
    return path


# -- without a GPU ------------------------------------------------------------------------------------------------


def test_the_warm_up_meets_the_largest_prefill_first_and_every_size_class() -> None:
    assert list(cuda_rank.prefill_shapes(512)) == [512, 256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert list(cuda_rank.prefill_shapes(300)) == [300, 256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert list(cuda_rank.prefill_shapes(1)) == [1]


@pytest.mark.parametrize("phase", list(Phase))
async def test_a_step_of_the_warm_up_carries_a_whole_forward(phase: Phase, checkpoint: Path) -> None:
    import models

    world = World()
    model = models.load(checkpoint, world, 0, blocks=8, block_size=16, slots=4)
    alone = Communicators()
    device = CpuDevice(0, {each: alone.collectives(each) for each in Phase})
    try:
        step = cuda_rank.make_step(device, world, 0, model.layers, phase, (4,), 3 if phase is Phase.D else 4)
        greedy = SamplingParams()
        rows = [Row(slot, None, 5, (slot,), greedy) for slot in range(3)]
        if phase is Phase.P:
            rows = [Row(0, (3, 4, 5, 6), 0, (0,), greedy)]
        driver: Driver[Any] = Driver(model.forward(step, rows), step, partial(device.scope, phase))
        assert driver.advance(1 << 30)
        assert len(driver.result) == len(rows)
    finally:
        await device.close()


class Fakes:
    """Stand-ins for what needs a GPU; `log` is what happened to them, in order."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.kernels: list[Kernel] = []

    def model(self, path: Any, world: World, rank: int, **options: Any) -> Any:
        self.log.append(("load", options))
        return type("Model", (), {"layers": 4})()

    def device(self, rank: int, index: int, collectives: Any, **options: Any) -> Any:
        self.log.append(("device", index, options["prefill_sms"]))
        self.kernels = options["exchange"](132)
        return type("Device", (), {"scope": self.scope})()

    def scope(self, phase: Phase) -> Any:
        from contextlib import nullcontext

        self.log.append(("scope", phase))
        return nullcontext()

    def graphs(self, model: Any, device: Any, buckets: Any, make_step: Any, *, enabled: bool) -> Any:
        self.log.append(("graphs", tuple(buckets), enabled))
        return type("Graphed", (), {"layers": 4, "warm": lambda _, shapes: self.log.append(("warm", shapes))})()

    def warm(self) -> None:
        self.log.append("link")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    import models
    from kernel.device import cuda

    graphs = pytest.importorskip("models.cuda.graphs")
    made = Fakes()
    monkeypatch.setattr(models, "load", made.model)
    monkeypatch.setattr(cuda, "CudaDevice", made.device)
    monkeypatch.setattr(graphs, "GraphedDecode", made.graphs)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1 << 34, 1 << 35))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: made.log.append("synchronize"))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: made.log.append(device) or empty(0, dtype=dtype))
    return made


def configuration(**options: Any) -> dict[str, Any]:
    device = DeviceOptions("cuda", dtype="bfloat16", attention="reference", **options)
    none = {"substrate": "none"}
    sizes = {"blocks": 8, "block_size": 16, "hidden": 64}
    return {"device": asdict(device), "exchange": none, "gpu": 1, "model": "m", **sizes}


async def test_a_rank_is_warm_in_one_order_before_it_serves(fakes: Fakes) -> None:
    limits = Limits(1, 1, 4, prefill_tokens=8, rows=3)
    link: Any = type("Link", (), {"collectives": {}, "warm": lambda _: fakes.warm()})()
    watch: Callable[..., None] = lambda *_: None  # noqa: E731
    _, model, quiet = await cuda_rank.build(
        configuration(graphs=False, prefill_sms=40), World(), 0, limits, link, watch
    )
    assert (model.layers, quiet) == (4, None)
    [load, device, communicators, graphs, warm, *reserved, last] = fakes.log
    assert load[1]["device"] == "cuda:1"
    assert (load[1]["attention"], load[1]["weights"], load[1]["slots"]) == ("reference", "checkpoint", 3)
    assert device == ("device", 1, 40)
    assert communicators == "link", "communicators first: graphs hold their collectives"
    assert graphs == ("graphs", (1, 2, 4), False)
    assert warm == ("warm", (8, 4, 2, 1))
    assert [each[1] for each in reserved if each[0] == "scope"] == [Phase.P, Phase.D]
    assert set(reserved) == {("scope", Phase.P), ("scope", Phase.D), "cuda:1"}
    assert last == "synchronize"


async def test_the_device_is_told_of_the_exchange_s_kernels(fakes: Fakes) -> None:
    async def compared(tag: str, payload: bytes) -> list[bytes]:
        return [payload] * 2

    shape = Shape(ranks=2, experts=64, hidden=2560, topk=8, prefill_rows=8, decode_rows=4)
    built: list[str] = []
    link: Any = SimpleNamespace(
        collectives={},
        warm=fakes.warm,
        rendezvous=SimpleNamespace(exchange=compared),
        exchange=lambda substrate, *_: built.append(substrate),
    )
    config = configuration(exchange="deepep", exchange_sms=12)
    config["exchange"] = {"substrate": "deepep", "reason": "", "shape": asdict(shape)}
    await cuda_rank.build(config, World(2, 2, 2), 0, Limits(2, 2, 4, prefill_tokens=8, rows=4), link, lambda *_: None)
    assert built == ["deepep"]
    assert {kernel.name: kernel.ctas for kernel in fakes.kernels} == {
        "D's low-latency exchange": 64, "P's exchange": 12, "P's notification": 3,
    }  # fmt: skip


async def test_memory_that_ends_while_loading_is_one_line(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    import models

    def load(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. More")

    monkeypatch.setattr(models, "load", load)
    link: Any = type("Link", (), {"collectives": {}})()
    with pytest.raises(DeviceFault, match=r"rank 3 ran out of GPU memory while it loaded the model \(9\.00 GiB more"):
        await cuda_rank.build(configuration(), World(), 3, Limits(1, 1, 4), link, lambda *_: None)


def test_a_rank_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError, match="is a build for CPUs"):
        cuda_rank.choose(0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="finds no usable GPU"):
        cuda_rank.choose(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="GPU 2 of this host was asked for, and it has 2"):
        cuda_rank.choose(2)


async def test_a_rank_s_link_leaves_its_kernels_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel.comm import nccl
    from kernel.comm.shared import Arena
    from rollout.ranks.links import connect
    from rollout.ranks.torchrun import serve_store

    log: list[Any] = []

    class World2:
        def __init__(self, world: World, rank: int, store: Any, index: int, *, max_ctas: int | None) -> None:
            store.set("hello", "from rank 1")
            log.append((world.size, rank, index, max_ctas))

        def collectives(self, phase: Phase) -> str:
            return f"those of {phase}"

        def warm(self) -> None:
            log.append("warm")

        def close(self) -> None:
            log.append("close")

    monkeypatch.setattr(nccl, "NcclWorld", World2)
    world = World(2, 2, 1)
    store, where = serve_store()
    arena = Arena.create(world)
    config = {**configuration(max_ctas=8), "arena": os.dup(arena.fd), "nccl": where}
    # Ranks inherit the launcher's descriptors; here rank 1 is the same process, and shares its bells.
    monkeypatch.setattr(Arena, "attach", classmethod(lambda cls, fd, rank: arena))
    link = await connect(config, world, 1)
    assert link.collectives == {Phase.P: "those of P", Phase.D: "those of D"}
    link.warm()
    link.abort("rank 0 was killed by signal 9")
    assert log == [(2, 1, 1, 8), "warm"], "graphs may hold the communicators: the device resets those first"
    assert arena.aborted == "rank 0 was killed by signal 9"
    link.close()
    assert log[-1] == "close"
    assert store.get("turnstile/nccl/hello") == b"from rank 1"
    os.close(config["arena"])
    arena.close()


async def test_a_lone_rank_needs_no_nccl() -> None:
    from kernel.comm.shared import Arena
    from kernel.topology import Role
    from rollout.ranks.links import connect

    arena = Arena.create(World())
    link = await connect({**configuration(), "arena": arena.fd, "nccl": None}, World(), 0)
    assert link.collectives[Phase.P].all_reduce(Role.TP, 7) == 7
    link.warm()
    link.close()
    link.rendezvous.close()


# -- with one ----------------------------------------------------------------------------------------------------


async def tokens(checkpoint: Path, world: World, nursery: Nursery, **options: Any) -> list[Any]:
    async with Engine(checkpoint, world, kv_tokens=4096, prefill_tokens=48, rows=8, nursery=nursery, **options) as made:
        done = await trajectories(made, count=4, turns=2, seed=5)
    return [turn.done for each in done for turn in each]


def agree(found: list[Any], expected: list[Any]) -> None:
    assert [turn.tokens for turn in found] == [turn.tokens for turn in expected]
    for mine, theirs in zip(found, expected, strict=True):
        worst = max(abs(a - b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True))
        assert worst < TOLERANCE, f"log-probability off by {worst}"


@pytest.mark.gpu
@needs(1)
@pytest.mark.parametrize("device", [REFERENCE, EAGER], ids=["graphs", "eager"])
@pytest.mark.parametrize("policy", ["fine:span=2", "normal"])
async def test_one_gpu_gives_the_cpu_s_tokens(
    device: DeviceOptions, policy: str, checkpoint: Path, nursery: Nursery
) -> None:
    expected = await tokens(checkpoint, World(), nursery)
    agree(await tokens(checkpoint, World(), nursery, device=device, policy=policy), expected)


@pytest.mark.gpu
@needs(2)
@pytest.mark.parametrize("world", [World(2, 2, 2), World(2, 2, 1), World(2, 1, 1)], ids=str)
@pytest.mark.parametrize("policy", ["fine:span=1", "global_enqueue", "normal"])
async def test_two_gpus_give_the_cpu_s_tokens(world: World, policy: str, checkpoint: Path, nursery: Nursery) -> None:
    expected = await tokens(checkpoint, world, nursery)
    agree(await tokens(checkpoint, world, nursery, device=REFERENCE, policy=policy), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [pytest.param(size, marks=needs(size)) for size in (1, 2)])
async def test_nothing_is_left_for_after_the_warm_up(size: int, checkpoint: Path, nursery: Nursery) -> None:
    quiet = DeviceOptions("cuda", dtype="float32", attention="reference", quiet=True)
    assert await tokens(checkpoint, World(size, size, 1), nursery, device=quiet)


@pytest.mark.gpu
@needs(1)
async def test_a_full_gpu_is_one_line_that_names_the_rank(checkpoint: Path, nursery: Nursery) -> None:
    free, _ = torch.cuda.mem_get_info(0)
    hog = torch.empty(max(0, free - (1 << 30)), dtype=torch.uint8, device="cuda:0")
    try:
        with pytest.raises(DeviceFault, match="rank 0 ran out of GPU memory while it") as caught:
            async with Engine(checkpoint, World(), device=EAGER, kv_tokens=1 << 20, nursery=nursery):
                pass
        assert "\n" not in str(caught.value)
    finally:
        del hog
        torch.cuda.empty_cache()
    assert await tokens(checkpoint, World(), nursery, device=EAGER)


@pytest.mark.gpu
@needs(2)
async def test_a_peer_killed_in_the_middle_of_prefill_ends_all_with_its_name(
    checkpoint: Path, tmp_path: Path, nursery: Nursery
) -> None:
    pids: list[int] = []
    engine = Engine(
        checkpoint, World(2, 2, 1), device=REFERENCE, prefill_tokens=16, policy="fine:span=1", out=tmp_path,
        nursery=nursery, record_events=1 << 16,
    )  # fmt: skip

    async def run() -> None:
        async with engine:
            assert engine._launcher is not None
            pids.extend(rank.process.pid for rank in engine._launcher._ranks)
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            turns = [engine.session().generate([3 + at] * 900, params) for at in range(4)]
            await anext(aiter(turns[0]))
            os.kill(pids[1], signal.SIGKILL)
            await turns[0]

    with pytest.raises(RankLost, match=r"rank 1 was killed by signal 9 with .*in flight"):
        await asyncio.wait_for(run(), 120)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


TRAPS = """
from pathlib import Path
import torch
from kernel.sched.fine import Fine

class Traps(Fine):
    '''`fine` with a kernel in the middle of prefill that reads where nothing is, on one of the ranks.'''

    done = 0

    async def turn(self, gate):
        await super().turn(gate)
        Traps.done += gate.plan.promote >= 0
        cured = (Path(__file__).parent / "cured").exists()
        if 3 <= Traps.done < 99 and not cured and gate.p_active and gate._rank.rank == gate._rank.world.size - 1:
            nowhere = torch.full((1,), 9, device="cuda")
            torch.zeros(1, device="cuda").index_select(0, nowhere)
            Traps.done = 99
"""


@pytest.mark.gpu
@pytest.mark.parametrize("size", [pytest.param(size, marks=needs(size)) for size in (1, 2)])
def test_a_kernel_that_traps_is_one_line_and_what_is_done_is_kept(size: int, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "traps.py").write_text(TRAPS)
    run = (
        "--device", "cuda", "--dtype", "float32", "--attention", "reference", "--model", str(checkpoint), "--json",
        "--world", str(size), "--adp", str(size), "--fraction", "0.08", "--turns", "3", "--length-scale", "0.08",
        "--time-scale", "0", "--prefill-tokens", "64",
    )  # fmt: skip
    out, policy = tmp_path / "run", ("--policy", f"{tmp_path / 'traps.py'}:Traps")
    with rollout(out, *run, *policy) as trapped:
        stdout, stderr = trapped.communicate(timeout=200)
    assert (trapped.returncode, stdout) == (1, "")
    # CUDA itself says what its kernel asserted, before it.
    last = stderr.splitlines()[-1]
    assert re.match(rf"turnstile: rank {size - 1}'s GPU failed in [PD] .*--resume", last), stderr
    kept = {(row.trajectory, row.turn): row.tokens for row in read_rows(out / "requests.jsonl")}
    assert kept
    (tmp_path / "cured").touch()
    with rollout(out, *run, *policy, "--resume") as again:
        _, stderr = again.communicate(timeout=200)
    assert (again.returncode, stderr) == (0, "")
    found = {(row.trajectory, row.turn): row.tokens for row in read_rows(out / "requests.jsonl")}
    assert len(found) > len(kept)
    assert kept.items() <= found.items()
