"""Policies that loop, block, exit or raise: each is found with its line, and the checker never hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import ProtocolError, TurnstileError, UsageError
from kernel.sched.fine import Fine
from kernel.topology import World
from verify.blame import Class
from verify.sources import foreign
from verify.trial.enact import attempt, run
from verify.trial.family import family
from verify.trial.findings import Finding
from verify.trial.guard import TOOL, Guard
from verify.trial.supervise import supervised

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.trial.scenario import Scenario

POLICIES = Path(__file__).parent / "data" / "policies"


def scenario(spec: str) -> Scenario:
    return family(World(2), spec, 2, 3)[1]


def wrong(name: str) -> Scenario:
    return scenario(f"{POLICIES / name}.py:Wrong")


def line(name: str, text: str) -> int:
    """The line of a policy file that has `text`."""
    lines = (POLICIES / f"{name}.py").read_text().splitlines()
    return next(number for number, each in enumerate(lines, 1) if text in each)


@pytest.mark.parametrize(
    ("name", "at", "say"),
    [
        ("endless_plan", "plan = plan", "in plan"),
        ("endless_turn", "    pass", "in turn"),
        ("sleeps", "time.sleep", "in turn"),
        ("opens", "read_text", "opens"),
        ("connects", "create_connection", "uses a socket"),
        ("starts", "subprocess.run", "starts 'true'"),
        ("asks", "input(", "reads the terminal"),
    ],
)
def test_what_never_returns_or_touches_the_outside_is_found_with_its_line(name: str, at: str, say: str) -> None:
    outcome = attempt(wrong(name))
    (finding,) = outcome.findings
    assert (finding.cls, finding.rule) == (Class.OUTSIDE, "outside")
    where = f"policies/{name}.py:"
    assert finding.where.startswith(where)
    assert int(finding.where.removeprefix(where)) in (line(name, at), line(name, at) - 1)  # a loop has two lines
    assert say in finding.say
    assert len(str(finding).splitlines()) == 1


def test_a_policy_that_swallows_what_stops_it_is_found_all_the_same() -> None:
    (finding,) = attempt(wrong("endless_swallowed")).findings
    assert "an endless loop" in finding.say


@pytest.mark.parametrize(
    ("name", "at", "say"),
    [
        ("raises_plan", "raise ValueError", "raises ValueError in plan at {}: too many rows (rank "),
        ("raises_turn", '{}["rows"]', "raises KeyError in turn at {}: 'rows' (rank "),
        ("exits", "sys.exit", "raises SystemExit in plan at {}: 3 (rank "),
    ],
)
def test_an_exception_of_a_policy_is_one_line_with_its_place(name: str, at: str, say: str) -> None:
    outcome = attempt(wrong(name))
    (finding,) = outcome.findings
    where = f"policies/{name}.py:{line(name, at)}"
    assert (finding.cls, finding.where) == (Class.EXCEPTION, where)
    assert say.format(where) in finding.say
    assert len(str(finding).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "say"),
    [
        ("def plan(:\n", "bad.py:1: SyntaxError"),
        ("import nothing_like_this\n", "bad.py:1: ModuleNotFoundError"),
        ("x = 1\n1 / 0\n", "bad.py:2: ZeroDivisionError"),
        ("class Other:\n    pass\n", "has no class 'Wrong'"),
        ("class Wrong:\n    pass\n", "not a class with `plan` and `turn`"),
        ("from kernel.sched.fine import Fine\nclass Wrong(Fine):\n    def __init__(self, limits):\n        limits.no\n",
         "bad.py:4: AttributeError"),
        ("import sys\nsys.exit(3)\n", "bad.py:2: SystemExit"),
        ("from kernel.sched.fine import Fine\nclass Wrong(Fine):\n    guarantees = None\n", "has no guarantees"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_made_is_unusable_input(tmp_path: Path, text: str, say: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UsageError) as caught:
        attempt(scenario(f"{tmp_path / 'bad.py'}:Wrong"))
    assert say in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


HELPER = """
import threading, queue
from kernel.sched.fine import Fine

