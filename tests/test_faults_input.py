"""Unusable input that used to end a command silently, late, or with a traceback: one line and exit code 2 each."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel import files
from kernel.errors import UsageError
from kernel.sched import registry
from models.config import read_config
from rollout import cli, resume
from rollout.ranks import faults, host_memory
from rollout.report import files as report_files
from rollout.trace import read as trace
from tests.users import Repository

if TYPE_CHECKING:
    from collections.abc import Callable

HOUSE = Path(__file__).resolve().parent.parent


def turnstile(*arguments: object, prepare: Callable[[], None] | None = None) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "turnstile", *map(str, arguments)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(HOUSE)}, preexec_fn=prepare, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("call", ["os._exit(0)", "os.fork()", "os.abort()", "os.forkpty()"])
def test_a_policy_that_leaves_or_splits_while_it_is_imported(call: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import os\n\n{call}\n")
    code, out, err = turnstile("rollout", "--policy", f"{file}:Mine", "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    what = f"SystemExit: a policy must not call {call.partition('(')[0]}"
    assert err.startswith(f"turnstile: policy file {file}:3: {what}")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\nwhile True:\n    x += 1\n", r"[23]"),
        ("import threading\nthreading.Event().wait()\n", "2"),
        ("import itertools\nsum(itertools.repeat(0))\n", "2"),
        ("from kernel.sched.fine import Fine\n\nclass Mine(Fine):\n    name = 'mine'\n"
         "    def __init__(self, limits):\n        while True: pass\n", "6"),
    ],
    ids=["loops", "waits", "loops in C", "loops when made"],
)  # fmt: skip
def test_a_policy_whose_import_does_not_end(
    text: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(text)
    monkeypatch.setattr("verify.trial.supervise.SILENCE_S", 1.0)
    assert cli.main(["rollout", "--policy", f"{file}:Mine", "--out", str(out)]) == 2
    written, err = capfd.readouterr()
    assert (written, err.count("\n")) == ("", 1)
    assert re.search(rf"policy {file}:Mine: \S*/mine\.py:{line} does not return .* \(for 1 s\)", err)
    assert not out.exists()


INSTALLED = """
import sys, sysconfig, verify.trial.supervise
paths = {**sysconfig.get_paths(), "purelib": sys.argv.pop(1)}
sysconfig.get_paths = lambda *given, **named: paths
verify.trial.supervise.SILENCE_S = 2.0
from rollout.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "before", "inside", "line"),
    [
        (("rollout", "--policy"), "while True: pass", "pass", 2),
        (("check",), "while True: pass", "pass", 2),
        (("check",), "", "while True: pass", 6),
    ],
    ids=["rollout at import", "check at import", "check in a hook"],
)
def test_a_policy_that_is_installed_among_the_libraries_is_watched_as_any(
    asked: tuple[str, ...], before: str, inside: str, line: int, tmp_path: Path
) -> None:
    theirs = Repository(tmp_path)
    info, package = theirs.site / "installed-1.dist-info", theirs.site / "installed"
    for folder in (info, package):
        folder.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[turnstile.policies]\nmine = installed.mine:Mine\n")
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text(
        f"from kernel.sched.fine import Fine\n{before}\n"
        f"class Mine(Fine):\n    name = 'mine'\n    def span(self, now):\n        {inside}\n        return 1\n"
    )
    ended = theirs.run("-c", INSTALLED, str(theirs.site), *asked, "mine")
    assert f"installed/mine.py:{line}" in ended.stdout + ended.stderr, ended
    assert ended.returncode == (2 if asked[0] == "rollout" else 1)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def __init__(self, limits): raise SystemExit(0)", r"cannot be made, \S+mine\.py:3: SystemExit: 0$"),
        ("class Odd(BaseException): pass\n    def __init__(self, limits): raise Mine.Odd('hm')",
         r"cannot be made, \S+mine\.py:4: Odd: hm$"),
        ("def __init__(self, limits): raise KeyboardInterrupt", r"cannot be made, \S+mine\.py:3: KeyboardInterrupt$"),
        ("def __init__(self): pass", r"cannot be made, Mine\.__init__ \(\S+mine\.py:3\): TypeError: "),
        ("name = 7", r"has the name 7: it must be text"),
        ("guarantees = None", r"has no guarantees: subclass"),
        ("route = 'zigzag'", r"has the route 'zigzag': choose one of auto, paper"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_made(body: str, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(f"from kernel.sched.fine import Fine\nclass Mine(Fine):\n    {body}\n")
    assert cli.main(["rollout", "--policy", f"{file}:Mine", "--out", str(out)]) == 2
    written, err = capfd.readouterr()
    assert (written, err.count("\n")) == ("", 1)
    assert re.search(says, err.strip())
    assert not out.exists()


@pytest.mark.slow
def test_what_a_policy_prints_is_no_part_of_the_json(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\nfrom kernel.sched.fine import Fine\nprint('at import')\nclass Mine(Fine):\n    name = 'mine'\n"
        "    def __init__(self, limits):\n        super().__init__(limits)\n        print('made')\n"
        "    def span(self, now):\n        print('in a hook')\n        os.write(1, b'to the descriptor\\n')\n"
        "        return 1\n"
    )
    small = ("--fraction", "0.02", "--turns", "2", "--length-scale", "0.02", "--time-scale", "0")
    code, out, err = turnstile("rollout", "--policy", f"{file}:Mine", *small, "--json", "--out", tmp_path / "o")
    assert code == 0, err
    assert json.loads(out)
    for said in ("at import", "made", "in a hook", "to the descriptor"):
        assert said in err


def test_what_a_policy_takes_from_os_works_once_it_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os\nfrom os import fork as split\nfrom kernel.sched.planner import Planner\n\n"
                    "class Mine(Planner):\n    name = 'mine'\n    child = staticmethod(split)\n")  # fmt: skip
    before = os.fork
    made = registry._from_file(f"{file}:Mine")
    assert os.fork is before
    script = tmp_path / "forks.py"
    script.write_text("import os, sys\nfrom kernel.sched import registry\n"
                      f"made = registry._from_file('{file}:Mine')\npid = made.child()\n"
                      "os._exit(7) if pid == 0 else None\n"
                      "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n")  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(HOUSE)}
    assert subprocess.run([sys.executable, script], env=env, check=False).returncode == 7
    assert made.name == "mine"


