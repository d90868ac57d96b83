"""What the Promela model of the turnstile (tests/spin) must say of each variant of the protocol, as data.

The expected verdicts are part of the specification: they were written down before the kernel was asked, and other
checkers of the same protocol are compared with them. Flags are those of tests/spin/turnstile.pml.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


class Verdict(StrEnum):
    """Of an exhaustive search."""

    OK = "ok"
    DEADLOCK = "deadlock"
    ORDER = "order differs"
    """A D iteration would enter the device after different numbers of P calls on two of its ranks."""
    PERMIT = "beyond permit"
    """P enqueues past its permit."""
    CALL = "calls differ"
    """Ranks meet in a P collective with different calls."""
    DIVERGENCE = "divergence"
    """A rendezvous compared the ranks' plans and they differ."""
    COUNTS = "data before counts"
    """P submits data before the counts of its peers are there."""
    PENDING = "second dispatch"
    """A buffer is dispatched on while an operation is pending on it."""
    RETIRED = "retired buffer"
    """A buffer is used that an abandoned operation has retired."""
    STARVATION = "starvation"
    """A fair run in which what must happen again and again does not."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One row.

    flags: what differs from the model's defaults. ranks: numbers of ranks for which it is run. grid: those for which
    the search is too long for continuous integration; grid_flags: what else differs there. reason: why the verdict is
    what it is.
    """

    name: str
    expected: Verdict
    flags: Mapping[str, int]
    reason: str
    grid: tuple[int, ...] = (4,)
    ranks: tuple[int, ...] = (2, 3, 4)
    grid_flags: Mapping[str, int] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """Checked under weak fairness, on endless runs."""
        return bool(self.flags.get("LIVE"))

    @property
    def asyncio(self) -> bool:
        """A task runs undisturbed between two awaits; otherwise anything may come between two statements."""
        return bool(self.flags.get("COOP"))

    @property
    def given(self) -> str:
        """The flags, as people write them."""
        return " ".join(f"{key}={value}" for key, value in self.flags.items()) or "-"

    @property
    def competing(self) -> bool:
        """Kernels of two streams compete for the room of a device."""
        return self.flags.get("ROUTE", 1) != 1 and self.flags.get("CAP", 1) == 1

    def definitions(self, ranks: int) -> dict[str, int]:
        """Every flag to give for this many ranks.

        With two ranks kernels always come to the device whenever they like; with more only where that can matter.
        """
        prompt = {"PROMPT": 1} if ranks > 2 and not self.competing else {}
        return {"N": ranks, **prompt, **self.flags, **(self.grid_flags if ranks in self.grid else {})}


OK, DEADLOCK, STARVATION = Verdict.OK, Verdict.DEADLOCK, Verdict.STARVATION


def _coop(**flags: int) -> dict[str, int]:
    return {"COOP": 1, **flags}


def _hang(**flags: int) -> dict[str, int]:
    """Only a hang counts: the protocol's own checks would object earlier."""
    return {"COOP": 1, "ORDER": 0, "RULES": 0, **flags}


_LARGE: Final = {"M": 2}

CORRECT: Final = (
    Variant(
        "correct, pre-emptive",
        OK,
        {},
        "the protocol does not rely on tasks being undisturbed",
        (3, 4),
        grid_flags={"PROMPT": 0},
        ranks=(2, 3),
    ),
    Variant("correct, pre-emptive, two decode rounds", OK, {"M": 2}, "the same, grid_flagser", ranks=(2, 3)),
    Variant(
        "correct",
        OK,
        _coop(),
        "every collective has one place in a common order, and host waits follow it",
        grid_flags=_LARGE,
    ),
    Variant(
        "correct, S=3 K=2, launch queue of 1",
        OK,
        _coop(S=3, K=2, Q=1, LAG=0),
        "a full stream waits for earlier work only",
        grid_flags=_LARGE,
    ),
    Variant(
        "correct, two epochs",
        OK,
        _coop(E=2),
        "an epoch closes on all ranks in the same round",
        grid_flags=_LARGE,
        ranks=(2, 3),
    ),
    Variant("correct, two epochs, pre-emptive", OK, {"E": 2}, "the same with disturbance", ranks=(2,)),
)

