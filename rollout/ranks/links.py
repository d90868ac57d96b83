"""How one rank reaches the others: shared memory on one host, TCP across hosts; tensors over it, gloo or NCCL."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Protocol

from kernel.comm.local import LocalCollectives
from kernel.request import Phase
from rollout.ranks.exchange import beside, refuse, sms

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kernel.comm.exchange.pair import Exchange
    from kernel.comm.shared import Arena
    from kernel.exchange.shape import Shape
    from kernel.ports import Collectives, ExpertExchange, Rendezvous
    from kernel.topology import World


class Link(Protocol):
    """One rank's communication, and what it tells the outside of its own state."""

    rendezvous: Rendezvous
    collectives: Mapping[Phase, Collectives]

    def warm(self) -> None:
        """Use every communicator once, in one order on all ranks; where that costs something later."""

    def exchange(self, substrate: str, shape: Shape, dtype: str) -> ExpertExchange:
        """This rank's expert exchange, which the device owns. All ranks call it at the same point."""

    def running(self) -> None:
        """This rank serves."""

    def ended(self, error: BaseException | None) -> None:
        """This rank is through; with an error, its peers are to give up too."""

    def abort(self, reason: str) -> None:
        """Make everything that waits here on the host raise RankLost; on a GPU, closing the device does."""

    def close(self) -> None:
        """Release the communicators, once the device is closed. Idempotent."""


class Communicators:
    """A backend's communicators of one rank. This one is that of a world of one rank: identities."""

    def collectives(self, phase: Phase) -> Collectives:
        """Those of `phase`; what closes them (`Collectives.close`) is the device, at its end."""
        return LocalCollectives()

    def exchange(self, substrate: str, shape: Shape, dtype: str) -> ExpertExchange:
        """This rank's expert exchange over `substrate`. Raises UsageError where this backend has no such."""
        from kernel.comm.exchange import pair

        if substrate != "local":
            raise refuse(substrate)
        return pair.local(shape, torch_type(dtype))

    def warm(self) -> None:
        """Use each once; all ranks call it at the same point."""

    def abort(self) -> None:
        """Make host calls in progress, and later ones, raise RankLost. Not for kernels: graphs may hold them."""

    def close(self) -> None:
        """Release what outlives the device. Idempotent."""


class ArenaLink:
    """Rendezvous and liveness over an arena inherited from the launcher; collectives over `communicators`."""

    def __init__(self, arena: Arena, rank: int, communicators: Communicators) -> None:
        from kernel.comm.rendezvous import SharedRendezvous

        self._arena, self._rank, self._communicators = arena, rank, communicators
        self.rendezvous: Rendezvous = SharedRendezvous(arena, rank)
        self.collectives: Mapping[Phase, Collectives] = {phase: communicators.collectives(phase) for phase in Phase}

    def warm(self) -> None:
        """See `Link`."""
        self._communicators.warm()

    def exchange(self, substrate: str, shape: Shape, dtype: str) -> ExpertExchange:
        """See `Link`."""
        return self._communicators.exchange(substrate, shape, dtype)

    def running(self) -> None:
        """See `Link`."""
        from kernel.comm.shared import Liveness

        self._arena.report(Liveness.RUNNING)

    def ended(self, error: BaseException | None) -> None:
        """See `Link`."""
        from kernel.comm.shared import Liveness

        if error is None:
            self._arena.report(Liveness.ENDED)
        else:
            self._arena.report(Liveness.FAILED, f"{type(error).__name__}: {error}")
            self._arena.abort(f"rank {self._rank} failed: {error}")

    def abort(self, reason: str) -> None:
        """See `Link`."""
        self._arena.abort(reason)

    def close(self) -> None:
        """See `Link`."""
        self._communicators.close()


class SharedMemory(Communicators):
    """In the arena, whose abort its collectives see."""

    def __init__(self, arena: Arena, rank: int) -> None:
        self._arena, self._rank = arena, rank

    def collectives(self, phase: Phase) -> Collectives:
        """Those of `phase`."""
        from kernel.comm.shm_collectives import SharedCollectives

        return SharedCollectives(self._arena, phase, self._rank)

    def exchange(self, substrate: str, shape: Shape, dtype: str) -> ExpertExchange:
        """In the arena, `shm`, or of one rank."""
        from kernel.comm.exchange import pair
        from kernel.comm.exchange.shared import SharedWire

        if substrate != "shm":
            return super().exchange(substrate, shape, dtype)
        prefill, decode = (SharedWire(self._arena, phase, self._rank) for phase in (Phase.P, Phase.D))
        return pair.over(shape, torch_type(dtype), prefill, decode)


class HostsLink:
    """Over TCP, and collectives over `communicators`. A lost connection tells the peers by itself."""

    def __init__(self, rendezvous: Rendezvous, communicators: Communicators) -> None:
        self.rendezvous, self._communicators = rendezvous, communicators
        self.collectives: Mapping[Phase, Collectives] = {phase: communicators.collectives(phase) for phase in Phase}

    def warm(self) -> None:
        """See `Link`."""
        self._communicators.warm()

    def exchange(self, substrate: str, shape: Shape, dtype: str) -> ExpertExchange:
        """See `Link`."""
        return self._communicators.exchange(substrate, shape, dtype)

    def running(self) -> None:
        """See `Link`."""

    def ended(self, error: BaseException | None) -> None:
        """See `Link`."""
        if error is not None:
            self.abort(str(error))

    def abort(self, reason: str) -> None:
        """See `Link`."""
        self._communicators.abort()
        self.rendezvous.close()

    def close(self) -> None:
        """See `Link`."""
        self._communicators.close()


