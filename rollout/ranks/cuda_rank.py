"""A rank of the CUDA world from its configuration: GPU, model, graphs, and a warm-up that leaves nothing for later.

After `build` every communicator, kernel, D bucket and prefill size has been used once, in one order on all ranks, and
both phases' memory is in the allocator. Work that follows makes no call that waits for the device behind the program's
back: such a call would close a cycle that no policy sees.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError
from kernel.phase import own
from kernel.request import Phase
from kernel.step import Step
from rollout.device import used_buckets
from rollout.ranks import exchange, faults
from rollout.ranks.memory import activation_bytes
from rollout.ranks.quiet import Quiet, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.device.worker import Watch
    from kernel.ports import Device, Model
    from kernel.sched.policy import Limits
    from kernel.topology import World
    from rollout.ranks.links import Link

MIB: Final = 1 << 20
SPARE: Final = 512 * MIB
"""Kept in the allocator for a phase beyond its activations: logits, and sizes that the warm-up did not meet."""
SMALL: Final = 64
"""Segments of 2 MiB kept for a phase's tensors of up to 1 MiB, which the allocator serves apart."""


def choose(rank: int | None) -> int:
    """Make a GPU the process's own and return its number: `rank`, or under torchrun (None) the local rank.

    Raises UsageError when torch cannot use it.
    """
    import torch

    from rollout.ranks.torchrun import place

    here = place()
    index = rank if rank is not None else here.local if here is not None else 0
    if torch.version.cuda is None:
        raise UsageError(f"--device cuda: torch {torch.__version__} is a build for CPUs: install a build for CUDA")
    if not torch.cuda.is_available():
        raise UsageError(f"--device cuda: torch {torch.__version__} (CUDA {torch.version.cuda}) finds no usable GPU")
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"--device cuda: GPU {index} of this host was asked for, and it has {torch.cuda.device_count()}: start at"
            " most one rank a GPU"
        )
    torch.cuda.set_device(index)
    return index


async def build(
    config: dict[str, Any], world: World, rank: int, limits: Limits, link: Link, watch: Watch
) -> tuple[Device, Model, Quiet | None]:
    """The device and the model of a rank, warm. Raises DeviceFault when the GPU fails or is too small for them."""
    import torch

    import models
    from kernel.device.cuda import CudaDevice
    from models.cuda.graphs import GraphedDecode

    options, gpu = config["device"], config["gpu"]
    doing = "while it loaded the model"
    try:
        model: Any = models.load(
            Path(config["model"]),
            world,
            rank,
            blocks=config["blocks"],
            block_size=config["block_size"],
            slots=limits.rows,
            dtype=options["dtype"],
            device=f"cuda:{gpu}",
            attention=options["attention"],
            weights=options["weights"],
            quantization=options["quantization"],
        )
        made = await exchange.build(config, rank, link)
        device = CudaDevice(
            rank,
            gpu,
            link.collectives,
            watch=watch,
            prefill_sms=options["prefill_sms"],
            exchange=partial(exchange.kernels, config),
            expert_exchange=made,
        )
        doing = "while it warmed up"
        link.warm()
        graphed = GraphedDecode(
            model,
            device,
            used_buckets(limits.bucket, limits.rows),
            partial(make_step, device, world, rank, model.layers),
            enabled=options["graphs"],
        )
        graphed.warm(tuple(prefill_shapes(limits.prefill_tokens)))
        activations = activation_bytes(limits.prefill_tokens * world.adp, config["hidden"])
        for phase, room in ((Phase.P, activations + SPARE), (Phase.D, SPARE)):
            _reserve(torch, partial(device.scope, phase), gpu, room)
        torch.cuda.synchronize(gpu)
    except Exception as error:
        if (ours := faults.explained(error, rank, doing)) is not None:
            raise ours from error
        raise
    return device, graphed, Quiet(rank, partial(reading, gpu)) if options["quiet"] else None


def make_step(
    device: Device, world: World, rank: int, layers: int, phase: Phase, sizes: tuple[int, ...], live: int
) -> Step:
    """A step for a forward outside of the rank's own rounds. Collectives run where the phase's own stream is."""
    # No place was reserved on D's stream for the warm-up's collectives, so none is routed.
    state = own(device, world.under("none"), layers, phase)
    return Step(
        state.program,
        rank,
        sizes,
        live,
        state.collectives,
        device.layout,
        normal=state.normal,
        low_latency=state.low_latency,
    )


def prefill_shapes(most: int) -> Iterator[int]:
    """Token counts of the warm-up's prefills: the largest first, so that the allocator grows once, then its halves.

    Kernels are chosen by size, and each is loaded at its first use.
    """
    yield most
    size = 1 << (most - 1).bit_length() >> 1
    while size:
        yield size
        size >>= 1


def _reserve(torch: Any, scope: Callable[[], Any], gpu: int, room: int) -> None:
    """Let the allocator own `room` bytes, and small segments, on the stream of `scope`."""
    free, _ = torch.cuda.mem_get_info(gpu)
    sizes = [min(room, free // 4), *[MIB] * SMALL]
    with scope():
        kept = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}") for size in sizes if size]
    del kept
