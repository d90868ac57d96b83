"""The split dispatch beside D's exchange: SPIN on a model of the paper and the explorer on the real kernel agree
on right programs and on planted mistakes."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from kernel.sched import registry
from kernel.topology import World
from tests.planted import planted
from tests.spin_exchange import HELPERS, NOT_HERE, TWINS, VARIANTS
from tests.spin_oracle import MODEL, check, missing
from tests.spin_variants import Variant, Verdict
from verify.blame import Class
from verify.explore.certify import judge
from verify.explore.result import Conclusion
from verify.trial.enact import run
from verify.trial.family import family
from verify.trial.findings import GUARANTEES

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.mark import ParameterSet

EXCHANGE: Final = MODEL.parent / "exchange.pml"
WHY_NOT: Final = missing()
BY_NAME: Final = {variant.name: variant for variant in VARIANTS}
BUDGET: Final = 400


def rows(*, kernel: bool) -> list[ParameterSet]:
    return [
        pytest.param(
            variant,
            ranks,
            id=f"{variant.name}, N={ranks}",
            marks=[pytest.mark.grid] if not kernel and ranks in variant.grid else [],
        )
        for variant in VARIANTS
        if not kernel or variant.name in TWINS
        for ranks in variant.ranks
    ]


needs_spin = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")


@pytest.mark.spin
@needs_spin
@pytest.mark.parametrize(("variant", "ranks"), rows(kernel=False))
def test_the_model_gives_the_verdict(variant: Variant, ranks: int, tmp_path: Path) -> None:
    found = check(variant, ranks, tmp_path, EXCHANGE.read_text())
    assert found.verdict is variant.expected, f"{found}; expected since {variant.reason}"


FAULTS: Final = {
    "counts are there at once": ("(counted[r] || !COUNTED) ->", "true ->", "split dispatch", Verdict.COUNTS),
    "a buffer is never retired": ("buffer[r] = RETIRED", "buffer[r] = IDLE",
                                  "a retired buffer is never taken back", Verdict.OK),
    "there is always room": ("CAP == 1 && room[OTHER(x)] != OUTSIDE", "false",
                             "no room for both exchanges", Verdict.OK),
    "P does not stop": ("(at[r] <= permit[r] + PASS)", "true", "split dispatch", Verdict.PERMIT),
    "D is never through with an operation": ("        d_pending[r] = 0\n", "        skip\n", "split dispatch",
                                             Verdict.PENDING),
    "whoever gives up is not alone": ("GIVE == 2 && r == BAD", "GIVE == 2", "abandoned on one rank", Verdict.OK),
}  # fmt: skip


@pytest.mark.spin
@needs_spin
@pytest.mark.parametrize(("was", "becomes", "name", "verdict"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_the_model_changes_a_verdict(
    was: str, becomes: str, name: str, verdict: Verdict, tmp_path: Path
) -> None:
    """Otherwise the table could be right for the wrong reason."""
    variant, text = BY_NAME[name], EXCHANGE.read_text()
    assert text.count(was) == 1
    found = check(variant, 2, tmp_path, text.replace(was, becomes))
    assert found.verdict is verdict is not variant.expected, found


@pytest.mark.parametrize(("variant", "ranks"), rows(kernel=True))
def test_the_kernel_gives_the_verdict(variant: Variant, ranks: int) -> None:
    twin = TWINS[variant.name]
    world = World(ranks, adp=ranks, ep=ranks, exchange="split")
    members = family(world, twin.policy, twin.segments, twin.rounds, capacity=twin.capacity)
    scenario = next(member for member in members if member.name == twin.only)
    program: Any = partial(run, scenario, registry.create)
    with planted(twin.changes, **HELPERS):
        results = judge(program, variant.name, GUARANTEES, BUDGET)
    wrong = {result.cls for result in results.values() if result.verdict is Conclusion.REFUTED}
    match variant.expected:
        case Verdict.OK:
            assert all(result.verdict is Conclusion.PROVED for result in results.values()), results
        case Verdict.DEADLOCK:
            assert wrong
            assert wrong <= {Class.CYCLE, Class.MISSING}
        case _:
            assert wrong == {Class.RULE}


def test_every_variant_is_here_or_says_why_not() -> None:
    assert sorted([*TWINS, *NOT_HERE]) == sorted(BY_NAME)
    assert len(BY_NAME) == len(VARIANTS)


def test_the_variants_are_in_the_readme() -> None:
    text = (MODEL.parent / "README.md").read_text()
    listed = re.findall(r"^\| `([^|]*)` \| ([^|]+?) \| ([^|]+?) \|", text, re.MULTILINE)
    assert listed == [(variant.given, variant.name, str(variant.expected)) for variant in VARIANTS]
