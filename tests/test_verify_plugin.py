"""`explore` as somebody else's test suite uses it: in a repository of its own, with the base install and pytest."""

from __future__ import annotations

import re
import shutil
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import UsageError
from kernel.sched.fine import Fine, FineConfig
from kernel.topology import World
from tests.users import HOUSE, Repository
from turnstile import explore
from verify.mistakes import Greedy, Moody
from verify.testing import ASKED, Asked, NotProved, maker, spec_of
from verify.trial.family import family

if TYPE_CHECKING:
    from pathlib import Path

POLICIES = """
from kernel.sched.fine import Fine

class Calm(Fine):
    name = "calm"

class Greedy(Fine):
    name = "greedy"

    def span(self, now):
        return 2 * self.config.span
"""

TESTS = """
import pytest
from turnstile import World, explore
from verify.trial.family import family
from mine import Calm, Greedy

FEW = [each for each in family(World(1), "mine", 2, 1) if each.name in ("P before D", "P meets D after 0")]

@explore(world=(World(1), World(2)), segments=(1, 2), rounds=1)
def test_calm():
    return Calm

@pytest.mark.parametrize("policy", [Calm, "fine:span=2"])
@explore(scenarios=FEW)
def test_with_parameters(policy):
    return policy

def test_call():
    assert explore(Calm, scenarios=FEW).assert_proved().proved

class TestClass:
    @explore(scenarios=FEW)
    def test_method(self):
        return Calm
"""

WRONG = """
from turnstile import World, explore
from verify.trial.family import family
from mine import Greedy

FEW = [each for each in family(World(1), "mine", 2, 3) if each.name == "P meets D after 0"]

@explore(scenarios=FEW)
def test_greedy():
    return Greedy
"""


SCOPES = """
from turnstile import World, explore
from mine import Greedy

@explore(world=World(1), segments=(1, 2), explained=False)
def test_greedy():
    return Greedy
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Repository:
    return Repository(tmp_path, {"mine.py": POLICIES, "test_mine.py": TESTS, "pytest.ini": "[pytest]\n"})


# -- right policies ----------------------------------------------------------------------------------------------------


def test_a_suite_of_theirs_passes_with_the_base_install(theirs: Repository) -> None:
    ran = theirs.pytest("-v", "--strict-markers", "-W", "error")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    names = re.findall(r"::(\S+) PASSED", ran.stdout)
    scopes = [f"test_calm[g{n}-adp1-ep1-segments={s}]" for n in (1, 2) for s in (1, 2)]
    assert set(names) == {
        *scopes, "test_with_parameters[Calm]", "test_with_parameters[fine:span=2]", "test_call",
        "TestClass::test_method",
    }  # fmt: skip


def test_the_marker_selects_decorated_tests_and_an_id_one_scope(theirs: Repository) -> None:
    ran = theirs.pytest("--collect-only", "-q", "-m", "turnstile")
    assert "7/8 tests collected (1 deselected)" in ran.stdout
    ran = theirs.pytest("-q", "test_mine.py::test_calm[g2-adp1-ep1-segments=1]")
    assert "1 passed" in ran.stdout, ran.stdout


def test_a_suite_that_does_not_use_it_loads_none_of_it(tmp_path: Path) -> None:
    test = """
import sys

def test_plain():
    loaded = {name for name in sys.modules if name.partition(".")[0] in ("verify", "kernel", "turnstile", "networkx")}
    assert loaded == {"verify", "verify.plugin"}