HARMLESS: Final = (
    Variant(
        "no turnstile, 2 streams, 2 slots",
        OK,
        _coop(TURN=0, ROUTE=0, ORDER=0, CAP=2),
        "both kernels of the pair fit, so neither waits for room",
        grid_flags={"M": 1},
    ),
    Variant("no route, 2 slots", OK, _coop(ROUTE=0, CAP=2), "as before", grid_flags=_LARGE),
    Variant(
        "route on one rank only, 2 slots",
        OK,
        _coop(ROUTE=2, CAP=2),
        "host order is common, so the one stream fits the others",
        grid_flags=_LARGE,
    ),
    Variant(
        "no rendezvous, plan shared",
        OK,
        _coop(PRE=0, POST=0),
        "stop, launch and permit order the streams locally; the plan makes the order common",
        grid_flags={"M": 1},
    ),
    Variant(
        "no rendezvous, plan shared, pre-emptive", OK, {"PRE": 0, "POST": 0}, "the same with disturbance", ranks=(2,)
    ),
    Variant("permit before post-d", OK, _coop(PERMIT=1), "D is on the stream already", grid_flags=_LARGE),
    Variant("permit before post-d, pre-emptive", OK, {"PERMIT": 1}, "the same with disturbance", ranks=(2,)),
    Variant(
        "permit before launch, no await between",
        OK,
        _coop(PERMIT=2),
        "P cannot run before the launch",
        grid_flags=_LARGE,
    ),
    Variant(
        "endpoint awaited after pre-d", OK, _coop(REACHED=2), "the launch still finds P stopped", grid_flags=_LARGE
    ),
    Variant(
        "lean: one exchange a round, no pre-d",
        OK,
        _coop(PRE=0, EVERY=1, DIGEST=1),
        "neither rendezvous is what orders the streams",
        grid_flags=_LARGE,
    ),
    Variant(
        "completion of the device, agreed in post-d",
        OK,
        _coop(FIN=3),
        "a value from the exchange is the same on all ranks",
        grid_flags=_LARGE,
    ),
    Variant(
        "lean, completion of the device agreed",
        OK,
        _coop(PRE=0, EVERY=1, DIGEST=1, FIN=3),
        "the same in the only exchange",
        grid_flags=_LARGE,
    ),
    Variant("duplicate epoch refused", OK, _coop(AGAIN=1), "epoch numbers must increase", grid_flags=_LARGE),
    Variant(
        "stale epoch refused", OK, _coop(AGAIN=2, E=2), "epoch numbers must increase", grid_flags=_LARGE, ranks=(2, 3)
    ),
)

STUCK: Final = (
    Variant(
        "no turnstile, 2 streams, 1 slot", DEADLOCK, _hang(TURN=0, ROUTE=0), "P holds one rank's room and D another's"
    ),
    Variant(
        "no turnstile, shared stream",
        DEADLOCK,
        _hang(TURN=0, ROUTE=1, CAP=2),
        "FIFO fixes different orders on two ranks",
    ),
    Variant(
        "rank-local turnstile, no rendezvous",
        DEADLOCK,
        _hang(PLAN=1, PRE=0, POST=0, CAP=2),
        "ready D is noticed in different rounds",
    ),
    Variant("plan from local state", DEADLOCK, _hang(PLAN=1), "a rendezvous makes ranks wait, not agree"),
    Variant("no route, 1 slot", DEADLOCK, _hang(ROUTE=0), "host order does not order two streams of a device"),
    Variant("route on one rank only, 1 slot", DEADLOCK, _hang(ROUTE=2), "the other ranks still have two streams"),
    Variant("pre-d skipped by one rank", DEADLOCK, _hang(PRE=2), "the others wait for it"),
    Variant("post-d skipped by one rank", DEADLOCK, _hang(POST=2), "the others wait for it"),
    Variant(
        "pre-d and post-d swapped on one rank",
        DEADLOCK,
        _hang(SWAP=1),
        "each waits in a rendezvous that the other has not come to",
    ),
    Variant("idle rank skips both rendezvous", DEADLOCK, _hang(IDLE=1), "no-work calls are calls"),
    Variant("idle rank skips the turn", DEADLOCK, _hang(IDLE=2), "no-work calls are calls"),
    Variant("permit before launch, await between", DEADLOCK, _hang(PERMIT=3), "P may run on before D is enqueued"),
    Variant("permit before launch, pre-emptive", DEADLOCK, {"ORDER": 0, "RULES": 0, "PERMIT": 2}, "the same"),
    Variant(
        "launch before the endpoint is reached",
        DEADLOCK,
        _hang(REACHED=3),
        "D lands inside P's segment, elsewhere on each rank",
    ),
    Variant(
        "epoch activated locally", DEADLOCK, _hang(PLAN=2), "one rank makes a turn of a round in which another does not"
    ),
    Variant("completion read again after the permit", DEADLOCK, _hang(FIN=1), "P moves while it is read"),
    Variant("completion of the device, not agreed", DEADLOCK, _hang(FIN=2), "ranks look at different moments"),
    Variant("duplicate epoch accepted", DEADLOCK, _hang(AGAIN=1, ACCEPT=1), "one rank's P starts again"),
    Variant(
        "stale epoch accepted",
        DEADLOCK,
        _hang(AGAIN=2, ACCEPT=1, E=2),
        "one rank has an epoch that the others have closed",
    ),
    Variant("P passes its permit on one rank", DEADLOCK, _hang(PASS=1), "a P call is ahead of D there only"),
    Variant("P passes its permit everywhere", DEADLOCK, _hang(PASS=2), "as without a turnstile"),
    Variant("one boundary more on one rank", DEADLOCK, _hang(S_BAD=3), "its last P call has no partners"),
    Variant("one boundary less on one rank", DEADLOCK, _hang(S_BAD=1), "the others' last P call lacks a partner"),
    Variant("larger span on one rank", DEADLOCK, _hang(S=3, K_BAD=2), "D enters between different P calls"),
)

