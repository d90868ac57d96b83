"""Tokens: what goes in comes out, anything else is told apart in one line, and a replay says where it diverged."""

from __future__ import annotations

import base64
import re
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.errors import UsageError
from tests.failing import racing
from verify.blame import Class
from verify.explore.schedule import Schedule, followed, made
from verify.explore.shrink import Sign, fewer_decisions, search, sign
from verify.explore.token import VERSION, Token, prints, rerun

WANTED = Sign(Class.CYCLE, "deadlock_free", ("D", "P", "room"))

tokens = st.builds(
    Token,
    scenario=st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=12) | st.lists(st.booleans())),
    decisions=st.lists(st.tuples(st.integers(0, 10**6), st.text(max_size=20))).map(tuple),
    fidelity=st.sampled_from(["any", "fifo"]),
    cls=st.sampled_from(Class),
    rule=st.text(max_size=10),
    steps=st.integers(0, 10**6),
    prints=st.text("0123456789abcdef", max_size=24),
)


@given(tokens)
def test_a_token_is_read_as_it_was_written(token: Token) -> None:
    text = str(token)
    assert Token.parse(text) == token
    assert Token.parse(f"  {text[:9]}\n{text[9:]} ") == token


def example() -> str:
    return str(Token({"policy": "fine", "ranks": 2}, ((17, "rank 1: D 4"), (20, "~rank 0 stream P")), steps=40))


def test_every_cut_off_token_is_refused() -> None:
    text = example()
    for length in range(len(text)):
        with pytest.raises(UsageError) as caught:
            Token.parse(text[:length])
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("--replay")


@settings(max_examples=300)
@given(st.data())
def test_a_changed_character_is_noticed(data: st.DataObject) -> None:
    text = example()
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda letter: letter != text[at]))
    changed = text[:at] + other + text[at + 1 :]
    try:
        read = Token.parse(changed)
    except UsageError:
        return
    assert read == Token.parse(text), "a few bits fill up the last byte and mean nothing"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("hello", "not a token"),
        (f"t{VERSION + 1}.abc", f"version {VERSION + 1}"),
        (f"t{VERSION}.ab!c", "'!' at character 5"),
        (f"t{VERSION}.{base64.urlsafe_b64encode(b'nonsense').decode()}", "damaged"),
        (f"t{VERSION}.{base64.urlsafe_b64encode(zlib.compress(b'[1]')).decode()}", "does not hold a schedule"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Token.parse(text.rstrip("="))


def test_an_unknown_fidelity_is_refused() -> None:
    with pytest.raises(UsageError, match="fidelity 'some'"):
        Token.parse(str(Token({}, fidelity="some")))


# -- running again ----------------------------------------------------------------------------------------------


def failing(program: Any) -> tuple[Token, Schedule]:
    found = search(program, WANTED)
    assert found is not None
    schedule = fewer_decisions(program, followed(program, found.trace.names), WANTED)
    names = schedule.names
    return Token({}, schedule.decisions, "any", WANTED.cls, WANTED.rule, len(names), prints(names)), schedule


def test_a_token_leads_to_the_same_steps_and_the_same_end() -> None:
    program = racing()
    token, schedule = failing(program)
    again = rerun(Token.parse(str(token)), program)
    assert (again.same, again.exact) == (True, True)
    assert again.execution.trace.names == schedule.names
    assert again.say.startswith(f"the same {len(schedule.names)} steps")


def test_a_program_that_changed_is_followed_as_far_as_it_goes() -> None:
    token, _ = failing(racing())
    again = rerun(token, racing(before=2))
    assert (again.exact, again.same) == (False, True)
    assert "diverged" in again.say
    assert "still cycle" in again.say


def test_a_mended_program_is_said_not_to_fail() -> None:
    token, _ = failing(racing())
    again = rerun(token, racing(capacity=2))
    assert (again.same, again.exact) == (False, False)
    assert again.say.endswith("nothing failed")


def test_a_decision_that_cannot_be_made_is_named() -> None:
    program = racing()
    token, schedule = failing(program)
    lost = Token({}, ((2, "rank 7: nobody"),), "any", Class.CYCLE, "deadlock_free", token.steps, token.prints)
    assert "decision 1 of 1: 'rank 7: nobody' was never ready from choice 2 on" in rerun(lost, program).say
    name = schedule.decisions[0][1]
    early = Token({}, ((0, name),), "any", Class.CYCLE, "deadlock_free", 7, token.prints)
    said = rerun(early, program).say
    assert re.search(rf"decision 1 of 1: '{name}' was not ready at choice 0, but at choice \d+;", said)


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=8, max_size=60), st.data())
def test_prints_tell_where_two_traces_part(names: list[str], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(names) - 1))
    other = [*names[:at], "x", *names[at + 1 :]]
    mine, theirs = prints(names), prints(other)
    assert len(mine) == len(theirs) == 22
    eighth = next(mark for mark in range(8) if at < len(names) * (mark + 1) // 8)
    assert mine[: 2 * eighth] == theirs[: 2 * eighth]
    assert mine != theirs


def test_made_says_when_decisions_were_made() -> None:
    program = racing()
    token, schedule = failing(program)
    assert made(program, token.decisions).decisions == schedule.decisions
    assert sign(made(program, token.decisions).execution) == WANTED
