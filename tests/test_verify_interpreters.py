"""The same verdicts on every interpreter, without torch, and whatever order Python gives its hashes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
POLICIES = Path(__file__).parent / "data" / "policies"
MINORS = (11, 12, 13)
BASE = ("networkx", "rich")
"""The base install, see pyproject.toml."""

SMALL = ("--world", "2", "--segments", "1")
CASES = (
    ("fine", "--world", "2", "--segments", "1-2", "--layers", "4"),
    ("lean", *SMALL),
    ("normal", *SMALL, "--bound", "1"),
    ("unordered", *SMALL, "--rounds", "1", "--capacity", "1"),
    *((f"{POLICIES / name}.py:Wrong", *SMALL) for name in ("forgets_permit", "returns_plan", "raises_turn", "sleeps")),
    *((f"{POLICIES / name}.py:Wrong", *SMALL) for name in ("endless_plan", "early_promotion", "greedy_span", "locks")),
)

BLOCKED = """
import sys
for name in ("torch", "uvloop", "numpy", "safetensors", "matplotlib", "transformers"): sys.modules[name] = None
from turnstile.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(python: str | Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`turnstile` in a process, with nothing beyond the base install."""
    return subprocess.run(
        [python, "-c", BLOCKED, *argv], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def checked(python: str | Path, *argv: str, **environment: str) -> dict[str, Any]:
    """What `turnstile check --json` prints."""
    done = run(python, "check", *argv, "--json", **environment)
    assert done.returncode in (0, 1), done.stderr
    plain: dict[str, Any] = json.loads(done.stdout)
    return plain


def candidates(minor: int) -> list[str]:
    """Interpreters of a version, on PATH and where version managers keep them."""
    named = shutil.which(f"python3.{minor}")
    kept = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
    own = [sys.executable] if sys.version_info[:2] == (3, minor) else []
    return [*own, *([named] if named else []), *map(str, kept)]


@cache
def environment(minor: int) -> Path | str:
    """The python of a virtual environment with the base install, made once and kept; or why there is none."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnstile-tests"
    why = f"no Python 3.{minor} is installed"
    for python in candidates(minor):
        asked = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:3], sep='.')"], capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        version = asked.stdout.strip()
        if not version.startswith(f"3.{minor}."):
            continue
        place = home / f"base-{version}"
        own = place / "bin" / "python"
        if (place / "ready").exists():
            return own
        shutil.rmtree(place, ignore_errors=True)
        install = [own, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", *BASE]
        for command in ([python, "-m", "venv", place], install):
            made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
            if made.returncode:
                lines = made.stderr.strip().splitlines() or ["no reason given"]
                why = f"no base install for Python {version}: {lines[-1]}"
                break
        else:
            (place / "ready").touch()
            return own
    return why


def without_paths(plain: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the interpreter: a line of its own library may be cited."""
    return json.loads(json.dumps(plain).replace(str(ROOT), ""))  # type: ignore[no-any-return]


def test_check_needs_the_base_install_only() -> None:
    plain = checked(sys.executable, "fine", *SMALL, "--layers", "4")
    assert (plain["verdict"], plain["certificate"]["verdict"]) == ("proved", "proved")


def test_a_counterexample_does_not_depend_on_hash_seeds() -> None:
    spec = f"{POLICIES / 'forgets_permit.py'}:Wrong"
    texts = {run(sys.executable, "check", spec, *SMALL, PYTHONHASHSEED=seed).stdout for seed in ("0", "1", "42")}
    assert len(texts) == 1
    assert "--replay t1." in texts.pop()


@pytest.mark.slow
@pytest.mark.parametrize("argv", [CASES[2], CASES[3]], ids=lambda argv: argv[0])
def test_a_schedule_does_not_depend_on_hash_seeds(argv: tuple[str, ...]) -> None:
    texts = {run(sys.executable, "check", *argv, PYTHONHASHSEED=seed).stdout for seed in ("0", "7")}
    assert len(texts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("minor", MINORS[1:])
@pytest.mark.parametrize("argv", CASES, ids=lambda argv: Path(argv[0]).name.partition(":")[0])
def test_verdicts_are_those_of_the_oldest_interpreter(argv: tuple[str, ...], minor: int) -> None:
    one, other = environment(MINORS[0]), environment(minor)
    for each in (one, other):
        if isinstance(each, str):
            pytest.skip(each)
    assert without_paths(checked(one, *argv)) == without_paths(checked(other, *argv))
