"""Files that are written whole or not at all, in directories that others may write."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import pytest

from kernel import files

if TYPE_CHECKING:
    from pathlib import Path


def test_the_new_one_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with files.replacing(path) as fd:
        os.write(fd, b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_old_one_stays_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def half() -> None:
        with files.replacing(path) as fd:
            os.write(fd, b"half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_that_somebody_put_there_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("mine")
    (run / "a.json").symlink_to(victim)
    with files.replacing(run / "a.json") as fd:
        os.write(fd, b"new")
    assert (run / "a.json").read_text() == "new"
    assert not (run / "a.json").is_symlink()
    monkeypatch.setattr(secrets, "token_hex", lambda _: "foreseen")
    (run / f".a.json.{os.getpid()}.foreseen").symlink_to(victim)
    with pytest.raises(FileExistsError), files.replacing(run / "a.json"):
        pass
    assert victim.read_text() == "mine"
    assert (run / "a.json").read_text() == "new"
