"""The certificate file, and the checker that shares nothing with its writer."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.topology import World
from verify import certificate
from verify.order import certify, from_program


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    result = certify(from_program(World(4, 2, 4, "cross", "paper"), 2))
    path = tmp_path_factory.mktemp("file") / "certificate.jsonl"
    assert result.certificate is not None
    result.certificate.write(path)
    return path.read_text().splitlines()


def test_the_checker_shares_nothing_with_the_writer() -> None:
    tree = ast.parse(Path(certificate.__file__).read_text())
    names = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"json", "sys", "typing", "__future__"}


def run_checker(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verify.certificate", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_checker_as_a_command(written: list[str], tmp_path: Path) -> None:
    good, bad, none = tmp_path / "good", tmp_path / "bad", tmp_path / "none"
    good.write_text("\n".join(written))
    assert (run_checker(good).returncode, run_checker(good).stdout) == (0, "valid\n")
    queue = next(n for n, line in enumerate(written) if '"queue"' in line)
    line = json.loads(written[queue])
    line["calls"][0], line["calls"][1] = line["calls"][1], line["calls"][0]
    bad.write_text("\n".join([*written[:queue], json.dumps(line), *written[queue + 1 :]]))
    assert run_checker(bad).returncode == 1
    assert run_checker(bad).stdout.startswith("not valid: rank 0 queue D")
    none.write_text('{"certificate": 2}\n')
    assert run_checker(none).returncode == run_checker(tmp_path / "missing").returncode == 2
    assert run_checker(none).stderr.count("\n") == 1


@given(st.data())
def test_a_changed_certificate_is_not_valid(data: st.DataObject) -> None:
    """Whatever is changed: a queue's order, an index, a call left out or made twice, a member, a number, an edge."""
    result = certify(from_program(World(4, 2, 4, "cross", "paper"), 2))
    assert result.certificate is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        result.certificate.write(path)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert certificate.check(str(path)) == ""
        queues = [line for line in lines if line.get("calls")]
        comms = [line for line in lines if "index" in line]
        queue = data.draw(st.sampled_from(queues))
        calls = queue["calls"]
        at = data.draw(st.integers(0, len(calls) - 2))
        match data.draw(st.sampled_from(["swap", "index", "drop", "twice", "member", "number", "edge", "open"])):
            case "swap":
                other = data.draw(st.integers(at + 1, len(calls) - 1))
                calls[at], calls[other] = calls[other], calls[at]
            case "index":
                comm = next(line for line in comms if calls[at] in line["instances"])
                after = next(line for line in comms if calls[at + 1] in line["instances"])
                later = after["index"][after["instances"].index(calls[at + 1])]
                comm["index"][comm["instances"].index(calls[at])] = later + data.draw(st.integers(0, 3))
            case "drop":
                # A routed call stands in two queues of its rank: it is then in different streams of its members.
                del calls[at]
            case "twice":
                calls.insert(at, calls[at])
            case "member":
                lines[0]["communicators"][data.draw(st.sampled_from(comms))["communicator"]][1].append(7)
            case "number":
                comm = data.draw(st.sampled_from([line for line in comms if len(line["sequence"]) > 1]))
                comm["sequence"][0] = comm["sequence"][1]
            case "edge":
                lines.append({"rank": 0, "before": calls[at + 1], "after": calls[at], "reason": "event"})
            case "open":
                # Declaring a call open does not excuse a wrong order.
                lines[0]["open"] = [calls[at], calls[at + 1]]
                calls[at], calls[at + 1] = calls[at + 1], calls[at]
        path.write_text("\n".join(map(json.dumps, lines)))
        assert certificate.check(str(path)) != ""


def test_a_certificate_that_cannot_be_written(tmp_path: Path) -> None:
    result = certify(from_program(World(2), 1))
    assert result.certificate is not None
    with pytest.raises(UsageError, match="choose another file"):
        result.certificate.write(tmp_path / "no" / "such" / "folder")
    order = result.certificate.order()
    assert [result.certificate.index[each] for each in order] == list(range(len(order)))
