"""The rank: one event loop that ties plan, turn, prefill, decode and the exchange of views together (paper section 3).

It knows neither gloo nor CUDA nor a policy's name. One round:

    plan       every rank computes the same plan from the same views; promotions, admissions and D rows follow from it
    turn       the policy lets D and P enter the device, in its order
    exchange   tokens of the previous round's D are committed, inbox entries up to the plan's number take effect, and
               all ranks exchange their views for the next round, with this round's plan digest and order hash
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kernel import views as control
from kernel.driver import Driver
from kernel.errors import Divergence, TurnstileError
from kernel.gate import RankGate
from kernel.inbox import Abort, EndSession, Entry, Flush, Inbox, Pause, Resume, Stop, Submit, UpdateWeights, UsePolicy
from kernel.order import Order
from kernel.phase import PhaseState, own
from kernel.prefill import Epoch
from kernel.replica import Output, Replica, Turn
from kernel.request import Phase, Sampled
from kernel.sched import hooks
from kernel.sched.policy import Limits, Memory, Plan, Policy, RankView
from kernel.step import Step
from kernel.turnstile import Turnstile

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kernel.cache import KVCache
    from kernel.journal import Journal
    from kernel.ports import Device, Model, Rendezvous
    from kernel.program import Call
    from kernel.topology import World


@dataclass(frozen=True, slots=True)
class Ports:
    """What a world plugs into a rank.

    emit: called on the loop with each output of this rank's replica, on the replica's leader only.
    use_policy: resolves a policy spec and opens the record of the run under it. away: entered around what holds the
    loop for long, with its name.
    """

    device: Device
    rendezvous: Rendezvous
    model: Model
    cache: KVCache
    inbox: Inbox
    journal: Journal
    emit: Callable[[Output], None]
    use_policy: Callable[[UsePolicy], Policy]
    away: Callable[[str], AbstractAsyncContextManager[Any]] = nullcontext


@dataclass(slots=True)
class Iteration:
    """A D iteration in flight."""

    round: int
    turns: list[Turn]
    task: asyncio.Task[Sequence[Sampled | None]]
    driver: Driver[Sequence[Sampled | None]]


class Rank:
    """One rank of `world`; `run` returns after a Stop entry took effect and nothing is in flight."""

    def __init__(self, rank: int, world: World, limits: Limits, policy: Policy, ports: Ports) -> None:
        self.rank, self.world, self.limits, self.ports = rank, world, limits, ports
        self._d = own(ports.device, world, ports.model.layers, Phase.D)
        self._adopt(policy)
        self._leads = rank in world.leaders()
        self._scopes = {phase: partial(ports.device.scope, phase) for phase in Phase}
        self._most = limits.bucket(limits.rows)
        emit = ports.emit if self._leads else _nobody
        self._replica = Replica(rank, world.replica(rank), limits.rows, ports.cache, emit)
        self.turnstile = Turnstile(rank)
        self._order = Order(rank)
        self._journal = ports.journal
        self._memory = Memory()
        self._views: tuple[RankView, ...] = ()
        self._epoch: Epoch | None = None
        self._flights: deque[Iteration] = deque()
        self._rows: list[tuple[Turn, Any]] = []
        self._plan = Plan(round=-1)
        self._digest = 0
        self._ended = self._yielded = False
        self._stopping = False
        self._changes: deque[UsePolicy | UpdateWeights] = deque()
        self._tasks: asyncio.TaskGroup | None = None
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Serve until stopped. Raises the first TurnstileError of any task, or what else broke."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._exchange("views")
                while not (self._stopping and self._plan.idle):
                    await self._round()
        except BaseExceptionGroup as group:
            error = hooks.first(group)
            self._journal.exception(error)
            raise error from group
        except TurnstileError as error:
            self._journal.exception(error)
            raise
        finally:
            if self._epoch is not None:
                self._epoch.close()
            for flight in self._flights:
                flight.driver.close()  # its stream may end without having begun it

    async def _round(self) -> None:
        if not self._yielded:
            # A round may find everybody there already and so never wait. The loop must still get to read the inbox:
            # ranks that see different lengths of it are not idle, and would go round for ever without reading on.
            await asyncio.sleep(0)
        self._yielded = False
        policy, now = self.policy, self._memory.round
        try:
            planned = policy.plan(self._views, self._memory)
        except hooks.FAILS as error:
            hooks.raised(error, policy, "plan", self._at(now))
            raise
        try:
            self._plan, self._memory = plan, memory = self._planned(planned)
            self._digest = control.digest_of(plan, memory)
            self._ended = False
            self._journal.plan(plan, self._digest)
            self._apply(plan)
        except Exception as error:
            hooks.unusable(error, policy, "plan", self._at(now))
            raise
        if plan.idle and self._stopping:
            return
        if plan.idle and self._changes:
            await self._change(self._changes.popleft())
        elif plan.idle:
            self._journal.wait("inbox", leaves=False)
            await self.ports.inbox.beyond(plan.inbox)
            self._journal.wait("inbox", leaves=True)
        else:
            gate = RankGate(plan, self, self._meet)
            try:
                await self.policy.turn(gate)
            except hooks.FAILS as error:
                hooks.raised(error, policy, "turn", self._at(now))
                raise
            gate.close()
        if not self._ended:
            await self._exchange("end")

    def _at(self, round_: int) -> str:
        return f"rank {self.rank}, round {round_}"

    def _planned(self, answer: object) -> tuple[Plan, Memory]:
        """What a policy's plan returned. Raises PolicyError unless it is what the seam says."""
        # In every round, so what is right is looked at first and by hand: a match takes ten times as long.
        if type(answer) is tuple and len(answer) == 2:
            plan, memory = answer
            if type(plan) is Plan and type(memory) is Memory and plan.round == self._memory.round:
                bucket = plan.bucket
                rows = max(plan.decode, default=0)
                fits = rows <= bucket <= self._most and not bucket % self.limits.granule
                if fits and type(plan.span) is int and plan.span >= 1:
                    return plan, memory
        match answer:
            case (Plan(round=round_), Memory()) if round_ != self._memory.round:
                what = f"round {round_!r:.60}: it must be the round that its memory names"
            case (Plan(span=int(span)) as plan, Memory() as memory) if span >= 1:
                rows = max(plan.decode, default=0)
                if rows <= plan.bucket <= self._most and not plan.bucket % self.limits.granule:
                    return plan, memory
                what = (
                    f"a bucket of {plan.bucket} rows for {rows}: it must hold them, be at most {self._most} and a"
                    f" multiple of {self.limits.granule}"
                )
            case (Plan(span=span), Memory()):
                what = f"a span of {span!r:.60}: it must be a whole number of boundaries, at least 1"
            case _:
                what = f"{type(answer).__name__}: it must be (Plan, Memory)"
        raise hooks.wrong(self.policy, "plan", f"returned {what}", self._at(self._memory.round))

    def _adopt(self, policy: Policy) -> None:
        self.policy = policy
        world = self.world.under(getattr(policy, "route", None))
        self._p = own(self.ports.device, world, self.ports.model.layers, Phase.P)
        # A policy that claims no order is not stopped for having none: it is there to show what happens then.
        self._ordered = policy.guarantees.deadlock_free

    async def _change(self, entry: UsePolicy | UpdateWeights) -> None:
        """Nothing is in flight on any rank (the plan is idle), so this is the same round everywhere."""
        if isinstance(entry, UpdateWeights):
            async with self.ports.away("loading weights"):
                self.ports.model.reload(entry.path)
            self.ports.cache.flush()
            what = "weights"
        else:
            self._adopt(self.ports.use_policy(entry))
            self._memory = Memory(self._memory.round, self._memory.inbox, self._memory.epoch)
            what = "policy"
        if self.rank == 0:
            self.ports.emit(Output(-1, finish=what))

    # -- plan ---------------------------------------------------------------------------------------------------

    def _apply(self, plan: Plan) -> None:
        """Carry out what the plan decided. Nothing has changed since the views were made, so it fits exactly."""
        mine = self._replica.index
        if plan.promote >= 0 and self._epoch is not None:
            self.turnstile.complete(plan.promote)
            sampled = self._epoch.sampled
            self._journal.promote(plan.promote, sum(drawn is not None for drawn in sampled))
            self._replica.promote(sampled)
            self._epoch = None
        if plan.activate >= 0:
            self._activate(plan)
        self._rows = self._replica.launch(plan.round, plan.decode[mine]) if plan.bucket else []

    def _activate(self, plan: Plan) -> None:
        rows = self._replica.begin(plan.prefill[self._replica.index], plan.round)
        sizes = tuple(sum(chunk.tokens for chunk in chunks) for chunks in plan.prefill)
        if self._p.normal is not None:
            self._p.normal.quiesce()  # the plan found every rank's last epoch complete: nothing of P is in flight
        step = self._step(self._p, sizes, sum(row.fed for row in rows), plan.activate)
        driver: Driver[Sequence[Sampled | None]] = Driver(
            self.ports.model.forward(step, rows), step, self._scopes[Phase.P]
        )
        number = plan.activate
        publish = partial(self._published, number)
        self._epoch = Epoch(number, self._p, driver, rows, sizes, publish, self._spawn, self.rank)
        self.turnstile.activate(number, self._p.program.boundaries)
        self._published(number, 0)
        if not rows:
            self._journal.no_work(Phase.P, f"P e{number}")

    def _step(self, state: PhaseState, sizes: tuple[int, ...], live: int, number: int = -1) -> Step:
        journal, phase, size = self._journal, state.phase, sum(sizes)

        def watch(call: Call, finished: bool) -> None:
            journal.collective(phase, call, size, finished)

        def splits(call: Call, rows: Sequence[int]) -> None:
            journal.splits(phase, call, rows)

        calls = bool(state.program.calls)
        return Step(
            state.program,
            self.rank,
            sizes,
            live,
            state.collectives,
            self.ports.device.layout,
            state.route,
            watch if calls and self.ports.device.deferred else None,
            normal=state.normal,
            low_latency=state.low_latency,
            number=number,
            splits=splits if calls else None,
        )

    # -- what a gate may do -------------------------------------------------------------------------------------

    async def p_reached(self) -> None:
        """P stands at its permitted endpoint, has ended its enqueue, or there is none."""
        if self._epoch is not None:
            await self._epoch.standing()
        while not self.turnstile.at_endpoint:
            self._moved.clear()
            await self._moved.wait()

    async def p_enqueued(self) -> None:
        """All of P has been enqueued here; the permit must already allow it."""
        if self._epoch is not None:
            await self._epoch.standing()
        while self.turnstile.open and self.turnstile.snapshot.reached < self._p.program.boundaries:
            self._moved.clear()
            await self._moved.wait()

    async def p_drained(self) -> None:
        """Everything enqueued of P has finished on this device."""
        if self._epoch is not None:
            self._journal.wait("P device", leaves=False)
            await self._epoch.drained()
            self._journal.wait("P device", leaves=True)

    async def d_drained(self) -> None:
        """Every D iteration enqueued so far has finished on this device."""
        for flight in list(self._flights):
            self._journal.wait_for_decode(flight.round, leaves=False)
            await asyncio.shield(flight.task)
            self._journal.wait_for_decode(flight.round, leaves=True)

    def launch(self) -> None:
        """Enqueue this round's D iteration, padded to the common bucket."""
        plan, rows = self._plan, [row for _, row in self._rows]
        sizes = (plan.bucket,) * self.world.adp
        label = f"D {plan.round}"
        step = self._step(self._d, sizes, len(rows), plan.round)
        driver: Driver[Sequence[Sampled | None]] = Driver(
            self.ports.model.forward(step, rows), step, self._scopes[Phase.D]
        )
        calls = self._d.program.calls
        if self._ordered:
            self._order.enqueue(plan.round, Phase.D, calls, sizes)
        if not rows:
            self._journal.no_work(Phase.D, label)
        self._journal.submitted(label, Phase.D, calls, plan.bucket, len(rows), sum(sizes))
        event = self._d.stream.submit(driver.whole, label)
        task = self._spawn(event.wait(), label)
        self._flights.append(Iteration(plan.round, [turn for turn, _ in self._rows], task, driver))

    def release(self, span: int) -> None:
        """p += span: enqueue P's next segment. An epoch that has ended makes the matched no-work call."""
        epoch = self._epoch
        assert epoch is not None
        start, end = self.turnstile.release(epoch.number, span)
        self._journal.permit(start, end)
        if start == end:
            self._journal.no_work(Phase.P, f"P e{epoch.number}")
            return
        calls = self._p.program.segment(start, end)
        if self._ordered:
            self._order.enqueue(self._plan.round, Phase.P, calls, epoch.sizes)
        self._journal.submitted(f"P e{epoch.number} [{start},{end})", Phase.P, calls, start, end, sum(epoch.sizes))
        epoch.submit(start, end, self._plan.round)

    def _published(self, epoch: int, boundary: int) -> None:
        if boundary >= self._p.program.boundaries:
            self.turnstile.enqueued(epoch)
        else:
            self.turnstile.publish(epoch, boundary)
        self._journal.boundary(epoch, boundary)
        self._moved.set()

    # -- exchange -----------------------------------------------------------------------------------------------

    async def _meet(self, tag: str) -> None:
        """A rendezvous that a turn asks for. Everything but pre-d ends the round's exchange."""
        if tag == "post-d":
            await self._exchange(tag)
            return
        blobs = await self._rendezvous(tag, control.encode_pair(self._digest, self._order.hash))
        pairs = [control.decode_pair(blob) for blob in blobs]
        await self._agree([plan for plan, _ in pairs], [order for _, order in pairs])

    async def _exchange(self, tag: str) -> None:
        """The round's one exchange of views."""
        if self._ended:
            raise TurnstileError(f"rank {self.rank} round {self._plan.round}: a second {tag} exchange in one round")
        self._ended = True
        await self._harvest(self._plan.round - 1)
        await self._settle(self._plan.round - 1)
        for entry in self.ports.inbox.take(self._plan.inbox):
            self._take(entry)
        mine = self._view(), self._digest, self._order.hash
        blobs = await self._rendezvous(tag, control.encode(*mine))
        if len(blobs) == 1:  # nobody else has said anything
            self._views = (mine[0],)
            return
        answers = [mine if rank == self.rank else control.decode(blob) for rank, blob in enumerate(blobs)]
        await self._agree([plan for _, plan, _ in answers], [order for _, _, order in answers])
        self._views = tuple(view for view, _, _ in answers)
        control.check_peers(self._views, self.world.atp)

    async def _rendezvous(self, tag: str, payload: bytes) -> list[bytes]:
        self._journal.exchange(tag, leaves=False)
        answers = await self.ports.rendezvous.exchange(tag, payload)
        self._journal.exchange(tag, leaves=True)
        return answers

    async def _agree(self, plans: list[int], orders: list[int]) -> None:
        """Raise Divergence, on the CPU and before the next launch, unless plans and orders are equal everywhere."""
        round_ = self._plan.round
        if any(plan != plans[0] for plan in plans):
            text = f"{self._plan!r}"[:-1] + f", memory={self._memory!r})"
            texts = [blob.decode() for blob in await self.ports.rendezvous.exchange("why", text.encode()[:3900])]
            name, values = control.first_difference(texts)
            raise Divergence(control.odd_ranks(plans), round_, name, values)
        control.check_equal(orders, round_, "order")

    async def _harvest(self, upto: int) -> None:
        """Commit the D iterations of rounds up to `upto`: a constant lag, the same on every rank."""
        while self._flights and self._flights[0].round <= upto:
            flight = self._flights.popleft()
            self._journal.wait_for_decode(flight.round, leaves=False)
            sampled = await flight.task
            self._journal.wait_for_decode(flight.round, leaves=True)
            self._replica.harvest(flight.turns, sampled)
            self._yielded = True  # the iteration is a task of a later turn of the loop than its launch

    async def _settle(self, upto: int) -> None:
        """Wait for a P epoch whose last segment was submitted by round `upto`: the same lag as D's, on every rank.

        Its routed collectives stand before the next D iteration in D's stream, so there is little left to wait for; an
        expert exchange has waited for all but the last layer, whose counts are known. Where there is neither D runs on
        beside P, and the device is asked instead.
        """
        epoch = self._epoch
        if epoch is not None and not epoch.settled and 0 <= epoch.ended_in <= upto:
            if self._p.program.routes or self.world.splits:
                await self.p_drained()
            else:
                epoch.poll()

    def _view(self) -> RankView:
        replica, epoch, ports = self._replica, self._epoch, self.ports
        complete = epoch is None or epoch.settled
        promotable = replica.promotable(epoch.sampled) if epoch is not None and complete else 0
        newest, reached = self.turnstile.newest
        # In order, since names take twice as long in every round.
        return RankView(
            self.rank, self._plan.round + 1, ports.inbox.length, len(replica.ready()), promotable, replica.free_slots,
            ports.cache.available, replica.waiting(), replica.queued, newest, reached, complete, replica.tokens_hash,
            bool(self._flights), replica.paused,
        )  # fmt: skip

    def _take(self, entry: Entry) -> None:
        replica = self._replica
        match entry:
            case Submit(request):
                if request.replica == replica.index and not self._stopping:
                    replica.submit(request)
            case Abort(request_id):
                replica.abort(request_id)
            case EndSession(session):
                replica.end_session(session)
            case Flush():
                self.ports.cache.flush()
            case Pause():
                replica.paused = True
            case Resume():
                replica.paused = False
            case UsePolicy() | UpdateWeights():
                self._changes.append(entry)
            case Stop():
                self._stopping = True
                replica.paused = False
                replica.abort_all()

    # -- inside -------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        assert self._tasks is not None
        return self._tasks.create_task(work, name=name)


def _nobody(output: Output) -> None:
    """Peers of a replica's leader tell nothing."""