def test_too_few_open_files_are_one_line(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))

    code, _, err = turnstile("rollout", "--out", tmp_path / "out", prepare=few)
    assert code != 0
    assert "Traceback" not in err
    assert err.count("\n") == 1
    assert "open" in err


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o755])
def test_a_directory_below_one_that_others_can_change(mode: int, tmp_path: Path) -> None:
    above = tmp_path / "above"
    (above / "mine").mkdir(parents=True)
    above.chmod(mode)
    try:
        if mode == 0o777:
            with pytest.raises(UsageError, match=r"above it can be changed by others \(mode 777\), who could"):
                report_files.directory(above / "mine" / "out")
        else:
            assert report_files.directory(above / "mine" / "out").is_dir()
    finally:
        above.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_a_directory_below_one_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, -1)
    with pytest.raises(UsageError, match="above it belongs to another user"):
        report_files.directory(tmp_path / "theirs" / "out")


@pytest.mark.parametrize("name", ["requests.jsonl", "run.json", "record"])
def test_a_link_in_a_fresh_directory_is_not_followed(name: str, tmp_path: Path) -> None:
    target, out = tmp_path / "target", tmp_path / "out"
    out.mkdir(mode=0o700)
    target.write_text("precious")
    if name == "run.json":
        target.unlink()  # a run there would be one to resume
    (out / name).symlink_to(target)
    with pytest.raises(UsageError, match=f"{name} in it is a link, which is not followed: remove it"):
        report_files.directory(out)
    assert not target.exists() or target.read_text() == "precious"


@pytest.mark.parametrize("wait", [1e300, 7 * 86_400_000 + 1])
def test_a_wait_without_end_in_a_trace(wait: float, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    lines = [json.loads(line) for line in _two_turns()]
    lines[1]["wait_ms"] = wait
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match=r"t\.jsonl:2: field 'wait_ms' is .*: it must be at most 604,800,000 ms"):
        trace.read(file)
    lines[1]["wait_ms"] = 7 * 86_400_000
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert trace.read(file).trajectories


