"""`turnstile check` of programs and of recorded runs: verdicts with their lines, damaged rings, unusable files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings

from kernel.record import ring_path
from kernel.topology import World
from rollout import cli
from tests import programs
from tests.test_verify_order_record import record
from verify.check.program import Text, split
from verify.notation import format_program, parse_program
from verify.order import turnstile_steps
from verify.waitgraph import diagnose_program

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.events import Program

    Check = Callable[..., tuple[int, str, str]]

HANGS = json.loads((Path(__file__).parent / "data" / "hangs" / "programs.json").read_text())

CROSSED = """\
# ranks 0 and 1 issue two calls in opposite orders
[crossed]
r0: s:a.AR{0,1} s:b.AR{0,1}   # on one stream
r1: s:b.AR{0,1}
    s:a.AR{0,1}

[in one order]
r0: a.AR{0,1} wait(*); r1: a.AR{0,1}
"""


@pytest.fixture
def check(capfd: pytest.CaptureFixture[str]) -> Check:
    """Run the command; (exit code, standard output, standard error)."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.main(["check", *argv])
        return (code, *capfd.readouterr())

    return run


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "hang.txt"
    file.write_text(text)
    return str(file)


def answer(ran: tuple[int, str, str]) -> dict[str, Any]:
    _, out, err = ran
    assert out.count("\n") == 1
    assert err == ""
    plain: dict[str, Any] = json.loads(out)
    return plain


# -- programs -----------------------------------------------------------------------------------------------------


def test_each_program_is_judged_and_its_lines_are_cited(check: Check, tmp_path: Path) -> None:
    code, out, err = check(write(tmp_path, CROSSED))
    assert (code, err) == (1, "")
    assert "crossed: refuted (cycle, certain): 2 ranks, room for every kernel" in out
    assert "hang.txt:3:5 before hang.txt:3:17" in out
    assert "hang.txt:4:5 before hang.txt:5:5" in out
    assert "in one order: proved: 2 ranks" in out
    assert out.splitlines()[-1].startswith("refuted (cycle, certain): 2 programs of hang.txt")
    assert max(map(len, out.splitlines())) <= 120


def test_the_whole_corpus_of_real_hangs_in_one_file(check: Check, tmp_path: Path) -> None:
    parts = [f"[{each['id']}{' X' if each['exclusive_device'] else ''}]\n{each['program']}\n" for each in HANGS]
    plain = answer(check(write(tmp_path, "\n".join(parts)), "--json"))
    assert plain["verdict"] == "refuted"
    found = {each["name"]: (each["class"], each["certainty"], each["verdict"]) for each in plain["programs"]}
    wanted = {
        "conditional": ("cycle", "conditional", "refuted"),
        "completes": ("none", "certain", "proved"),
    }
    assert found == {
        each["id"]: wanted.get(each["verdict"], (each["verdict"], "certain", "refuted")) for each in HANGS
    }


def test_one_kernel_at_a_time_is_asked_for_by_a_mark_or_by_capacity(check: Check, tmp_path: Path) -> None:
    rows = "r0: s:a.AR{0,1} t:b.AR{0,1}\nr1: t:b.AR{0,1} s:a.AR{0,1}\n"
    file = write(tmp_path, rows)
    assert answer(check(file, "--json"))["verdict"] == "proved"
    for argv in ([file, "--capacity", "1"], [write(tmp_path, f"[X]\n{rows}")]):
        plain = answer(check(*argv, "--json"))
        assert (plain["verdict"], plain["class"], plain["certainty"]) == ("refuted", "cycle", "conditional")
    assert answer(check(write(tmp_path, rows), "--capacity", "2", "--json"))["verdict"] == "proved"


def test_programs_without_headings_are_told_apart_by_their_ranks() -> None:
    text = "r0: AR{0,1}\n\nr1: AR{0,1}\n\n# next\nr0: BAR{0,1}\nr1: BAR{0,1}\n"
    found = split(text)
    assert [(each.name, each.start) for each in found] == [("program 1", 1), ("program 2", 6)]
    assert [each.parse("f.txt").ranks for each in found] == [(0, 1), (0, 1)]


