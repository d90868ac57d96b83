"""One rank's process, forked by `nursery`, or started by torchrun as `python -m rollout.ranks.worker join`.

It reads its configuration from the control socket, attaches to the world, loads its shards, and runs `kernel.rank.Rank`
on uvloop until told to stop. When the socket closes, the launcher is gone and the rank ends too.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel.comm.tcp_link import keep_alive
from kernel.errors import RankLost, TurnstileError, UsageError
from kernel.inbox import Inbox, UsePolicy
from kernel.journal import Journal, groups
from kernel.program import Program
from kernel.rank import Ports, Rank
from kernel.record import NullRecorder, Recorder, ring_path
from kernel.record.layout import ORPHANED
from kernel.request import Phase
from kernel.sched import hooks, registry
from kernel.sched.policy import Limits, Policy
from kernel.topology import World
from rollout.ranks import exchange, faults, heap, standing, wire, words
from rollout.ranks.heart import Heart
from rollout.ranks.orphans import Offspring
from rollout.ranks.strays import Strays

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kernel.ports import Device, ExpertExchange, Model
    from kernel.replica import Output
    from rollout.ranks.links import Link


GRACE_S: Final = 2.0
"""For a rank that was told to give up to do so by itself."""
STOPS: Final = 100
"""How often a policy may have stopped the loop before the rank gives up saying why."""
_left: Final[list[BaseException]] = []
"""With what a task that is none of ours left the loop, or ended: a policy may have started one."""


class Outbox:
    """Outputs of one leader, sent once per turn of the loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._outputs: list[tuple[Output, int]] = []
        self._loop = asyncio.get_running_loop()

    def emit(self, output: Output) -> None:
        """Send an output, stamped with the time at which it was committed."""
        if not self._outputs:
            self._loop.call_soon(self.flush)
        self._outputs.append((output, time.monotonic_ns()))

    def flush(self) -> None:
        """Hand over what is there; to nobody once the launcher has gone."""
        if self._outputs and not self._writer.is_closing():
            self._writer.write(wire.pack_outputs(self._outputs))
        self._outputs = []

    def send(self, message: dict[str, Any]) -> None:
        """Send any other message, in order."""
        if not self._writer.is_closing():  # else the launcher has gone
            self.flush()
            self._writer.write(wire.pack(message))


class Gap:
    """The loop's longest gap: how late a timer of a few milliseconds fired at worst."""

    def __init__(self, journal: Journal, every_s: float = 0.02) -> None:
        self._journal, self._every = journal, every_s
        self._loop = asyncio.get_running_loop()
        self._longest = 0.0
        self._arm()

    def _arm(self) -> None:
        self._due = self._loop.time() + self._every
        self._handle = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        late = self._loop.time() - self._due
        if late > self._longest:
            self._longest = late
            self._journal.mark("longest loop gap, ns", int(late * 1e9))
        self._arm()

    def close(self) -> None:
        """Stop watching."""
        self._handle.cancel()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, offspring: Offspring) -> int:
    """Run one rank; its exit code. offspring: what its policies start."""
    config = await wire.read(reader)
    if config is None:
        return 1
    outbox = Outbox(writer)
    heart = Heart(outbox.send, config["beat_s"])
    if "store" in config:
        keep_alive(writer.get_extra_info("socket"), 2 * config["rank_timeout_s"])
        config["address"] = writer.get_extra_info("sockname")[0]
    try:
        await _run(config, reader, outbox, heart)
    except TurnstileError as error:
        outbox.send({"failed": type(error).__name__, "message": str(error)})
        code = 2 if isinstance(error, UsageError) else 1
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a class of the policy's own too: the launcher is to hear of it
        import traceback

        trace = "".join(traceback.format_exception(error))
        message = f"rank {config['rank']}: {hooks.told(error)}"
        outbox.send({"failed": type(error).__name__, "message": message, "trace": trace})
        code = 1
    else:
        outbox.send({"stopped": config["rank"], "left": offspring.end()})
        code = 0
    offspring.end()
    heart.close()
    await words.part(reader, writer)
    return code


