"""Real processes on gloo that are stuck: the dumps that PyTorch itself writes there, and the stacks beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verify.hang import main

JOB = Path(__file__).parent / "gloo_job.py"
HOUSE = JOB.parent.parent


def stuck(scene: str, size: int, out: Path) -> Path:
    """The folder of a job's dumps and stacks after it has ended."""
    pytest.importorskip("torch")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(JOB), str(rank), str(size), scene, str(out)], cwd=HOUSE,
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        for rank in ranks:
            _, error = rank.communicate(timeout=180)
            assert rank.returncode == 0, error.decode()[-2000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for note in ("store", *(f"{name}_{rank}" for name in ("last", "left") for rank in range(size))):
        (out / note).unlink()
    return out


def hang(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, dict[str, Any]]:
    code = main("hang", ["--json", *map(str, paths)])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "from_dumps", "with_stacks"),
    [
        # They hold no sends and receives, in which all may wait.
        ("completes", (3, "none", []), None),
        ("missing", (1, "missing", [2]), None),
        ("reads", (1, "missing", [2]), (1, "outside", [2])),
        ("crossing", (1, "cycle", [0, 1]), (1, "cycle", [0, 1])),
    ],
)
def test_what_pytorch_dumps_of_gloo(
    scene: str,
    from_dumps: tuple[int, str, list[int]],
    with_stacks: tuple[int, str, list[int]] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = stuck(scene, 3, tmp_path)
    code, found = hang(capsys, *sorted(out.glob("dump_rank_*")))
    assert (code, found["class"], found["ranks"]) == from_dumps, found
    assert code == 0 or "rank" in found["say"]
    if with_stacks is not None:
        code, found = hang(capsys, out)
        assert (code, found["class"], found["ranks"]) == with_stacks, found
        assert "gloo_job.py" in found["say"]
