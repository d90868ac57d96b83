"""The commands from argument to exit code, on a fake engine: output, files, one-line errors, interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import RankLost, UsageError
from kernel.journal import Journal
from kernel.record import Recorder, ring_path
from kernel.request import Phase
from rollout import campaign, cli
from rollout.args import COMPARED, DEMO, parse
from rollout.replay import read_rows
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable

for needed in ("uvloop", "numpy", "safetensors", "matplotlib"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[1]
SMALL = ("--fraction", "0.03", "--turns", "3", "--length-scale", "0.02", "--time-scale", "0")

Engines = list[FakeEngine]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engines]:
    """Put fake engines, made with the settings given, in the place of the real one; returns those that are made."""

    def install(**settings: Any) -> Engines:
        made: Engines = []
        real = campaign._engine_part

        def make(model: Path, world: Any, **options: Any) -> FakeEngine:
            defaults: dict[str, Any] = {"prefill_s": 0.0, "step_s": 0.0, "clock": time.monotonic_ns}
            made.append(FakeEngine(model, world, options["policy"], settings=options, **(defaults | settings)))
            return made[-1]

        monkeypatch.setattr(
            campaign, "_engine_part", lambda module, name: make if name == "Engine" else real(module, name)
        )
        return made

    return install


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def write_record(policy: str, folder: Path) -> None:
    """A record of two iterations, 3 ms apart, beside a segment."""
    now = [0]
    journal = Journal(Recorder(ring_path(folder, 0), rank=0, groups={}, clock=lambda: now[0]))
    for round_ in range(2):
        for what, ms in (("start", 10), ("finish", 7)):
            if what == "start":
                journal.submitted(f"D {round_}", Phase.D, (), 1, 1, 1)
            journal.device(Phase.D, f"D {round_}", what)
            now[0] += (ms if what == "start" else 3) * 1_000_000
    journal.close()


def test_json_is_one_object_and_nothing_else(
    engines: Callable[..., Engines], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engines(on_policy=write_record)
    assert cli.main(["rollout", *SMALL, "--json", "--out", str(tmp_path / "run")]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    [policy] = json.loads(out)["policies"]
    assert json.loads(out).keys() == {"policies"}
    assert policy["policy"] == "fine"
    assert policy["completed"] == 12
    for name in ("ttft_ms", "e2el_ms", "itl_ms", "tpot_ms", "trajectory_completion_s", "decode_wait_ms"):
        assert {f"{statistic}_{name}" for statistic in ("mean", "median", "p99")} <= policy.keys()
    assert {"makespan_s", "request_throughput", "output_throughput", "kv_cache_hit_percent"} <= policy.keys()
    assert policy["mean_decode_wait_ms"] == 3
    assert (policy["mean_rendezvous_ms"], policy["mean_permit_wait_ms"]) == (None, None)
    assert policy["pd_overlap_ratio"] == 0


def test_directory_holds_rows_report_pictures_and_what_was_run(
    engines: Callable[..., Engines], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engines(on_policy=write_record)
    out = tmp_path / "run"
    assert cli.main(["rollout", *SMALL, "--world", "4", "--adp", "2", "--ep", "4", "--out", str(out)]) == 0
    rows = list(read_rows(out / "requests.jsonl"))
    assert len(rows) == 12
    assert {(row.policy, row.repeat) for row in rows} == {("fine", 0)}
    run, report = load(out / "run.json"), load(out / "report.json")
    assert run["status"] == report["status"] == "complete"
    assert run["command"][0] == "turnstile"
    assert run["world"] | {"size": 4, "adp": 2, "ep": 4, "atp": 2, "etp": 1} == run["world"]
    assert run["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run["trace"]["sha256"].startswith("6498525c")
    assert report["policies"][0]["total_output_tokens"] == sum(row.output_tokens for row in rows)
    for name in ("completion.png", "lanes-fine.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in out.iterdir()} == {
        "model", "record", "requests.jsonl", "run.json", "report.json", "completion.png", "lanes-fine.png",
    }  # fmt: skip
    assert "Makespan (s):" in capfd.readouterr().out


def test_compare_keeps_one_engine_and_gives_each_policy_the_same_work(
    engines: Callable[..., Engines], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = engines()
    assert cli.main(["compare", *SMALL, "--span", "2", "--out", str(tmp_path / "run")]) == 0
    [engine] = made
    names = [*COMPARED[:3], "fine:span=2", "adaptive"]
    assert [policy for policy, _ in engine.policies] == names
    folders = [folder for _, folder in engine.policies]
    assert len(set(folders)) == len(names)
    assert all(folder is not None and folder.parent == tmp_path / "run" for folder in folders)
    assert engine.flushes == len(names)
    assert not engine.open
    # After the warm-up (one short turn for the one replica) the same prompts, policy by policy.
    asked = [(call.prompt, call.params.max_tokens) for call in engine.calls][1:]
    each = len(asked) // len(names)
    assert all(sorted(asked[at * each : (at + 1) * each]) == sorted(asked[:each]) for at in range(len(names)))
    out, err = capfd.readouterr()
    title, *_ = out.splitlines()
    assert title.startswith("paper_replay_1265: 4 of 128 conversations, 12 requests")
    assert "--turns 3 --length-scale 0.02 --time-scale 0 --seed 0" in title
    assert [line.split()[0] for line in out.splitlines() if line.startswith(tuple(names))] == names
    assert "not GPU speed" in out
    assert err.count("no waits are reported") == len(names)  # the fake left no records
    assert err.count("\n") == len(names)


def test_repeats_report_median_and_spread_and_each_run(
    engines: Callable[..., Engines], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = engines(on_policy=write_record)
    args = ["compare", *SMALL, "--policy", "fine", "--policy", "normal", "--repeat", "3", "--json"]
    assert cli.main([*args, "--out", str(tmp_path / "run")]) == 0
    assert [policy for policy, _ in made[0].policies] == ["fine", "normal"] * 3
    assert len({folder for _, folder in made[0].policies}) == 6
    policies = json.loads(capfd.readouterr().out)["policies"]
    report = load(tmp_path / "run" / "report.json")
    for policy in policies:
        spans = sorted(run["makespan_s"] for run in report["runs"] if run["policy"] == policy["policy"])
        assert len(spans) == policy["repeats"] == 3
        assert policy["makespan_s"] == spans[1]
        assert policy["makespan_s_iqr"] == pytest.approx((spans[2] - spans[0]) / 2)
        assert policy["completed_iqr"] == 0


def test_turns_that_end_early_are_a_failed_run_that_is_still_reported(
    engines: Callable[..., Engines], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engines(cut={2: 0}, on_policy=write_record)
    assert cli.main(["rollout", *SMALL, "--json", "--out", str(tmp_path / "run")]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["policies"][0]["failed"] == 1
    assert err == "turnstile: fine: c000 turn 0 ended before the recorded length: see requests.jsonl\n"


def test_a_lost_rank_is_a_failed_run_whose_rows_are_kept(
    engines: Callable[..., Engines], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engines(fail=(9, RankLost("rank 2 exited with code 3\nsee its log")))
    out = tmp_path / "run"
    assert cli.main(["rollout", *SMALL, "--json", "--out", str(out)]) == 1
    assert capfd.readouterr() == ("", "turnstile: rank 2 exited with code 3 see its log\n")
    assert load(out / "run.json")["status"] == load(out / "report.json")["status"] == "failed"
    rows = list(read_rows(out / "requests.jsonl"))
    assert 0 < len(rows) < 12
    assert load(out / "report.json")["policies"][0]["completed"] == len(rows)


def test_input_that_the_engine_refuses_leaves_no_run(
    engines: Callable[..., Engines], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    engines(fail=(1, UsageError("does not fit the KV pool")))
    assert cli.main(["rollout", *SMALL, "--out", str(out)]) == 2
    assert capfd.readouterr() == ("", "turnstile: does not fit the KV pool\n")
    engines()  # and the directory can be used again
    assert cli.main(["rollout", *SMALL, "--out", str(out)]) == 0
    assert cli.main(["rollout", *SMALL, "--out", str(out)]) == 2
    assert "it holds a run already" in capfd.readouterr().err


def test_default_directory_is_named_by_the_time(
    engines: Callable[..., Engines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["rollout", *SMALL, "--json"]) == 0
    assert cli.main(["rollout", *SMALL, "--json"]) == 0
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2
    assert all(len(run.name) >= len("20260101T000000Z") and (run / "report.json").exists() for run in runs)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["rolout"], "unknown command 'rolout': did you mean `turnstile rollout`?"),
        (["chek"], "unknown command 'chek'"),
        (["--wrld"], "unknown option '--wrld'"),
        (["rollout", "--polcy", "fine"], "unknown argument '--polcy': did you mean --policy?"),
        (["rollout", "--demo"], "unknown argument '--demo'"),
        (["rollout", "extra"], "unknown argument 'extra'"),
        (["rollout", "--policy", "fin"], "unknown policy 'fin': did you mean fine"),
        (["rollout", "--policy", "nowhere.py:Mine"], "policy file nowhere.py"),
        (["rollout", "--policy", "fine:spam=2"], "has no option 'spam'"),
        (["rollout", "--policy", "fine", "--policy", "fine"], "--policy fine is given twice"),
        (["rollout", "--policy", "normal", "--span", "2"], "--span 2 applies to"),
        (["rollout", "--world", "4", "--adp", "3"], "--adp 3 does not divide --world 4"),
        (["rollout", "--world", "9" * 26, "--adp", "7"], "--adp 7 does not divide --world 999"),
        (["rollout", "--model", "A" * 5000], "no file system takes so long a name"),
        (["hang", "A" * 5000], "no file system takes so long a name"),
        (["top", "A" * 5000], "no file system takes so long a name"),
        (["trace", "A" * 5000], "no file system takes so long a name"),
        (["check", "A" * 5000], "no file system takes so long a name"),
        (["rollout", "--world", "four"], "--world"),
        (["rollout", "--route", "nowhere"], "--route"),
        (["rollout", "--repeat", "0"], "--repeat 0"),
        (["rollout", "--rows", "0"], "--rows 0"),
        (["rollout", "--fraction", "2"], "--fraction 2"),
        (["rollout", "--trace", "nowhere.jsonl"], "--trace nowhere.jsonl"),
        (["rollout", "--model", "nowhere"], "nowhere"),
        (["rollout", "--kv-tokens", "600", "--length-scale", "0.1"], "lower --length-scale"),
    ],
)
def test_unusable_input_is_one_line_and_exit_code_2(
    engines: Callable[..., Engines], argv: list[str], says: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    made = engines()
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert says in err
    assert err.startswith("turnstile: ")
    assert err.count("\n") == 1
    assert made == []
    assert not list(tmp_path.glob("runs/*/run.json"))


def test_a_trajectory_that_outgrows_the_model_is_refused_with_a_scale_that_fits(
    engines: Callable[..., Engines], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from models.tiny import write_checkpoint

    engines()
    model = write_checkpoint(tmp_path / "model", max_positions=300)
    args = [
        "rollout",
        "--model",
        str(model),
        "--fraction",
        "0.05",
        "--time-scale",
        "0",
        "--out",
        str(tmp_path / "run"),
        "--json",
    ]
    assert cli.main([*args, "--length-scale", "0.1"]) == 2
    message = capfd.readouterr().err
    assert "the model has positions 300" in message
    scale = message.partition("about ")[2].partition(")")[0]
    assert cli.main([*args, "--length-scale", str(float(scale) * 0.95)]) == 0


def test_abort_on_cycle_is_a_live_check() -> None:
    for flags, wanted in ([], (False, False)), (["--live-check"], (True, False)), (["--abort-on-cycle"], (True, True)):
        options = parse("rollout", flags)
        assert (options.live_check, options.abort_on_cycle) == wanted


def test_demo_has_its_defaults_and_explicit_flags_win() -> None:
    demo = parse("compare", ["--demo"])
    assert (demo.world.size, demo.world.adp, demo.world.ep) == (4, 2, 4)
    assert demo.policies == COMPARED
    assert (demo.shape.fraction, demo.shape.turns) == (DEMO["fraction"], DEMO["turns"])
    other = parse("compare", ["--demo", "--world", "2", "--ep", "2", "--turns", "1", "--policy", "fine"])
    assert (other.world.size, other.world.adp, other.world.ep) == (2, 2, 2)
    assert (other.shape.turns, other.shape.length_scale) == (1, DEMO["length_scale"])
    assert other.policies == ("fine",)


def test_demo_is_a_slice_of_at_least_16_conversations_within_300_decode_iterations() -> None:
    from rollout.trace.read import read

    shaped = parse("compare", ["--demo"]).shape.apply(read("paper").trajectories)
    assert len(shaped) >= 16
    # A trajectory's turns follow each other; the longest chain bounds the iterations from below, and all together
    # from above. The margin to 300 is what turns lose while they wait for prefill.
    chains = [sum(turn.output_tokens for turn in trajectory.turns) for trajectory in shaped]
    assert max(chains) <= 100


def test_help_needs_neither_torch_nor_uvloop() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'uvloop', 'numpy', 'matplotlib', 'safetensors'): sys.modules[name] = None\n"
        "from turnstile.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for argv in (["--help"], ["rollout", "--help"], ["compare", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "--json" in done.stdout or "compare" in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", code, "rollout"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "`engine` extra" in done.stderr


def turnstile(cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "turnstile", *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_foreign_kernel_is_named(tmp_path: Path) -> None:
    assert turnstile(tmp_path, "--version").returncode == 0
    for name in ("kernel", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package ran')")
        done = turnstile(tmp_path, "rollout")
        assert done.returncode == 2
        assert done.stderr.startswith(f"turnstile: `{name}` at {tmp_path / name} is another package, not turnstile's")
        assert done.stderr.count("\n") == 1
        (tmp_path / name / "__init__.py").unlink()
        (tmp_path / name).rmdir()


def test_the_distribution_of_a_foreign_kernel_is_named(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "__init__.py").touch()
    info = tmp_path / "popcorn-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: popcorn\nVersion: 3.1\n")
    (info / "RECORD").write_text("kernel/__init__.py,,\n")
    done = turnstile(tmp_path, "--version")
    assert done.returncode == 2
    assert "is of the distribution popcorn, not turnstile's: pip uninstall popcorn" in done.stderr


SLOW = """
import sys, time
from rollout import campaign
from rollout.cli import main
from tests.fake_engine import FakeEngine
real = campaign._engine_part
def make(model, world, **options):
    return FakeEngine(model, world, step_s=0.02, clock=time.monotonic_ns)
