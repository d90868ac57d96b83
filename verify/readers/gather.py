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
from verify.events import Kind
from verify.readers.found import Damaged, Found
from verify.readers.lines import rank_of_file
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
    silent: list[Path] = []
    inside: set[Path] = set()
    for path in map(Path, paths):
        if path.is_dir():
            inside |= _folder(path, known, chosen, silent, damaged)
        elif (reader := _reader(path, known)) is not None:
            _take(chosen, reader, path)
        else:
            silent.append(path)
    _companions(chosen, silent, inside, ignored)
    found = [_read(reader, _once(files), inside, damaged) for reader, files in chosen.values()]
    if damaged:
        found.append(Found("", unknown=tuple(f"not used: {line}" for line in damaged[:4])))
    if ignored:
        names_ = ", ".join(sorted(ignored)[:3]) + (f" and {len(ignored) - 3} more" if len(ignored) > 3 else "")
        found.append(Found("", unknown=(f"not read, of no known format: {names_}",)))
    return merge(found)


Chosen = dict[str, "tuple[Reader, list[Path]]"]
"""Name of a reader -> the reader and what it is to read."""


def _folder(folder: Path, known: Sequence[Reader], chosen: Chosen, silent: list[Path], damaged: list[str]) -> set[Path]:
    """Choose what to read of a folder; its own files. silent: gets those that are of no known format."""
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
            silent.append(file)
        else:
            _take(chosen, reader, file)
        taken |= {file} if reader is not None else set()
    if not taken:
        if runs_ := [each for each in folders if has_rings(each)]:
            raise UsageError(f"{folder}: {several(runs_)}")
        below = f"name one of its folders, such as {folders[0]}" if folders else "name the folder of the dumps or logs"
        raise UsageError(f"{folder}: holds no evidence that is known here: {below}")
    return {*files}


def _companions(chosen: Chosen, silent: Sequence[Path], inside: set[Path], ignored: list[str]) -> None:
    """What is of no known format: beside the logs of other ranks, a rank's log without a line of a watchdog says that
    the rank was there. Otherwise it is ignored in a folder, and an error where it was named.
    """
    logs = chosen.get("watchdog")
    for path in silent:
        if logs is not None and rank_of_file(path) is not None and path.is_file() and _is_text(path):
            logs[1].append(path)
        elif path in inside:
            ignored.append(path.name)
        else:
            raise UsageError(
                f"{path}: no format that is known here ({', '.join(READERS)}): name another file, or its folder"
            )


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(HEAD)


def _once(files: Sequence[Path]) -> list[Path]:
    """Each file once, however often it was named, itself or by its folder."""
    return list({path.resolve(): path for path in reversed(files)}.values())[::-1]


def _take(chosen: Chosen, reader: Reader, path: Path) -> None:
    chosen.setdefault(reader.name, (reader, []))[1].append(path)


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
    """Several pieces of evidence as one. Each rank's events stay in the order of their source; how it left comes last,
    whichever file told it.
    """
    events = [event for each in found for event in each.events]
    present = frozenset[int]().union(*(each.present for each in found))
    return Found(
        source=", ".join(dict.fromkeys(each.source for each in found if each.source)),
        events=tuple(sorted(events, key=lambda event: event.kind is Kind.EXIT)),
        present=present,
        expected=frozenset[int]().union(*(each.expected for each in found)),
        stacks=tuple(stack for each in found for stack in each.stacks),
        unknown=tuple(dict.fromkeys(line for each in found for line in each.unknown)),
        moved_ns=max((each.moved_ns for each in found if each.moved_ns is not None), default=None),
        unsure=frozenset[tuple[int, str]]().union(*(each.unsure for each in found)),
        whole=frozenset[int]().union(*(each.whole for each in found)),
        doubt=next((each.doubt for each in found if each.doubt), ""),
    )
