"""One rank of a job whose other ranks are pretended: torch's fake backend, and random programs on it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from verify.events import Event, State
from verify.events import Kind as What

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4
DTYPES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.int64: "Long"}
REDUCTIONS = ("SUM", "MAX", "MIN")

Essence = tuple[Any, ...]
"""kind, operation, members, name, sequence, sizes, outputs, dtype, root, splits, peer, tag, over"""


class Fake:
    """The groups of rank 0, and programs on them."""

    def __init__(self, home: Path) -> None:
        self._home, self._count = home, count()
        self.groups: dict[str, Any] = {
            "default_pg": dist.group.WORLD,
            "tp": dist.new_group([0, 1], group_desc="tp"),
            "odd": dist.new_group([0, 2, 3], group_desc="odd"),
        }
        self.names = {
            name: name if name == "default_pg" else f"{name}#{group.group_name}" for name, group in self.groups.items()
        }
        self.members = {"default_pg": (0, 1, 2, 3), "tp": (0, 1), "odd": (0, 2, 3)}

    def directory(self) -> Path:
        """Of a run of its own."""
        return self._home / str(next(self._count) % 8)

    @staticmethod
    def essence(event: Event) -> Essence:
        """What of an event the program decided."""
        comm = event.communicator
        assert comm is not None
        return (
            event.kind, event.operation, comm.members, comm.name, event.sequence, event.sizes, event.outputs,
            event.dtype, event.root, event.splits, event.peer, event.tag, event.state is State.COMPLETED,
        )  # fmt: skip

    def run(self, data: st.DataObject) -> list[Essence]:
        """Make up a program and run it; what each call is, said independently of the record."""
        numbers: dict[Any, int] = {}
        expected: list[Essence] = []
        for _ in range(data.draw(st.integers(0, 12))):
            name = data.draw(st.sampled_from(sorted(self.groups)))
            dtype = data.draw(st.sampled_from(list(DTYPES)))
            what = data.draw(st.sampled_from(sorted(CALLS)))
            later = data.draw(st.booleans())
            made = CALLS[what](self, name, dtype, later, data)
            kind, operation, sizes, outputs, root, splits, peer, tag, channel = made
            key = (name, channel)
            number = numbers[key] = numbers.get(key, -1) + 1
            typed = DTYPES[dtype] if sizes is not None or outputs is not None else None
            tagged = kind is not What.COLLECTIVE and tag != "0"
            full = f"{self.names[name]} tag {tag}" if tagged else self.names[name]
            expected.append(
                (kind, operation, self.members[name], full, number, sizes, outputs, typed, root, splits, peer,
                 "" if kind is not What.COLLECTIVE else tag, True)
            )  # fmt: skip
        return expected


@contextmanager
def one_rank(home: Path) -> Iterator[Fake]:
    """Rank 0 of SIZE, on the fake backend, for as long as the block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    try:
        yield Fake(home)
    finally:
        dist.destroy_process_group()


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def _size(data: st.DataObject) -> int:
    return data.draw(st.integers(1, 9))


def _collective(op: str, sizes: Any, outputs: Any, root: int | None = None, splits: Any = None, tag: str = "") -> Any:
    return (What.COLLECTIVE, op, sizes, outputs, root, splits, None, tag, "")


