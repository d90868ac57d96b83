"""`turnstile check` of policies, from arguments to exit code: verdicts, JSON, replay, code that never returns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import UsageError
from kernel.sched import registry
from kernel.topology import World
from rollout import cli
from verify.check import args
from verify.check import policy as checked_policy
from verify.check.args import LAYERS, SEGMENTS, parse
from verify.check.order import certified
from verify.check.worlds import RANKS, SIZES
from verify.explore.token import Token
from verify.sim.world import WIDE
from verify.trial.enact import attempt
from verify.trial.family import family
from verify.trial.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parents[1]
POLICIES = Path(__file__).parent / "data" / "policies"
SMALL = ("--world", "2", "--segments", "1")
KEYS = {"verdict", "class", "certainty", "scope", "executions", "replay", "counterexample"}


@pytest.fixture
def check(capfd: pytest.CaptureFixture[str]) -> Check:
    """Run the command; (exit code, standard output, standard error)."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.main(["check", *argv])
        return (code, *capfd.readouterr())

    return run


def answer(ran: tuple[int, str, str]) -> dict[str, Any]:
    """The one object of `--json`."""
    _, out, err = ran
    assert out.count("\n") == 1
    assert err == ""
    plain: dict[str, Any] = json.loads(out)
    assert plain.keys() >= KEYS
    return plain


def policy(tmp_path: Path, body: str, before: str = "") -> str:
    """The spec of a policy of these lines in its class."""
    file = tmp_path / "mine.py"
    lines = ["from kernel.sched.fine import Fine", *before.splitlines(), "class Mine(Fine):", "    name = 'mine'"]
    file.write_text("\n".join([*lines, *(f"    {line}" for line in body.splitlines())]) + "\n")
    return f"{file}:Mine"


# -- policies -----------------------------------------------------------------------------------------------------


def test_each_guarantee_has_a_line_and_the_last_line_says_the_scope(check: Check) -> None:
    code, out, err = check("fine", *SMALL)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    rules = [line.split()[0] for line in lines[:4]]
    assert rules == ["deadlock_free", "epochs_complete", "decode_bound", "rules"]
    assert all(line.split()[1] == "proved" for line in lines[:4])
    last = " ".join(lines[4:])
    assert last.startswith("proved: fine on g2 adp2 ep2 cross route=paper, 1 segment, 3 D iterations, room for every")
    assert all(len(line) <= 120 for line in lines)


def test_a_policy_alone_is_searched_on_two_worlds_and_certified_for_eight_ranks() -> None:
    asked = parse("check", ["fine"])
    assert tuple(world.size for world in asked.worlds) == SIZES == (2, 4)
    assert {world.adp for world in asked.worlds} == {2}
    assert asked.segments == SEGMENTS == (1, 2, 3)
    assert (asked.layers, asked.certified.size) == (LAYERS, RANKS) == (40, 8)
    assert parse("check", ["fine", "--world", "4"]).layers is None
    own = parse("check", ["fine", "--world", "4", "--layers", "12"])
    assert (own.layers, own.certified) == (12, own.worlds[0])


def test_the_certificate_is_for_the_order_in_which_the_policy_enters(check: Check) -> None:
    plain = answer(check("fine:span=2", *SMALL, "--layers", "6", "--json"))
    certificate = plain["certificate"]
    assert certificate["verdict"] == plain["verdict"] == "proved"
    assert (certificate["ranks"], certificate["layers"]) == (2, 6)
    # An epoch alone in one segment, then one beside D in 6 / 2.
    assert (certificate["segments"], certificate["decodes"]) == (1 + 3, 7)
    assert "Kahn" in certificate["theorem"]


def test_no_certificate_where_a_schedule_changes_the_order(check: Check) -> None:
    plain = answer(check("unordered", *SMALL, "--layers", "4", "--rounds", "2", "--json"))
    assert (plain["verdict"], plain["replay"]) == ("proved", None)
    assert plain["certificate"] is None


@pytest.mark.parametrize("name", ["normal", "global_complete", "global_enqueue", "lean", "adaptive"])
def test_the_shipped_policies_have_one(name: str) -> None:
    found = certified(parse("check", [name, *SMALL, "--layers", "4"]), registry.create, Guard())
    assert found is not None
    assert found.code == 0


@pytest.mark.slow
def test_a_capacity_too_small_without_the_route_refutes_on_condition(check: Check) -> None:
    plain = answer(check("unordered", *SMALL, "--rounds", "1", "--capacity", "1", "--json"))
    assert (plain["verdict"], plain["class"], plain["certainty"]) == ("refuted", "cycle", "conditional")
    assert "capacity 1" in plain["scope"]
    assert plain["counterexample"]["replay"] == plain["replay"]


