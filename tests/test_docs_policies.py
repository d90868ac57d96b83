"""docs/policies.md does what it says: every program is written and every command run, in the order of the page.

A block of `console` is compared with what its command prints, where `[...]` stands for anything, unless it says why it
is not. Slow ones say so, and run by themselves.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.users import HOUSE, Repository

if TYPE_CHECKING:
    from pathlib import Path

PAGE = HOUSE / "docs" / "policies.md"
COMMANDS = {"turnstile": ("-m", "turnstile"), "pytest": ("-m", "pytest"), "python": ()}
SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Block:
    """A fenced block. kind, info: its language and what follows that. line: of the page."""

    kind: str
    info: str
    text: str
    line: int

    @property
    def slow(self) -> bool:
        return "slow:" in self.info


def blocks() -> list[Block]:
    page = PAGE.read_text()
    found = re.finditer(r"^```(\S+) ?(.*)\n((?:.*\n)*?)^```$", page, re.MULTILINE)
    return [Block(each[1], each[2], each[3], page.count("\n", 0, each.start()) + 1) for each in found]


def matches(told: str, printed: str) -> bool:
    """Whether a program printed what the page tells, line breaks apart."""
    parts = [re.escape(SPACE.sub(" ", part).strip()).replace(r"\ ", r"\s+") for part in told.split("[...]")]
    return re.fullmatch(r"\s*" + r"[\s\S]*".join(parts) + r"\s*", printed) is not None


def follow(theirs: Repository, block: Block) -> None:
    """Do what one block says."""
    if block.kind == "python":
        assert re.fullmatch(r"\w+\.py", block.info), f"line {block.line}: a program says in which file it is"
        (theirs.folder / block.info).write_text(block.text)
        return
    assert block.kind == "console", f"line {block.line}: a block of {block.kind}"
    command, _, told = block.text.partition("\n")
    program, *arguments = shlex.split(command.removeprefix("$ "))
    ran = theirs.run(*COMMANDS[program], *arguments, timeout=300)
    assert ran.returncode in (0, 1), f"line {block.line}: {command}: {ran.stderr}"
    assert re.fullmatch(r"(not compared: [^;]+)?(; )?(slow: .+)?", block.info), f"line {block.line}: {block.info}"
    if block.info.startswith("not compared"):
        assert ran.stdout
        assert not told
    else:
        assert matches(told, ran.stdout), f"line {block.line}: {command} prints\n{ran.stdout}{ran.stderr}"


@pytest.mark.slow
def test_the_page_works(tmp_path: Path) -> None:
    theirs = Repository(tmp_path)
    (theirs.folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:asyncio -p no:cacheprovider\n")
    for block in blocks():
        if not block.slow:
            follow(theirs, block)


@pytest.mark.slow
def test_its_slow_commands_work(tmp_path: Path) -> None:
    theirs = Repository(tmp_path)
    slow = [block for block in blocks() if block.slow]
    assert slow
    for block in blocks():
        if block.kind == "python" or (block.slow and (find_spec("torch") is not None or "torch" not in block.info)):
            follow(theirs, block)


def test_what_counts_as_the_same() -> None:
    assert matches("a  b\n[...]\nc", "a\nb what\never c\n")
    assert not matches("a [...] c", "a b")
    assert not matches("a.c", "abc")


def test_every_call_of_the_gate_and_every_flag_is_real() -> None:
    from kernel.sched.planner import Planner
    from kernel.sched.policy import Gate
    from verify.check.args import parser

    page = PAGE.read_text()
    calls = set(re.findall(r"`(?:await )?(?:gate\.)?(\w+)\(", page)) & set(dir(Gate))
    assert {name for name in vars(Gate) if not name.startswith("_")} - {"p_active", "d_ready"} <= calls
    flags = {flag for action in parser("check")._actions for flag in action.option_strings}
    table = page.partition("| flag | meaning |")[2].partition("\n\n")[0]
    assert set(re.findall(r"--[a-z]+", table)) <= flags
    assert flags - set(re.findall(r"--[a-z]+", table)) <= {"-h", "--help", "--depth"}
    for name in ("prefill_now", "decode_now", "span", "remember"):
        assert f"`{name}(now" in page
        assert callable(getattr(Planner, name))
