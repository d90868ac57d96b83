"""The Python API: an engine on this host's ranks, sessions that keep their KV between turns, streaming generation.

async with Engine("path/to/checkpoint", World(4, adp=2, ep=4), policy="fine") as engine:
    session = engine.session()
    async for output in session.generate(prompt_ids, SamplingParams(max_tokens=64)):
        print(output.token, output.logprob)
"""

from __future__ import annotations

import asyncio
import platform
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

import models
from kernel.errors import RankLost, TurnstileError, UsageError
from kernel.inbox import EndSession, Entry, Flush, Pause, Resume, Stop, Submit, UpdateWeights, UsePolicy
from kernel.request import Request, SamplingParams, whole
from kernel.sched import registry
from kernel.sched.policy import MOST_ROWS, Limits
from kernel.topology import World
from models.native import build as kernels
from rollout import stall, typed
from rollout.device import CPU_KV_TOKENS, DeviceOptions
from rollout.policies import spec
from rollout.ranks import exchange, gpus, host_memory, last_words, memory, wire
from rollout.ranks.hosts import HostsLauncher
from rollout.ranks.launcher import Launcher
from rollout.ranks.pulse import RANK_TIMEOUT_S
from rollout.ranks.torchrun import Place, place
from rollout.ranks.wire import failure
from rollout.stall import STALL_TIMEOUT_S, Stall
from rollout.turns import Completion, Generation, Session, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from rollout.ranks.nursery import Nursery

WHERE_S: Final = 5.0
"""For all ranks of a stalled run to say where they wait; those whose loop is held do not."""
EXIT_S: Final = MappingProxyType({"cpu": 30.0, "cuda": 120.0})
"""For ranks to stop by themselves; on cuda they drop graphs and communicators."""

__all__ = ["Completion", "Engine", "Generation", "Session", "TokenOutput", "spec", "versions"]


