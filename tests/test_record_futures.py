"""Waits through futures in the record of `turnstile.record.install`: of calls, chained to them, and of anybody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.record import read
from kernel.record.layout import Kind
from tests.installed import run_script

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.record import Recording

pytest.importorskip("torch")
HEAD = """
import sys, threading, torch, torch.distributed as dist
from turnstile import record
record.install(sys.argv[1], rank=0)
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(4)
def future():
    return dist.all_reduce(x, async_op=True).get_future()
"""
TAIL = "\nrecord.uninstall()\nassert torch._C.Future.wait.__qualname__ != 'Futures._wait.<locals>.wait'\n"


def recorded(tmp_path: Path, text: str) -> Recording:
    script = tmp_path / "futures.py"
    script.write_text(HEAD + text + TAIL)
    run_script(script, str(tmp_path / "run"))
    return read(tmp_path / "run" / "record" / "rank0.ring")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("future().wait()", 1),
        ("assert future().then(lambda f: f.value()[0] * 2).wait()[0] == 2", 1),
        ("future().then(lambda f: f.value()).then(lambda f: f.value()).wait()", 1),
        ("torch.futures.wait_all([future(), future()])", 2),
        ("torch.futures.collect_all([future(), future()]).then(lambda f: 1).wait()", 2),
    ],
)
def test_a_wait_for_what_calls_give_is_a_wait_for_them(text: str, calls: int, tmp_path: Path) -> None:
    found = recorded(tmp_path, text).events
    made = [each for each in found if each.kind is Kind.CALL and "all_reduce" in each.text]
    assert len(made) == calls
    waited = [each for each in found if each.kind is Kind.CALL_WAIT and each.a == made[-1].number]
    assert len(waited) == 1
    assert waited[0].site.endswith("<module>")
    over = {each.a for each in found if each.kind is Kind.CALL_DONE}
    assert {each.number for each in made} <= over


def test_a_call_of_which_only_a_future_was_kept_is_over_some_time(tmp_path: Path) -> None:
    found = recorded(tmp_path, "kept = future().then(lambda f: f)\nimport time\ntime.sleep(1.5)").events
    (made,) = [each for each in found if each.kind is Kind.CALL and "all_reduce" in each.text]
    assert made.number in {each.a for each in found if each.kind is Kind.CALL_DONE}


def test_a_wait_for_anything_else_is_the_hosts(tmp_path: Path) -> None:
    text = "f = torch.futures.Future()\nthreading.Timer(0.1, lambda: f.set_result(3)).start()\nassert f.wait() == 3\n"
    found = recorded(tmp_path, text + "assert f.wait() == 3").events
    kinds = [each.kind for each in found if each.text.startswith("future: ")]
    assert kinds == [Kind.HOST_WAIT_ENTER, Kind.HOST_WAIT_LEAVE]


def test_what_a_callback_raises_is_no_fault_of_the_call(tmp_path: Path) -> None:
    text = """
def bad(f):
    raise ValueError("mine")
try:
    future().then(bad).wait()
except Exception as error:
    assert "mine" in str(error)
else:
    raise SystemExit("nothing was raised")
"""
    found = recorded(tmp_path, text).events
    assert not any(each.text for each in found if each.kind is Kind.CALL_DONE)