async def _run(config: dict[str, Any], reader: asyncio.StreamReader, outbox: Outbox, heart: Heart) -> None:
    # Before anything that starts CUDA or NCCL, which read these once.
    os.environ.update(config["environment"])
    import torch

    from kernel.cache import KVCache
    from rollout.ranks.links import connect

    rank, world = config["rank"], World(**config["world"])
    cuda = config["device"]["device"] == "cuda"
    if cuda:
        from rollout.ranks import cuda_rank

        config["gpu"] = cuda_rank.choose(rank if "arena" in config else None)
    link = await connect(config, world, rank)
    limits = Limits(**{**config["limits"], "buckets": tuple(config["limits"]["buckets"])})
    torch.manual_seed(0)
    programs = [Program(world, phase, world.layers(limits.boundaries)) for phase in Phase]

    def open_record(directory: str, policy: str) -> Recorder | NullRecorder:
        if not directory:
            return NullRecorder()
        meta = {**config["meta"], "policy": policy, "world": str(world)}
        path = ring_path(directory, rank)
        return Recorder(path, rank=rank, groups=groups(programs, rank), meta=meta, capacity=config["capacity"])

    journal = Journal(open_record(config["record"], config["policy"]))

    def use_policy(entry: UsePolicy) -> Policy:
        strays.check(f"rank {rank}, round {journal.round}")
        policy = registry.create(entry.spec, limits)
        journal.switch(open_record(entry.record, entry.spec))
        return policy

    quiet = None
    try:
        if cuda:
            async with heart.away("starting its GPU"):
                device, model, quiet = await cuda_rank.build(config, world, rank, limits, link, journal.device)
        else:
            # On a thread, so that the heart goes on beating.
            made = await exchange.build(config, rank, link)
            device, model = await asyncio.to_thread(_on_cpu, config, world, rank, limits, link, journal, made)
    except BaseException as error:
        journal.exception(error)
        journal.close()
        if (ours := faults.explained(error, rank, "while it loaded the model")) is not None:
            raise ours from error
        raise  # the launcher, told why, ends the others
    # Weights and modules stay for good; without this every collection would walk through them.
    gc.freeze()
    inbox = Inbox()
    ports = Ports(
        device=device,
        rendezvous=link.rendezvous,
        model=model,
        cache=KVCache(config["blocks"], config["block_size"]),
        inbox=inbox,
        journal=journal,
        emit=outbox.emit,
        use_policy=use_policy,
        away=heart.away,
    )
    engine = Rank(rank, world, limits, registry.create(config["policy"], limits), ports)
    link.running()
    heart.journal = journal
    outbox.send({"ready": rank})
    gap = Gap(journal)
    # A kernel that waits for a dead peer sees no abort of the host's: closing the device ends it, and what awaits it.
    end_device = device.close if cuda else None
    main = asyncio.current_task()
    assert main is not None

    def fail(error: BaseException) -> None:
        _left.append(error)
        main.cancel()

    strays = Strays(lambda: engine.policy, fail)
    listener = asyncio.create_task(_listen(reader, inbox, heart, link.abort, end_device, main), name="control")
    try:
        await engine.run()
        strays.check(f"rank {rank}, round {journal.round}")
        if quiet is not None:
            quiet.check()
        link.ended(None)
    except asyncio.CancelledError as error:
        why = _ended_by(error, engine.policy, f"rank {rank}, round {journal.round}", listener)
        journal.exception(why)
        link.ended(why)
        raise why from why.__cause__ or error
    except BaseException as error:
        if (ours := faults.explained(error, rank, "while it served")) is not None:
            link.ended(ours)
            raise ours from error
        link.ended(error)
        raise
    finally:
        strays.close()
        listener.cancel()
        await asyncio.wait([listener])  # until it has, nobody else may read
        gap.close()
        await device.close()
        link.close()
        ports.rendezvous.close()
        journal.close()