campaign._engine_part = lambda module, name: make if name == "Engine" else real(module, name)
sys.exit(main(["compare", "--fraction", "0.1", "--length-scale", "0.05", "--time-scale", "0", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_keeps_what_is_done(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            if (out / "requests.jsonl").exists() and (out / "requests.jsonl").stat().st_size > 1000:
                break
            time.sleep(0.02)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, stderr
    rows = list(read_rows(out / "requests.jsonl"))
    assert rows
    assert stdout == ""
    assert stderr == (f"turnstile: interrupted: {len(rows)} of {5 * len_of_slice()} turns are done and kept in {out}\n")
    report = load(out / "report.json")
    assert report["status"] == load(out / "run.json")["status"] == "interrupted"
    assert [policy["policy"] for policy in report["policies"]] == ["normal"]
    assert report["policies"][0]["completed"] == len(rows)


def len_of_slice() -> int:
    """Turns of one policy in SLOW's slice."""
    from rollout.trace.read import read
    from rollout.trace.shape import Shape
    from rollout.trace.trajectory import counted

    return counted(Shape(fraction=0.1).apply(read("paper").trajectories))[0]


def test_a_failed_run_goes_on_where_it_ended(
    engines: Callable[..., Engines], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    again = ["compare", *SMALL, "--policy", "fine", "--policy", "normal", "--json", "--out", str(out), "--resume"]
    engines(fail=(21, RankLost("rank 1 was killed by signal 9")))
    assert cli.main(again[:-1]) == 1
    before = list(read_rows(out / "requests.jsonl"))
    assert {row.policy for row in before} == {"fine", "normal"}
    with (out / "requests.jsonl").open("ab") as file:
        file.write(b'{"policy":"normal","rep')  # the launcher was killed as well
    second = engines(on_policy=write_record)
    assert cli.main(again) == 0
    [engine] = second
    assert [policy for policy, _ in engine.policies] == ["normal"], "the first policy had finished"
    rows = list(read_rows(out / "requests.jsonl"))
    assert len({(row.policy, row.trajectory, row.turn) for row in rows}) == len(rows) == 24
    kept = [row for row in rows if row in before]
    assert {(row.policy, row.trajectory, row.turn) for row in kept} == {
        (row.policy, row.trajectory, row.turn) for row in before
    }
    asked = {(call.prompt, call.params.max_tokens) for call in engine.calls[1:]}  # but the warm-up
    assert len(asked) == len(engine.calls) - 1 == 24 - len(before), "no turn is asked for twice"
    last = max((row.finished_ns for row in kept if row.policy == "normal"), default=0)
    assert all(row.released_ns >= last for row in rows if row.policy == "normal" and row not in before)
    assert load(out / "run.json")["status"] == "complete"
    assert all(row.released_ns <= row.submitted_ns <= row.token_ns[0] <= row.finished_ns for row in rows)
    assert load(out / "run.json")["resumed"] == len(kept)
    capfd.readouterr()
    for argv, says in (
        (again, "is complete: there is nothing left to do"),
        ([*again[:-2], str(tmp_path / "other"), "--resume"], "holds no run (run.json)"),
        (["rollout", "--resume"], "--resume goes on with the run in a directory: name it with --out DIR"),
    ):
        assert cli.main(argv) == 2
        err = capfd.readouterr().err
        assert says in err
        assert err.count("\n") == 1


def test_another_run_is_not_resumed(
    engines: Callable[..., Engines], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    engines(fail=(9, RankLost("rank 1 was killed by signal 9")))
    assert cli.main(["rollout", *SMALL, "--out", str(out)]) == 1
    rows = (out / "requests.jsonl").read_bytes()
    capfd.readouterr()
    other = (
        (["--rows", "7"], "rows 64"),
        (["--seed", "3"], "trace.seed 0, and this command says 3"),
        (["--policy", "normal"], "policies"),
    )
    for changed, name in other:
        assert cli.main(["rollout", *SMALL, *changed, "--out", str(out), "--resume"]) == 2
        err = capfd.readouterr().err
        assert f"--resume: the run in {out} has {name}" in err
        assert err.count("\n") == 1
    assert (out / "requests.jsonl").read_bytes() == rows
