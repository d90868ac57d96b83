"""The arguments of each method of a process group -> what of it is noted.

Methods come in two forms, with an options object or with plain arguments; the legacy and the newer names of the same
operation (`_allgather_base`, `all_gather_single`) take the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(slots=True)
class Shape:
    """One call as its arguments say it. root, peer: numbers in the group. ins, outs: tensors. splits: elements for
    each member, where the call names them.
    """

    op: str
    ins: Sequence[Any] = ()
    outs: Sequence[Any] = ()
    root: int | None = None
    peer: int | None = None
    tag: str = ""
    reduce: str = ""
    asynchronous: bool = False
    splits_in: Sequence[int] = field(default=())
    splits_out: Sequence[int] = field(default=())
    blocks: bool = False
    """The method itself returns when the call is over."""


def _options(rest: Sequence[Any], named: dict[str, Any]) -> Any:
    """The options object of a call, if it has one."""
    # As torch's own functions call: last, or by name.
    if rest and type(rest[-1]).__name__.endswith("Options"):
        return rest[-1]
    found = named.get("opts")
    if found is not None or len(rest) < 3:
        return found
    return next((each for each in rest if type(each).__name__.endswith("Options")), None)


def _reduction(options: Any, rest: Sequence[Any], named: dict[str, Any]) -> str:
    op = getattr(options, "reduceOp", None) if options is not None else named.get("op")
    if op is None:
        op = next((each for each in rest if type(each).__name__ in ("ReduceOp", "RedOpType")), None)
    if op is None:
        return "SUM"
    # A ReduceOp holds its kind, or is one.
    kind = getattr(op, "op", op)
    return str(getattr(kind, "name", "")) or str(kind)


def _tensors(value: Any) -> Sequence[Any]:
    """A tensor, a list of them, or a list of lists of them, as one list."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        return (value,)
    if value and isinstance(value[0], list | tuple):
        return [each for inner in value for each in inner]
    return value


def _symmetric(op: str, reduces: bool = False) -> Callable[..., Shape]:
    """Tensors are inputs and outputs."""

    def shape(rest: Sequence[Any], named: dict[str, Any]) -> Shape:
        first = rest[0] if rest else next((named[name] for name in ("tensors", "tensor") if name in named), None)
        tensors, options = _tensors(first), _options(rest, named)
        return Shape(
            op, tensors, tensors, reduce=_reduction(options, rest[1:], named) if reduces else "",
            asynchronous=_async(options),
        )  # fmt: skip

    return shape


def _async(options: Any) -> bool:
    return bool(getattr(options, "asyncOp", False)) if options is not None else False


def _rooted(op: str, reduces: bool = False) -> Callable[..., Shape]:
    def shape(rest: Sequence[Any], named: dict[str, Any]) -> Shape:
        found = _symmetric(op, reduces)(rest, named)
        options = _options(rest, named)
        root = named.get("root", rest[1] if len(rest) > 1 else 0)
        found.root = int(options.rootRank if options is not None else root)
        return found

    return shape


def _out_in(op: str, reduces: bool = False, rooted: bool = False) -> Callable[..., Shape]:
    """Outputs first, then inputs."""

    def shape(rest: Sequence[Any], named: dict[str, Any]) -> Shape:
        values = [*rest[:2], *(named[name] for name in _OUT_IN if name in named)]
        options = _options(rest, named)
        found = Shape(
            op, _tensors(values[1]), _tensors(values[0]),
            reduce=_reduction(options, rest[2:], named) if reduces else "", asynchronous=_async(options),
        )  # fmt: skip
        if rooted:
            found.root = int(options.rootRank if options is not None else named.get("root", rest[2] if rest[2:] else 0))
        return found

    return shape


_OUT_IN: Final = (
    "output_tensors", "output_tensor", "outputs", "output", "outputTensor", "output_lists",
    "input_tensors", "input_tensor", "inputs", "input", "inputTensor", "input_list",
)  # fmt: skip


def _all_to_all(rest: Sequence[Any], named: dict[str, Any]) -> Shape:
    found = _out_in("all_to_all")(rest, named)
    given = [each for each in rest[2:] if isinstance(each, list | tuple)]
    outs = named.get("output_split_sizes", given[0] if given else ())
    ins = named.get("input_split_sizes", given[1] if len(given) > 1 else ())
    found.splits_in, found.splits_out = _elements(ins, found.ins), _elements(outs, found.outs)
    return found


def _elements(rows: Sequence[int], tensors: Sequence[Any]) -> list[int]:
    """Rows of a tensor as elements."""
    if not rows or not tensors or not tensors[0].dim() or not tensors[0].shape[0]:
        return [0] * len(rows)
    each = tensors[0].numel() // tensors[0].shape[0]
    return [int(row) * each for row in rows]


def _pair(op: str) -> Callable[..., Shape]:
    def shape(rest: Sequence[Any], named: dict[str, Any]) -> Shape:
        tensors = _tensors(rest[0] if rest else named.get("tensors", named.get("arg0")))
        last = "tag" if "tag" in named else "arg1"
        tag = named.get(last, rest[-1] if len(rest) > 1 else 0)
        anybody = op == "recv_anysource"
        peer = -1 if anybody else int(named.get("dstRank", named.get("srcRank", rest[1] if len(rest) > 1 else -1)))
        ins, outs = (tensors, ()) if op == "send" else ((), tensors)
        return Shape("recv" if anybody else op, ins, outs, peer=peer, tag=str(int(tag)), asynchronous=True)

    return shape


def _barrier(rest: Sequence[Any], named: dict[str, Any]) -> Shape:
    return Shape("barrier", asynchronous=_async(_options(rest, named)))


def _monitored(rest: Sequence[Any], named: dict[str, Any]) -> Shape:
    return Shape("monitored_barrier", blocks=True)


SHAPES: Final[dict[str, Callable[[Sequence[Any], dict[str, Any]], Shape]]] = {
    "allreduce": _symmetric("all_reduce", reduces=True),
    "allreduce_coalesced": _symmetric("all_reduce", reduces=True),
    "broadcast": _rooted("broadcast"),
    "reduce": _rooted("reduce", reduces=True),
    "allgather": _out_in("all_gather"),
    "_allgather_base": _out_in("all_gather"),
    "all_gather_single": _out_in("all_gather"),
    "allgather_coalesced": _out_in("all_gather"),
    "allgather_into_tensor_coalesced": _out_in("all_gather"),
    "all_gather_single_coalesced": _out_in("all_gather"),
    "gather": _out_in("gather", rooted=True),
    "scatter": _out_in("scatter", rooted=True),
    "reduce_scatter": _out_in("reduce_scatter", reduces=True),
    "_reduce_scatter_base": _out_in("reduce_scatter", reduces=True),
    "reduce_scatter_single": _out_in("reduce_scatter", reduces=True),
    "reduce_scatter_tensor_coalesced": _out_in("reduce_scatter", reduces=True),
    "reduce_scatter_single_coalesced": _out_in("reduce_scatter", reduces=True),
    "alltoall_base": _all_to_all,
    "all_to_all_single": _all_to_all,
    "alltoall": _out_in("all_to_all"),
    "send": _pair("send"),
    "recv": _pair("recv"),
    "recv_anysource": _pair("recv_anysource"),
    "barrier": _barrier,
    "monitored_barrier": _monitored,
}
"""Method of a process group -> what its arguments say. Raise whatever comes to mind for arguments of another form."""
