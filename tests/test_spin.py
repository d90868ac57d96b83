"""The Promela model of the turnstile, exhaustively: each variant must get its verdict, and each check must bite."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

from tests.spin_oracle import MODEL, OracleError, Result, check, missing, read
from tests.spin_variants import VARIANTS, Variant, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _pytest.mark import ParameterSet

pytestmark = pytest.mark.spin

WHY_NOT: Final = missing()
needs_spin = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
BY_NAME: Final = {variant.name: variant for variant in VARIANTS}


def rows() -> list[ParameterSet]:
    found = []
    for variant in VARIANTS:
        for ranks in variant.ranks:
            marks = [pytest.mark.grid] if ranks in variant.grid else []
            found.append(pytest.param(variant, ranks, id=f"{variant.name}, N={ranks}", marks=marks))
    return found


def search(variant: Variant, ranks: int, folder: Path) -> Result:
    try:
        return check(variant, ranks, folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def searches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Result]]]:
    """All selected searches, two at a time: compiling takes longer than most of them."""
    with ThreadPoolExecutor(2) as pool:
        started = {}
        for item in request.session.items:
            if getattr(item, "originalname", None) == test_the_model_gives_the_verdict.__name__:
                given = item.callspec.params  # type: ignore[attr-defined]
                folder = tmp_path_factory.mktemp("spin")
                started[item.nodeid] = pool.submit(search, given["variant"], given["ranks"], folder)
        yield started
        pool.shutdown(cancel_futures=True)


@needs_spin
@pytest.mark.parametrize(("variant", "ranks"), rows())
def test_the_model_gives_the_verdict(
    variant: Variant, ranks: int, request: pytest.FixtureRequest, searches: dict[str, Future[Result]]
) -> None:
    found = searches[request.node.nodeid].result()
    assert found.verdict is variant.expected, f"{found}; expected since {variant.reason}"


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake planted in the model's text, and what it makes of a variant at two ranks."""

    was: str
    becomes: str
    variant: str
    verdict: Verdict


FAULTS: Final = {
    "a rendezvous holds nobody": Fault(
        "#define GONE(tag)  (!(came[SLOT(tag)] & BIT(r)))",
        "#define GONE(tag) true",
        "pre-d skipped by one rank",
        Verdict.OK,
    ),
    "P does not stop": Fault("(at[r] <= permit[r] || !TURN || PASS", "(true || PASS", "correct", Verdict.PERMIT),
    "nobody waits for P to stop": Fault(
        "#define STANDS(r)  (done[r] || at[r] > permit[r])", "#define STANDS(r) true", "correct", Verdict.DEADLOCK
    ),
    "there is always room": Fault("CAP == 1 && room[OTHER(x)] != OUTSIDE", "false", "no route, 1 slot", Verdict.OK),
    "there is never room for two": Fault("CAP == 1 && room", "room", "no route, 2 slots", Verdict.DEADLOCK),
    "the permit never moves": Fault("permit[r] < BOUNDS(r) ->", "false ->", "every epoch closes", Verdict.STARVATION),
    "P is done before its task has ended": Fault(
        "going[r] = 0; done[r] = 1", "done[r] = 1; going[r] = 0", "correct, two epochs, pre-emptive", Verdict.DEADLOCK
    ),
}


@needs_spin
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_the_model_changes_a_verdict(fault: Fault, tmp_path: Path) -> None:
    """Otherwise the table could be right for the wrong reason."""
    variant, text = BY_NAME[fault.variant], MODEL.read_text()
    assert text.count(fault.was) == 1
    found = check(variant, 2, tmp_path, text.replace(fault.was, fault.becomes))
    assert found.verdict is fault.verdict is not variant.expected, found


SEARCHED: Final = """
(Spin Version 6.5.2 -- 6 December 2019)
State-vector 236 byte, depth reached 274, errors: {errors}
     6528 states, stored
pan: elapsed time 0.02 seconds
"""


def test_a_search_that_was_cut_short_has_no_verdict() -> None:
    correct = BY_NAME["correct"]
    whole = SEARCHED.format(errors=0)
    assert read(whole, correct) == Result(Verdict.OK, 6528, 0.02, "")
    for note in (
        "error: max search depth too small",
        "pan: reached -DMEMLIM bound",
        "Warning: Search not completed",
    ):
        with pytest.raises(OracleError, match="not exhaustive"):
            read(note + whole, correct)
    with pytest.raises(OracleError, match="no verdict"):
        read("pan:1: assertion violated - invalid array index (at depth 3)\n" + SEARCHED.format(errors=1), correct)
    with pytest.raises(OracleError, match="not exhaustive"):
        read("", correct)


def test_the_variants_are_in_the_readme() -> None:
    """Every row of its table is a variant with the verdict expected of it, and the other way round."""
    assert len(BY_NAME) == len(VARIANTS)
    listed = re.findall(
        r"^\| ([^|]+?) \| `([^|]*)` \| (.+) \|$", (MODEL.parent / "README.md").read_text(), re.MULTILINE
    )
    assert [name for name, _, _ in listed] == list(BY_NAME)
    for name, flags, cells in listed:
        variant = BY_NAME[name]
        assert flags == variant.given
        for ranks, cell in zip((2, 3, 4), cells.split(" | "), strict=True):
            if ranks not in variant.ranks:
                assert cell == "-"
            elif cell == "no verdict":
                assert ranks in variant.grid
            else:
                assert cell.startswith(f"{variant.expected}, "), (name, ranks)
