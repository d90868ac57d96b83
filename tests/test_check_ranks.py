"""Decisions that differ from process to process are refuted, and every check is bounded by its work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import TurnstileError, UsageError
from kernel.sched.registry import create
from kernel.topology import World
from verify.blame import Class
from verify.check import policy as checked_policy
from verify.check import ranks
from verify.check.args import parse
from verify.explore import certify, counterexample, critical, dpor, schedule, shrink
from verify.explore.certify import SEARCH, Work, judge
from verify.explore.dpor import explore
from verify.explore.execution import Execution, Unsteady, execute
from verify.explore.policy import Scope, check, scenarios_of
from verify.explore.result import Conclusion
from verify.trial.elsewhere import absolute, decided, environment
from verify.trial.enact import attempt, run
from verify.trial.family import family
from verify.trial.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[1]
SMALL = ("--world", "2", "--segments", "1-2")


def wrong(name: str) -> str:
    return f"{DATA / 'policies' / name}.py:Wrong"


def judged(spec: str, *argv: str) -> Any:
    """In this process: what `turnstile check` answers."""
    return checked_policy._judged(parse("check", [spec, *(argv or SMALL)]), lambda: None)


# -- what a callback asks for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("loop_clock", "asks for the time of its loop"),
        ("local_time", "asks for the time"),
        ("working_folder", "(getcwd)"),
        ("looks_at_files", "(exists)"),
        ("host_name", "(node)"),
        ("load_average", "(getloadavg)"),
    ],
)
def test_a_callback_that_asks_for_what_is_not_shared_is_found_with_its_line(name: str, says: str) -> None:
    (finding,) = attempt(family(World(2), wrong(name), 2, 3)[1]).findings
    assert (finding.cls, finding.rule) == (Class.OUTSIDE, "outside")
    lines = (DATA / "policies" / f"{name}.py").read_text().splitlines()
    assert finding.where == f"policies/{name}.py:{len(lines)}"
    assert says in finding.say


ASKING = """
import os, os.path, platform, time, logging
from pathlib import Path, PurePath
from kernel.sched.fine import Fine

class Mine(Fine):
    name = "mine"
    def span(self, now):
        {}
        return 1
