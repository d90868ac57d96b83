"""docs/debugging.md does what it says: every command is run, its output and exit code are those of the page.

`[...]` stands for anything. Slow commands run by themselves, one after the other, in the order of the page.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.test_docs_policies import Block, matches
from tests.users import HOUSE, Repository
from verify import words
from verify.blame import Class

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (HOUSE / "docs" / "debugging.md").read_text()
FOUND = re.finditer(r"^```(\S+) ?(.*)\n((?:.*\n)*?)^```$", PAGE, re.MULTILINE)
BLOCKS = [Block(each[1], each[2], each[3], PAGE.count("\n", 0, each.start()) + 1) for each in FOUND]


def follow(theirs: Repository, block: Block) -> None:
    command, _, told = block.text.partition("\n")
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == "turnstile"
    ran = theirs.run("-m", "turnstile", *arguments, timeout=400)
    printed = ran.stderr if "standard error" in block.info else ran.stdout
    code = int(found[1]) if (found := re.search(r"exit (\d)", block.info)) else 0
    assert ran.returncode == code, f"line {block.line}: {command}: {ran.stderr}"
    if "not compared" not in block.info:
        assert matches(told, printed), f"line {block.line}: {command} prints\n{ran.stdout}{ran.stderr}"
        assert "[...]" in told or told == printed, f"line {block.line}: broken otherwise"


@pytest.fixture
def theirs(tmp_path: Path) -> Repository:
    """A clone, as far as the page's examples go."""
    found = Repository(tmp_path)
    for name in ("tests", "examples"):
        (found.folder / name).symlink_to(HOUSE / name)
    return found


LIVE = [block for block in BLOCKS if "live:" in block.info]
QUICK = [block for block in BLOCKS if block.kind == "console" and not block.slow and block not in LIVE]


@pytest.mark.parametrize("block", QUICK, ids=lambda block: f"line {block.line}")
def test_a_command_of_the_page(block: Block, theirs: Repository) -> None:
    follow(theirs, block)


@pytest.mark.slow
def test_the_commands_about_a_run(theirs: Repository) -> None:
    pytest.importorskip("torch")
    for block in BLOCKS:
        if block.slow:
            follow(theirs, block)


@pytest.mark.slow
@pytest.mark.parametrize("block", LIVE, ids=lambda block: f"line {block.line}")
def test_a_command_about_a_program_that_hangs(block: Block, theirs: Repository) -> None:
    pytest.importorskip("torch")
    script = block.info.rpartition("live: ")[2]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, "stuck"]
    job = subprocess.Popen(
        [sys.executable, *command], cwd=theirs.folder, env={**os.environ, "PYTHONPATH": str(HOUSE)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 200
        while theirs.run("-m", "turnstile", "hang", "stuck", timeout=100).returncode != 1:
            assert time.monotonic() < end, "it never hung"
            assert job.poll() is None, "it ended"
            time.sleep(0.5)
        follow(theirs, block)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def test_the_program_of_the_page_is_the_example() -> None:
    (snippet,) = [block.text for block in BLOCKS if block.kind == "python"]
    script = (HOUSE / "examples" / "stuck" / "early_return.py").read_text()
    assert all(line.strip() in script for line in snippet.splitlines())


def test_every_block_is_run_or_says_why_not() -> None:
    assert len(QUICK) >= 9
    for block in BLOCKS:
        told = block.kind in ("console", "python") or block.info.startswith("not run: ")
        assert told, f"line {block.line}"


def test_the_tables_are_those_of_the_program() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*?) ?\|$", PAGE, re.MULTILINE))
    for name, fix in words.FIXES.items():
        assert rows[name] == fix
    order = [name for name in rows if name in set(Class)]
    assert order == [cls for cls in Class if cls in {*words.FIXES, "none"}]


def test_its_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\((images/[\w-]+\.png)\)", PAGE)
    assert len(pictures) == 2
    for picture in pictures:
        data = (HOUSE / "docs" / picture).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < 200_000
    from bench.pictures import PICTURES

    assert {f"images/{each.name}.png" for each in PICTURES} == set(pictures)
    assert all(path.is_dir() for each in PICTURES for path in each.evidence)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a headless Chromium")
def test_the_pictures_can_be_made(tmp_path: Path) -> None:
    from bench.pictures import PICTURES, draw

    for picture in PICTURES:
        assert draw(picture, tmp_path, "chromium").read_bytes().startswith(b"\x89PNG")
