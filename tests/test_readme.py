"""What README shows of `turnstile check` is what it prints."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from turnstile.__main__ import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def shown(text: str) -> str:
    """As README indents it."""
    return "\n".join(line.rstrip() for line in textwrap.indent(text.rstrip(), "    ").splitlines())


def policy(name: str) -> str:
    """The policy of README, under a name."""
    [found] = re.findall(r"```python\n(# calm\.py\n.*?)```", README, re.DOTALL)
    return str(found).replace("calm", name).replace("Calm", name.capitalize())


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_program(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [lines] = re.findall(r"    \$ cat crossed\.txt\n(.*?)    \$", README, re.DOTALL)
    (here / "crossed.txt").write_text(textwrap.dedent(lines))
    assert main(["check", "crossed.txt"]) == 1
    assert shown(capsys.readouterr().out) in README


def test_a_policy_that_stands_still(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = "        gate.release(gate.plan.span)\n"
    (here / "hasty.py").write_text(policy("hasty").replace(release, f"        if gate.d_ready:\n    {release}"))
    assert main(["check", "hasty.py:Hasty"]) == 1
    out = capsys.readouterr().out
    assert shown(out[out.index("failed ") : out.index("\nrefuted (")]) in README
