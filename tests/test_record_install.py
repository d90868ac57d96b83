"""`turnstile.record.install` in this process: what is recorded, what stays as it was, what cannot break."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.record import read
from kernel.record.foreign import BROKEN, Captured, call_of, captured_of, groups_of, threads_of
from kernel.record.layout import Kind
from tests.installed import SIZE, Fake, one_rank
from turnstile import record
from verify.events import Event, State
from verify.events import Kind as What
from verify.readers.record import READER

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch")
dist = torch.distributed
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.*deprecated.*:FutureWarning")
HOUSE = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    """The default group of a job of SIZE ranks, of which this is rank 0 and the others never object."""
    with one_rank(tmp_path_factory.mktemp("installed")) as made:
        yield made


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    record.uninstall()


def events(path: Path) -> list[Event]:
    """What the reader makes of a ring, without the exit of its closed record."""
    return [event for event in READER.read(path).events if event.kind is not What.EXIT]


# -- what is recorded --------------------------------------------------------------------------------------------------


@given(program=st.data())
def test_the_reader_gives_back_exactly_what_was_called(fake: Fake, program: st.DataObject) -> None:
    """Random programs of collectives and pairs, on three groups, with all of their arguments."""
    with record.install(fake.directory()) as made:
        expected = fake.run(program)
        path = made.path
    assert path is not None
    found = events(path)
    assert [fake.essence(event) for event in found] == expected
    recording = read(path)
    assert not any(event.text.startswith(BROKEN) for event in recording.events if event.kind is Kind.MARK)


def test_names_imported_before_are_seen_too(fake: Fake) -> None:
    from torch.distributed import all_reduce, new_group

    here = globals()
    here["early_group"] = new_group
    try:
        with record.install(fake.directory()) as made:
            all_reduce(torch.ones(3))
            here["early_group"]([0, 1])
    finally:
        del here["early_group"]
    assert [event.operation for event in events(made.path)] == ["all_reduce", "INIT"]


def test_lines_are_those_of_the_program(fake: Fake) -> None:
    with record.install(fake.directory()) as made:
        dist.all_reduce(torch.ones(3))
        dist.all_gather_object([None] * SIZE, "x")
    found = events(made.path)
    assert {event.site.file for event in found if event.site} == {__file__}
    assert {event.site.function for event in found if event.site} == {"test_lines_are_those_of_the_program"}
    via = [call.via for event in read(made.path).events if event.kind is Kind.CALL and (call := call_of(event.text))]
    assert via[0] == ""
    assert set(via[1:]) == {"all_gather_object"}


def test_functional_collectives_and_their_waits(fake: Fake) -> None:
    from torch.distributed import _functional_collectives as functional

    with record.install(fake.directory()) as made:
        total = functional.all_reduce(torch.ones(6), "max", dist.group.WORLD) + 0
        whole = functional.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD) + 0
    assert (total.numel(), whole.numel()) == (6, 2 * SIZE)
    first, second = events(made.path)
    assert (first.operation, first.sizes, first.tag, first.state) == ("all_reduce", ((6,),), "MAX", State.COMPLETED)
    assert (second.operation, second.sizes) == ("all_gather", ((2,),))
    assert (first.sequence, second.sequence) == (0, 1)


def test_calls_that_a_reducer_makes_in_cpp(tmp_path: Path) -> None:
    """DistributedDataParallel's all-reduces, on gloo, at the line of backward()."""
    script = tmp_path / "ddp.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from turnstile import record\n"
        "record.install(sys.argv[1], rank=0)\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 5))\n"
        "for _ in range(2):\n"
        "    model(torch.ones(2, 3)).sum().backward()\n"
        "dist.all_reduce(torch.ones(2))\n"
    )
    run_script(script, str(tmp_path / "run"))
    calls = [event for event in events(tmp_path / "run") if event.operation == "all_reduce"]
    gradients = [event for event in calls if event.site is not None and event.site.line == 7]
    assert [event.sizes for event in gradients if event.dtype == "Float"] == [((20,),)] * 2
    assert calls[-1].site is not None
    assert calls[-1].site.line == 8


