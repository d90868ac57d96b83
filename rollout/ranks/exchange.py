"""Which expert exchange a run has, decided by the launcher, and its building on a rank."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kernel.device import occupancy
from kernel.errors import UsageError
from kernel.exchange import deep_ep
from kernel.exchange.choose import NEEDS, Choice, Situation, choose, world_refuses
from kernel.exchange.shape import Shape, agree
from kernel.exchange.sizes import exchange_bytes
from kernel.program import collects
from kernel.request import Phase
from kernel.sched.policy import Limits
from rollout.ranks.torchrun import place

if TYPE_CHECKING:
    from kernel.ports import ExpertExchange
    from kernel.topology import World
    from rollout.device import DeviceOptions
    from rollout.ranks.links import Link


def resolve(
    options: DeviceOptions, config: object, world: World, *, prefill_tokens: int, rows: int
) -> tuple[World, Choice]:
    """(the world with its program's exchange, the substrate and why) for `--exchange`. config: of the model.

    prefill_tokens, rows: most of a replica. Raises UsageError for an exchange that this world, model or device cannot
    have, PackageMissing.
    """
    now = situation(options, config, world)
    if options.device == "cuda" and hasattr(config, "hidden_size") and world_refuses(now) is None:
        limits = Limits(world.size, world.adp, 1, prefill_tokens=prefill_tokens, rows=rows, granule=world.atp)
        limits = replace(limits, buckets=options.buckets(rows, limits.buckets))
        shape = _shape(config, options, limits, world)
        nccl = beside(world, occupancy.NCCL_CTAS if options.max_ctas is None else options.max_ctas)
        try:
            deep_ep.check(shape, num_sms=sms(options.exchange_sms), sms=deep_ep.SMS, nccl=nccl)
        except UsageError as error:
            now = replace(now, broken={**now.broken, "deepep": str(error)})
    asked = options.exchange
    if asked == "auto" and world.exchange == "split" and options.device == "cpu":
        asked = "local" if world.size == 1 else "gloo" if "shm" in now.broken else "shm"
    choice = choose(asked, now)
    if asked == "auto" and world.exchange != "split" and choice.substrate != "none":
        # An exchange on GPUs is young: whoever wants it asks for it.
        choice = Choice("none", f"collectives; --exchange {choice.substrate} could be had ({choice.reason})")
    return replace(world, exchange=choice.program), choice


def situation(options: DeviceOptions, config: object, world: World) -> Situation:
    """What is known of the world that this process starts, or was started in."""
    here = place()
    if here is None:
        hosts, broken = 1, {"gloo": "the ranks of this host share memory: choose shm, or start them with torchrun"}
    else:
        each = int(os.environ.get("LOCAL_WORLD_SIZE") or here.size)
        hosts = -(-here.size // each)
        broken = {"shm": "ranks that torchrun started share no memory: choose gloo"}
    return Situation(
        world,
        options.device,
        hosts,
        frozenset(name for name in {name for names in NEEDS.values() for name in names} if _installed(name)),
        experts=getattr(config, "experts", 0),
        dense=bool(getattr(config, "dense_layers", ())),
        broken=broken,
    )


def settings(choice: Choice, config: Any, options: DeviceOptions, limits: Limits, world: World) -> dict[str, Any]:
    """What ranks need to build it, for their configuration. Raises UsageError for sizes that nothing can exchange."""
    if choice.substrate == "none":
        return {"substrate": "none", "reason": choice.reason}
    shape = asdict(_shape(config, options, limits, world))
    return {"substrate": choice.substrate, "reason": choice.reason, "shape": shape}


def kernels(config: dict[str, Any], of_gpu: int) -> list[occupancy.Kernel]:
    """What a rank's exchange may hold of a GPU of `of_gpu` SMs while it waits for peers. config: of the ranks."""
    wanted = config["exchange"]
    if wanted["substrate"] == "none":
        return []
    options, shape = config["device"], Shape(**wanted["shape"])
    asked = sms(options["exchange_sms"])
    return occupancy.exchanges(wanted["substrate"], shape, num_sms=asked, sms=of_gpu, nccl=options["max_ctas"])


def reserved(wanted: dict[str, Any], options: DeviceOptions) -> int:
    """GPU memory of one rank, in bytes, that the exchange with these `settings` takes, so that KV cannot have it."""
    if wanted["substrate"] == "none":
        return 0
    return exchange_bytes(wanted["substrate"], Shape(**wanted["shape"]), num_sms=sms(options.exchange_sms))


def beside(world: World, ctas: int) -> int:
    """`ctas`, the most of one of NCCL's collectives, where ranks have any beside their exchange; else 0."""
    split = replace(world, exchange="split")
    return ctas if any(collects(split, phase) for phase in Phase) else 0


def sms(asked: int | None) -> int:
    """SMs of DeepEP's prefill kernels, for what `--exchange-sms` asks."""
    return asked or deep_ep.NUM_SMS


def _shape(config: Any, options: DeviceOptions, limits: Limits, world: World) -> Shape:
    return Shape(
        ranks=world.size,
        experts=config.experts,
        hidden=config.hidden_size,
        topk=config.experts_per_token,
        # Each rank of a replica takes an equal share of its rows.
        prefill_rows=-(-limits.prefill_tokens // world.atp),
        decode_rows=limits.bucket(limits.rows) // world.atp,
        itemsize=4 if options.dtype == "float32" else 2,
    )


async def build(config: dict[str, Any], rank: int, link: Link) -> ExpertExchange | None:
    """This rank's exchange; None where there is none. All ranks call it at the same point, and compare their shapes.

    Raises PeersDiffer.
    """
    wanted = config["exchange"]
    if wanted["substrate"] == "none":
        return None
    shape = Shape(**wanted["shape"])
    agree(rank, shape, await link.rendezvous.exchange("expert exchange", shape.encode()))
    make = partial(link.exchange, wanted["substrate"], shape, config["device"]["dtype"])
    if config["device"]["device"] == "cuda":  # of this thread's GPU; its heart has said that it is away
        return make()
    # Groups are made with all peers: meanwhile the heart goes on beating, else who waits for a rank is lost with it.
    return await asyncio.to_thread(make)


def _installed(name: str) -> bool:
    if name == "symm_mem":  # part of torch, where that is built with CUDA; the rank that uses it looks closer
        return find_spec("torch.distributed._symmetric_memory") is not None if find_spec("torch") else False
    try:
        return find_spec(name) is not None
    except ImportError:  # of a package that a dotted name is in
        return False


def refuse(substrate: str) -> UsageError:
    """A link that cannot carry the substrate that was chosen for it."""
    return UsageError(f"--exchange {substrate}: these ranks' link has none: choose --exchange none")
