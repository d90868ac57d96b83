"""A training loop that hangs: a rank whose data runs out leaves the loop, the others wait for it.

    torchrun --nproc-per-node 2 examples/stuck/early_return.py runs/stuck

It never ends by itself. `turnstile hang runs/stuck` says why.
"""

import sys
import threading

import torch
import torch.distributed as dist

from turnstile import record


def train(batches: int) -> None:
    """One gradient averaged over all ranks for each batch of this rank."""
    for _ in range(batches):
        gradient = torch.ones(1024)
        dist.all_reduce(gradient)


def main() -> None:
    """One rank."""
    record.install(sys.argv[1])
    dist.init_process_group("gloo")
    batches = 8 - dist.get_rank()  # the last file is shorter
    record.decision(f"{batches} batches")
    train(batches)
    threading.Event().wait()  # what a service does when its work is done


if __name__ == "__main__":
    main()
