"""More scenes of `stuck_program`: calls in which a rank fails, is killed, or differs from the others."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.stuck_program import RANK, SIZE, here, train


def dies_beside() -> None:
    """Rank 1 dies, rank 2 that received from it gives up and stays away, rank 0 waits for rank 2."""
    group = dist.new_group([0, 2])
    x = train()
    here()
    if RANK == 1:
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 2:
        try:
            dist.recv(x, 1)
        except RuntimeError:
            time.sleep(600)
    dist.all_reduce(x, group=group)


def killed_beside_a_slow_one() -> None:
    """Rank 1 is killed inside a call, which rank 2 has not reached yet."""
    import threading

    x = train()
    here()
    if RANK == 1:
        threading.Thread(target=lambda: sys.stdin.readline() and os.kill(os.getpid(), signal.SIGKILL)).start()
    if RANK == 2:
        while x.sum() > 0:
            x = x * 1.0
    dist.all_reduce(x)


def waits_for_a_callback() -> None:
    """Rank 1 waits for what a callback of its own call sets, which rank 2 has not made; rank 0 waits for rank 1."""
    import threading

    one, other = dist.new_group([1, 2]), dist.new_group([0, 1])
    x = train()
    here()
    if RANK == 1:
        over = threading.Event()
        work = dist.all_reduce(x, group=one, async_op=True)
        work.get_future().then(lambda _: over.set())
        over.wait()
    if RANK == 2:
        while x.sum() > 0:
            x = x * 1.0
        dist.all_reduce(x, group=one)
    if RANK < 2:
        dist.all_reduce(x, group=other)


def sleeps_in_a_creation() -> None:
    """The last rank takes its time to make its part of a group, for which the others wait."""
    train()
    make = dist.distributed_c10d.ProcessGroupGloo

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(600)
        return make(*arguments, **named)

    if RANK == SIZE - 1:
        dist.distributed_c10d.ProcessGroupGloo = slow  # type: ignore[misc]
    here()
    dist.new_group()


def splits_differ() -> None:
    """Rank 0 sends rank 1 less than that expects, and gets more: gloo aborts rank 0."""
    x = train()
    here()
    splits = [3, 1] if RANK == 0 else [2, 2]
    dist.all_to_all_single(torch.empty(4), x, splits, splits)


def roots_send_more() -> None:
    """The root of a broadcast is through with it when gloo aborts whoever expects less."""
    train()
    here()
    dist.broadcast(torch.ones(16 if RANK == 0 else 8), 0)
    dist.all_reduce(torch.ones(4))


def retries(stays: bool = False) -> None:
    """The last rank leaves, or stays away, and the others try their barrier again and again."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    train()
    here()
    if RANK == SIZE - 1:
        if not stays:
            sys.exit(0)
        time.sleep(600)
    while True:
        try:
            dist.barrier(group)
        except RuntimeError:
            time.sleep(0.3)


retries_for_one_that_stays = partial(retries, stays=True)