def _all_reduce(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    size, red = _size(data), data.draw(st.sampled_from(REDUCTIONS))
    work = dist.all_reduce(
        torch.ones(size, dtype=dtype), op=getattr(dist.ReduceOp, red), group=fake.groups[name], async_op=later
    )
    _finish(work)
    return _collective("all_reduce", ((size,),), ((size,),), tag="" if red == "SUM" else red)


def _broadcast(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    size, root = _size(data), data.draw(st.sampled_from(fake.members[name]))
    _finish(dist.broadcast(torch.ones(size, dtype=dtype), root, group=fake.groups[name], async_op=later))
    return _collective("broadcast", ((size,),), ((size,),), root)


def _reduce(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    size, root = _size(data), data.draw(st.sampled_from(fake.members[name]))
    _finish(dist.reduce(torch.ones(size, dtype=dtype), root, group=fake.groups[name], async_op=later))
    return _collective("reduce", ((size,),), ((size,),), root)


def _gather_into(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    size, many = _size(data), len(fake.members[name])
    out, x = torch.ones(size * many, dtype=dtype), torch.ones(size, dtype=dtype)
    _finish(dist.all_gather_into_tensor(out, x, group=fake.groups[name], async_op=later))
    return _collective("all_gather", ((size,),), ((size * many,),))


def _all_gather(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    size, many = _size(data), len(fake.members[name])
    outs = [torch.ones(size, dtype=dtype) for _ in range(many)]
    _finish(dist.all_gather(outs, torch.ones(size, dtype=dtype), group=fake.groups[name], async_op=later))
    return _collective("all_gather", ((size,),), ((size,),) * many)


def _reduce_scatter(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    size, many = _size(data), len(fake.members[name])
    out, x = torch.ones(size, dtype=dtype), torch.ones(size * many, dtype=dtype)
    _finish(dist.reduce_scatter_tensor(out, x, group=fake.groups[name], async_op=later))
    return _collective("reduce_scatter", ((size * many,),), ((size,),))


def _gather(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    size, many, root = _size(data), len(fake.members[name]), data.draw(st.sampled_from(fake.members[name]))
    outs = [torch.ones(size, dtype=dtype) for _ in range(many)] if root == 0 else None
    _finish(dist.gather(torch.ones(size, dtype=dtype), outs, dst=root, group=fake.groups[name], async_op=later))
    return _collective("gather", ((size,),), ((size,),) * many if root == 0 else None, root)


def _all_to_all(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    many, columns = len(fake.members[name]), data.draw(st.integers(1, 3))
    rows = st.lists(st.integers(0, 4), min_size=many, max_size=many).filter(any)
    ins = data.draw(rows)
    outs = data.draw(st.permutations(ins))
    x, out = (torch.ones(sum(each), columns, dtype=dtype) for each in (ins, outs))
    _finish(dist.all_to_all_single(out, x, list(outs), ins, group=fake.groups[name], async_op=later))
    sizes, outputs = (tuple((row * columns,) for row in each) for each in (ins, outs))
    return _collective("all_to_all", sizes, outputs, splits=tuple(row * columns for row in ins))


def _barrier(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    _finish(dist.barrier(group=fake.groups[name], async_op=later))
    return _collective("barrier", None, None)


def _send(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    return _pair(fake, name, dtype, later, data, sends=True)


def _recv(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject) -> Any:
    return _pair(fake, name, dtype, later, data, sends=False)


def _pair(fake: Fake, name: str, dtype: Any, later: bool, data: st.DataObject, sends: bool) -> Any:
    size, tag = _size(data), data.draw(st.integers(0, 2))
    peer = data.draw(st.sampled_from(fake.members[name][1:]))
    x, group = torch.ones(size, dtype=dtype), fake.groups[name]
    if later:
        _finish((dist.isend if sends else dist.irecv)(x, peer, group=group, tag=tag))
    else:
        (dist.send if sends else dist.recv)(x, peer, group=group, tag=tag)
    kind = What.SEND if sends else What.RECV
    return (kind, "", ((size,),), None, None, None, peer, str(tag), (kind, peer, tag))


CALLS = {
    "all_reduce": _all_reduce, "broadcast": _broadcast, "reduce": _reduce, "all_gather_into": _gather_into,
    "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "gather": _gather, "all_to_all": _all_to_all,
    "barrier": _barrier, "send": _send, "recv": _recv,
}  # fmt: skip


def run_script(script: Path, *arguments: str, code: int = 0, **environment: str) -> str:
    """Run a script of its own process; what it said on standard error."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120, check=False,
        env={**clean, "PYTHONPATH": str(Path(__file__).resolve().parent.parent), **environment},
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    return ended.stderr