def test_decisions_in_order_with_the_line(fake: Fake) -> None:
    record.decision("before the record begins")
    with record.install(fake.directory()) as made:
        for text in ("takes step 1", "skips step 2"):
            record.decision(text)
    decided = [(event.text, event.site) for event in read(made.path).events if event.kind is Kind.DECISION]
    assert [text for text, _ in decided] == ["takes step 1", "skips step 2"]
    assert all(site.startswith(__file__) for _, site in decided)
    assert READER.read(made.path).remarks[0] == (0, f"it decided last: skips step 2 (at {decided[1][1]})")


def test_threads_are_lanes_of_their_own(fake: Fake) -> None:
    with record.install(fake.directory()) as made:

        def work() -> None:
            for _ in range(50):
                dist.all_reduce(torch.ones(2))

        workers = [threading.Thread(target=work, name=f"worker {number}") for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        dist.all_reduce(torch.ones(2))
    found = events(made.path)
    assert sorted(event.sequence or 0 for event in found) == list(range(201))
    lanes = {event.thread for event in found}
    assert lanes == {"", *(f"worker {number}" for number in range(4))}
    assert all(sum(event.thread == lane for event in found) == 50 for lane in lanes - {""})


class Buffer:
    """Like DeepEP's, of the legacy kind."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0) -> None:
        self.group = group

    def dispatch(self, x: Any, topk_idx: Any = None, async_finish: bool = False) -> Any:
        return x, topk_idx

    def combine(self, x: Any, handle: Any = None, async_finish: bool = False) -> Any:
        if x is None:
            raise ValueError("no rows")
        return x

    def low_latency_dispatch(self, x: Any, topk_idx: Any, num_max_dispatch_tokens_per_rank: int) -> Any:
        return x


@pytest.mark.parametrize("early", [True, False])
def test_deep_ep_calls(fake: Fake, early: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package that is there before, or imported afterwards."""
    if early:
        module = ModuleType("deep_ep")
        module.Buffer = Buffer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "deep_ep", module)
    else:
        source = "from tests.test_record_install import Buffer as B\nclass Buffer(B): pass\n"
        (tmp_path / "deep_ep.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    x = torch.ones(5, 4, dtype=torch.bfloat16)
    with record.install(fake.directory()) as made:
        import deep_ep

        buffer = deep_ep.Buffer(fake.groups["tp"], num_nvl_bytes=8)
        rows, _ = buffer.dispatch(x)
        assert rows is x
        assert buffer.combine(x) is x
        buffer.low_latency_dispatch(x, None, 128)
        with pytest.raises(ValueError, match="no rows"):
            buffer.combine(None)
    found = events(made.path)
    assert [event.operation for event in found] == ["dispatch", "combine", "low-latency dispatch", "combine"]
    assert {event.medium for event in found} == {"deep_ep"}
    assert {event.communicator.members for event in found if event.communicator} == {(0, 1)}
    assert (found[2].tag, found[0].dtype, found[0].sizes) == ("128", "BFloat16", None)
    assert "dispatch" not in {getattr(vars(deep_ep.Buffer).get("dispatch"), "__module__", None)}
    assert buffer.dispatch(x) == (x, None)  # and nothing is recorded any more
    assert len(events(made.path)) == 4
    sys.modules.pop("deep_ep", None)


# -- what stays as it was ----------------------------------------------------------------------------------------------


def everything() -> dict[str, Any]:
    """All that a record replaces, and something that it must not."""
    from torch._C._distributed_c10d import ProcessGroup, Store, Work

    found: dict[str, Any] = {}
    for owner in (ProcessGroup, Work, Store, torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph):
        found |= {f"{owner.__name__}.{name}": value for name, value in vars(owner).items() if callable(value)}
    for module in (dist, dist.distributed_c10d, torch.cuda):
        found |= {f"{module.__name__}.{name}": value for name, value in vars(module).items() if callable(value)}
    found |= {"excepthook": sys.excepthook, "threads": threading.excepthook, "paths": list(sys.meta_path)}
    found["exit"] = sys.exit
    return found | {"ddp": torch.nn.parallel.DistributedDataParallel.forward}


def test_uninstall_puts_everything_back(fake: Fake) -> None:
    before = everything()
    made = record.install(fake.directory())
    during = everything()
    assert made.active
    assert sum(during[name] is not value for name, value in before.items() if callable(value)) > 30
    assert record.install(fake.directory()) is made
    record.uninstall()
    record.uninstall()
    after = everything()
    assert [name for name, value in before.items() if after[name] is not value and name != "paths"] == []
    assert after["paths"] == before["paths"]
    assert not made.active
    assert not any(thread.name == "turnstile record" for thread in threading.enumerate())
    dist.all_reduce(torch.ones(2))
    assert events(made.path) == []
    again = record.install(fake.directory())
    assert again is not made
    dist.all_reduce(torch.ones(2))
    again.uninstall()
    assert len(events(again.path)) == 1


def test_what_somebody_else_replaced_since_stays(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    made = record.install(fake.directory())
    wrapper = dist.new_group

    def mine(*args: Any, **named: Any) -> Any:
        return wrapper(*args, **named)

    monkeypatch.setattr(dist, "new_group", mine)
    record.uninstall()
    assert dist.new_group is mine
    assert mine([0, 1]) is not None
    assert events(made.path) == []


def test_results_and_exceptions_are_the_same_objects(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._distributed_c10d import ProcessGroup

    class Odd(Exception):
        pass

    odd, result = Odd("mine"), object()

    def stub(group: Any, tensors: Any, opts: Any = None) -> Any:
        if opts is None:
            raise odd
        return result

    monkeypatch.setattr(ProcessGroup, "allreduce", stub)
    with record.install(fake.directory()) as made:
        group = dist.group.WORLD
        assert group.allreduce([torch.ones(2)], dist.AllreduceOptions()) is result
        with pytest.raises(Odd) as caught:
            group.allreduce([torch.ones(2)])
        assert caught.value is odd
        with pytest.raises(TypeError):
            group.broadcast("nonsense")
    kinds = [event.kind for event in read(made.path).events]
    assert kinds.count(Kind.CALL_DONE) >= 2


def test_a_record_that_breaks_says_so_and_harms_nobody(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel.comm.tap.notes import Notes

    def breaks(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    with record.install(fake.directory()) as made:
        monkeypatch.setattr(Notes, "call", breaks)
        x = torch.ones(2)
        dist.all_reduce(x)
        monkeypatch.undo()
    recording = read(made.path)
    marks = [event.text for event in recording.events if event.kind is Kind.MARK]
    assert marks == [f"{BROKEN}allreduce (RuntimeError: planted)"]
    found = READER.read(made.path)
    assert found.whole == frozenset()
    assert any("planted" in line for line in found.unknown)


@pytest.mark.parametrize("place", ["file/below", "/proc/nowhere"])
def test_a_directory_that_cannot_be_written_is_one_line(
    fake: Fake, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    made = record.install(tmp_path / place)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "no record of rank 0" in told
    assert place in told
    assert not made.active
    assert made.path is None
    dist.all_reduce(torch.ones(2))
    record.decision("nobody hears")


def run_script(script: Path, *arguments: str, code: int = 0, **environment: str) -> str:
    """Run a script of its own process; what it said on standard error."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120, check=False,
        env={**clean, "PYTHONPATH": str(HOUSE), **environment},
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    return ended.stderr


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


@pytest.mark.parametrize(
    ("status", "said"), [("fatal: no shard", "sys.exit: fatal: no shard"), (3, "sys.exit: 3"), (0, "")]
)
def test_an_exit_with_a_code_or_a_message_is_in_the_record(fake: Fake, status: object, said: str) -> None:
    made = record.install(fake.directory())
    with pytest.raises(SystemExit) as left:
        sys.exit(status)  # type: ignore[arg-type]
    assert left.value.code == status
    assert made.path is not None
    texts = [event.text for event in read(made.path).events if event.kind is Kind.DECISION]
    assert texts == [said] * bool(said)
