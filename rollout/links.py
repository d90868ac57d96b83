"""How one rank reaches the others: shared memory on one host, TCP and gloo across hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.comm.shared import Arena
    from kernel.ports import Collectives, Rendezvous
    from kernel.topology import World


class Link(Protocol):
    """One rank's communication, and what it tells the outside of its own state."""

    rendezvous: Rendezvous
    collectives: Mapping[Phase, Collectives]

    def running(self) -> None:
        """This rank serves."""

    def ended(self, error: BaseException | None) -> None:
        """This rank is through; with an error, its peers are to give up too."""

    def abort(self, reason: str) -> None:
        """Make everything that waits here raise RankLost."""


class SharedLink:
    """Over an arena inherited from the launcher."""

    def __init__(self, arena: Arena, rank: int) -> None:
        from kernel.comm.rendezvous import SharedRendezvous
        from kernel.comm.shm_collectives import SharedCollectives

        self._arena, self._rank = arena, rank
        self.rendezvous: Rendezvous = SharedRendezvous(arena, rank)
        self.collectives: Mapping[Phase, Collectives] = {p: SharedCollectives(arena, p, rank) for p in Phase}

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


class HostsLink:
    """Over TCP and gloo. The store is torchrun's; a lost connection tells the peers by itself."""

    def __init__(self, rendezvous: Rendezvous, world: World, rank: int) -> None:
        from kernel.comm.gloo import GlooWorld

        gloo = GlooWorld(world, rank)
        self.rendezvous = rendezvous
        self.collectives: Mapping[Phase, Collectives] = {phase: gloo.collectives(phase) for phase in Phase}

    @classmethod
    async def open(cls, config: dict[str, Any], world: World, rank: int) -> HostsLink:
        """Meet the other ranks at the addresses in `config`."""
        import asyncio
        from functools import partial

        import torch.distributed as dist

        from kernel.comm.tcp_rendezvous import TcpRendezvous
        from rollout.torchrun import store_at

        store = store_at(config["store"])
        # Every rank finds rank 0's port in the store; the call waits for it, so it must not hold the loop.
        port = 0 if rank == 0 else int(await asyncio.to_thread(store.get, "rendezvous"))
        rendezvous = await TcpRendezvous.open(
            rank,
            world.size,
            config["token"],
            host=config["store"]["host"],
            port=port,
            listening=lambda chosen: store.set("rendezvous", str(chosen)),
        )
        group = dist.distributed_c10d.PrefixStore("gloo", store)
        join = partial(dist.init_process_group, "gloo", store=group, rank=rank, world_size=world.size)
        await asyncio.to_thread(join)
        return cls(rendezvous, world, rank)

    def running(self) -> None:
        """See `Link`."""

    def ended(self, error: BaseException | None) -> None:
        """See `Link`."""
        if error is not None:
            self.abort(str(error))

    def abort(self, reason: str) -> None:
        """See `Link`."""
        for communicators in self.collectives.values():
            communicators.close()
        self.rendezvous.close()


async def connect(config: dict[str, Any], world: World, rank: int) -> Link:
    """The link that the launcher's configuration asks for."""
    if "arena" in config:
        from kernel.comm.shared import Arena

        return SharedLink(Arena.attach(config["arena"], rank), rank)
    return await HostsLink.open(config, world, rank)
