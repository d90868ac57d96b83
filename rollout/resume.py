"""Going on with a run that failed or was interrupted: what of it is kept, and whether it is the same run.

Every turn that was done is kept, and its trajectory goes on with the next one: its context is made again from the seed
and the tokens in requests.jsonl, its KV by prefill. Times of what is replayed later follow the last kept one, so that a
run's makespan is that of both parts, without the time between them and with the second part's filling and draining.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any, Final

from kernel import files
from kernel.errors import UsageError
from kernel.topology import World
from rollout.device import DeviceOptions
from rollout.replay import read_rows
from rollout.report.files import write
from rollout.trace.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rollout.replay import Row
    from rollout.trace.trajectory import Trajectory, Turn

LARGEST: Final = 16 << 20
"""Bytes of a run.json."""
MOST_ROWS: Final = 16 << 30
"""Bytes of a requests.jsonl."""
SAME: Final = ("world", "device", "device_options", "policies", "trace", "repeat", "max_concurrency", "kv_tokens",
               "prefill_tokens", "rows", "model_sha256")  # fmt: skip
"""Entries of run.json that must not change."""
KINDS: Final[Mapping[str, type]] = {"world": World, "device_options": DeviceOptions, "trace": Shape}
"""Whose fields an entry holds. A field that a later version added had, before it, what is its default now."""


def check(out: Path, about: Mapping[str, Any]) -> None:
    """Raise UsageError unless `out` holds an unfinished run that `about`, a run.json to be, would go on with."""
    try:
        found: dict[str, Any] = json.loads(files.read(out / "run.json", LARGEST).decode())
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        raise UsageError(f"--resume: {out} holds no run (run.json): name its directory with --out") from None
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--resume: {out / 'run.json'} cannot be read ({why}): put the run's own back, or start anew with another"
            " --out"
        ) from None
    if found.get("status") == "complete":
        raise UsageError(f"--resume: the run in {out} is complete: there is nothing left to do")
    wanted: dict[str, Any] = json.loads(json.dumps(dict(about)))
    known = "model_sha256" in found
    found, wanted = _comparable(found), _comparable(wanted)
    for name in (*SAME, "exchange", *(() if known else ("model",))):
        if name == "model_sha256" and not known:
            continue  # of a version that did not take it down
        old, new = found.get(name), wanted.get(name)
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):  # only what differs in it
                name, old, new = next(
                    (f"{name}.{key}", old.get(key), new.get(key))
                    for key in sorted(old.keys() | new.keys())
                    if old.get(key) != new.get(key)
                )
            raise UsageError(
                f"--resume: the run in {out} has {name} {old!r}, and this command says {new!r}: give the arguments of"
                " its first command (run.json has them)"
            )


def with_defaults(found: Any, kind: type) -> Any:
    """The fields of a `kind` that a file holds, with the defaults of those that it was written too early to have."""
    if not isinstance(found, dict):
        return found
    usual = {each.name: each.default for each in fields(kind) if each.default is not MISSING}
    return {**usual, **found}


def _comparable(about: Mapping[str, Any]) -> dict[str, Any]:
    """Entries as this version would have written them; of an exchange and a model, what makes runs differ."""
    found = {"device": "cpu", **about}
    for name, kind in KINDS.items():
        if name in found:
            found[name] = with_defaults(found[name], kind)
    exchange, model, options = (found.get(name) for name in ("exchange", "model", "device_options"))
    found["exchange"] = exchange.get("substrate") if isinstance(exchange, dict) else "none"
    if isinstance(model, dict):
        found["model"] = {name: model.get(name) for name in ("type", "layers")}
    if isinstance(options, dict):  # what was asked for matters by what it came to
        found["device_options"] = {name: value for name, value in options.items() if name != "exchange"}
    return found


def rows(path: Path) -> list[Row]:
    """The rows of a requests.jsonl, less a last line that was cut off. Raises UsageError on any other that is none."""
    try:
        data = files.read(path, MOST_ROWS)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"--resume: {path} cannot be read ({error.strerror}): put the run's own back, or start anew with another"
            " --out"
        ) from None
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        write(path, whole)
    return list(read_rows(path))


def kept(
    path: Path, found: Iterable[Row], trajectories: Sequence[Trajectory], vocabulary: int
) -> dict[tuple[str, int], list[Row]]:
    """By (policy, repeat): the rows of each trajectory's turns, from its first one on, without a gap.

    Raises UsageError, naming the line of `path`, for a finished turn that is not the trace's.
    """
    turns = {each.id: each.turns for each in trajectories}
    by_trajectory: dict[tuple[str, int, str], dict[int, Row]] = {}
    for number, row in enumerate(found, 1):
        if not row.failed:
            asked = turns.get(row.trajectory, ())
            if row.turn < len(asked) and not _belongs(row, asked[row.turn], vocabulary):
                raise UsageError(
                    f"{path}:{number}: turn {row.turn} of {row.trajectory} is not that of the trace (new_tokens,"
                    " output_tokens or token ids): remove the line, or choose another --out"
                )
            by_trajectory.setdefault((row.policy, row.repeat, row.trajectory), {}).setdefault(row.turn, row)
    result: dict[tuple[str, int], list[Row]] = {}
    for (policy, repeat, trajectory), done in by_trajectory.items():
        asked = turns.get(trajectory, ())
        first = [done[at] for at in range(len(asked)) if set(range(at + 1)) <= done.keys()]
        # Rows of an older version lack the tokens that a next turn would need.
        if len(first) == len(asked) or all(len(row.tokens) == row.output_tokens for row in first):
            result.setdefault((policy, repeat), []).extend(first)
    return result


def _belongs(row: Row, turn: Turn, vocabulary: int) -> bool:
    """Whether a finished turn's numbers are those that the trace asks for."""
    sizes = (row.new_tokens, row.asked_tokens) == (turn.new_tokens, turn.output_tokens)
    return sizes and all(0 <= token < vocabulary for token in row.tokens)


def later(row: Row, by_ns: int) -> Row:
    """The row with its times moved."""
    return replace(
        row,
        released_ns=row.released_ns + by_ns,
        submitted_ns=row.submitted_ns + by_ns,
        finished_ns=row.finished_ns + by_ns,
        token_ns=tuple(moment + by_ns for moment in row.token_ns),
    )
