"""`turnstile.record.install` in this process: what is recorded, what stays as it was, what cannot break."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.record import read
from kernel.record.foreign import BROKEN, UNINSTALLED, call_of
from kernel.record.layout import Kind
from tests.installed import SIZE, Fake, one_rank, run_script
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


Plain = list[tuple[Any, ...]]


def plain(path: Path | None) -> Plain:
    """All that a ring says, but for times."""
    assert path is not None
    recording = read(path)
    return [
        (event.kind, event.group, event.seq, event.round, event.epoch, event.a, event.text, event.site)
        for event in recording.events
    ] + [("string", text) for text in sorted(recording.strings)]


class Again:
    """Hands out what it drew the first time, in the same order."""

    def __init__(self, data: st.DataObject) -> None:
        self._data, self._drawn, self._at = data, list[Any](), -1

    def again(self) -> None:
        self._at = 0

    def draw(self, strategy: Any) -> Any:
        if self._at >= 0:
            self._at += 1
            return self._drawn[self._at - 1]
        self._drawn.append(self._data.draw(strategy))
        return self._drawn[-1]


@settings(max_examples=20)
@given(program=st.data())
def test_calls_that_were_seen_before_are_recorded_as_any_other(fake: Fake, program: st.DataObject) -> None:
    """The quick way and the long one leave the same ring, to the last string, also when a call comes again."""
    data: Any = Again(program)
    rings = []
    for quick in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not quick:
                patch.setattr("kernel.comm.tap.groups.QUICK", {})
            with record.install(fake.directory(), capacity=2048) as made:
                for _ in range(3):
                    fake.run(data)
                    data.again()
        rings.append(plain(made.path))
    assert rings[0] == rings[1]


def variants(fake: Fake) -> None:
    """Calls that differ in one argument each, all of a kind from one line, twice."""
    reductions = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
    tensors = [torch.ones(3), torch.ones(5), torch.ones(3, dtype=torch.int64)]
    groups = [fake.groups["default_pg"], fake.groups["odd"]]
    works = []
    for _ in range(2):
        for x, group, later, at in itertools.product(tensors, groups, (False, True), range(2)):
            many, rank = group.size(), (0, 2)[at]
            for op in reductions:
                works.append(dist.all_reduce(x, op, group=group, async_op=later))
                works.append(dist.reduce(x, rank, op, group=group, async_op=later))
                out = torch.ones(many * len(x), dtype=x.dtype)
                works.append(dist.reduce_scatter_tensor(x, out, op, group=group, async_op=later))
            works.append(dist.broadcast(x, rank, group=group, async_op=later))
            works.append(dist.all_gather_into_tensor(out, x, group=group, async_op=later))
            outs = [torch.ones(2 + at * n, dtype=x.dtype) for n in range(many)]
            works.append(dist.all_gather(outs, x[:2], group=group, async_op=later) if not at else None)
            for peer, tag in ((2, 0), (3, 0), (2, 1), (3, 1)):
                works.append(dist.isend(x, peer, group=group, tag=tag))
                works.append(dist.irecv(x, peer, group=group, tag=tag))
    for work in works:
        if work is not None:
            work.wait()


def test_no_argument_is_forgotten_of_a_call_like_one_before(fake: Fake) -> None:
    rings = []
    for quick in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not quick:
                patch.setattr("kernel.comm.tap.groups.QUICK", {})
            with record.install(fake.directory()) as made:
                variants(fake)
        # Whether a call without a wait is known to be over in time is up to a thread.
        rings.append([each for each in plain(made.path) if each[0] not in (Kind.CALL_DONE, Kind.CALL_WAIT)])
    calls = [[each for each in ring if each[0] == Kind.CALL] for ring in rings]
    assert len(calls[0]) > 500
    one, other = (
        [(group, seq, given, taken, text, site) for _, group, seq, given, _, taken, text, site in each]
        for each in calls
    )
    assert one == other


def test_torch_calls_its_groups_in_a_form_that_the_quick_way_knows(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or every call would take the long one, which nobody would see but in its cost."""
    from kernel.comm.tap.groups import Groups

    seen: list[str] = []
    long = Groups.before

    def before(self: Groups, group: Any, shape_of: Any, args: Any, named: Any, name: str, key: Any = None) -> Any:
        seen.append(name)
        return long(self, group, shape_of, args, named, name, key)

    monkeypatch.setattr(Groups, "before", before)
    x, many = torch.ones(4), [torch.ones(4) for _ in range(SIZE)]
    with record.install(fake.directory()):
        for _ in range(3):
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.reduce(x, 0)
            dist.all_gather(many, x)
            dist.all_gather_into_tensor(torch.ones(4 * SIZE), x)
            dist.reduce_scatter_tensor(x, torch.ones(4 * SIZE))
            dist.send(x, 1)
            dist.recv(x, 1)
    assert len(seen) == len(set(seen)) == 8


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
    monkeypatch.setattr(dist, "new_group", dist.new_group)  # what is there at the end, whatever is put there since
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
    assert marks == [f"{BROKEN}allreduce (RuntimeError: planted)", UNINSTALLED]
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": "0"}, "rank '0' is no rank: give record.install a whole number from 0 on, as int(os.environ["),
        ({"rank": -1}, "rank -1 is no rank: give record.install"),
        ({"rank": True}, "rank True is no rank"),
        ({"capacity": 0}, "capacity 0: give record.install a whole number of events in 1.."),
        ({"capacity": "many"}, "capacity 'many': give"),
    ],
)
def test_an_argument_that_is_none_is_refused_in_one_line(
    fake: Fake, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], said: str
) -> None:
    before = everything()
    made = record.install(fake.directory(), **arguments)
    assert (made.path, made.active) == (None, False)
    assert everything() == before
    told = capsys.readouterr().err
    assert told.startswith(f"turnstile: nothing is recorded: {said}")
    assert told.count("\n") == 1
    again = record.install(fake.directory())
    assert again.active, "a mistake is no record"