@pytest.mark.parametrize("named", ["/dev/zero", "/dev/full", "."])
def test_a_trace_that_is_no_file(named: str) -> None:
    with pytest.raises(UsageError, match=f"--trace {named}: not a regular file or a pipe; give a JSONL file or"):
        trace.read(named)


def test_a_pipe_is_a_trace_unless_nobody_writes_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"pipe: a pipe that nobody wrote to for 0\.1 s"):
        trace.read(tmp_path / "pipe")
    monkeypatch.setattr(files, "PIPE_S", 60)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(trace.read, tmp_path / "pipe")
        (tmp_path / "pipe").write_text("\n".join(_two_turns()))
        assert len(reading.result().trajectories[0].turns) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_without_end_and_a_line_without_end(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "LARGEST", 2 << 20)
    monkeypatch.setattr(trace, "LONGEST_LINE", 1 << 20)
    file = tmp_path / "t.jsonl"
    for size, says in ((3 << 20, "than 2 MiB"), ((1 << 20) + 1, r":2: a line of more than 1 MiB")):
        data = b"\n" + b"x" * size
        file.write_bytes(gzip.compress(data) if packed else data)
        with pytest.raises(UsageError, match=says):
            trace.read(file)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_a_checkpoint(name: str, tmp_path: Path) -> None:
    from models.tiny import write_checkpoint
    from models.weights.checkpoint import Checkpoint
    from rollout import fingerprint

    model = write_checkpoint(tmp_path / "model")
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    calls = [read_config, fingerprint.of] if name == "config.json" else [Checkpoint, fingerprint.of]
    for call in calls[: 1 if name.endswith("index.json") else 2]:
        with pytest.raises(UsageError, match=f"{name}: not a regular file; "):
            call(model)