@pytest.mark.slow
def test_a_bound_that_is_asked_for_is_judged_instead_of_the_claim(check: Check) -> None:
    code, out, _ = check("normal", "--world", "2", "--segments", "2", "--rounds", "1", "--bound", "1")
    assert code == 1
    found = re.search(r"^decode_bound +REFUTED \(certain\) +a ready D launches after at most 1 segment ", out, re.M)
    assert found
    assert re.search(r"^deadlock_free +proved", out, re.M)


def test_a_failure_is_told_in_thirty_lines_and_runs_again_from_its_token(check: Check) -> None:
    spec = str(POLICIES / "forgets_permit.py") + ":Wrong"
    code, out, _ = check(spec, *SMALL)
    assert code == 1
    lines = out.splitlines()
    told = lines[lines.index("") + 1 : lines.index("", lines.index("") + 1)]
    assert told[0].startswith("failed    starvation")
    assert len(told) <= 30
    assert max(map(len, lines)) <= 120
    assert "refuted (starvation, certain): " in out
    token = re.sub(r"\\\n", "", out).partition("check --replay ")[2].split()[0]

    again, replayed, _ = check("--replay", token)
    assert again == 1
    assert replayed.splitlines()[: len(told)] == told
    assert "replayed  exact: the same " in replayed
    plain = answer(check("--replay", token, "--json"))
    assert plain["replayed"]["exact"]
    assert (plain["replay"], plain["class"]) == (token, "starvation")


def test_a_replay_that_takes_other_steps_says_so(check: Check) -> None:
    token = answer(check(f"{POLICIES / 'forgets_permit.py'}:Wrong", *SMALL, "--json"))["replay"]
    other = str(replace(Token.parse(token), prints="0" * 22))
    code, out, _ = check("--replay", other)
    assert code == 1
    assert "replayed  still fails: diverged between steps 0 and " in out
    assert answer(check("--replay", other, "--json"))["replayed"]["exact"] is False


def test_one_guard_watches_many_executions() -> None:
    guard = Guard()
    right, wrong = family(World(2), "fine", 1, 1)[0], f"{POLICIES / 'endless_plan.py'}:Wrong"
    for _ in range(2):
        assert attempt(replace(right, policy=wrong), guard=guard).broken("outside")
        assert attempt(replace(right, policy=f"{POLICIES / 'greedy_span.py'}:Wrong"), guard=guard).clean


def test_replay_follows_edits_of_the_policy(check: Check, tmp_path: Path) -> None:
    wrong = "async def turn(self, gate):\n    if gate.d_ready:\n        await super().turn(gate)"
    token = answer(check(policy(tmp_path, wrong), *SMALL, "--json"))["replay"]
    policy(tmp_path, wrong.replace("gate.d_ready", "gate.plan.decode and gate.d_ready"))
    code, out, _ = check("--replay", token)
    assert code == 1
    assert "replayed  exact" in out or "replayed  still fails" in out
    policy(tmp_path, "pass")
    code, out, _ = check("--replay", token)
    assert code == 3
    assert "this schedule no longer fails; check again for all schedules" in " ".join(out.split())
    assert "nothing failed" in out
    assert answer(check("--replay", token, "--json"))["verdict"] == "inconclusive"
    policy(tmp_path, "def plan(self, views, memory):\n    raise KeyError('rows')")
    plain = answer(check("--replay", token, "--json"))
    assert (plain["verdict"], plain["class"], plain["replayed"]["same"]) == ("refuted", "exception", False)
    (tmp_path / "mine.py").unlink()
    assert check("--replay", token)[0] == 2