# Local plans with a digest are not run at four ranks. The model lets a rank leave when its own D group has nothing
# left; the other group may still owe D, and then its exchange waits for ranks that have gone.
REFUSED: Final = (
    Variant(
        "rank-local turnstile, no rendezvous: order",
        Verdict.ORDER,
        _coop(PLAN=1, PRE=0, POST=0),
        "what the deadlock comes from",
        (3,),
        (2, 3),
    ),
    Variant(
        "permit before launch, await between: order", Verdict.ORDER, _coop(PERMIT=3), "what the deadlock comes from"
    ),
    Variant(
        "launch before the endpoint is reached: order", Verdict.ORDER, _coop(REACHED=3), "what the deadlock comes from"
    ),
    Variant("P passes its permit: rule", Verdict.PERMIT, _coop(PASS=1), "the controller's own check"),
    Variant(
        "duplicate epoch accepted: calls",
        Verdict.CALL,
        _coop(AGAIN=1, ACCEPT=1, ORDER=0),
        "call 1 of one rank meets call 2",
    ),
    Variant(
        "local plan, digest in every round: found",
        Verdict.DIVERGENCE,
        _coop(PLAN=1, EVERY=1, DIGEST=2),
        "the digests differ",
        ranks=(2, 3),
    ),
    Variant(
        "local plan, digest in every round: no hang",
        OK,
        _coop(PLAN=1, EVERY=1, DIGEST=1, NAMED=0),
        "stopped before a crossed D is launched",
        grid_flags=_LARGE,
        ranks=(2, 3),
    ),
    Variant(
        "local plan, lean: no hang",
        OK,
        _coop(PLAN=1, PRE=0, EVERY=1, DIGEST=1, ORDER=0),
        "stopped before anybody waits for the crossed D",
        grid_flags=_LARGE,
        ranks=(2, 3),
    ),
    Variant(
        "local activation, digest: no hang",
        OK,
        _coop(PLAN=2, EVERY=1, DIGEST=1, NAMED=0),
        "calls match by order, and their names differ",
        grid_flags=_LARGE,
    ),
    Variant(
        "local activation, digest, matched by name",
        DEADLOCK,
        _hang(PLAN=2, EVERY=1, DIGEST=1),
        "one waits in pre-d, another in post-d: no digest is compared",
    ),
    Variant(
        "swapped rendezvous, matched by order: no hang",
        OK,
        _coop(SWAP=1, DIGEST=1, NAMED=0),
        "the first pair has different names",
        grid_flags=_LARGE,
    ),
    Variant(
        "larger span on one rank, digest: no hang",
        OK,
        _coop(S=3, K_BAD=2, DIGEST=1),
        "the span is in the digest",
        grid_flags=_LARGE,
    ),
    Variant(
        "pre-d skipped by one rank, matched by order: no hang",
        OK,
        _coop(PRE=2, DIGEST=1, NAMED=0),
        "pre-d meets post-d",
        grid_flags=_LARGE,
    ),
)

LIVE: Final = (
    Variant("decodes for ever", OK, _coop(LIVE=1, ORDER=0), "P cannot pass its permit", ranks=(2, 3)),
    Variant(
        "decodes for ever, pre-emptive", OK, {"LIVE": 1, "ORDER": 0, "PROMPT": 1}, "the same with disturbance", (), (2,)
    ),
    Variant(
        "every epoch closes", OK, _coop(LIVE=2, ORDER=0), "every round moves the permit, also without D", (3,), (2, 3)
    ),
    Variant(
        "every epoch closes, pre-emptive",
        OK,
        {"LIVE": 2, "ORDER": 0, "PROMPT": 1},
        "the same with disturbance",
        (2,),
        (2,),
    ),
    Variant("lean decodes for ever", OK, _coop(LIVE=1, ORDER=0, PRE=0, EVERY=1), "as with both", ranks=(2, 3)),
    Variant("strict P priority", STARVATION, _coop(LIVE=1, ORDER=0, PFIRST=1), "an endless backlog of P", ranks=(2, 3)),
    Variant(
        "permit forgotten in a round without D",
        STARVATION,
        _coop(LIVE=2, ORDER=0, FORGET=1),
        "P stands while nothing is left to decode",
        ranks=(2, 3),
    ),
)

VARIANTS: Final = (*CORRECT, *HARMLESS, *STUCK, *REFUSED, *LIVE)
