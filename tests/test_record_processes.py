"""`turnstile.record.install` in processes of its own: ranks, exceptions, forks; and texts of records of any kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.record import read
from kernel.record.foreign import OVER, Captured, call_of, captured_of, groups_of, threads_of
from kernel.record.layout import Kind
from tests.installed import run_script
from verify.events import Event
from verify.events import Kind as What
from verify.readers.record import READER

pytest.importorskip("torch")
HOUSE = Path(__file__).resolve().parent.parent


def events(path: Path) -> list[Event]:
    """What the reader makes of a ring, without the exit of its closed record."""
    return [event for event in READER.read(path).events if event.kind is not What.EXIT]


def test_rank_from_the_environment_or_from_the_default_group(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from turnstile import record\n"
        "made = record.install(sys.argv[1])\n"
        "print(made.path, file=sys.stderr)\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(2))\n"
    )
    assert run_script(script, str(tmp_path / "late")).splitlines()[0] == "None"
    assert [event.operation for event in events(tmp_path / "late")] == ["all_reduce"]
    assert "rank0.ring" in run_script(script, str(tmp_path / "early"), RANK="0", WORLD_SIZE="1")
    assert [event.operation for event in events(tmp_path / "early")] == ["INIT", "all_reduce"]


def test_an_exception_that_nobody_catches_is_the_last_word(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(
        "import sys\nfrom turnstile import record\nrecord.install(sys.argv[1], rank=0)\n"
        "def step():\n    raise KeyError('tokens')\nstep()\n"
    )
    assert "KeyError: 'tokens'" in run_script(script, str(tmp_path / "run"), code=1)
    (event,) = READER.read(tmp_path / "run").events
    assert (event.kind, event.operation) == (What.EXIT, "KeyError: 'tokens'")
    assert event.site is not None
    assert (event.site.line, event.site.function) == (5, "step")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, sys\n"
        "from turnstile import record\n"
        "made = record.install(sys.argv[1], rank=0)\n"
        "if (child := os.fork()) == 0:\n"
        "    record.decision('of the child')\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert made.active\n"
        "record.decision('of the parent')\n"
    )
    run_script(script, str(tmp_path / "run"))
    recording = read(tmp_path / "run" / "record" / "rank0.ring")
    assert [event.text for event in recording.events if event.kind is Kind.DECISION] == ["of the parent"]
    assert recording.events[-1].kind is Kind.DECISION
    assert recording.closed_ns is not None
    assert recording.closed_ns > recording.events[-1].time_ns


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_threads_that_end_are_over_and_those_that_a_fork_drops_are_not(tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text(
        "import gc, os, sys, threading\n"
        "from turnstile import record\n"
        "made = record.install(sys.argv[1], rank=0)\n"
        "stay, said = threading.Event(), threading.Event()\n"
        "def lives():\n    record.decision('lives'); said.set(); stay.wait()\n"
        "one = threading.Thread(target=lives, name='lives'); one.start(); said.wait()\n"
        "two = threading.Thread(target=record.decision, args=('ends',), name='ends'); two.start(); two.join()\n"
        "if (child := os.fork()) == 0:\n    gc.collect(); os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "record.decision('last'); record.uninstall(); stay.set(); one.join()\n"
    )
    run_script(script, str(tmp_path / "run"))
    recording = read(tmp_path / "run" / "record" / "rank0.ring")
    names = threads_of(recording.strings)
    assert set(names.values()) >= {"lives", "ends"}
    over = [names[event.epoch] for event in recording.events if event.kind is Kind.MARK and event.text == OVER]
    assert over == ["ends"]


def test_the_record_of_a_program_needs_no_torch_before_it_is_asked_for() -> None:
    code = (
        "import sys; from turnstile import record; record.decision('unheard'); record.uninstall();"
        " assert record.install; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HOUSE, timeout=60)


ODD = (
    "[]", "[1]", "[[]]", "[1,2,3,4,5,6]", '[true,"a",[0],"",0,true]', '["x","","",null,null,"","",-1,0,"",false,""]',
    '["x","","",null,null,"","",1,1e9,"",false,""]', "[[1,2,3,4,5,6]]", "[[-1,0,0,0]]", '[["a",0,0,0]]', "[" * 5000,
)  # fmt: skip


# -- texts -------------------------------------------------------------------------------------------------------------


@given(head=st.sampled_from(["", "group ", "thread "]), tail=st.text(max_size=60) | st.sampled_from(ODD))
def test_strings_of_any_kind_are_read_or_left_out(head: str, tail: str) -> None:
    text = head + tail
    assert call_of(text) is None or isinstance(call_of(text), tuple)
    assert captured_of(text) is None or all(isinstance(call, Captured) for call in captured_of(text) or [])
    assert isinstance(groups_of([text]), dict)
    assert isinstance(threads_of([text]), dict)