"""
    ran = Repository(tmp_path, {"test_plain.py": test}).pytest("-q")
    assert ran.returncode == 0, ran.stdout


def test_naming_explore_loads_none_of_the_checker(tmp_path: Path) -> None:
    loads = "import sys; from turnstile import explore; print([n for n in sys.modules if n.startswith('verify.')])"
    ran = Repository(tmp_path).run("-c", loads)
    assert ran.stdout.strip() == "['verify.testing']", ran.stderr


# -- wrong ones --------------------------------------------------------------------------------------------------------


def test_a_refutation_is_told_on_one_screen_and_replays(tmp_path: Path) -> None:
    theirs = Repository(tmp_path, {"mine.py": POLICIES, "test_wrong.py": WRONG})
    ran = theirs.pytest("-q")
    assert ran.returncode == 1
    assert "FAILED test_wrong.py::test_greedy - refuted: starvation (decode_bound is broken), certain" in ran.stdout
    assert "Traceback" not in ran.stdout
    assert "verify/" not in ran.stdout.replace("sched/fine.py", ""), "no line of ours"
    lines = ran.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if "test_greedy" in line)
    end = next(number for number, line in enumerate(lines) if "short test summary" in line)
    assert end - start <= 33, "30 lines of a counterexample, the title and the place"
    assert any(line.startswith("lanes ") for line in lines)
    assert lines[end - 1] == "test_wrong.py:8: refuted"
    (command,) = [line for line in lines if line.startswith("replay ")]
    found = re.fullmatch(r"replay +pytest (\S+) --turnstile-replay (t1\.\S+)", command)
    assert found is not None
    again = theirs.pytest("-q", found[1], "--turnstile-replay", found[2])
    assert again.returncode == 1
    assert "the same" in again.stdout.split("replayed  ")[1].splitlines()[0]
    assert "FAILED test_wrong.py::test_greedy - replayed: starvation (decode_bound)" in again.stdout
    long = theirs.pytest("-q", "--tb=native", found[1], "--turnstile-replay", found[2])
    assert "Traceback" in long.stdout
    # Once the policy is right, the schedule is no longer a failure, nor a proof.
    (theirs.folder / "mine.py").write_text(POLICIES.replace("return 2 *", "return 1 *"))
    mended = theirs.pytest("-q", "-rs", found[1], "--turnstile-replay", found[2])
    assert mended.returncode == 0
    assert "1 skipped" in mended.stdout
    assert "nothing failed; this one schedule only" in mended.stdout


def test_a_test_of_one_scope_looks_at_that_scope_only(tmp_path: Path) -> None:
    ran = Repository(tmp_path, {"mine.py": POLICIES, "test_scopes.py": SCOPES}).pytest("-v")
    assert "::test_greedy[segments=1] PASSED" in ran.stdout, ran.stdout
    assert "::test_greedy[segments=2] FAILED" in ran.stdout
    assert "- refuted: decode_bound: D is ready since round" in ran.stdout


def test_a_token_of_another_policy_and_a_damaged_one(theirs: Repository) -> None:
    with pytest.raises(NotProved) as failure:
        explore(Greedy, world=World(1)).assert_proved()
    assert failure.value.explored is not None
    found = failure.value.explored.counterexample
    assert found is not None
    ran = theirs.pytest("-q", "-rs", "-k", "test_calm", "--turnstile-replay", found.token)
    assert "1 skipped, 7 deselected" in ran.stdout, "one test of a function is enough for a token"
    assert "this test is of mine.py:Calm" in ran.stdout
    ran = theirs.pytest("-q", "-k", "test_method", "--turnstile-replay", found.token[:-9])
    assert ran.returncode == 1
    assert re.search(r"FAILED \S+test_method - UsageError: --replay t1\.\S+: the token is", ran.stdout), ran.stdout


def test_the_budget_is_the_option_then_the_tests_own() -> None:
    few = [family(World(1), "mine", 1, 1)[0]]
    assert explore(Fine, scenarios=few).reports[0].scope.budget == 400
    assert explore(Fine, scenarios=few, budget=7).reports[0].scope.budget == 7
    asked = ASKED.set(Asked(budget=3))
    try:
        assert explore(Fine, scenarios=few, budget=7).reports[0].scope.budget == 3
    finally:
        ASKED.reset(asked)


def test_an_option_that_is_no_number_is_refused(theirs: Repository) -> None:
    for text in ("0", "many"):
        ran = theirs.pytest("--turnstile-budget", text)
        assert ran.returncode == 4
        assert f"argument --turnstile-budget: {text!r} is not a whole number of at least 1" in ran.stderr


def test_inconclusive_fails_with_its_own_words_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    from verify.explore import policy
    from verify.explore.result import Evidence, conclude

    def open_(program: Any, scope: str, rules: Any, budget: int, *_: Any) -> Any:
        return {rule: conclude(scope, Evidence(executions=budget)) for rule in (*rules, "rules")}

    monkeypatch.setattr(policy, "judge", open_)
    few = [family(World(1), "mine", 1, 1)[0]]
    with pytest.raises(NotProved) as failure:
        explore(Fine, scenarios=few, budget=5).assert_proved()
    assert failure.value.headline.startswith("inconclusive: deadlock_free: nothing was found in 5 executions")
    assert "--turnstile-budget 20" in str(failure.value)
    assert "allow_inconclusive=True" in str(failure.value)
    allowed = explore(Fine, scenarios=few, budget=5, allow_inconclusive=True).assert_proved()
    assert not allowed.proved
    assert str(allowed).startswith("inconclusive: ")


# -- the call and the decorator by themselves --------------------------------------------------------------------------


def test_the_worst_scope_decides_and_ends_the_search() -> None:
    explored = explore(Greedy, world=World(1), segments=(1, 2, 3), explained=False)
    assert [str(report.verdict) for report in explored.reports] == ["proved", "refuted"]
    assert (explored.verdict, explored.cls, explored.certainty) == ("refuted", "starvation", "certain")
    assert explored.counterexample is None
    with pytest.raises(NotProved, match="refuted: decode_bound: D is ready"):
        explored.assert_proved()


def test_a_decorated_test_fails_and_passes_without_pytest_too() -> None:
    few = [family(World(1), "mine", 1, 1)[0]]

    @explore(scenarios=few)
    def right(span: int) -> Any:
        return partial(Fine, config=FineConfig(span))

    @explore(scenarios=few, explained=False)
    def wrong() -> Any:
        return Moody

    @explore(scenarios=few)
    def nothing() -> Any:
        return None

    right(2)
    with pytest.raises(NotProved, match="not a function"):
        wrong()
    with pytest.raises(UsageError, match="nothing returns no policy"):
        nothing()


def test_unusable_arguments_are_refused_at_once() -> None:
    for keywords, error in (
        ({"segments": 0}, UsageError), ({"segments": ()}, UsageError), ({"rounds": "3"}, TypeError),
        ({"world": 4}, TypeError), ({"capacity": -1}, UsageError), ({"budget": 0}, UsageError),
        ({"bound": "soon"}, UsageError), ({"depth": 0}, UsageError),
    ):  # fmt: skip
        with pytest.raises(error):
            explore(**keywords)
    with pytest.raises(UsageError, match="unknown policy"):
        explore("fien")
    with pytest.raises(UsageError, match="no `plan` and `turn`"):
        explore(World)
    with pytest.raises(TypeError, match="is no policy"):
        explore(7)  # type: ignore[call-overload,unused-ignore]

    class Picky(Fine):
        def __init__(self, limits: Any) -> None:
            raise ValueError("no such\nrow")

    with pytest.raises(UsageError, match=r"Picky cannot be made, .*test_verify_plugin.py:\d+: ValueError: no such row"):
        explore(Picky)


def test_the_spec_of_a_class_loads_it_again() -> None:
    assert spec_of(Fine) == "fine"
    assert spec_of(partial(Fine, config=FineConfig(3))) == "fine:span=3"
    spec = spec_of(Greedy)
    assert spec.endswith("verify/mistakes.py:Greedy")
    _, make = maker(Greedy)
    limits = family(World(1), "fine", 1, 1)[0].limits
    assert type(make(spec, limits)) is Greedy
    assert type(make("fine", limits)) is Fine


# -- the examples ------------------------------------------------------------------------------------------------------


def test_the_examples_run_in_a_repository_of_their_own(tmp_path: Path) -> None:
    theirs = Repository(tmp_path)
    for file in (HOUSE / "examples" / "policies").glob("*.py"):
        shutil.copy(file, theirs.folder)
    ran = theirs.pytest("-q")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "8 passed" in ran.stdout


@pytest.mark.skipif(find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_workers_share_the_scopes(theirs: Repository) -> None:
    ran = theirs.pytest("-n", "2", "-q")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "8 passed" in ran.stdout
