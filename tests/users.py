"""A repository of somebody else's in a temporary directory, with turnstile and pytest installed and nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

HOUSE = Path(__file__).resolve().parent.parent

BARE = '''
import sys

class Blocker:
    """The base install has none of these."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "uvloop", "numpy", "safetensors", "matplotlib", "hypothesis"}:
            raise ModuleNotFoundError(f"{name} is not in the base install", name=name)

sys.meta_path.insert(0, Blocker())
'''


class Repository:
    """folder: where its files lie. site: where packages are installed, with turnstile as pip would have installed it
    (its entry points)."""

    def __init__(self, folder: Path, files: Mapping[str, str] | None = None) -> None:
        self.folder = folder / "theirs"
        self.folder.mkdir()
        self.site = folder / "site"
        info = self.site / "turnstile-0.0.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: turnstile\nVersion: 0.0.0\n")
        project = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
        points = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in found.items())
                  for group, found in project["entry-points"].items()]  # fmt: skip
        (info / "entry_points.txt").write_text("\n".join(points))
        (self.site / "bare.py").write_text(BARE)
        for name, text in (files or {}).items():
            (self.folder / name).write_text(text)

    def run(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments in it."""
        path = os.pathsep.join((str(self.site), str(HOUSE)))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120"}
        environment.pop("PYTEST_ADDOPTS", None)
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pytest as its owner would; other plugins of this machine stay out."""
        quiet = ("-p", "no:asyncio", "-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "bare")
        return self.run("-m", "pytest", *quiet, *arguments)