def test_a_replay_in_another_folder_says_which_file_is_missing(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy(tmp_path, "def plan(self, views, memory):\n    raise KeyError('rows')")
    token = answer(check("mine.py:Mine", *SMALL, "--json"))["replay"]
    assert check("--replay", token)[0] == 1
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    code, out, err = check("--replay", token)
    assert (code, out) == (2, "")
    assert f"the token is of mine.py, seen from the folder of that check, and here there is no {Path.cwd()}/mine" in err
    assert err.count("\n") == 1


def test_the_line_of_an_import_error_is_that_of_its_statement(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_mine.py").write_text("\n\n\n\nx = (\n")
    policy(tmp_path, "pass", "\nimport nowhere_at_all")
    assert "mine.py:3: ModuleNotFoundError" in check("mine.py:Mine", *SMALL)[2]
    policy(tmp_path, "pass", "\nimport helper_of_mine")
    assert "mine.py:3: SyntaxError" in check("mine.py:Mine", *SMALL)[2]


def test_starvation_is_told_by_the_plans_of_its_rounds(check: Check) -> None:
    ran = check(f"{POLICIES / 'decodes_alone.py'}:Wrong", *SMALL, "--json")
    found = answer(ran)["counterexample"]
    round_ = int(found["say"].rpartition("round ")[2].rstrip(")"))
    assert found["plan"][-1].startswith(f"round {round_}: no D, P e")
    assert any("D of 1+0 rows, no P" in line for line in found["plan"])
    assert len(found["plan"]) <= 8
    assert found["broken"]["name"] == "progress of D"


def test_a_turn_that_never_ends_breaks_completion_and_not_the_bound(check: Check) -> None:
    found = answer(check(f"{POLICIES / 'gives_up.py'}:Wrong", *SMALL, "--json"))["counterexample"]
    assert (found["rule"], found["broken"]["name"]) == ("epochs_complete", "completion of P")
    assert "tokens when the plan went idle for good" in found["say"]


def test_room_for_every_kernel_is_one_number() -> None:
    assert args.WIDE == WIDE


def test_a_launch_queue_that_is_too_short_is_kept_in_the_token(check: Check, tmp_path: Path) -> None:
    spec = policy(tmp_path, "async def turn(self, gate):\n    if gate.d_ready:\n        await super().turn(gate)")
    plain = answer(check(spec, *SMALL, "--depth", "1", "--json"))
    assert "launch queues of 1" in plain["scope"]
    assert Token.parse(plain["replay"]).scenario["with"]["depth"] == 1
    again = answer(check("--replay", plain["replay"], "--json"))
    assert again["replayed"]["exact"]
    assert again["counterexample"] == plain["counterexample"]


@pytest.mark.parametrize(
    ("body", "before", "says"),
    [
        ("pass", "x = (", r"mine\.py:2: SyntaxError"),
        ("pass", "import nowhere_at_all", r"mine\.py:2: ModuleNotFoundError"),
        ("pass", "raise SystemExit(0)", r"mine\.py:2: SystemExit"),
        ("pass", "import os\nos._exit(0)", r"mine\.py:3: SystemExit: a policy must not call os\._exit\(0\) while"),
        ("pass", "class B(BaseException): pass\nraise B('hm')", r"policy file \S+mine\.py:3: B: hm$"),
        ("pass", "raise KeyboardInterrupt", r"policy file \S+mine\.py:2: KeyboardInterrupt$"),
        ("def __init__(self, limits):\n    raise KeyboardInterrupt('no')", "", r"mine\.py:5: KeyboardInterrupt: no$"),
        ("def __init__(self, limits):\n    import os\n    os._exit(3)", "", r"imported or made, exit code 3"),
        ("def __init__(self, limits):\n    self.x = 1 / 0", "", r"mine\.py:5: ZeroDivisionError"),
        ("guarantees = None", "", r"has no guarantees"),
    ],
)
def test_a_policy_that_does_not_load_is_unusable_input(
    check: Check, tmp_path: Path, body: str, before: str, says: str
) -> None:
    code, out, err = check(policy(tmp_path, body, before), *SMALL)
    assert (code, out) == (2, "")
    assert re.search(says, err.strip())
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "cls", "line"),
    [
        ("raises_plan", "exception", "raise ValueError"),
        ("raises_turn", "exception", '{}["rows"]'),
        ("exits", "exception", "sys.exit"),
        ("ends_process", "exception", None),
        ("random_plan", "outside", "random.randrange"),
        ("endless_turn", "outside", "    pass"),
        ("sleeps", "outside", "time.sleep"),
    ],
)
def test_a_policy_whose_code_fails_is_refuted_with_its_line(
    check: Check, name: str, cls: str, line: str | None
) -> None:
    file = POLICIES / f"{name}.py"
    plain = answer(check(f"{file}:Wrong", *SMALL, "--json"))
    assert (plain["verdict"], plain["class"], plain["certainty"]) == ("refuted", cls, "certain")
    assert bool(plain["replay"]) == (line is not None)
    if line is not None:
        numbers = [number for number, each in enumerate(file.read_text().splitlines(), 1) if line in each]
        cited = [int(each) for each in re.findall(rf"{name}\.py:(\d+)", plain["counterexample"]["say"])]
        assert set(cited) & {*numbers, *(number - 1 for number in numbers)}  # a loop has two lines


@pytest.mark.parametrize("name", ["loops_in_c", "locks"])
def test_code_that_no_hook_sees_ends_too(check: Check, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_policy, "SILENCE_S", 1.0)
    code, out, err = check(f"{POLICIES / name}.py:Wrong", *SMALL)
    assert (code, err) == (1, "")
    assert re.search(rf"policies/{name}\.py:\d+ does not return", out)
    assert "refuted (outside, certain): " in out


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(POLICIES.glob("*.py")), ids=lambda file: file.stem)
def test_every_wrong_policy_is_refuted(check: Check, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_policy, "SILENCE_S", 4.0)
    plain = answer(check(f"{file}:Wrong", "--json"))
    assert plain["verdict"] == "refuted"
    assert plain["class"] not in ("none", "cycle")


