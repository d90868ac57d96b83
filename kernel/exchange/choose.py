"""Which substrate carries the expert exchange: from the world, its hosts, what is installed and the device. Pure.

    none     no exchange: experts are reached by the collectives of `kernel.program`
    local    one rank: every expert is at home
    shm      shared memory of one host, CPU tensors
    gloo     torch.distributed's gloo, CPU tensors, any number of hosts
    nccl     all-to-all over NCCL, any number of hosts
    deepep   DeepEP's normal path for P and its low-latency path for D, one host
    symm     torch's symmetric memory over NVSHMEM (`all_to_all_vdev_2d`), one host
    sim      the simulated world's

Stock DeepEP cannot hold two phases' buffers across hosts: NVSHMEM's world, its team, its queue pairs and its barriers
are of the process, and the second buffer either fails to construct or is fenced by the first. There the exchange falls
back to NCCL, under the same states, boundaries and permits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kernel.errors import PackageMissing, UsageError
from kernel.exchange.sizes import DEEP_EP_RANKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.topology import World

CHOICES: Final = ("auto", "none", "local", "shm", "gloo", "nccl", "deepep", "symm")
"""What `--exchange` takes."""
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "shm": ("torch",),
    "gloo": ("torch",),
    "nccl": ("torch",),
    "symm": ("torch", "symm_mem"),
    "deepep": ("torch", "deep_ep", "nvshmem.core"),
}
INSTALL: Final[Mapping[str, str]] = {
    "torch": "pip install 'turnstile[engine]'",
    "deep_ep": "pip install 'turnstile[cuda]' (tokenspeed-deepep, for Linux on x86-64, Python 3.12 and CUDA 13)",
    "nvshmem.core": "pip install 'turnstile[cuda]' (nvshmem4py-cu13, beside nvidia-nvshmem-cu13)",
    "symm_mem": "install a build of torch with CUDA whose symmetric memory has NVSHMEM (2.9 or later)",
}
SYMMETRIC_EXPERTS: Final = 16
"""Local experts of `all_to_all_vdev_2d` (torch 2.9 to 2.13): a warp each, of a block of 512 threads."""
GPUS: Final = ("nccl", "deepep", "symm")
"""Substrates that move GPU tensors."""
ONE_HOST: Final = "stock DeepEP cannot hold the buffers of two phases across hosts"


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known before anything is built.

    device: `cpu` or `cuda`. hosts: of the world. packages: importable modules among those of `NEEDS`. experts: of the
    model, 0 where it has none. dense: it has layers without experts. broken: substrates that a check of their own has
    refused, with its words.
    """

    world: World
    device: str = "cpu"
    hosts: int = 1
    packages: frozenset[str] = frozenset({"torch"})
    experts: int = 0
    dense: bool = False
    broken: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """substrate: one of `CHOICES` without `auto`. reason: why, for people."""

    substrate: str
    reason: str

    @property
    def program(self) -> str:
        """Which collective program it executes; see `kernel.program`."""
        return "none" if self.substrate == "none" else "split"


def choose(asked: str, now: Situation) -> Choice:
    """The substrate for what `--exchange` asks.

    Raises UsageError for a choice that this world or device cannot have, PackageMissing for one that is not installed.
    `auto` never raises: it takes the best that works, and says what kept it from a better one.
    """
    if asked not in CHOICES:
        raise UsageError(f"--exchange {asked}: choose one of {', '.join(CHOICES)}")
    if asked == "none":
        return Choice("none", "asked for")
    if asked == "auto":
        return _best(now)
    if (why := world_refuses(now)) is not None:
        raise UsageError(f"--exchange {asked}: {why}")
    if (why := _refuses(asked, now)) is not None:
        raise UsageError(f"--exchange {asked}: {why}")
    missing = [name for name in NEEDS.get(asked, ()) if name not in now.packages]
    if missing:
        raise PackageMissing(f"--exchange {asked} needs {missing[0]}, which is not installed: {INSTALL[missing[0]]}")
    return Choice(asked, "asked for")


def world_refuses(now: Situation) -> str | None:
    """Why this world and model can have no exchange on any substrate; None where they can."""
    world = now.world
    if now.experts < 2:
        return "the model has no routed experts: leave it at none"
    if now.dense:
        return "the model has layers without experts, whose columns all ranks share: leave it at none"
    if world.ep != world.size:
        return f"experts must be spread over all ranks: choose --ep {world.size}, not {world.ep}, or --exchange none"
    if world.adp == 1 and world.size > 1:
        return "with --adp 1 every rank has all rows already: choose --adp above 1, or --exchange none"
    if now.experts % world.size:
        return f"{now.experts} experts do not divide over {world.size} ranks: choose --exchange none"
    return None


def _best(now: Situation) -> Choice:
    if (why := world_refuses(now)) is not None:
        return Choice("none", why)
    if now.device == "cpu" or now.world.size == 1:
        # One process's experts, or CPU collectives over shared memory, are reached faster without an exchange.
        return Choice("none", "collectives are as good here; ask for --exchange to have one")
    passed: list[str] = []
    for name in ("deepep", "symm", "nccl"):
        why = _refuses(name, now)
        missing = [each for each in NEEDS[name] if each not in now.packages]
        if why is None and not missing:
            return Choice(name, "; ".join(passed) or "the best there is")
        passed.append(f"no {name}: {why or f'{missing[0]} is not installed ({INSTALL[missing[0]]})'}")
    return Choice("none", "; ".join(passed))


def _refuses(name: str, now: Situation) -> str | None:
    """Why `name` cannot be had here, packages aside."""
    cuda = now.device == "cuda"
    if name == "deepep" and cuda and now.hosts > 1:
        return f"{ONE_HOST} ({now.hosts} here): choose nccl, which keeps the same boundaries and permits"
    if name in now.broken:
        return now.broken[name]
    if name == "local":
        return None if now.world.size == 1 else "it is for one rank: choose --world 1, or another exchange"
    if now.world.size == 1:
        return "one rank has every expert at home: choose local, or none"
    if name in ("shm", "gloo"):
        if cuda:
            return "it moves CPU tensors: choose nccl, deepep or symm with --device cuda"
        if name == "shm" and now.hosts > 1:
            return f"{now.hosts} hosts share no memory: choose gloo"
        return None
    if not cuda:
        return "it moves GPU tensors: choose shm or gloo with --device cpu"
    if name == "symm" and now.experts > SYMMETRIC_EXPERTS * now.world.size:
        return (
            f"torch's exchange over symmetric memory takes {SYMMETRIC_EXPERTS} experts a rank at most, not"
            f" {now.experts // now.world.size}: choose nccl, or raise --world"
        )
    if name == "symm" and now.hosts > 1:
        return f"it is used on one host alone ({now.hosts} here): choose nccl"
    if name == "deepep" and now.world.size not in DEEP_EP_RANKS:
        return f"its normal path is built for 2, 4 or 8 ranks, not {now.world.size}: change --world, or choose nccl"
    return None