class Gloo(Communicators):
    """Over gloo; its groups end with the process, so that no rank waits for another to end."""

    def __init__(self, world: World, rank: int) -> None:
        from kernel.comm.gloo import GlooWorld

        gloo = GlooWorld(world, rank)
        self._made = {phase: gloo.collectives(phase) for phase in Phase}
        self._exchange: Exchange | None = None

    def collectives(self, phase: Phase) -> Collectives:
        """Those of `phase`."""
        return self._made[phase]

    def exchange(self, substrate: str, shape: Shape, dtype: str) -> ExpertExchange:
        """Over process groups of their own, `gloo`, or of one rank."""
        from kernel.comm.exchange import pair
        from kernel.comm.exchange.gloo import GlooWire

        if substrate != "gloo":
            return super().exchange(substrate, shape, dtype)
        prefill, decode = GlooWire(Phase.P), GlooWire(Phase.D)
        self._exchange = pair.over(shape, torch_type(dtype), prefill, decode)
        return self._exchange

    def abort(self) -> None:
        """Close them: they poll."""
        for each in self._made.values():
            each.close()
        if self._exchange is not None:
            self._exchange.close()


class Nccl(Communicators):
    """Over NCCL. where: the store through which its communicators find each other. gpu: this rank's, on its host."""

    def __init__(self, config: dict[str, Any], world: World, rank: int, where: dict[str, Any]) -> None:
        import torch.distributed

        from kernel.comm.nccl import NcclWorld
        from rollout.ranks.torchrun import store_at

        dist: Any = torch.distributed
        self._rank, self._gpu, self._options = rank, config["gpu"], config["device"]
        self._store = store_at(where)
        store = dist.PrefixStore("nccl", self._store)
        self._nccl = NcclWorld(world, rank, store, self._gpu, max_ctas=self._options["max_ctas"])

    def collectives(self, phase: Phase) -> Collectives:
        """Those of `phase`."""
        found: Collectives = self._nccl.collectives(phase)
        return found

    def exchange(self, substrate: str, shape: Shape, dtype: str) -> ExpertExchange:
        """By DeepEP, `deepep`; over the same communicators, `nccl`; over symmetric memory, `symm`; or of one rank."""
        if substrate == "deepep":
            from kernel.comm import deep_ep

            asked = sms(self._options["exchange_sms"])
            ctas = beside(self._nccl.world, self._nccl.ctas)
            return deep_ep.build(shape, self._store, self._rank, self._gpu, num_sms=asked, nccl=ctas)
        if substrate == "nccl":
            from kernel.comm.exchange.nccl import nccl

            return nccl(shape, torch_type(dtype), self._nccl)
        if substrate == "symm":
            from kernel.comm.exchange.symm import symm

            return symm(shape, torch_type(dtype), self._nccl)
        return super().exchange(substrate, shape, dtype)

    def warm(self) -> None:
        """Once each, in one global order."""
        self._nccl.warm()

    def close(self) -> None:
        """Abort what the device has not closed already; returns after 10 s at the latest."""
        self._nccl.close()


def torch_type(name: str) -> torch.dtype:
    """A type by its name."""
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


async def connect(config: dict[str, Any], world: World, rank: int) -> Link:
    """The link that the launcher's configuration asks for. On cuda the rank's GPU must have been chosen already."""
    cuda = config["device"]["device"] == "cuda"
    if "arena" in config:
        from kernel.comm.shared import Arena

        arena = Arena.attach(config["arena"], rank)
        if not cuda:
            return ArenaLink(arena, rank, SharedMemory(arena, rank))
        where = config["nccl"]
        return ArenaLink(arena, rank, Communicators() if where is None else Nccl(config, world, rank, where))
    rendezvous = await _meet(config, world, rank)
    if cuda:
        alone = world.size == 1
        return HostsLink(rendezvous, Communicators() if alone else Nccl(config, world, rank, config["store"]))
    await _join_gloo(config, world, rank)
    return HostsLink(rendezvous, await asyncio.to_thread(Gloo, world, rank))


async def _meet(config: dict[str, Any], world: World, rank: int) -> Rendezvous:
    """A rendezvous of ranks on several hosts, at the addresses in `config`."""
    from kernel.comm.tcp_rendezvous import TcpRendezvous
    from rollout.ranks.torchrun import store_at

    store = store_at(config["store"])
    # Every rank finds rank 0's port in the store; the call waits for it, so it must not hold the loop.
    port = 0 if rank == 0 else int(await asyncio.to_thread(store.get, "rendezvous"))
    return await TcpRendezvous.open(
        rank,
        world.size,
        config["token"],
        host=config["store"]["host"],
        port=port,
        dead_s=2 * config["rank_timeout_s"],  # the launcher, which knows more of what was lost, shall speak first
        listening=lambda chosen: store.set("rendezvous", str(chosen)),
    )


async def _join_gloo(config: dict[str, Any], world: World, rank: int) -> None:
    from functools import partial

    import torch.distributed as dist

    from rollout.ranks.torchrun import interface, store_at

    # Else gloo listens where this host's name leads to. A choice that was made for it stands.
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface(config["address"])) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    group = dist.distributed_c10d.PrefixStore("gloo", store_at(config["store"]))
    join = partial(dist.init_process_group, "gloo", store=group, rank=rank, world_size=world.size)
    await asyncio.to_thread(join)
