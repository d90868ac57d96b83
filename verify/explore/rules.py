"""Which rule of the paper a failure breaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verify.blame import Class

if TYPE_CHECKING:
    from verify.sim.errors import Standstill


@dataclass(frozen=True)
class Rule:
    """name, and section of the paper. say: what it asks for, in our words."""

    name: str
    section: str
    say: str

    def __str__(self) -> str:
        return f"{self.name} ({self.section}): {self.say}"


_ORDER = Rule(
    "order of the registered pair", "paper section 4",
    "on every rank D's launch comes between the P segments before and after it, in the same place",
)  # fmt: skip
_ROUTE = Rule(
    "selective stream route", "paper section 4",
    "a P collective that shares ranks with D runs on D's launch stream, so that the device keeps the host's order",
)  # fmt: skip
_LAUNCH = Rule(
    "enqueue does not wait", "paper section 4",
    "the host must be able to enqueue what a device waits for, whatever its launch queue holds",
)  # fmt: skip
_ALIGNED = Rule(
    "rank-aligned boundaries", "paper section 4",
    "every rank comes to both control phases of a round; one without work makes the matched no-work calls",
)  # fmt: skip
_NO_DEVICE = Rule(
    "control phases wait for no device", "paper section 4",
    "neither rendezvous may depend on device work that needs another rank's later calls",
)  # fmt: skip
_PLAN = Rule(
    "rank-shared plan", "paper sections 3 and 6",
    "all ranks derive the same plan from the same views; no rank follows its own ready queue",
)  # fmt: skip
_PERMIT = Rule(
    "permit", "paper section 4",
    "P stops at its permitted endpoint; epochs and boundaries only grow, each has one producer, none passes the permit",
)  # fmt: skip
_RESIDENCY = Rule(
    "residency", "paper section 4, Figure 2",
    "kernels that nothing orders must fit on the device together",
)  # fmt: skip
_PROGRESS = Rule(
    "progress of D", "paper sections 3 and 4",
    "a ready D enters at the next boundary, and P reaches its end by one segment a round",
)  # fmt: skip
_COMPLETES = Rule(
    "completion of P", "paper sections 3 and 4",
    "every admitted prompt reaches the end of its epoch and every turn ends; a plan is idle only when nothing is left",
)  # fmt: skip
_LEASE = Rule(
    "reservation", "paper section 6",
    "KV storage belongs to its request from admission until promotion, or until submitted work has drained",
)  # fmt: skip
_EXCHANGE = Rule(
    "split dispatch", "paper section 5",
    "P submits data only when the counts and the permit are there; what is abandoned behind its notification retires"
    " its buffer until a quiescent point",
)  # fmt: skip
_SEAM = Rule("policy seam", "kernel.sched.policy", "plan is pure, turn awaits its gate alone, and both return")

_BY_RULE = {
    **dict.fromkeys(("shared plan", "pure plan", "plan", "round", "inbox", "idle", "view"), _PLAN),
    **dict.fromkeys(("turnstile", "permit", "one dispatch", "one epoch"), _PERMIT),
    **dict.fromkeys(("promotion", "lease", "kv", "lag"), _LEASE),
    "exchange": _EXCHANGE,
    "decode_bound": _PROGRESS,
    "epochs_complete": _COMPLETES,
    "order": _ORDER,
}


def rule_of(cls: Class, rule: str, standstill: Standstill | None = None, ordered: bool | None = None) -> Rule:
    """The paper's rule behind a failure. ordered: whether the hosts enqueued what is in the cycle in one order."""
    if cls in (Class.CYCLE, Class.MISSING, Class.TIMEOUT) and standstill is not None:
        kinds = set(standstill.kinds)
        if "room" in kinds:
            both = {"D", "P"} <= kinds
            return (_ROUTE if ordered else _ORDER) if both else _RESIDENCY
        if "launch" in kinds:
            return _LAUNCH
        if "rendezvous" in kinds:
            return _ALIGNED if not kinds & {"D", "P", "queue", "event"} else _NO_DEVICE
        return _ORDER if kinds & {"queue", "event", "D", "P"} else _ALIGNED
    return _BY_RULE.get(rule, _SEAM)
