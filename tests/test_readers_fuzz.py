"""Damaged and hostile evidence of every format: a report or one line, never a crash, in memory that stays bounded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import CORPUS, DEEP_EP, FAULT, NCCL, RAS_JSON, RAS_TEXT, WATCHDOG, damaged, outcome, ring, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

HOUSE = Path(__file__).resolve().parent.parent
SAMPLES = samples()
NAMES = {
    "flight_recorder": "dump_rank_0", "flight_recorder_json": "dump_rank_0.json", "watchdog": "job.log",
    "nccl_log": "nccl.log", "ras": "ras.txt", "deepep": "rank3.log", "stacks": "rank1.txt", "record": "rank0.ring",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_the_samples_are_what_they_are_taken_for(kind: str, tmp_path: Path) -> None:
    for sample in SAMPLES[kind]:
        file = tmp_path / NAMES[kind]
        file.write_bytes(sample)
        assert outcome(file) in (0, 1, 3), sample[:80]


@pytest.mark.parametrize("kind", sorted(SAMPLES))
@given(data=st.data())
def test_damage_is_a_report_or_one_line(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / NAMES[kind]
    file.write_bytes(data.draw(damaged(SAMPLES[kind])))
    outcome(file)


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return [ring(tmp_path_factory.mktemp("ring"))]


@given(data=st.data())
def test_a_damaged_record_is_a_report_or_one_line(
    data: st.DataObject, rings: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / NAMES["record"]
    file.write_bytes(data.draw(damaged(rings)))
    outcome(file)


@given(data=st.data())
def test_a_folder_of_damaged_evidence_is_a_report_or_one_line(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for kind in data.draw(st.lists(st.sampled_from(sorted(SAMPLES)), min_size=1, max_size=4)):
        source = data.draw(st.sampled_from(["true", "damaged"]))
        content = SAMPLES[kind][0] if source == "true" else data.draw(damaged(SAMPLES[kind]))
        (folder / NAMES[kind]).write_bytes(content)
    outcome(folder)


@pytest.mark.parametrize("file", sorted(CORPUS.rglob("*.bin")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_what_once_did_harm_does_none(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / NAMES[file.parent.name]
    copy.write_bytes(file.read_bytes())
    outcome(copy)
    beside = tmp_path / "folder"
    beside.mkdir()
    (beside / copy.name).write_bytes(file.read_bytes())
    (beside / "other.log").write_text(DEEP_EP)
    outcome(beside)


@pytest.mark.parametrize(
    "language", ["мы не знаем\n" * 50, "何も分からない\n" * 50, "\ufeff{}\n", "\x00" * 500, "\n" * 99]
)
def test_texts_of_other_kinds_are_one_line(language: str, tmp_path: Path) -> None:
    for name in NAMES.values():
        (file := tmp_path / name).write_bytes(language.encode())
        assert outcome(file) == 2
        file.write_bytes(language.encode("utf-16"))
        assert outcome(file) == 2


# -- large and hostile: in a process of its own, which may not take more than it is allowed ---------------------------

LIMIT = 2 << 30
"""Bytes of address space, of which the interpreter and its libraries take about 0.3 GiB."""
CODE = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2);"
    " from rollout.cli import main; sys.exit(main(['hang', *sys.argv[2:]]))"
)
SPARSE = (2 << 30) + 1


def limited(*paths: Path) -> tuple[int, str]:
    """Exit code and standard error within LIMIT."""
    command = [sys.executable, "-c", CODE, str(LIMIT), *map(str, paths)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "PYTHONPATH": str(HOUSE)}
    )
    assert "Traceback" not in ended.stderr, ended.stderr[-2000:]
    assert "MemoryError" not in ended.stderr
    return ended.returncode, ended.stderr


def one_line(code: int, error: str) -> None:
    assert (code, error.count("\n")) == (2, 1), (code, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("dump_rank_0", SAMPLES["flight_recorder"][0][:200]),
        ("dump_rank_0.json", SAMPLES["flight_recorder_json"][0][:200]),
        ("ras.json", RAS_JSON.encode()[:60]), ("rank0.ring", b""), ("nothing", b"\n"), ("zeros", b""),
    ],
)  # fmt: skip
def test_a_file_of_two_gigabytes_takes_little_memory(
    name: str, head: bytes, tmp_path: Path, rings: list[bytes]
) -> None:
    file = tmp_path / name
    file.write_bytes(rings[0] if name.endswith(".ring") else head)
    os.truncate(file, SPARSE)
    code, error = limited(file)
    if name.endswith(".ring"):
        assert code in (0, 1, 2, 3)
    else:
        one_line(code, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [WATCHDOG, NCCL, RAS_TEXT, DEEP_EP, FAULT], ids=["watchdog", "nccl", "ras", "deepep", "stack"]
)
def test_a_line_of_a_hundred_megabytes_in_a_log(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rank1.log"
    with file.open("wb") as out:
        out.write(text.encode())
        for _ in range(100):
            out.write(b"x" * (1 << 20))
        out.write(b"\n" + text.encode())
    code, error = limited(file)
    assert code in (0, 1, 3), error


def many(text: str) -> Callable[[BinaryIO], None]:
    def write(out: BinaryIO) -> None:
        for n in range(2_000):
            out.write(text.replace("@", str(n)).encode())

    return write


def hostile() -> Iterator[tuple[str, str, Callable[[BinaryIO], None]]]:
    """Name, file name, and what writes it: small things that ask for much."""
    yield "empty lists", "dump_rank_0", lambda out: out.write(b"\x80\x02" + b"]" * (60 << 20) + b".")
    yield "tuples in tuples", "dump_rank_0", lambda out: out.write(b"\x80\x02N" + b"\x85" * (60 << 20) + b".")
    yield "memo", "dump_rank_0", lambda out: out.write(b"\x80\x02}" + b"r\xff\xff\xff\x7f" * 9 + b".")
    doubled = b"]q\x00(" + b"".join(b"h%c" % n + b"h%c" % n + b"e]q%c(" % (n + 1) for n in range(40)) + b"e"
    yield (
        "doubled",
        "dump_rank_0",
        lambda out: out.write(
            b"\x80\x02}(X\x07\x00\x00\x00entries]}(X\x0e\x00\x00\x00profiling_name"
            + doubled
            + b"uaX\x09\x00\x00\x00pg_config}u."
        ),
    )
    yield "brackets", "dump_rank_0.json", lambda out: out.write(b'{"pg_config": [' + b"[]," * (20 << 20) + b"1]}")
    yield "deep", "dump_rank_0.json", lambda out: out.write(b'{"pg_config": ' + b"[" * 60_000)
    yield "members", "dump_rank_0.json", lambda out: out.write(
        b'{"pg_config": {"0": {"desc": "default_pg", "ranks": "'
        + b",".join(b"%d" % (n * 900) for n in range(1_000_000)) + b'"}}, "entries": []}'
    )  # fmt: skip
    communicator = '{"hash": "@", "size": 1048576, "ranks": []},'
    yield "ras", "ras.json", lambda out: (
        out.write(b'{"communicators_count": 1, "nccl_version": "1", "communicators": ['),
        many(communicator)(out),
        out.write(b'{"size": 1}]}'),
    )[0]  # fmt: skip
    yield (
        "nccl",
        "nccl.log",
        many(
            "h:@:1 [0] NCCL INFO x comm 0x1 rank 0 nranks 1048576 commId 0x@ - Init COMPLETE\n"
            "h:@:1 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0 recvbuff 0 count 1 datatype 7 op 0 root 0 comm 0x1"
            " [nranks=1048576] stream 0x1\n"
        ),
    )
    yield (
        "watchdog",
        "job.log",
        many(
            "[rank@]: [Rank @] Watchdog caught collective operation timeout: WorkNCCL("
        "SeqNum=@, OpType=X, NumelIn=1, NumelOut=1\n"
            "[rank@]: [PG 0(default_pg) Rank @] failure at work sequence id: 1 last enqueued work: 999999999999,"
            " last completed work: 1\n"
        ),
    )
    yield "deepep", "job.log", many("DeepEP timeout check failed: rank = @, thread = 1@, value = 1024)\n")
    yield "stacks", "rank1.txt", many('Thread @ (idle): "MainThread"\n    step (a@.py:@)\n')


HOSTILE = list(hostile())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "write"), [each[1:] for each in HOSTILE], ids=[each[0] for each in HOSTILE])
def test_small_things_that_ask_for_much(name: str, write: Callable[[BinaryIO], None], tmp_path: Path) -> None:
    file = tmp_path / name
    with file.open("wb") as out:
        write(out)
    code, error = limited(file)
    assert code in (0, 1, 2, 3), (code, error)
    if code == 2:
        one_line(code, error)