{before}

class Wrong(Fine):
    def {what}:
        {body}
        return {rest}
"""


@pytest.mark.parametrize(
    ("before", "body", "say"),
    [
        ("LOCK = threading.Lock(); LOCK.acquire()", "LOCK.acquire()", "waits for a lock"),
        ("Q = queue.SimpleQueue()", "Q.get()", "waits for a queue"),
        ("", "threading.Thread(target=print).start()", "starts a thread"),
        ("def endless():\n    while True: pass", "endless()", "an endless loop"),
        ("class Deep:\n    def go(self):\n        while True: self = self", "Deep().go()", "an endless loop"),
        ("", "all(True for _ in iter(int, 1))", "an endless loop"),
    ],
)
def test_more_ways_not_to_return(tmp_path: Path, before: str, body: str, say: str) -> None:
    text = HELPER.format(before=before, what="plan(self, views, memory)", body=body, rest="super().plan(views, memory)")
    (tmp_path / "bad.py").write_text(text)
    (finding,) = attempt(scenario(f"{tmp_path / 'bad.py'}:Wrong")).findings
    assert finding.cls is Class.OUTSIDE
    assert say in finding.say
    assert f"{tmp_path.name}/bad.py:" in finding.where


def test_policies_may_compute_import_and_use_locks_that_are_free(tmp_path: Path) -> None:
    body = "import colorsys\n        with LOCK: sum(i * i for i in range(1000))\n        LOCK.acquire(); LOCK.release()"
    text = HELPER.format(
        before="LOCK = threading.Lock()",
        what="plan(self, views, memory)",
        body=body,
        rest="super().plan(views, memory)",
    )
    (tmp_path / "good.py").write_text(text)
    assert run(scenario(f"{tmp_path / 'good.py'}:Wrong")).clean


def test_the_budget_is_of_one_callback(tmp_path: Path) -> None:
    text = HELPER.format(
        before="",
        what="plan(self, views, memory)",
        body="for i in range(40): i = i",
        rest="super().plan(views, memory)",
    )
    (tmp_path / "busy.py").write_text(text)
    spec = f"{tmp_path / 'busy.py'}:Wrong"
    assert run(scenario(spec), guard=Guard(budget=200)).clean
    assert not attempt(scenario(spec), guard=Guard(budget=20)).clean


class Helped(Fine):
    """Steps of tasks that a turn starts, and of awaits besides the gate's, go on without confusing the guard."""

    async def turn(self, gate: Any) -> None:
        import asyncio

        async def both() -> None:
            await gate.reached()
            await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(both())
            tasks.create_task(both())
        await asyncio.sleep(0)
        await super().turn(gate)


def test_a_turn_may_use_tasks() -> None:
    assert run(scenario("helped"), lambda spec, limits: Helped(limits)).clean


def test_nothing_is_left_on_and_nothing_outside_a_policy_is_watched(tmp_path: Path) -> None:
    before = sys.gettrace(), sys.getprofile()
    with Guard() as guard:
        (tmp_path / "file").write_text("x")  # the hook hears it, and nobody listens
        assert guard.found is None
    attempt(wrong("endless_plan"))
    assert (sys.gettrace(), sys.getprofile()) == before
    if sys.version_info >= (3, 12):
        assert sys.monitoring.get_tool(TOOL) is None
    assert (tmp_path / "file").read_text() == "x"


def test_shipped_policies_are_not_slowed_down() -> None:
    with Guard() as guard:
        assert not guard.knows(Fine(scenario("fine").limits))
        assert guard.knows(Helped(scenario("fine").limits))
    assert foreign(__file__)
    assert not foreign(threading.__file__)


# -- a child that somebody watches ------------------------------------------------------------------------------------


def test_supervised_returns_what_the_work_returns() -> None:
    pid = supervised(lambda beat: (os.getpid(), run(scenario("fine")).clean), 30)
    assert isinstance(pid, tuple)
    assert pid[0] != os.getpid()
    assert pid[1] is True
    assert len(supervised(lambda beat: b"x" * 3_000_000, 30)) == 3_000_000  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["locks", "loops_in_c"])
