"""Mistakes in the split dispatch of an expert exchange, planted as those of `tests.mutants` are."""

from __future__ import annotations

from typing import Final

from kernel.topology import World
from tests.mutants import CYCLE, RULE, Mutant
from tests.planted import Change
from verify.blame import Certainty

SPLIT: Final = World(2, adp=2, ep=2, exchange="split")

UNCHECKED: Final = (
    Change("kernel.exchange.states:Normal.submit", "        if not self._permitted:", "if False:"),
    Change("kernel.exchange.states:Normal.submit", "        if not counted:", "if False:"),
    Change("kernel.turnstile:Turnstile.publish", "        if boundary > self._permit:", "if False:"),
)
"""The kernel's own checks of the same mistakes, taken out."""

UNCOUNTED: Final = Change(
    "kernel.step:_Notified.__await__", "            yield Suspend(event=self._pending.event)", "pass"
)
EARLY: Final = Change(
    "kernel.driver:Driver.advance", "                if request.index >= end:", "if request.index > end:"
)
ABANDONS: Final = Change(
    "kernel.step:Step.dispatch", "        experts = self._chosen",
    'experts = self._chosen; self.phase == "P" and self._p_exchange().abandon("its request was cancelled")',
)  # fmt: skip

EXCHANGE: Final = (
    Mutant(
        "data before the permit", "P runs past the boundary behind its notification", RULE, "exchange", (EARLY,),
        world=SPLIT, capacity=4,
    ),
    Mutant(
        "data before the permit, unchecked", "the same, and the kernel lets it pass", RULE, "exchange",
        (EARLY, *UNCHECKED), world=SPLIT, capacity=4,
    ),
    Mutant(
        "permit not asked for", "the model submits data without a boundary in between", RULE, "exchange",
        (Change("verify.sim.model:SimModel._exchanged", "        await step.notified(layer)",
                "await step.ready(step._pending.event) if step._pending else None"),),
        world=SPLIT, capacity=4,
    ),
    Mutant(
        "counts not awaited", "P submits data when the permit is there, whatever its peers have said", RULE, "exchange",
        (UNCOUNTED,),
        world=SPLIT, capacity=4,
    ),
    Mutant(
        "retired buffer reused", "data goes out on a buffer whose operation was abandoned", RULE, "exchange",
        (ABANDONS,), world=SPLIT, capacity=4,
    ),
    Mutant(
        "retired buffer reused, unchecked", "the same, and the kernel keeps no account of it", RULE, "exchange",
        (ABANDONS, Change("kernel.exchange.states:Normal.abandon",
                          "            self.state, self._why = State.RETIRED, why", "pass")),
        world=SPLIT, capacity=4,
    ),
    Mutant(
        "no room for both exchanges", "the kernels of D and of P cannot be resident together", CYCLE, "deadlock_free",
        world=SPLIT, capacity=1, executions=3, certainty=Certainty.CONDITIONAL,
    ),
)  # fmt: skip
