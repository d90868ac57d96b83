"""The house's own rules: what loads without torch, whose packages these are, what the repository may not contain."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from kernel import errors

HOUSE = Path(__file__).resolve().parent.parent
PACKAGES = ("kernel", "models", "verify", "rollout", "turnstile")
WITH_TORCH = ("kernel.comm", "kernel.device", "models", "rollout.engine")
"""Where torch may be loaded; the rest of the kernel, verify and the command must do without."""


def house_files() -> list[Path]:
    """Files that are, or would be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=HOUSE,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        found = [HOUSE / name for name in listed.stdout.split("\0") if name]
    else:
        found = [
            path for folder in (*PACKAGES, "tests", "docs", "bench", "examples") for path in (HOUSE / folder).rglob("*")
        ]
        found += HOUSE.glob("*")
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def modules(package: str) -> list[str]:
    names = [package]
    for found in pkgutil.walk_packages([str(HOUSE / package)], f"{package}."):
        names.append(found.name)
    return [name for name in names if not name.startswith(WITH_TORCH) and not name.endswith("__main__")]


BLOCKED = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {"torch", "uvloop", "numpy", "safetensors", "matplotlib", "transformers"}:
                raise ModuleNotFoundError(f"{name} is not in the base install", name=name)

    sys.meta_path.insert(0, Blocker())
    failed = []
    for name in sys.argv[1:]:
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            failed.append(f"{name}: {error}")
    sys.exit("\\n".join(failed) or None)
"""


@pytest.mark.parametrize("package", ["kernel", "verify", "turnstile"])
def test_the_base_install_loads_without_torch(package: str) -> None:
    names = modules(package)
    loaded = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BLOCKED), *names, *["rollout.cli"] * (package == "turnstile")],
        cwd=HOUSE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert package != "kernel" or {"kernel.step", "kernel.sched.fine", "kernel.record.reader"} <= set(names)


def test_the_blocker_blocks() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BLOCKED), "kernel.device.cpu"],
        cwd=HOUSE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "torch is not in the base install" in loaded.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_the_packages_are_ours(package: str) -> None:
    module = import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == HOUSE / package
    assert (HOUSE / package / "py.typed").is_file()


def test_the_tree_of_errors_is_complete() -> None:
    """The module's docstring draws every class under its base, with a line that says when it is raised."""
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = [(-1, "Exception")]
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        if found := re.match(r"([ │├└─]{4,})(\w+)( +\S.*)?$", line):
            indent, name, when = len(found[1]), found[2], found[3]
            while above[-1][0] >= indent:
                above.pop()
            drawn[name] = above[-1][1]
            above.append((indent, name))
            assert when or name == "TurnstileError", f"{name} does not say when it is raised"
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    assert drawn == {name: kind.__base__.__name__ for name, kind in classes.items() if kind.__base__}
    assert all(kind.__doc__ for kind in classes.values())


def test_no_file_has_more_than_500_lines() -> None:
    long = {
        path.name: lines
        for path in house_files()
        if path.suffix == ".py" and (lines := len(path.read_text().splitlines())) > 500
    }
    assert not long


FORBIDDEN = (
    # Spelled so that this file does not contain what it looks for.
    r"(?<![\w.])/(?:wor[k]|far[m])/",
    r"--(?:extra-)?index-ur[l]",
    r"(?:pypi|pythonhosted|npmjs|pytorch)[.](?:org|com)/(?:simple|whl|packages)",
    r"(?:download|files|registry)[.](?:pytorch|pythonhosted|npmjs)[.]org",
)


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_path_of_a_machine_and_no_package_index_is_named(pattern: str) -> None:
    found = []
    for path in house_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(HOUSE)}: {match[0]}" for match in re.finditer(pattern, text)]
    assert not found


def test_the_pinned_versions_are_of_the_ranges() -> None:
    """Every direct dependency of development is pinned in constraints.txt, once."""
    pins = re.findall(r"^([\w.-]+)==\S+$", (HOUSE / "constraints.txt").read_text(), re.MULTILINE)
    names = [name.lower().replace("_", "-") for name in pins]
    assert len(names) == len(set(names))
    project = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    direct = [*project["dependencies"], *extras["engine"], *extras["test"], *extras["dev"]]
    assert {re.split(r"[<>=~!;\[ ]", each)[0].lower() for each in direct} <= set(names)
    assert not any(each.startswith("torch") for each in (*project["dependencies"], *extras["cuda"]))


def test_what_looks_for_the_checkout_finds_it() -> None:
    """Files move from room to room, and count the steps to the house's root."""
    from rollout.ranks.nursery import search_path
    from rollout.report import files

    first = Path(search_path().split(os.pathsep)[0])
    assert (first / "kernel" / "__init__.py").is_file()
    assert (first / "rollout" / "__init__.py").is_file()
    if (HOUSE / ".git").exists() and shutil.which("git"):
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HOUSE, capture_output=True, text=True, check=True)
        assert str(files.surroundings()["commit"]).startswith(found.stdout.strip())