def test_waits_and_loops_that_no_hook_sees_are_found_with_their_line(name: str) -> None:
    finding = supervised(lambda beat: attempt(wrong(name), guard=Guard(beat=beat)).findings, 0.5)
    assert isinstance(finding, Finding)
    where = line(name, "with self.door") if name == "locks" else line(name, "sum(")
    assert finding.cls is Class.OUTSIDE
    assert finding.where == f"policies/{name}.py:{where}"


def test_a_module_that_does_not_end_is_found(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import itertools\nsum(itertools.repeat(0))\n")
    finding = supervised(lambda beat: attempt(scenario(f"{tmp_path / 'bad.py'}:Wrong")).findings, 0.5)
    assert isinstance(finding, Finding)
    assert finding.where.endswith("/bad.py:2")


def test_work_that_is_slow_outside_policies_is_left_alone() -> None:
    def work(beat: Any) -> int:
        time.sleep(1.0)
        return 3

    assert supervised(work, 0.2) == 3


def test_an_interrupt_at_the_fork_ends_the_child_too() -> None:
    """What CPython runs at a fork swallows exceptions; who interrupts just then must not be left with the child."""
    program = (
        "import os, signal, time\n"
        "from verify.trial.supervise import supervised\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "try:\n    supervised(lambda beat: time.sleep(600), 300)\n"
        "except KeyboardInterrupt:\n"
        "    try:\n        os.waitpid(-1, 0)\n    except ChildProcessError:\n        print('nobody is left')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.stderr) == ("nobody is left\n", "")


def test_exceptions_of_the_work_are_raised_here() -> None:
    def unusable(beat: Any) -> None:
        run(scenario("fines"))

    with pytest.raises(UsageError, match="unknown policy 'fines'"):
        supervised(unusable, 30)

    def protocol(beat: Any) -> None:
        raise ProtocolError("x", rank=1, epoch=2, boundary=3)

    with pytest.raises(TurnstileError, match="rank 1, epoch 2, boundary 3"):
        supervised(protocol, 30)
    with pytest.raises(TurnstileError, match="lambda"):
        supervised(lambda beat: lambda: 0, 30)


@pytest.mark.parametrize(
    ("end", "say"), [(lambda: os._exit(3), "exit code 3"), (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9")]
)
def test_a_child_that_ends_by_itself_is_a_finding(end: Any, say: str) -> None:
    finding = supervised(lambda beat: end(), 30)
    assert isinstance(finding, Finding)
    assert finding.cls is Class.EXCEPTION
    assert say in finding.say


def test_what_policies_print_does_not_reach_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    supervised(lambda beat: print("hello"), 30)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "hello\n")


def child_only(base: type[BaseException]) -> Any:
    """An object of a class whose module exists in the child alone."""
    module = ModuleType("only_in_the_child")
    sys.modules[module.__name__] = module
    made = type("Odd", (base,), {"__module__": module.__name__})
    vars(module)["Odd"] = made
    return made("hm")


@pytest.mark.parametrize("base", [BaseException, Exception, UsageError])
def test_what_only_the_child_can_raise_is_told_by_its_line(base: type[BaseException]) -> None:
    def work(_: Callable[[], None]) -> None:
        raise child_only(base)

    with pytest.raises(TurnstileError, match=r"^Odd: hm$"):
        supervised(work, 10.0)


@pytest.mark.parametrize("error", [KeyboardInterrupt("no"), SystemExit("no")])
def test_what_would_end_the_parent_is_told_by_its_line(error: BaseException) -> None:
    def work(_: Callable[[], None]) -> None:
        raise error

    with pytest.raises(TurnstileError, match=rf"^{type(error).__name__}: no$"):
        supervised(work, 10.0)


def test_an_answer_that_only_the_child_can_read_is_one_line() -> None:
    with pytest.raises(TurnstileError, match=r"^the answer of the checked code cannot be read: ModuleNotFoundError: "):
        supervised(lambda _: child_only(Exception), 10.0)
