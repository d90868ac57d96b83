"""`turnstile trace`: valid trace events whatever a record holds, and the slices and arrows that its events mean."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.record import HOST, Kind, Recorder, read, ring_path
from kernel.record.layout import TEXTS
from kernel.request import Phase
from rollout import cli
from verify.slices import Lane, Slice, timeline
from verify.trace.chrome import SPARE, nested, trace_lines

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = {"P.TP": (0, 1), "D.TP": (0, 1)}


def ring(path: Path, rank: int, events: list[dict[str, Any]], first_ns: int = 0, **options: Any) -> None:
    """A ring of these events, a microsecond apart unless they say when."""
    rec = Recorder(path, rank=rank, groups=GROUPS, **{"capacity": 4096, "strings": 1 << 18, **options})
    for at, event in enumerate(events, start=1):
        given = dict(event)
        kind = given.pop("kind")
        if "text" in given:
            given["b"] = rec.site(given.pop("text"))
        for name in ("site", "group"):
            if isinstance(given.get(name), str):
                given[name] = rec.site(given[name]) if name == "site" else rec.group(given[name])
        rec.event(kind, given.pop("phase", None), given.pop("stream", HOST), time_ns=first_ns + at * 1000, **given)
    rec.close()


def trace(*paths: Path) -> dict[str, Any]:
    return json.loads("".join(trace_lines([timeline(read(path)) for path in paths])))  # type: ignore[no-any-return]


def check(found: dict[str, Any]) -> None:
    """The rules of the trace-event format, as its document has them, and those of Perfetto's importer."""
    assert isinstance(found["traceEvents"], list)
    assert found["displayTimeUnit"] in ("ms", "ns")
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    named = set()
    for event in found["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) and event[key] > 0 for key in ("pid", "tid"))
        assert math.isfinite(event["ts"])
        place = (event["pid"], event["tid"])
        match event["ph"]:
            case "M":
                assert event["name"] in {
                    "process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index",
                }  # fmt: skip
                named |= {place} if event["name"] == "thread_name" else set()
            case "X":
                assert event["dur"] >= 0
                spans[place].append((event["ts"], event["ts"] + event["dur"]))
            case "B":
                assert "dur" not in event
                spans[place].append((event["ts"], math.inf))
            case "i":
                assert event["s"] in ("t", "p", "g")
            case "C":
                assert event["args"]
                assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
            case "s" | "t" | "f":
                assert event["bp"] == "e"
                flows[event["id"]].append(event)
            case other:
                pytest.fail(f"phase {other!r} is not used here")
    for place, found_spans in spans.items():
        assert place in named
        stack: list[float] = []
        for start, end in sorted(found_spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= start + 1e-4:  # ends and starts are rounded apart: microseconds as floats
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-4, "slices of a thread overlap without nesting"
            stack.append(end)
    for flow in flows.values():
        assert "".join(event["ph"] for event in flow) == "s" + "t" * (len(flow) - 2) + "f"
        assert [event["ts"] for event in flow] == sorted(event["ts"] for event in flow)
        assert len({event["pid"] for event in flow}) == len(flow) > 1
        for event in flow:  # each end is bound to a slice that starts there
            assert any(start == event["ts"] for start, _ in spans[event["pid"], event["tid"]])


ANY = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([kind for kind in Kind if kind is not Kind.SIZES]),
        "phase": st.sampled_from([None, Phase.D, Phase.P]),
        "stream": st.sampled_from([HOST, "D", "P"]),
        "group": st.integers(0, 3),
        "seq": st.integers(0, 3),
        "round_": st.integers(-1, 3),
        "epoch": st.integers(-1, 2),
        "a": st.integers(0, 3),
        "b": st.integers(0, 3),
        "site": st.sampled_from(["", "D 1", "P e0 [0,1)", 'quote " \n <b> \u2603']),
    }
).map(lambda event: event | ({"text": f"text {event['b']}"} if event["kind"] in TEXTS else {}))


@given(st.lists(st.lists(ANY, max_size=40), min_size=1, max_size=3), st.integers(3, 60))
def test_any_record_makes_a_valid_trace(
    tmp_path_factory: pytest.TempPathFactory, ranks: list[list[dict[str, Any]]], capacity: int
) -> None:
    folder = tmp_path_factory.mktemp("trace")
    paths = []
    for rank, events in enumerate(ranks):
        paths.append(folder / f"rank{rank}.ring")
        ring(paths[-1], rank, events, rank * 500, capacity=capacity)
    check(trace(*paths))


@given(st.lists(st.tuples(st.integers(0, 20), st.none() | st.integers(0, 8)), max_size=12))
def test_a_thread_of_the_trace_holds_disjoint_or_nested_slices(spans: list[tuple[int, int | None]]) -> None:
    slices = [Slice(0, Lane.D, "", at, None if length is None else at + length) for at, length in spans]
    threads = nested(slices)
    assert len(threads) <= SPARE
    if len(threads) < SPARE:
        assert sorted(map(id, slices)) == sorted(id(one) for thread in threads for one in thread)
    for thread in threads:
        for one in thread:
            for other in thread:
                (a, b), (c, d) = (
                    (each.start_ns, math.inf if each.end_ns is None else each.end_ns) for each in (one, other)
                )
                assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


