"""What the Promela model of the split dispatch (tests/spin/exchange.pml) must say of each variant, and the same done
to the real kernel on a simulated world, as `tests.spin_variants` and `tests.spin_twins` do for the turnstile's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kernel.exchange.states import Place
from kernel.request import Phase
from tests.mutants_exchange import EARLY, UNCOUNTED
from tests.planted import Change
from tests.spin_twins import Twin
from tests.spin_variants import Variant, Verdict

if TYPE_CHECKING:
    from kernel.step import Step

TWO_EPOCHS: Final = "a second epoch during the first"


def _coop(**flags: int) -> dict[str, int]:
    return {"COOP": 1, **flags}


VARIANTS: Final = (
    Variant(
        "split dispatch, pre-emptive",
        Verdict.OK,
        {},
        "P stands behind its counts when D is launched, and both phases have room: neither waits for the other",
        grid=(3,),
        ranks=(2, 3),
        grid_flags={"M": 1},
    ),
    Variant("split dispatch", Verdict.OK, _coop(), "as before", ranks=(2, 3)),
    Variant("split dispatch, three layers, span of two", Verdict.OK, _coop(L=3, K=2), "as before", ranks=(2, 3)),
    Variant(
        "abandoned behind its notification, taken back at the next activation",
        Verdict.OK,
        _coop(GIVE=1),
        "what was notified of has arrived, no data follows, and all take the buffer back at one point of the plan",
        ranks=(2, 3),
    ),
    Variant(
        "no room for both exchanges",
        Verdict.DEADLOCK,
        _coop(CAP=1, RULES=0),
        "P holds one rank's room and D another's",
        ranks=(2, 3),
    ),
    Variant(
        "abandoned on one rank",
        Verdict.DEADLOCK,
        _coop(GIVE=2, RULES=0),
        "the others' data waits for a partner that does not come",
        ranks=(2, 3),
    ),
    Variant("data before its permit", Verdict.PERMIT, _coop(PASS=1), "the port's own account", ranks=(2, 3)),
    Variant("data before its counts", Verdict.COUNTS, _coop(COUNTED=0), "the port's own account", ranks=(2, 3)),
    Variant("P notifies while its own is pending", Verdict.PENDING, _coop(AGAIN=1), "one a buffer", ranks=(2, 3)),
    Variant("D dispatches while its own is pending", Verdict.PENDING, _coop(AGAIN=2), "one a buffer", ranks=(2, 3)),
    Variant(
        "a retired buffer is used in the same epoch",
        Verdict.RETIRED,
        _coop(GIVE=3),
        "it is retired until the next activation",
        ranks=(2, 3),
    ),
    Variant(
        "a retired buffer is never taken back",
        Verdict.RETIRED,
        _coop(GIVE=1, QUIET=0),
        "the next epoch's notification finds it retired",
        ranks=(2, 3),
    ),
)


def gives_up(step: Step, layer: int, first: bool, ranks: tuple[int, ...]) -> bool:
    """On these ranks, P of the first epoch abandons the dispatch of its last layer, or of its first: whether it has."""
    at = 0 if first else step.program.layers - 1
    if step.phase is not Phase.P or step._number != 0 or layer != at or step._rank not in ranks:
        return False
    step._p_exchange().abandon("its request was cancelled")
    step._pending = None
    step._next += 2  # dispatch and combine are not made
    return True


def notifies_again(step: Step, layer: int, experts: Any) -> None:
    """P tells its peers of another dispatch."""
    if step.phase is Phase.P:
        step._p_exchange().notify(Place(step._number, layer), experts)


def dispatches_again(step: Step, layer: int, rows: Any) -> None:
    """D sends its rows once more."""
    if step.phase is Phase.D:
        step._d_exchange().dispatch(Place(step._number, layer), rows, None, None)


HELPERS: Final = {"gives_up": gives_up, "notifies_again": notifies_again, "dispatches_again": dispatches_again}

_LAYER: Final = "verify.sim.model:SimModel._exchanged"


def _abandons(*, first: bool = False, ranks: tuple[int, ...] = (0, 1, 2)) -> Change:
    return Change(
        _LAYER,
        "        await step.notified(layer)",
        f"await step.notified(layer)\n        if gives_up(step, layer, {first}, {ranks}):\n            return mine",
    )


TWINS: Final[dict[str, Twin]] = {
    "split dispatch": Twin(capacity=4, only=TWO_EPOCHS),
    "split dispatch, three layers, span of two": Twin(policy="fine:span=2", segments=3, capacity=4, only=TWO_EPOCHS),
    "abandoned behind its notification, taken back at the next activation": Twin(
        (_abandons(),), capacity=4, only=TWO_EPOCHS
    ),
    "no room for both exchanges": Twin(),
    "abandoned on one rank": Twin((_abandons(ranks=(1,)),), capacity=4, only=TWO_EPOCHS),
    "data before its permit": Twin((EARLY,), capacity=4),
    "data before its counts": Twin((UNCOUNTED,), capacity=4),
    "P notifies while its own is pending": Twin(
        (Change(_LAYER, "        step.notify(layer, mine)",
                "step.notify(layer, mine); notifies_again(step, layer, mine)"),), capacity=4
    ),
    "D dispatches while its own is pending": Twin(
        (Change(_LAYER, "        came = step.dispatch(layer, mine, None)",
                "came = step.dispatch(layer, mine, None); dispatches_again(step, layer, mine)"),), capacity=4
    ),
    "a retired buffer is used in the same epoch": Twin((_abandons(first=True),), capacity=4),
    "a retired buffer is never taken back": Twin(
        (_abandons(), Change(
            "kernel.rank:Rank._activate",
            "            self._p.normal.quiesce()"
            "  # the plan found every rank's last epoch complete: nothing of P is in flight",
            "pass",
        )), capacity=4, only=TWO_EPOCHS,
    ),
}  # fmt: skip

NOT_HERE: Final = {"split dispatch, pre-emptive": "a task of asyncio is not pre-empted"}
"""Variants that this kernel cannot be given, and why."""
