"""A schedule as a short token: what ran, the decisions that were not the default, and how to tell that it ran again.

    t1.<base64 of zlib of JSON>      url-safe, without padding; `1` is the version of the format

Decisions name their actor, so that a token survives small edits of the program. Eight prints along the trace tell
where another run began to differ.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel.errors import UsageError
from verify.blame import Class
from verify.explore.execution import execute
from verify.explore.schedule import Decision, Steered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verify.explore.execution import Execution, Program

VERSION = 1
FIDELITIES = ("any", "fifo")

_MARKS = 8
_LONGEST = 1 << 20
_COMMON = (
    b'{"c":"missing","c":"starvation","c":"rule","c":"cycle","d":[[10,"rank 0: unordered P"],[20,"rank 1: unordere'
    b'd D"],[30,"rank 1: D 4 delivered"],[40,"rank 0 stream P"],[50,"rank 1 stream D"]],"f":"fifo","f":"any","h":"'
    b'","n":100,"r":"decode_bound","r":"epochs_complete","r":"deadlock_free","s":{"block_size":4,"blocks":16,"capa'
    b'city":1,"capacity":1073741824,"entries":[[0,"Submit",{"request":{"id":0,"params":{"ignore_eos":true,"max_tok'
    b'ens":2,"seed":0,"stop_token_ids":[],"temperature":0.0,"top_k":0,"top_p":1.0},"prompt":[0,1,2],"replica":0,"s'
    b'ession":0}}],[3,"Submit",{"request":{"id":1,"params":{"ignore_eos":true,"max_tokens":3,"seed":0,"stop_token_'
    b'ids":[],"temperature":0.0,"top_k":0,"top_p":1.0},"prompt":[100,101,102],"replica":1,"session":1}}],[3,"Submi'
    b't",{"request":{"id":2,"params":{"ignore_eos":true,"max_tokens":2,"prompt":[200,201,202],"replica":0,"session'
    b'":2}}]],"late":[],"name":"P meets D after 0","policy":"unordered","policy":"fine","prefill_tokens":4,"rows":'
    b'4,"segments":2,"weights":[1,1],"world":{"adp":2,"ep":2,"gather":"cross","route":"none","route":"paper","rout'
    b'e":"auto","size":2}}}'
)
"""What tokens have in common; compression starts from it. A change of it is a change of the version."""


@dataclass(frozen=True)
class Token:
    """One failing schedule of one scenario.

    scenario: as `Scenario.to_dict` says it, or whatever the caller can build its program from. decisions: where the
    schedule departs from the oldest actor. fidelity: `any` or `fifo` (`verify.explore.lanes`). cls: what failed. steps,
    prints: of the trace.
    """

    scenario: Mapping[str, Any]
    decisions: tuple[Decision, ...] = ()
    fidelity: str = "fifo"
    cls: Class = Class.CYCLE
    rule: str = "deadlock_free"
    steps: int = 0
    prints: str = ""

    def __str__(self) -> str:
        plain = {
            "c": str(self.cls), "d": [list(each) for each in self.decisions], "f": self.fidelity, "h": self.prints,
            "n": self.steps, "r": self.rule, "s": self.scenario,
        }  # fmt: skip
        text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
        packer = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_DEFAULT_STRATEGY, _COMMON)
        return f"t{VERSION}." + base64.urlsafe_b64encode(packer.compress(text) + packer.flush()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Token:
        """The token that `str` wrote. Raises UsageError, in one line, for anything else."""
        text = "".join(text.split())
        body = _body(text)
        try:
            packed = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise _cut(text) from None
        unpacker = zlib.decompressobj(zdict=_COMMON)
        try:
            plain = unpacker.decompress(packed, _LONGEST)
        except zlib.error:
            raise UsageError(f"--replay {_short(text)}: the token is damaged; copy it again") from None
        if not unpacker.eof:
            raise _cut(text)
        return _read(text, plain)


def _body(text: str) -> str:
    if not text:
        raise UsageError("--replay: the token is empty; it is what stands behind --replay in a counterexample")
    found = re.fullmatch(r"t(\d+)\.(.*)", text)
    if found is None:
        raise UsageError(f"--replay {_short(text)}: not a token; a token begins with t{VERSION}.")
    if int(found[1]) != VERSION:
        say = f"a token of version {found[1]}, and this program reads version {VERSION}; check again to get a new one"
        raise UsageError(f"--replay {_short(text)}: {say}")
    if odd := re.search(r"[^A-Za-z0-9_-]", found[2]):
        at = odd.start() + len(text) - len(found[2])
        raise UsageError(f"--replay {_short(text)}: {odd[0]!r} at character {at} cannot be part of a token")
    return found[2]


def _cut(text: str) -> UsageError:
    return UsageError(f"--replay {_short(text)}: the token is cut off after {len(text)} characters; copy all of it")


def _short(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:12]}..."


def _read(text: str, plain: bytes) -> Token:
    try:
        told = json.loads(plain)
        decisions = tuple((int(at), str(name)) for at, name in told["d"])
        what = Class(told["c"]), str(told["r"])
        token = Token(dict(told["s"]), decisions, told["f"], *what, int(told["n"]), str(told["h"]))
    except (ValueError, TypeError, KeyError) as error:
        say = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise UsageError(f"--replay {_short(text)}: the token does not hold a schedule ({say})") from None
    if token.fidelity not in FIDELITIES:
        raise UsageError(f"--replay {_short(text)}: fidelity {token.fidelity!r}; one of {', '.join(FIDELITIES)}")
    return token


def prints(names: Sequence[str]) -> str:
    """A hash of the first eighth of a trace, of the first two eighths, and so on; the last is longer."""
    told, found, last = hashlib.blake2b(digest_size=8), "", 0
    for mark in range(1, _MARKS + 1):
        upto = len(names) * mark // _MARKS
        for name in names[last:upto]:
            told.update(f"{name}\n".encode())
        last = upto
        found += told.hexdigest()[: 2 if mark < _MARKS else 8]
    return found


@dataclass(frozen=True)
class Rerun:
    """A token's schedule, run again.

    same: it broke the same rule, in the same class. exact: with the same steps. say: one line.
    """

    execution: Execution
    same: bool
    exact: bool
    say: str


def rerun(token: Token, program: Program, notes: bool = False) -> Rerun:
    """Run the schedule of a token again. program: of its scenario. notes: see `execute`."""
    replayed = Steered(token.decisions)
    execution = execute(program, replayed, token.fidelity == "fifo", notes)
    names = execution.trace.names
    exact = len(names) == token.steps and prints(names) == token.prints
    failure = execution.fails(token.rule) or execution.failure
    same = failure is not None and (failure.cls, failure.rule) == (token.cls, token.rule)
    ended = f"{failure.cls}: {failure.say}" if failure is not None else "nothing failed"
    if exact and same:
        return Rerun(execution, same, exact, f"the same {len(names)} steps, and the same end: {ended}")
    where = _where(token, replayed, names)
    return Rerun(execution, same, exact, f"{where}; {'still ' if same else ''}{ended}")


def _where(token: Token, replayed: Steered, names: Sequence[str]) -> str:
    """Where a run departs from the recorded one."""
    numbers = {decision: number for number, decision in enumerate(token.decisions, start=1)}
    total = len(token.decisions)
    if replayed.late:
        decision, call = replayed.late[0]
        at, name = decision
        number = f"decision {numbers[decision]} of {total}"
        return f"diverged at {number}: {name!r} was not ready at choice {at}, but at choice {call}"
    if replayed.left:
        at, name = replayed.left[0]
        return f"diverged at decision {numbers[at, name]} of {total}: {name!r} was never ready from choice {at} on"
    if len(names) != token.steps:
        say = f"{len(names)} steps where {token.steps} were recorded, with all {total} decisions made in time"
        return f"diverged: {say}"
    mine = prints(names)
    mark = next((m for m in range(_MARKS) if mine[2 * m : 2 * m + 2] != token.prints[2 * m : 2 * m + 2]), _MARKS - 1)
    first, last = token.steps * mark // _MARKS, token.steps * (mark + 1) // _MARKS
    return f"diverged between steps {first} and {last} of {token.steps}, with all {total} decisions made in time"