def test_a_pipe_as_a_policy(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.py")
    with pytest.raises(UsageError, match=r"mine\.py: not a regular file"):
        registry.load(f"{tmp_path / 'mine.py'}:Mine")


@pytest.mark.parametrize("tokens", [999_999_999_999, 99_999_999_999_999_999_999])
def test_a_pool_larger_than_memory_is_refused_before_ranks_start(tokens: int, tmp_path: Path) -> None:
    code, out, err = turnstile("rollout", "--kv-tokens", tokens, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err.startswith(f"turnstile: --kv-tokens {tokens} takes ")
    assert "GiB can be had: at most " in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_a_pool_may_have(tmp_path: Path) -> None:
    from kernel.topology import World
    from models.tiny import write_checkpoint
    from models.weights.shards import kv_bytes_per_token

    def put(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert host_memory.available(tmp_path) is None
    put("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert host_memory.available(tmp_path) == 4000 << 10
    put("proc/self/cgroup", "4:memory,x:/a/b\n3:cpuset:/\n0::/c/d\n")
    put("sys/fs/cgroup/c/memory.max", "2000000\n")
    put("sys/fs/cgroup/c/d/memory.max", "max\n")
    assert host_memory.available(tmp_path) == 2_000_000
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n")
    memory = host_memory.available(tmp_path)
    assert memory == 1_000_000

    config, world = read_config(write_checkpoint(tmp_path / "model")), World(2, 1, 1)
    fits = memory // (2 * kv_bytes_per_token(config, world)) // 16 * 16
    more = {"block_size": 16, "ranks": 2, "memory": memory}
    host_memory.check(config, world, "float32", kv_tokens=fits, **more)
    with pytest.raises(UsageError, match=rf"for 2 ranks on this host, .*: at most --kv-tokens {fits} fits"):
        host_memory.check(config, world, "float32", kv_tokens=fits + 16, **more)
    with pytest.raises(UsageError, match=rf"^--kv-tokens is {fits + 16} by default, which takes .*-tokens {fits} fits"):
        host_memory.check(config, world, "float32", kv_tokens=fits + 16, default=True, **more)
    none = more | {"memory": 1000}
    with pytest.raises(UsageError, match="fewer ranks"):
        host_memory.check(config, world, "float32", kv_tokens=fits, **none)


def test_the_default_pool_is_held_against_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from models.tiny import write_checkpoint
    from rollout.engine import Engine

    model = write_checkpoint(tmp_path / "model")
    Engine(model)
    monkeypatch.setattr(host_memory, "available", lambda: 1_000_000)
    with pytest.raises(UsageError, match=r"--kv-tokens is 32768 by default, .* at most --kv-tokens \d+ fits"):
        Engine(model)



def test_an_allocation_that_fails_is_one_line() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(1 << 58)
    told = faults.explained(caught.value, 3, "while it loaded the model")
    assert str(told).startswith(
        "rank 3 ran out of memory while it loaded the model (1,073,741,824.0 GiB more asked for)"
    )
    assert "--kv-tokens" in str(told)
    assert faults.explained(RuntimeError("else"), 3, "while it loaded the model") is None


@pytest.mark.parametrize("policy", [7, None, Path("fine")])
def test_an_engine_s_policy_that_is_no_text(policy: object, tmp_path: Path) -> None:
    from rollout.engine import Engine

    with pytest.raises(UsageError, match=r"policy=.*: must be a name or path/file\.py:Class, as text"):
        Engine(tmp_path, policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "pipe"])
def test_a_run_json_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(text) if text != "pipe" else os.mkfifo(file)
    with pytest.raises(UsageError, match=r"--resume: .*run\.json cannot be read \(.+\): put .* or start anew"):
        resume.check(tmp_path, {})
    file.unlink()
    with pytest.raises(UsageError, match="holds no run"):
        resume.check(tmp_path, {})


def _two_turns() -> list[str]:
    """The first two requests of a conversation of the trace that ships."""
    lines = (HOUSE / "rollout" / "data" / "paper_replay_1265.jsonl").read_text().splitlines()
    first = json.loads(lines[0])["conversation_id"]
    return [line for line in lines if json.loads(line)["conversation_id"] == first][:2]


def test_more_layers_than_any_model_has(tmp_path: Path) -> None:
    from models.tiny import write_checkpoint

    model = write_checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1_000_000_000}))
    with pytest.raises(UsageError, match=r"num_hidden_layers is 1,000,000,000: no model has more than 10,000"):
        read_config(model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(bad: float, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    from kernel.topology import World
    from models.tiny import write_checkpoint
    from models.weights.checkpoint import Checkpoint
    from models.weights.qwen3_moe import read_weights

    model = write_checkpoint(tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = bad
    save_file(tensors, file, metadata={"format": "pt"})
    what = r"model\.norm\.weight holds numbers that are none"
    with Checkpoint(model) as opened, pytest.raises(UsageError, match=what):
        read_weights(opened, read_config(model), World(1), 0, torch.float32)


@pytest.mark.parametrize("hits", [1, 2])
@pytest.mark.parametrize("name", ["rollout", "rollout.cli", "rollout.args"])
@pytest.mark.parametrize("inside", ["", "exec"])  # of a string: a dataclass is made by that
def test_an_interrupt_while_modules_are_loaded_is_no_traceback(
    hits: int, name: str, inside: str, tmp_path: Path
) -> None:
    hit = f"[os.kill(os.getpid(), signal.SIGINT) for _ in range({hits})]"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nclass Finder:\n    def find_spec(self, name, *rest):\n"
        f"        if name == {name!r}: {f'exec({hit!r})' if inside else hit}\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    # As a module: a script's exit code is its own, whatever CPython remembers of interrupts.
    done = subprocess.run(
        [sys.executable, "-m", "turnstile", "rollout", "--help"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{HOUSE}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "turnstile: interrupted\n")


def test_an_interrupt_that_a_finaliser_swallows_comes_again(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys, time\nclass Ends:\n    def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "class Finder:\n    def find_spec(self, name, *rest):\n"
        "        if name == 'rollout.cli':\n            Ends()\n            time.sleep(600)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "turnstile", "rollout", "--help"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{HOUSE}"}, timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "turnstile: interrupted\n")
