"""The arguments of calls as torch's own functions make them, at little cost: tensors in and out, and all else as a key.

A training step makes the same few calls again and again. `SHAPES` looks at every argument of a call; what is here looks
at what may differ from one call to the next only, and knows the forms of the most frequent methods alone. A key is
equal for two calls of a method exactly if their shapes are equal but for the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch._C import _distributed_c10d as c

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Parts = tuple["Sequence[Any]", "Sequence[Any]", tuple[Any, ...]]
"""Tensors that go in, tensors that come out, and the key."""
Quick = "Callable[[tuple[Any, ...]], Parts | None]"


def _kinds_hash() -> bool:
    """Whether the hash of a reduction is that of its kind, which is four times as fast to get."""
    try:
        kinds = [getattr(c.ReduceOp.RedOpType, name) for name in c.ReduceOp.RedOpType.__members__]
        found = [hash(c.ReduceOp(kind)) for kind in kinds if kind.name != "PREMUL_SUM"]
        return found == [kind.value for kind in kinds if kind.name != "PREMUL_SUM"] and len(set(found)) == len(found)
    except Exception:
        return False


def _symmetric(args: tuple[Any, ...]) -> Parts | None:
    tensors, options = args
    if type(options) is not c.AllreduceOptions or type(tensors) is not list:
        return None
    return tensors, tensors, (hash(options.reduceOp), options.asyncOp)


def _broadcast(args: tuple[Any, ...]) -> Parts | None:
    tensors, options = args
    if type(options) is not c.BroadcastOptions or type(tensors) is not list:
        return None
    return tensors, tensors, (options.rootRank, options.asyncOp)


def _reduce(args: tuple[Any, ...]) -> Parts | None:
    tensors, options = args
    if type(options) is not c.ReduceOptions or type(tensors) is not list:
        return None
    return tensors, tensors, (hash(options.reduceOp), options.rootRank, options.asyncOp)


def _allgather(args: tuple[Any, ...]) -> Parts | None:
    outs, ins, options = args
    if type(options) is not c.AllgatherOptions:
        return None
    if type(outs) is list:
        if type(ins) is not list or len(outs) != 1 or type(outs[0]) is not list:
            return None
        return ins, outs[0], (options.asyncOp,)
    return (ins,), (outs,), (options.asyncOp,)


def _reduce_scatter(args: tuple[Any, ...]) -> Parts | None:
    outs, ins, options = args
    if type(options) is not c.ReduceScatterOptions:
        return None
    key = (hash(options.reduceOp), options.asyncOp)
    if type(outs) is list:
        if type(ins) is not list or len(ins) != 1 or type(ins[0]) is not list:
            return None
        return ins[0], outs, key
    return (ins,), (outs,), key


def _send(args: tuple[Any, ...]) -> Parts | None:
    tensors, peer, tag = args
    return (tensors, (), (peer, tag)) if type(tensors) is list and type(peer) is int and type(tag) is int else None


def _recv(args: tuple[Any, ...]) -> Parts | None:
    tensors, peer, tag = args
    return ((), tensors, (peer, tag)) if type(tensors) is list and type(peer) is int and type(tag) is int else None


_REDUCTIONS: Final = _kinds_hash()
QUICK: Final[dict[str, tuple[int, Callable[[tuple[Any, ...]], Parts | None]]]] = {
    "broadcast": (2, _broadcast),
    "allgather": (3, _allgather),
    "_allgather_base": (3, _allgather),
    "all_gather_single": (3, _allgather),
    "send": (3, _send),
    "recv": (3, _recv),
    **({
        "allreduce": (2, _symmetric), "reduce": (2, _reduce), "reduce_scatter": (3, _reduce_scatter),
        "_reduce_scatter_base": (3, _reduce_scatter), "reduce_scatter_single": (3, _reduce_scatter),
    } if _REDUCTIONS else {}),
}  # fmt: skip
"""Method of a process group -> how many arguments it takes in this form, none of them by name, and what they are; None
for any other form."""
