"""From files and folders to one `Found`: each is read by the reader that knows its format.

Readers are loaded when they are needed. A folder is a run directory, or the dumps and logs of one job: its own files
are read, those below it are not.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from verify.readers.found import Damaged, Found
from verify.runs import has_rings, several

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from verify.readers.found import Reader

READERS: Final = ("record", "flight_recorder", "ras", "stacks", "deepep", "nccl_log", "watchdog")
"""Modules of this package that export READER; the more particular formats first."""
HEAD: Final = 4096
MOST_FILES: Final = 100_000


def readers() -> list[Reader]:
    """All readers there are."""
    names = [f"verify.readers.{name}" for name in READERS]
    return [import_module(name).READER for name in names if find_spec(name) is not None]


def gather(paths: Sequence[str | Path]) -> Found:
    """Everything that the files and folders tell. Raises UsageError, one line, for what is unusable."""
    known = readers()
    chosen: Chosen = {}
    ignored: list[str] = []
    damaged: list[str] = []
    inside: set[Path] = set()
    for path in map(Path, paths):
        if path.is_dir():
            inside |= _folder(path, known, chosen, ignored, damaged)
        elif (reader := _reader(path, known)) is not None:
            _take(chosen, reader, path)
        else:
            names = ", ".join(reader.name for reader in known)
            raise UsageError(f"{path}: no format that is known here ({names}): name another file, or its folder")
    found = [_read(reader, files, inside, damaged) for reader, files in chosen.values()]
    if damaged:
        found.append(Found("", unknown=tuple(f"not used: {line}" for line in damaged[:4])))
    if ignored:
        names_ = ", ".join(sorted(ignored)[:3]) + (f" and {len(ignored) - 3} more" if len(ignored) > 3 else "")
        found.append(Found("", unknown=(f"not read, of no known format: {names_}",)))
    return merge(found)


Chosen = dict[str, "tuple[Reader, list[Path]]"]
"""Name of a reader -> the reader and what it is to read."""


def _folder(
    folder: Path, known: Sequence[Reader], chosen: Chosen, ignored: list[str], damaged: list[str]
) -> set[Path]:
    """Choose what to read of a folder; its own files that are of a known format."""
    if (whole := next((reader for reader in known if reader.recognises(folder, b"")), None)) is not None:
        _take(chosen, whole, folder)
        return set()
    files: list[Path] = []
    folders: list[Path] = []
    try:
        for each in sorted(folder.iterdir()):
            if each.name.startswith("."):
                continue
            (folders if each.is_dir() else files).append(each)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({error.strerror}): name a folder that can") from None
    if len(files) > MOST_FILES:
        raise UsageError(f"{folder}: {len(files):,} files: name a folder that holds the evidence of one job only")
    taken: set[Path] = set()
    for file in files:
        try:
            reader = _reader(file, known) if file.is_file() else None
        except Damaged as error:
            damaged.append(str(error))
            continue
        if reader is None:
            ignored.append(file.name)
        else:
            _take(chosen, reader, file)
            taken.add(file)
    if not taken:
        if runs_ := [each for each in folders if has_rings(each)]:
            raise UsageError(f"{folder}: {several(runs_)}")
        below = f"name one of its folders, such as {folders[0]}" if folders else "name the folder of the dumps or logs"
        raise UsageError(f"{folder}: holds no evidence that is known here: {below}")
    return taken


def _take(chosen: Chosen, reader: Reader, path: Path) -> None:
    taken = chosen.setdefault(reader.name, (reader, []))[1]
    if path.resolve() not in {each.resolve() for each in taken[-1:]}:
        taken.append(path)


def _reader(path: Path, known: Iterable[Reader]) -> Reader | None:
    """The reader of a file. Raises UsageError for what is no file, or cannot be read."""
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder")
    if not path.is_file():
        raise UsageError(f"{path}: neither a file nor a folder: copy what it gives into a file first")
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}): name a file that can") from None
    if not head:
        raise Damaged(f"{path}: empty: nothing was written to it; leave it out")
    return next((reader for reader in known if reader.recognises(path, head)), None)


def _read(reader: Reader, files: Sequence[Path], inside: set[Path], damaged: list[str]) -> Found:
    """What the files of one format tell. Damaged ones are left out, with a line in `damaged`, if they lay `inside` a
    folder beside others: a job that hangs often has a dump half written.
    """
    if (sparing := getattr(reader, "read_sparing", None)) is not None:  # each file is read once, however many there are
        found: Found = sparing(files, inside, damaged)
        return found
    try:
        return _all(reader, files)
    except Damaged:
        whole = []
        for file in files:
            try:
                reader.read(file)
            except Damaged as error:
                if file not in inside:
                    raise
                damaged.append(str(error))
            except UsageError:
                whole.append(file)  # whatever is wrong with it, it shows again among the others
            else:
                whole.append(file)
        if not whole:
            raise
        return _all(reader, whole)


def _all(reader: Reader, files: Sequence[Path]) -> Found:
    # Some formats say more together than one by one.
    if (together := getattr(reader, "read_all", None)) is not None:
        found: Found = together(files)
        return found
    return merge([reader.read(file) for file in files])


def merge(found: Sequence[Found]) -> Found:
    """Several pieces of evidence as one. Each rank's events stay in the order of their source."""
    present = frozenset[int]().union(*(each.present for each in found))
    return Found(
        source=", ".join(dict.fromkeys(each.source for each in found if each.source)),
        events=tuple(event for each in found for event in each.events),
        present=present,
        expected=frozenset[int]().union(*(each.expected for each in found)),
        stacks=tuple(stack for each in found for stack in each.stacks),
        unknown=tuple(dict.fromkeys(line for each in found for line in each.unknown)),
        moved_ns=max((each.moved_ns for each in found if each.moved_ns is not None), default=None),
        unsure=frozenset[tuple[int, str]]().union(*(each.unsure for each in found)),
        whole=frozenset[int]().union(*(each.whole for each in found)),
    )