@settings(max_examples=40)
@given(programs.arbitrary())
def test_places_do_not_change_a_verdict(program: Program) -> None:
    text = format_program(program)
    rows = tuple(text.replace("; ", "\n").splitlines())
    placed = Text("", False, 1, rows).parse("f.txt")
    assert format_program(placed) == text
    plain, told = diagnose_program(parse_program(text)), diagnose_program(placed)
    assert (plain.cls, plain.certainty, plain.ranks) == (told.cls, told.certainty, told.ranks)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("r0: a.AR{0,1}\nr1: a.AR{0,1} wait(\n", "hang.txt:2:15: cannot read `wait(`"),
        ("# nothing\n\nr0: AR{0,2}\nr1:\n", "hang.txt:3:7: rank 2 has no part"),
        ("r0:\n[two]\nr0: AR{0,1}\nr0: AR{0,1}\n", "hang.txt:4:1: this rank has a part already"),
        ("a b c\n", "hang.txt:1:1: expected a rank"),
        ("", "no program in it"),
        ("[empty]\n", "hang.txt:1:1: no rank at all"),
    ],
)
def test_a_syntax_error_names_line_and_column(check: Check, tmp_path: Path, text: str, place: str) -> None:
    code, out, err = check(write(tmp_path, text))
    assert (code, out) == (2, "")
    assert place in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_text_is_unusable(check: Check, tmp_path: Path) -> None:
    (tmp_path / "hang.txt").write_bytes(b"\xff\xfe\x00")
    assert check(str(tmp_path / "hang.txt"))[::2] == (
        2,
        f"turnstile: {tmp_path / 'hang.txt'}: not a text file: give a policy, a file of programs or a run directory\n",
    )


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    record(tmp_path, World(4, 2, 4, route="paper"), 3, turnstile_steps(3))
    return tmp_path


def test_a_recorded_run_has_one_order(check: Check, recorded: Path) -> None:
    plain = answer(check(str(recorded), "--json"))
    assert (plain["verdict"], plain["class"], plain["ranks"], plain["rings"]) == ("proved", "none", [0, 1, 2, 3], [])
    assert plain["collectives"] > 0
    code, out, _ = check(str(recorded))
    assert code == 0
    assert "proved: " in out
    assert "4 ranks as recorded" in out


def test_a_run_that_enqueued_in_two_orders_is_refuted(check: Check, tmp_path: Path) -> None:
    steps = turnstile_steps(2)
    world = World(2, 2, 2, route="all")
    record(tmp_path / "one", world, 2, steps)
    record(tmp_path / "two", world, 2, [steps[1], steps[0], *steps[2:]])
    ring_path(tmp_path / "two", 1).replace(ring_path(tmp_path / "one", 1))
    plain = answer(check(str(tmp_path / "one"), "--json"))
    assert (plain["verdict"], plain["class"]) == ("refuted", "cycle")
    assert plain["counterexample"]["chain"]


def test_capacity_is_judged_on_the_recorded_order(check: Check, tmp_path: Path) -> None:
    record(tmp_path, World(4, 2, 4, route="none"), 3, turnstile_steps(3))
    assert answer(check(str(tmp_path), "--capacity", "2", "--json"))["verdict"] == "proved"
    plain = answer(check(str(tmp_path), "--capacity", "1", "--json"))
    assert plain["verdict"] != "proved"
    assert "capacity 1" in plain["scope"]


def test_rings_that_are_cut_off_or_missing_leave_it_open(check: Check, recorded: Path) -> None:
    ring = ring_path(recorded, 1)
    ring.chmod(0o600)
    ring.write_bytes(ring.read_bytes()[:-20_000])
    code, out, _ = check(str(recorded))
    assert code == 3
    assert "rank 1: left a ring that is cut off" in out
    assert out.splitlines()[-1]
    assert "inconclusive: " in out
    ring.unlink()
    code, out, _ = check(str(recorded))
    assert code == 3
    assert "rank 1: left no ring" in out
    ring.write_bytes(b"not a ring")
    code, out, err = check(str(recorded))
    assert (code, out) == (2, "")
    assert "not a ring file" in err


def test_overwritten_events_are_said(check: Check, tmp_path: Path) -> None:
    record(tmp_path, World(2, 2, 2, route="paper"), 3, turnstile_steps(3), events=16)
    _, out, _ = check(str(tmp_path))
    assert "the oldest events are overwritten" in out


def test_a_directory_that_holds_several_runs(check: Check, tmp_path: Path) -> None:
    for name in ("fine", "normal"):
        record(tmp_path / name, World(2, 2, 2, route="paper"), 2, turnstile_steps(2))
    plain = answer(check(str(tmp_path), "--json"))
    assert plain["verdict"] == "proved"
    assert len(plain["runs"]) == 2
    assert "2 runs in " in plain["scope"]


def test_a_directory_that_is_no_run_is_unusable(check: Check, tmp_path: Path) -> None:
    code, out, err = check(str(tmp_path))
    assert (code, out) == (2, "")
    assert "no rank<k>.ring in it" in err
    assert err.count("\n") == 1