def test_what_a_policy_prints_does_not_get_into_the_answer(check: Check, tmp_path: Path) -> None:
    body = "def plan(self, views, memory):\n    print('noise')\n    return super().plan(views, memory)"
    spec = policy(tmp_path, body)
    code, out, err = check(spec, *SMALL, "--rounds", "1", "--json")
    assert code == 0
    assert json.loads(out)["verdict"] == "proved"
    assert "noise" in err


# -- unusable input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "nothing to check"),
        (["fin"], "did you mean fine"),
        (["nowhere.py:Mine"], "policy file nowhere.py"),
        (["fine", "--wrld", "2"], "did you mean --world"),
        (["fine", "--world", "4", "--adp", "3"], "--adp 3 does not divide --world 4"),
        (["fine", "--world", "65", "--adp", "1", "--ep", "1"], "at most 64"),
        (["fine", "--segments", "3-1"], "--segments 3-1"),
        (["fine", "--segments", "many"], "--segments many"),
        (["fine", "--rounds", "0"], "--rounds 0"),
        (["fine", "--bound", "soon"], "--bound soon"),
        (["fine", "--replay", "t1.x"], "leave out fine"),
        (["--replay", "t1.x", "--rounds", "2"], "leave out --rounds"),
        (["--replay", ""], "the token is empty"),
        (["fine", "--segments", "1-100000"], "--segments 1-100000: at most 64"),
        (["fine", "--segments", "9" * 5000], "at most 64"),
        (["fine", "--rounds", "100000000"], "--rounds 100000000: at most 64"),
        (["fine", "--layers", "1000000000"], "--layers 1000000000: at most 512"),
        (["fine", "--depth", "1000000000"], "--depth 1000000000: at most 65536"),
        (["fine", "--budget", "1000000000"], "--budget 1000000000: at most 1000000"),
        (["fine", "--bound", "1000000000000"], "--bound 1000000000000"),
        (["fine", "--bound", "100000"], "--bound 100000: at most 65536"),
        (["fine", "--capacity", "9" * 23], "leave it out for room for every kernel"),
        (["fine", "--world", "99999999999977"], "at most 64"),
        (["any.txt", "--world", "2"], "--world means nothing for a file of programs (any.txt)"),
        (["any.txt", "--segments", "1-2"], "--segments means nothing for a file of programs"),
        ([".", "--bound", "span"], "--bound means nothing for a recorded run"),
        (["--replay", "nonsense"], "not a token"),
        (["--replay", "t1.eJw"], "--replay"),
        (["nowhere.txt"], "nowhere.txt"),
    ],
)
def test_unusable_input_is_one_line_and_exit_code_2(check: Check, argv: list[str], says: str) -> None:
    code, out, err = check(*argv)
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("turnstile: ")
    assert err.count("\n") == 1


def test_defaults_follow_the_widths_given() -> None:
    assert [world.size for world in parse("check", ["fine", "--adp", "4"]).worlds] == [4]
    assert parse("check", ["fine", "--world", "3"]).worlds[0].adp == 3
    with pytest.raises(UsageError, match="--adp 0"):
        parse("check", ["fine", "--adp", "0"])


# -- the process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_child(tmp_path: Path, number: signal.Signals) -> None:
    here = tmp_path / "pid"
    spec = policy(
        tmp_path, "pass", f"import os, time\nopen({str(here)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "turnstile", "check", spec], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (here.exists() and here.read_text()):
            time.sleep(0.02)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, stdout) == (130, "")
    assert stderr.startswith("turnstile: ")
    assert stderr.count("\n") == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(here.read_text()), 0)


def given_names() -> list[str]:
    ranks = ["world", "adp", "ep", "gather", "route"]
    return [*ranks, "layers", "segments", "rounds", "capacity", "depth", "bound", "budget"]


def test_help_names_every_flag_and_exit_code(check: Check) -> None:
    code, out, _ = check("--help")
    assert code == 0
    flags = [f"--{name}" for name in (*given_names(), "replay", "json")]
    for flag in flags:
        assert flag in out
    assert "3 inconclusive" in " ".join(out.split())
