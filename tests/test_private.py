"""What a run leaves and what it listens on is its user's alone, and nothing that others could change is trusted."""

from __future__ import annotations

import os
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import UsageError
from kernel.topology import World
from rollout import campaign, cli
from rollout.report import files as report_files
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.ranks.nursery import Nursery

for needed in ("torch", "uvloop", "numpy", "safetensors", "matplotlib"):
    pytest.importorskip(needed)

SMALL = ("--fraction", "0.02", "--turns", "2", "--length-scale", "0.02", "--time-scale", "0", "--json")


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fake engine in the place of the real one, and the umask as it was."""
    real = campaign._engine_part

    def make(model: Any, world: Any, **options: Any) -> FakeEngine:
        return FakeEngine(model, world, prefill_s=0.0, step_s=0.0, clock=time.monotonic_ns)

    monkeypatch.setattr(
        campaign, "_engine_part", lambda module, name: make if name == "Engine" else real(module, name)
    )
    before = os.umask(0o022)
    yield
    os.umask(before)


def refused(argv: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line with which the command refuses."""
    assert cli.main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("turnstile: ")
    return err


def test_what_a_run_leaves_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["rollout", *SMALL]) == 0
    [run] = (tmp_path / "runs").iterdir()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"requests.jsonl", "report.json", "run.json", "model.safetensors"} <= {path.name for path in files}
    assert not [path for path in files if path.stat().st_mode & 0o077]


def test_a_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    me = out.stat().st_uid
    monkeypatch.setattr(report_files.os, "geteuid", lambda: me + 1)
    says = f"--out {out}: it belongs to another user (uid {me})"
    assert says in refused(["rollout", *SMALL, "--out", str(out)], capfd)
    assert not list(out.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702, 0o1777])
def test_a_directory_that_others_may_write_is_refused(
    mode: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    out.chmod(mode)
    assert f"others may write it (mode {mode:o})" in refused(["rollout", *SMALL, "--out", str(out)], capfd)
    assert not list(out.iterdir())


@pytest.mark.parametrize("name", ["run.json", "requests.jsonl"])
def test_a_run_of_which_others_could_have_changed_a_file_is_not_gone_on_with(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert cli.main(["rollout", *SMALL, "--out", str(out)]) == 0
    capfd.readouterr()
    (out / name).chmod(0o666)
    says = f"--out {out / name}: others may write it (mode 666)"
    assert says in refused(["rollout", *SMALL, "--out", str(out), "--resume"], capfd)


def listening(pids: list[int]) -> dict[str, int]:
    """Address -> process, of the TCP sockets that these processes listen on."""
    found = {}
    for pid in pids:
        sockets = set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets:
                    found[fields[1]] = pid
    return found


async def test_a_world_of_one_host_listens_on_nothing(tmp_path: Path, nursery: Nursery) -> None:
    from models.tiny import write_checkpoint
    from rollout.engine import Engine
    from rollout.ranks.launcher import Launcher

    write_checkpoint(tmp_path / "model")
    before, shared = set(listening([os.getpid()])), set(os.listdir("/dev/shm"))
    async with Engine(tmp_path / "model", World(2, 2, 2), nursery=nursery) as engine:
        await engine.generate([3, 4, 5])
        assert isinstance(engine._launcher, Launcher)
        ranks = [each.process.pid for each in engine._launcher._ranks]
        assert set(listening([os.getpid(), nursery._process.pid, *ranks])) == before
        assert {name for name in os.listdir("/dev/shm") if name not in shared and "turnstile" in name} == set()


def test_the_store_of_a_host_listens_on_loopback() -> None:
    from rollout.ranks.torchrun import serve_store, store_at

    before = set(listening([os.getpid()]))
    store, where = serve_store()
    try:
        store_at(where).set("key", "value")
        [address] = set(listening([os.getpid()])) - before
        assert address == f"0100007F:{where['port']:04X}"
    finally:
        del store


def test_a_disk_without_room_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    out = tmp_path / "run"
    says = f"--out {out}: No space left on device"
    assert says in refused(["rollout", *SMALL, "--out", str(out)], capfd)
    assert not out.exists()


@pytest.mark.parametrize("given", ["", " "])
@pytest.mark.parametrize("command", ["rollout", "compare"])
def test_an_empty_name_is_no_directory(
    command: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--out is empty: name a directory" in refused([command, *SMALL, "--out", given], capfd)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["_tiny", "_about", "fingerprint.of", "report_files.hold", "report_files._commit"])
@pytest.mark.parametrize("out", ["deep/er/run", "there", None])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), UsageError("refused")])
def test_what_ends_before_the_run_has_begun_leaves_nothing(
    where: str, out: str | None, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: Any, **named: Any) -> None:
        if where == "_tiny":
            (tmp_path / (out or "nowhere") / "model").mkdir(parents=True)
        raise error

    if where == "_tiny" and out is None:
        return
    (tmp_path / "there").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"rollout.campaign.{where}", end)
    command = ["rollout", *SMALL, *(("--out", out) if out else ())]
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert cli.main(command) == (2 if isinstance(error, UsageError) else 130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert [each.name for each in tmp_path.rglob("*")] == ["there"]


def test_the_directory_is_refused_by_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(UsageError, match="choose a directory that can be written"):
            report_files.directory(out)