class Engine:
    """A model served by `world.size` rank processes on this host, or on several under torchrun (`rollout.ranks.hosts`).

    model: a Hugging Face checkpoint directory. policy: a spec as in `--policy`. device: `cpu`, `cuda`, or everything
    that can be said about it; dtype, compiled: those of its options. out: run directory for the record, or None.
    kv_tokens: KV pool of one replica (None: 32,768 on cpu, what the GPU holds on cuda). prefill_tokens: new tokens of a
    replica in one epoch. rows: requests that decode together on one replica. threads: torch threads a rank. nursery:
    where ranks are forked, to share one among engines (None: one of its own). rank_timeout_s: a rank that says nothing
    for so long is lost, and the run with it (RankLost; 0: never). stall_timeout_s: without progress for so long while
    turns are in flight, the run ends with `rollout.stall.Stalled`, which has a report (0: never). Raises UsageError for
    what cannot be used.
    """

    def __init__(
        self,
        model: str | Path,
        world: World | None = None,
        *,
        policy: str = "fine",
        policy_config: dict[str, Any] | None = None,
        device: str | DeviceOptions = "cpu",
        out: str | Path | None = None,
        kv_tokens: int | None = None,
        prefill_tokens: int = 512,
        rows: int = 64,
        block_size: int = 16,
        dtype: str | None = None,
        compiled: bool | None = None,
        threads: int = 1,
        record_events: int = 1 << 18,
        nursery: Nursery | None = None,
        exit_s: float | None = None,
        rank_timeout_s: float = RANK_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        typed.check(model=model, world=world, policy_config=policy_config, device=device, out=out, compiled=compiled)
        typed.check(nursery=nursery, exit_s=exit_s, rank_timeout_s=rank_timeout_s, stall_timeout_s=stall_timeout_s)
        options = DeviceOptions(device) if isinstance(device, str) else device
        options = options if dtype is None else replace(options, dtype=dtype)
        options = options if compiled is None else replace(options, compiled=compiled)
        sizes = {"kv_tokens": CPU_KV_TOKENS if kv_tokens is None else kv_tokens, "prefill_tokens": prefill_tokens}
        sizes |= {"rows": rows, "block_size": block_size, "threads": threads, "record_events": record_events}
        for name, value in sizes.items():
            if whole(value, name) < 1:
                raise UsageError(f"{name}={value}: must be at least 1")
        if rows > MOST_ROWS:
            raise UsageError(f"rows={rows}: must be at most {MOST_ROWS}")
        for name, seconds in (("rank_timeout_s", rank_timeout_s), ("stall_timeout_s", stall_timeout_s)):
            if not 0 <= seconds < 1e9:
                raise UsageError(f"{name}={seconds}: must be a number of seconds, 0 for never")
        self.world = world or World()
        self.model = Path(model)
        self._spec = spec(policy, policy_config)
        self._out = Path(out) if out is not None else None
        self.config = models.read_config(self.model)
        models.check_split(self.config, self.world)
        self.options = options = options.resolved(self.config)
        self.world, self.exchange = exchange.resolve(
            options, self.config, self.world, prefill_tokens=prefill_tokens, rows=rows
        )
        limits = Limits(
            size=self.world.size,
            replicas=self.world.adp,
            boundaries=self.world.boundaries(self.config.layers),
            prefill_tokens=prefill_tokens,
            rows=rows,
            granule=self.world.atp,
        )
        self._limits = replace(limits, buckets=options.buckets(rows, limits.buckets))
        registry.create(self._spec, self._limits)  # a policy that cannot be used is refused before ranks start
        if options.compiled:
            options.check_installed(build=False)
        wanted = exchange.settings(self.exchange, self.config, options, self._limits, self.world)
        if options.device == "cuda":
            reserved = exchange.reserved(wanted, options)
            sizes["kv_tokens"] = self._on_gpus(options, kv_tokens, prefill_tokens, block_size, reserved)
        else:
            host_memory.check(
                self.config,
                self.world,
                options.dtype or "float32",
                kv_tokens=sizes["kv_tokens"],
                default=kv_tokens is None,
                block_size=block_size,
                ranks=host_memory.ranks_here(self.world),
                memory=host_memory.available(),
            )
        self._pool = sizes["kv_tokens"] // block_size * block_size
        if self._pool < block_size:
            raise UsageError(f"kv_tokens={kv_tokens}: must hold at least one block of {block_size} tokens")
        self._settings = {
            "world": asdict(self.world),
            "limits": asdict(self._limits),
            "model": str(self.model.resolve()),
            "policy": self._spec,
            "blocks": self._pool // block_size,
            "block_size": block_size,
            "device": asdict(options),
            "exchange": wanted,
            "environment": options.environment(),
            "hidden": self.config.hidden_size,
            "threads": threads,
            "rank_timeout_s": rank_timeout_s,
            "record": str(self._out) if self._out else "",
            "capacity": record_events,
            "meta": {"size": self.world.size, "versions": versions(), "exchange": self.exchange.substrate},
        }
        self._nursery, self._record = nursery, str(self._settings["record"])
        self._exit_s = EXIT_S[options.device] if exit_s is None else exit_s
        self._ended: set[int] = set()
        self._closed = False
        self._launcher: Launcher | HostsLauncher | None = None
        self._turns: dict[int, Generation] = {}
        self._load = [0] * self.world.adp
        self._requests = self._sessions = 0
        self._error: TurnstileError | None = None
        self._quiet = asyncio.Event()
        self._changed = asyncio.Event()
        self._paused = self._changing = False
        self._stopped = asyncio.Event()
        self._updates: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._stall = Stall(stall_timeout_s)
        self._waits: dict[int, list[str]] = {}
        self._told = asyncio.Event()
        self._outputs = 0
        self._left: list[str] = []

    async def __aenter__(self) -> Self:
        if self._launcher is not None:
            raise UsageError("an engine is opened once: make another Engine")
        if self.options.compiled:
            await kernels.wanted()  # on a thread: the loop goes on, and Ctrl-C kills the compiler
        here = place()
        self._launcher = (
            Launcher(self.world, self._settings, self._nursery) if here is None else self._across_hosts(here)
        )
        try:
            await self._launcher.start()
        except BaseException:
            await self._launcher.close("the engine did not start")
            raise
        self._tasks = [
            asyncio.create_task(self._listen(self._launcher), name="engine"),
            asyncio.create_task(self._watch(self._launcher), name="stall"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._launcher is not None
        try:
            if self._error is None:
                self._send(Stop())
                await self._until_stopped()
        finally:
            await self._launcher.close("" if self._error is None else str(self._error))
            for task in self._tasks:
                task.cancel()
            failed, self._closed = self._error, True
            self._fail_all(TurnstileError("the engine was closed: open it again with `async with`"))
        if failed is not None and error is None:
            raise failed

    async def _until_stopped(self) -> None:
        """Wait for all ranks to end; one that does not, stuck or stopped, is named, and all are killed."""
        try:
            async with asyncio.timeout(self._exit_s):
                await self._stopped.wait()
        except TimeoutError:
            late = ", ".join(str(rank) for rank in range(self.world.size) if rank not in self._ended)
            self._failed(RankLost(f"rank {late} did not stop within {self._exit_s:g} s and was killed"))

    # -- what users do ------------------------------------------------------------------------------------------

    @property
    def kv_tokens(self) -> int:
        """Tokens that a replica's KV pool holds."""
        return self._pool

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, which leaving it raises."""
        return self._error is not None

    @property
    def left(self) -> tuple[str, ...]:
        """What policies had started and left running, a clause about each (`orphans.Offspring.end`). It was ended."""
        return tuple(self._left)

    def now_ns(self) -> int:
        """The clock of all times here: monotonic nanoseconds."""
        return time.monotonic_ns()

    def session(self) -> Session:
        """A new session, on the replica with the fewest open ones."""
        self._sessions += 1
        replica = self._load.index(min(self._load))
        self._load[replica] += 1
        return Session(self, self._sessions, replica)

    async def generate(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Completion:
        """One turn in a session of its own."""
        session = self.session()
        try:
            return await session.generate(prompt, params)
        finally:
            await session.close()

    async def flush(self) -> None:
        """Drop the KV that idle sessions keep."""
        self._send(Flush())

    async def pause(self) -> None:
        """Decode and admit nothing more; turns keep their KV."""
        self._send(Pause())
        self._paused = True

    async def resume(self) -> None:
        """End a pause."""
        self._send(Resume())
        self._paused = False

    async def use_policy(
        self, policy: str, config: dict[str, Any] | None = None, record: str | Path | None = None
    ) -> None:
        """Wait until all turns have ended, then go on under another policy, with a record of its own. Ranks stay up.

        Raises UsageError for a policy that cannot be used.
        """
        typed.check(policy_config=config, record=record)
        new = spec(policy, config)
        registry.create(new, self._limits)
        while self._turns:
            self._quiet.clear()
            self._check()
            await self._quiet.wait()
        self._record, self._spec = str(record) if record else "", new
        await self._change(UsePolicy(new, self._record))

    async def update_weights(self, path: str | Path) -> None:
        """Load a checkpoint of the same shape in place. Turns in flight pause meanwhile and go on under its weights.

        KV kept between turns is dropped. Raises UsageError, and goes on with the old weights, for a checkpoint of
        another shape, or that is cut off, incomplete, or holds NaN as this host sees it.
        """
        typed.check(path=path)
        if models.read_config(path) != self.config:
            raise UsageError(f"{path}: its config differs from {self.model}'s: weights are updated in place only")
        # A caller that gives up must not leave the turns paused: the ranks load the weights all the same.
        update = asyncio.create_task(self._update(str(Path(path).absolute())), name="update weights")  # noqa: ASYNC240
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)
        await asyncio.shield(update)

    def abort(self, error: TurnstileError) -> None:
        """End everything at once with this error: turns in flight raise it, and so does leaving the engine."""
        typed.check(error=error)
        self._failed(error)

    # -- inside -------------------------------------------------------------------------------------------------

    def _on_gpus(
        self, options: DeviceOptions, kv_tokens: int | None, prefill_tokens: int, block_size: int, reserved: int
    ) -> int:
        """The KV pool of a replica, in tokens; raises UsageError unless this host can serve the world.

        reserved: bytes of a rank that its expert exchange keeps.
        """
        options.check_installed()
        found = gpus.check_host(self.world.size)
        return memory.kv_tokens(
            self.config,
            self.world,
            options,
            min(found[: self.world.size]),
            prefill_tokens=prefill_tokens,
            block_size=block_size,
            asked=kv_tokens,
            exchange=reserved,
        )

    def _across_hosts(self, here: Place) -> HostsLauncher:
        if here.rank:
            raise UsageError(f"torchrun's rank {here.rank} is no launcher: run the command with `-m turnstile`")
        return HostsLauncher(self.world, self._settings, here)

    async def _update(self, path: str) -> None:
        paused = self._paused
        await self.pause()
        try:
            # A rank that cannot load them could not go on, and the others neither.
            await asyncio.to_thread(models.check_weights, path, self.config)
            await self._change(UpdateWeights(path))
        except UsageError:
            if not paused:
                await self.resume()
            raise
        if not paused:
            await self.resume()

    async def _change(self, entry: UsePolicy | UpdateWeights) -> None:
        """Send an entry that takes effect once nothing is in flight, and wait until it has."""
        self._changed.clear()
        self._send(entry)
        self._changing = isinstance(entry, UsePolicy)  # weights take as long as their disk
        await self._changed.wait()
        self._changing = False
        self._check()

    def _submit(self, session: Session, prompt: tuple[int, ...], params: SamplingParams) -> Generation:
        self._check()
        if not prompt:
            raise UsageError("an empty prompt: give at least one token id")
        worst = max(prompt) if min(prompt) >= 0 else min(prompt)
        if not 0 <= worst < self.config.vocab_size:
            raise UsageError(f"token id {worst}: the vocabulary has ids 0 to {self.config.vocab_size - 1}")
        if not params.ignore_eos:
            ends = {*params.stop_token_ids, *self.config.eos_token_ids}
            params = replace(params, stop_token_ids=tuple(sorted(ends)))
        self._requests += 1
        request = Request(self._requests, session.id, session.replica, prompt, params)
        if request.longest > min(self._pool, self.config.max_positions):
            limit, knob = (
                (self._pool, "KV pool (raise --kv-tokens)")
                if self._pool <= self.config.max_positions
                else (self.config.max_positions, "model's positions")
            )
            raise UsageError(
                f"a turn of {len(prompt)} prompt tokens and up to {params.max_tokens} output tokens does not fit the"
                f" {limit} tokens of the {knob}"
            )
        generation = Generation(self, request)
        self._send(Submit(request))
        self._turns[request.id] = generation
        return generation

    def _close_session(self, session: Session) -> None:
        self._load[session.replica] -= 1
        if self._error is None and not self._closed:
            self._send(EndSession(session.id))

    def _send(self, entry: Entry) -> None:
        self._check()
        assert self._launcher is not None
        everything = {"entries": [wire.entry_to_json(entry)]}
        if isinstance(entry, Submit):
            short = {"entries": [wire.placeholder(entry)]}
            owner = entry.request.replica
            self._launcher.send(
                [everything if self.world.replica(rank) == owner else short for rank in range(self.world.size)]
            )
        else:
            self._launcher.send([everything] * self.world.size)

    async def _listen(self, launcher: Launcher | HostsLauncher) -> None:
        async for rank, message in launcher.messages():
            if "where" in message:
                self._waits[rank] = message["where"]
                if len(self._waits) == self.world.size:
                    self._told.set()
            elif "outputs" in message:
                self._outputs += len(message["outputs"])
                for request, token, logprob, finish, cached, stamp in message["outputs"]:
                    self._deliver(request, token, logprob, finish, cached, stamp)
            elif "stopped" in message:
                self._ended.add(rank)
                self._left += message.get("left", [])
                if len(self._ended) == self.world.size:
                    self._stopped.set()
            else:
                if "lost" in message:
                    message["lost"] += self._last_words(launcher, message.get("ranks", [rank]))
                self._failed(failure(rank, message))

    def _last_words(self, launcher: Launcher | HostsLauncher, ranks: Sequence[int]) -> str:
        """What lost ranks were doing: by their records, or where these are on another host, by their last beat."""
        said = {rank: last_words.of(self._record, rank) or launcher.pulse.at.get(rank, "") for rank in ranks}
        if len(said) == 1:
            return next(iter(said.values()))
        return "".join(f"; rank {rank}{clause}" for rank, clause in said.items())

    async def _watch(self, launcher: Launcher | HostsLauncher) -> None:
        """End the run, with a report, when it makes no progress."""

        def progress() -> object:
            return self._outputs, sorted(launcher.pulse.moved.items())

        await self._stall.watch(progress, lambda: (bool(self._turns) or self._changing) and not self._paused)
        if self._error is not None:
            return
        launcher.send([{"where": True}] * self.world.size)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._told.wait(), WHERE_S)
        report = partial(stall.found, self._stall.timeout_s, self._record, launcher.pulse, self._waits)
        self._failed(await asyncio.to_thread(report, len(self._turns), self._spec))

    def _deliver(self, request: int, token: int, logprob: float, finish: str, cached: int, stamp: int) -> None:
        if request < 0:
            self._changed.set()
            return
        turn = self._turns.get(request)
        if turn is None:
            return
        turn._take(token, logprob, finish, cached, stamp)
        if finish:
            del self._turns[request]
            if not self._turns:
                self._quiet.set()

    def _failed(self, error: TurnstileError) -> None:
        # The first report names the cause; those of ranks that were waiting for it follow.
        if self._error is None or (isinstance(self._error, RankLost) and not isinstance(error, RankLost)):
            self._error = error
        self._fail_all(self._error)
        self._stopped.set()

    def _fail_all(self, error: TurnstileError) -> None:
        for turn in self._turns.values():
            turn._fail(error)
        self._turns.clear()
        self._quiet.set()
        self._changed.set()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._launcher is None or self._closed:
            raise UsageError("the engine is not open: use it inside `async with Engine(...) as engine`")


def versions() -> dict[str, str]:
    """Versions that a record and a report name."""
    found = {"python": platform.python_version()}
    for name in ("turnstile", "torch", "uvloop"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