RUN: list[dict[str, Any]] = [
    {"kind": Kind.BOUNDARY, "phase": Phase.P, "epoch": 3, "a": 0},
    {"kind": Kind.EXCHANGE_ENTER, "seq": 1, "text": "pre-d"},
    {"kind": Kind.EXCHANGE_LEAVE, "seq": 1, "text": "pre-d"},
    {"kind": Kind.SUBMIT, "phase": Phase.D, "stream": "D", "a": 4, "b": 2, "site": "D 7"},
    {"kind": Kind.WORK_START, "phase": Phase.D, "stream": "D", "a": 4, "b": 2, "site": "D 7"},
    {"kind": Kind.PERMIT, "phase": Phase.P, "epoch": 3, "a": 0, "b": 2},
    {"kind": Kind.BOUNDARY, "phase": Phase.P, "epoch": 3, "a": 2},
    {"kind": Kind.START, "phase": Phase.P, "stream": "D", "group": "P.TP", "seq": 9, "a": 8, "text": "AR",
     "site": "model.py:12 forward"},
]  # fmt: skip


def test_slices_and_arrows_are_those_of_the_events(tmp_path: Path) -> None:
    paths = [tmp_path / "rank0.ring", tmp_path / "rank1.ring"]
    ring(paths[0], 0, RUN)
    ring(paths[1], 1, [*RUN, {"kind": Kind.FINISH, "phase": Phase.P, "stream": "D", "group": "P.TP", "seq": 9}], 300)
    found = trace(*paths)
    check(found)
    events = found["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = {
        (e["pid"] - 1000, lanes[e["pid"], e["tid"]], e["name"]): (e["ph"], e["ts"], e.get("dur"))
        for e in events
        if e["ph"] in "XB"
    }
    host, turnstile = "host", "turnstile (P's host enqueue)"
    assert slices[0, host, "rendezvous pre-d"] == ("X", 1.0, 1.0)
    assert slices[0, turnstile, "e3 at 0"] == ("X", 0.0, 5.0)
    assert slices[0, turnstile, "e3 enqueues [0,2)"] == ("X", 5.0, 1.0)
    assert slices[1, turnstile, "e3 at 2"] == ("B", 6.3, None)
    assert slices[0, "D on the device", "D 7"] == ("B", 4.0, None)
    assert slices[0, "collectives on D's stream", "AR P.TP #9"] == ("B", 7.0, None)
    assert slices[1, "collectives on D's stream", "AR P.TP #9"] == ("X", 7.3, 1.0)
    arrows = [(e["name"], e["ph"], e["pid"] - 1000, e["ts"]) for e in events if e["ph"] in "stf"]
    assert arrows == [
        ("boundary 0 of e3", "s", 0, 0.0), ("boundary 0 of e3", "f", 1, 0.3),
        ("boundary 2 of e3", "s", 0, 6.0), ("boundary 2 of e3", "f", 1, 6.3),
    ]  # fmt: skip
    call = next(e for e in events if e["ph"] == "B" and e["name"].startswith("AR"))
    assert call["args"]["site"] == "model.py:12 forward"
    assert call["args"]["ranks"] == [0, 1]


# -- the command -----------------------------------------------------------------------------------------------------


def run(folder: Path, ranks: int = 2) -> Path:
    for rank in range(ranks):
        ring(ring_path(folder, rank), rank, RUN)
    return folder


def test_the_command_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run")
    assert cli.main(["trace", str(folder)]) == 0
    check(json.loads((folder / "trace.json").read_text()))
    assert "ranks 0 and 1" in capsys.readouterr().out
    packed = tmp_path / "t.json.gz"
    assert cli.main(["trace", str(folder / "record"), "-o", str(packed)]) == 0
    assert json.loads(gzip.decompress(packed.read_bytes())) == json.loads((folder / "trace.json").read_text())
    capsys.readouterr()
    assert cli.main(["trace", str(folder), "-o", "-"]) == 0
    check(json.loads(capsys.readouterr().out))


def test_what_is_not_shown_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring(ring_path(tmp_path, 0), 0, RUN, capacity=3)
    assert cli.main(["trace", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "rank 1: no record" in told
    assert "rank 0: older events are overwritten" in told


def test_unusable_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = tmp_path / "several"
    for name in ("fine", "normal"):
        run(several / name, 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "rank0.ring").write_bytes(b"TURNRING, not")
    good = str(run(tmp_path / "good", 1))
    for arguments, said in (
        ([], "the following arguments are required"),
        ([str(tmp_path / "absent")], "no such directory"),
        ([str(tmp_path / "empty")], "no rank<k>.ring in it"),
        ([str(several)], "holds 2 runs: name one of them: fine, normal"),
        ([str(tmp_path / "bad")], "cut off inside its header"),
        ([good, "-o", str(tmp_path)], "it is a directory"),
        ([good, "-o", str(tmp_path / "no" / "t.json")], "No such file or directory"),
        ([good, "--nonsense"], "unrecognized arguments"),
    ):
        assert cli.main(["trace", *arguments]) == 2
        out, err = capsys.readouterr()
        assert said in err
        assert err.count("\n") == 1
        assert not out
    assert not list(tmp_path.rglob("*.json"))
