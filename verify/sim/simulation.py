"""The real rank, policies and planner on a simulated world: who served what when, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernel.cache import KVCache
from kernel.inbox import Entry, Inbox, UsePolicy
from kernel.journal import Journal
from kernel.rank import Ports, Rank
from kernel.record import NullRecorder
from kernel.sched import registry
from kernel.sched.policy import Limits, Policy
from verify.sim.arrivals import Trajectory, TurnResult, Users
from verify.sim.kv import SimKV
from verify.sim.model import CostModel, SimModel
from verify.sim.world import WIDE, SimRank, SimWorld

if TYPE_CHECKING:
    from kernel.topology import World
    from verify.sim.kernels import Entry as LogEntry
    from verify.sim.rendezvous import Skew
    from verify.sim.scheduler import Choose


@dataclass(frozen=True, slots=True)
class Engine:
    """Sizes of a simulated engine.

    layers: of the model. prefill_tokens: new tokens of one replica in one epoch. rows: slots of a replica. blocks,
    block_size: KV pool of a replica. cost: what takes how long. audit: see `verify.sim.kv.SimKV`.
    """

    layers: int = 2
    prefill_tokens: int = 512
    rows: int = 64
    blocks: int = 4096
    block_size: int = 16
    cost: CostModel = field(default_factory=CostModel)
    vocab: int = 32_000
    audit: bool = True

    def limits(self, world: World) -> Limits:
        """What plans respect."""
        return Limits(
            size=world.size,
            replicas=world.adp,
            boundaries=world.boundaries(self.layers),
            prefill_tokens=self.prefill_tokens,
            rows=self.rows,
            granule=world.atp,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished simulation.

    makespan_ns: to the last token. turns: results by request id. logs: events of each rank. digest: of the logs.
    steps: of the scheduler.
    """

    makespan_ns: int
    turns: dict[int, TurnResult]
    logs: tuple[list[LogEntry], ...]
    digest: str
    steps: int


MakePolicy = Callable[[str, Limits], Policy]


def simulate(
    world: World,
    policy: str,
    trajectories: Sequence[Trajectory],
    engine: Engine | None = None,
    *,
    extra: Sequence[tuple[int, Entry]] = (),
    capacity: int = WIDE,
    weights: tuple[int, int] = (1, 1),
    skew: Skew | None = None,
    choose: Choose | None = None,
    permute: bool = False,
    log: bool = True,
    make_policy: MakePolicy = registry.create,
    journal: Callable[[int], Journal] | None = None,
) -> Outcome:
    """Serve `trajectories` under `policy` (a spec as in `--policy`) until all have ended.

    extra: further inbox entries by virtual time. journal: makes a rank's (None: nothing is recorded). The other
    parameters are those of `SimWorld`. Raises whatever a rank raises, Deadlock, Livelock, and UsageError for a policy
    or sizes that cannot be used.
    """
    engine = engine or Engine()
    cost, limits = engine.cost, engine.limits(world)
    simulated = SimWorld(
        world,
        capacity=capacity,
        weights=weights,
        collective_ns=cost.collective,
        contention=cost.contention,
        latency_ns=cost.rendezvous_ns,
        skew=skew,
        choose=choose,
        permute=permute,
        log=log,
    )
    inboxes = [Inbox() for _ in simulated.ranks]
    places = [(sim.loop, inbox) for sim, inbox in zip(simulated.ranks, inboxes, strict=True)]
    models = [
        SimModel(world, sim.device, engine.layers, cost, SimKV(engine.block_size, engine.audit), engine.vocab)
        for sim in simulated.ranks
    ]
    users = Users(simulated.scheduler, places, world.adp, trajectories, extra)

    def use(entry: UsePolicy) -> Policy:
        return make_policy(entry.spec, limits)

    async def main(sim: SimRank) -> None:
        ports = Ports(
            device=sim.device,
            rendezvous=sim.rendezvous,
            model=models[sim.rank],
            cache=KVCache(engine.blocks, engine.block_size),
            inbox=inboxes[sim.rank],
            journal=Journal(NullRecorder()) if journal is None else journal(sim.rank),
            emit=users.output,
            use_policy=use,
        )
        await Rank(sim.rank, world, limits, make_policy(policy, limits), ports).run()

    try:
        simulated.run(main)
    finally:
        for model in models:
            model.close()
    ended = [turn.done_ns for turn in users.results.values()]
    return Outcome(
        makespan_ns=max(ended, default=0),
        turns=users.results,
        logs=tuple(sim.log for sim in simulated.ranks),
        digest=simulated.digest(),
        steps=simulated.scheduler.steps,
    )