def _ended_by(
    error: asyncio.CancelledError, policy: Policy, where: str, listener: asyncio.Task[None]
) -> TurnstileError:
    """Why a rank's own task was cancelled, which is never its own doing. where: the rank and its round."""
    if _left:
        try:
            hooks.raised(_left[0], policy, "turn", where)
        except TurnstileError as why:
            return why
    if not listener.done() or listener.cancelled():  # else it has ended the rank, and returned
        what = "may have cancelled tasks that are not its own, and so ended this rank (a SIGINT to it does the same)"
        return hooks.wrong(policy, "turn", what, where)
    return RankLost(f"{where.partition(',')[0]} waited for something of its policy's own and was ended")


def _on_cpu(
    config: dict[str, Any],
    world: World,
    rank: int,
    limits: Limits,
    link: Link,
    journal: Journal,
    made: ExpertExchange | None,
) -> tuple[Device, Model]:
    import models
    from kernel.device.cpu import CpuDevice

    model = models.load(
        Path(config["model"]),
        world,
        rank,
        blocks=config["blocks"],
        block_size=config["block_size"],
        slots=limits.rows,
        dtype=config["device"]["dtype"],
        compiled=config["device"]["compiled"],
    )
    watch, threads = journal.device, config["threads"]
    return CpuDevice(rank, link.collectives, threads=threads, watch=watch, expert_exchange=made), model


async def _listen(
    reader: asyncio.StreamReader,
    inbox: Inbox,
    heart: Heart,
    abort: Callable[[str], None],
    end_device: Callable[[], Coroutine[Any, Any, None]] | None,
    main: asyncio.Task[Any],
) -> None:
    reason = ORPHANED
    while (message := await wire.read(reader)) is not None:
        if "abort" in message:
            reason = message["abort"]
            break
        if "where" in message:
            heart.tell()
            continue
        inbox.put(*(wire.entry_from_json(entry) for entry in message["entries"]))
    abort(reason)
    inbox.fail(RankLost(f"this rank waited for work and gave up: {reason}"))
    if end_device is not None:
        await end_device()
    await asyncio.sleep(GRACE_S)
    main.cancel()  # a turn that awaits neither the others nor its device hears of none of this


def main() -> None:
    """Entry point of the process."""
    sys.exit(run_loop(sys.argv[1]))


def join_world() -> int:
    """Be the rank that torchrun started this process as; its exit code."""
    with suppress(OSError):
        os.dup2(2, 1)  # what a policy prints: standard output is the launcher's
    return run_loop("join")


def run_loop(how: str) -> int:
    """Serve on the control socket with this descriptor, or `join` the world that torchrun started; the exit code."""
    import uvloop

    heap.keep_pages()
    standing.offer()
    offspring = Offspring()
    # A stream thread that holds the interpreter would otherwise keep the loop waiting for 5 ms at a time.
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_connected(how, offspring))
        except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
            # The last: the loop was stopped. No Ctrl-C comes to a rank, which has a session of its own.
            # What is left is now cancelled, and `_run` says why.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _left.append(error)
            _let_end(runner.get_loop())
            raise


def _let_end(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks and wait for them, also in a loop that was told to stop several times."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    for _ in range(STOPS if tasks else 0):
        with suppress(RuntimeError):
            loop.run_until_complete(asyncio.wait(tasks))
            return


async def _connected(how: str, offspring: Offspring) -> int:
    if how == "join":
        from rollout.ranks.torchrun import join, place

        here = place()
        if here is None:
            raise UsageError("`rollout.ranks.worker join` is for torchrun, which did not start this process")
        return await serve(*await join(here), offspring)
    return await serve(*await asyncio.open_connection(sock=socket.socket(fileno=int(how))), offspring)


if __name__ == "__main__":
    main()