"""


@pytest.mark.parametrize(
    "statement",
    ["time.strftime('%S')", "time.ctime()", "time.gmtime()", "os.uname()", "os.cpu_count()", "os.stat('/')",
     "os.path.isdir('/')", "os.path.abspath('a')", "Path('/').exists()", "Path('a').resolve()", "Path.cwd()",
     "platform.machine()", "os.getppid()"],
)  # fmt: skip
def test_every_way_to_ask_is_found(tmp_path: Path, statement: str) -> None:
    (tmp_path / "mine.py").write_text(ASKING.format(statement))
    (finding,) = attempt(family(World(2), f"{tmp_path / 'mine.py'}:Mine", 1, 1)[1]).findings
    assert finding.cls is Class.OUTSIDE


@pytest.mark.parametrize(
    "statement",
    ["os.path.join('a', 'b')", "os.path.basename('a/b')", "PurePath('a') / 'b'", "Path('a').name", "os.fspath('a')",
     "time.struct_time", "logging.getLogger('mine').debug('said')", "sorted({1, 2})", "os.path.commonprefix(['a'])"],
)  # fmt: skip
def test_what_is_only_about_text_is_allowed(tmp_path: Path, statement: str) -> None:
    (tmp_path / "mine.py").write_text(ASKING.format(statement))
    assert attempt(family(World(2), f"{tmp_path / 'mine.py'}:Mine", 1, 1)[1]).clean


# -- the processes of other ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("set_order_turn", "what rank 0 does differs"),
        ("set_order_span", "plan differs in span at round "),
        ("module_pid", "plan differs in span at round "),
        ("module_chance", "plan differs in span at round "),
        ("module_rank", "plan differs in span at round "),
        ("module_date", "plan differs in span at round "),
        ("init_leaves", "plan differs in span at round "),
    ],
)
def test_what_differs_from_process_to_process_is_refuted_with_its_line(name: str, says: str) -> None:
    scenario = scenarios_of(Scope(wrong(name), World(2, 2, 2), 2, 2))[2]
    found = ranks.compared([scenario], create(scenario.policy, scenario.limits))
    assert found is not None
    assert (found.cls, found.rule) == (Class.RULE, "shared plan")
    assert found.say.startswith("not the same in every process: ")
    assert says in found.say
    function = "async def turn" if "turn" in name else "def span"
    lines = (DATA / "policies" / f"{name}.py").read_text().splitlines()
    assert found.where == f"policies/{name}.py:{1 + next(n for n, each in enumerate(lines) if function in each)}"


def test_what_ranks_share_is_the_same_in_every_process() -> None:
    scenario = scenarios_of(Scope(wrong("greedy_span"), World(2, 2, 2), 2, 2))[2]
    assert ranks.compared([scenario], create(scenario.policy, scenario.limits), 3) is None
    fine = scenarios_of(Scope("fine", World(2, 2, 2), 2, 2))[2]
    assert ranks.compared([fine], create("fine", fine.limits), 2) is None


def test_a_file_that_is_there_for_one_rank_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("span.txt").write_text("1")
    Path("mine.py").write_text(ASKING.format("pass").replace("\nclass", "\nopen('span.txt').close()\nclass"))
    scenario = scenarios_of(Scope("mine.py:Mine", World(2, 2, 2), 1, 1))[1]
    found = ranks.compared([scenario], create(scenario.policy, scenario.limits))
    assert found is not None
    assert "cannot be made in every process" in found.say
    assert "span.txt" in found.say


def test_a_failure_of_our_own_is_told_with_its_trace(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "json", SimpleNamespace(dumps=lambda task: "{}", loads=json.loads))
    with pytest.raises(TurnstileError, match="a process that compares decisions failed: KeyError: 'number'"):
        ranks._ran([], 0)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["set_order_turn", "module_pid", "chance_in_init", "module_chance", "addresses"])
def test_the_command_says_so(name: str) -> None:
    answer = checked_policy.check_policy(parse("check", [wrong(name), *SMALL]))
    assert (answer.verdict, answer.cls, answer.code) == (Conclusion.REFUTED, Class.RULE, 1)
    assert "not the same in every" in answer.as_text() or "ranks diverged" in answer.as_text()


def test_processes_differ_in_all_that_ranks_do_not_share() -> None:
    told = []
    script = (
        "import json, os, sys, time, socket, platform, random, datetime\nfrom verify.trial.elsewhere import settle\n"
        "settle(int(sys.argv[1]))\nprint(json.dumps([os.getpid(), os.getppid(), os.uname().nodename, platform.node(),"
        "socket.gethostname(), time.time(), time.monotonic(), time.ctime(), time.strftime('%c'), random.random(),"
        "str(datetime.datetime.now()), str(datetime.date.today()), os.environ['RANK'], hash('a'), len(sys.argv)]))"
    )
    for number in (1, 2):
        ran = subprocess.run(
            [sys.executable, "-c", script, str(number)], env={**os.environ, **environment(number)},
            capture_output=True, text=True, timeout=60, check=True, cwd=ROOT,
        )  # fmt: skip
        told.append(json.loads(ran.stdout))
    assert all(one != other for one, other in zip(*told, strict=True))
    assert told[1][5] - told[0][5] > 86_400
    assert (told[0][0] - told[1][0]) % 2 == 1
    assert absolute("fine:span=2") == "fine:span=2"
    assert Path(absolute("a/b.py:C").partition(".py:")[0]).is_absolute()


def test_what_is_decided_is_told_in_plans_and_steps() -> None:
    scenario = family(World(2), "fine", 1, 1)[1]
    found = decided(scenario)
    assert [plan["round"] for plan in found["plans"]] == list(range(len(found["plans"])))
    assert found["ended"] == []
    assert any(step.startswith("enqueue D") for step in found["did"][0])
    assert "arrive pre-d" in found["did"][1]
    assert time.time() < 10**10  # the clock of this process goes on as it was


# -- what cannot be repeated ------------------------------------------------------------------------------------------


def test_a_search_that_cannot_be_repeated_says_so() -> None:
    calls = iter(range(100))

    def program(**options: Any) -> Any:
        spec = "fine" if next(calls) else f"{DATA / 'open' / 'stray_task'}.py:Open"
        return run(family(World(2, 2, 2), spec, 1, 1)[1], **options)

    with pytest.raises(Unsteady, match="not the same in every run: "):
        list(explore(program))


def test_a_failure_that_does_not_come_back_refutes_and_is_not_a_crash() -> None:
    calls = iter(range(10_000))

    def sometimes(spec: str, limits: Any) -> Any:
        return create(wrong("never_decodes") if next(calls) < 8 else "fine", limits)

    scenario = family(World(2, 2, 2), "mine", 1, 1)[0]
    report = check(Scope("mine", World(2, 2, 2), 1, 1), sometimes, [scenario])
    assert (report.verdict, report.cls) == (Conclusion.REFUTED, Class.RULE)
    assert report.unsteady.startswith("not the same in every run: ")
    assert report.counterexample is None


# -- bounds -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, int]]:
    """(executions, their steps) so far, of everything that explores."""
    seen: list[Execution] = []

    def counting(*args: Any, **options: Any) -> Execution:
        seen.append(execute(*args, **options))
        return seen[-1]

    for module in (certify, counterexample, dpor, schedule, shrink):
        monkeypatch.setattr(module, "execute", counting)
    assert critical.explore is dpor.explore
    return lambda: (len(seen), sum(len(each.trace.names) for each in seen))


@pytest.mark.parametrize("name", ["skips_decode", "decodes_alone", "span_by_pool"])
def test_what_every_schedule_shows_is_explained_without_a_search(
    name: str, counted: Callable[[], tuple[int, int]]
) -> None:
    found = judged(wrong(name)).counterexample
    assert found["class"] == "starvation"
    assert found["critical"].endswith("every schedule ends like this")
    executions, _ = counted()
    assert executions < 200


@pytest.mark.parametrize("name", ["stray_task", "waits_for_time"])
def test_what_stays_open_ends_within_its_work(name: str, counted: Callable[[], tuple[int, int]]) -> None:
    answer = judged(f"{DATA / 'open' / name}.py:Open", *SMALL, "--budget", "60")
    assert answer.verdict is Conclusion.INCONCLUSIVE
    _, steps = counted()
    assert steps < answer.more["scenarios"] * 2 * 250 + SEARCH * 60 + 500


def test_work_bounds_a_search_whatever_its_budget() -> None:
    scenario = family(World(2, 2, 2), f"{DATA / 'open' / 'stray_task'}.py:Open", 1, 1)[0]
    work = Work(1_000)
    results = judge(partial(run, scenario, create), "mine", ("deadlock_free",), 10_000, work=work)
    assert results["deadlock_free"].verdict is Conclusion.INCONCLUSIVE
    assert -500 < work.steps <= 0


def test_a_plain_refutation_of_a_later_scope_comes_before_any_search(counted: Callable[[], tuple[int, int]]) -> None:
    """`span_by_pool` is right with one segment; nothing is searched there first."""
    answer = judged(wrong("span_by_pool"))
    assert "1 to 2 segments" in answer.scope
    assert counted()[0] < 120


def test_the_finding_of_another_process_is_an_answer() -> None:
    found = judged(wrong("set_order_span"))
    assert isinstance(found, Finding)
    with pytest.raises(UsageError):
        judged(f"{DATA / 'policies' / 'nowhere'}.py:Wrong")
