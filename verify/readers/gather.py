"""From files and folders to one `Found`: each is read by the reader that knows its format.

Readers are loaded when they are needed. A folder is a run directory, or the dumps and logs of one job: its own files
are read, those below it are not, but for the folders that torchrun makes for logs (`verify.readers.log_tree`).
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from verify.events import Kind
from verify.readers import plain_json
from verify.readers.attempts import of_present
from verify.readers.found import Damaged, Empty, Found
from verify.readers.joined import join, widened
from verify.readers.lines import BIGGEST, Numbers, distinct, named, numbers_of, of_hosts, rank_of_file
from verify.readers.log_tree import logs_below
from verify.readers.outlived import outlived
from verify.runs import has_rings, several

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from verify.readers.found import Reader

READERS: Final = ("record", "flight_recorder", "ras", "stacks", "deaths", "gloo_words", "deepep", "nccl_log",
                  "watchdog")  # fmt: skip
"""Modules of this package that export READER; the more particular formats first."""
LOGS: Final = ("stacks", "deaths", "gloo's words", "deepep", "nccl_log", "watchdog")
"""Readers of lines in logs: one log may hold lines of each."""
STRICT: Final = "flight recorder"
"""The reader whose files are refused for more than damage: what it does not leave out itself is an error."""
HEAD: Final = 4096
MOST_FILES: Final = 100_000


def readers() -> list[Reader]:
    """All readers there are."""
    names = [f"verify.readers.{name}" for name in READERS]
    return [import_module(name).READER for name in names if find_spec(name) is not None]


class NoEvidence(UsageError):
    """A folder holds none: logs of a job that hangs are empty, dumps not written yet."""


def gather(paths: Sequence[str | Path], beside: bool = False) -> Found:
    """Everything that the files and folders tell. Raises UsageError, one line, for what is unusable.

    beside: there is other evidence, so that folders without any are only said not to be used.
    """
    return _gather(paths, readers(), beside)


def _gather(paths: Sequence[str | Path], known: Sequence[Reader], beside: bool = False) -> Found:
    chosen: Chosen = {}
    ignored: list[str] = []
    damaged: list[str] = []
    silent: list[Path] = []
    inside: set[Path] = set()
    bare: list[NoEvidence] = []
    empty: dict[Path, Empty] = {}
    for path in map(Path, paths):
        if path.is_dir():
            odd: list[Path] = []
            try:
                inside |= _folder(path, known, chosen, odd, damaged)
                silent += odd
            except NoEvidence as error:
                bare.append(error)
            continue
        try:
            mine = _readers(path, known)
        except Empty as error:
            empty[path] = error
            continue
        for reader in mine:
            _take(chosen, reader, path)
        if not mine:
            silent.append(path)
    # Nothing was written to the log of a rank that is well, nor yet to a dump.
    if not chosen and not beside and (nothing := [*bare, *empty.values()]):
        raise nothing[0]
    damaged += map(str, bare)
    damaged += _empty(list(empty))
    _companions(chosen, silent, inside, ignored)
    again = of_present({name: files for name, (_, files) in chosen.items() if name in LOGS})
    numbered = _numbered_by_host({path for name, (_, files) in chosen.items() if name in LOGS for path in files})
    untold = [path for path, numbers in numbered.items() if numbers.untold]
    apart = untold if len(numbered) > 1 else []
    found, refused = _read_each(chosen, apart, inside, damaged, known)
    if len(numbered) == 1 and untold:
        # More ranks than it has numbers: the job has another host.
        (numbers,) = numbered.values()
        if max((rank for each in found for rank in each.expected), default=0) > max(numbers.untold | {*numbers.ranks}):
            apart = untold
            found, refused = _read_each(chosen, apart, inside, [], known)
    if untold:
        found.append(Found("", unknown=(_numbering(untold, min(numbered[untold[0]].untold), bool(apart)),)))
    if refused and not any(each.events or each.stacks for each in found):
        raise refused[0]
    damaged += map(str, refused)
    if damaged:
        found.append(Found("", unknown=tuple(f"not used: {line}" for line in damaged[:4])))
    if again:
        found.append(Found("", unknown=tuple(again[:4])))
    if ignored:
        names_ = ", ".join(sorted(ignored)[:3]) + (f" and {len(ignored) - 3} more" if len(ignored) > 3 else "")
        found.append(Found("", unknown=(f"not read, of no known format: {names_}",)))
    return merge(found)


def _read_each(
    chosen: Chosen, hosts: Iterable[Path], inside: set[Path], damaged: list[str], known: Sequence[Reader]
) -> tuple[list[Found], list[UsageError]]:
    """What each reader makes of its files, and why some cannot be used. hosts: see `verify.readers.lines.of_hosts`."""
    found: list[Found] = []
    refused: list[UsageError] = []
    with of_hosts(hosts):
        for reader, files in (each for each in chosen.values() if each[1]):
            try:
                found.append(_read(reader, _once(files), inside, damaged))
            except UsageError as error:
                found += _beside(error, reader, files, inside, known)
                refused.append(error)
    return found, refused


def _numbered_by_host(logs: Iterable[Path]) -> dict[Path, Numbers]:
    """Those of some logs whose lines have a number within a host, and what that stands for."""
    found = {}
    for path in sorted(distinct([path for path in logs if path.is_file() and rank_of_file(path) is None])):
        with suppress(OSError, UsageError):
            if (numbers := numbers_of(path)).ranks or numbers.untold:
                found[path] = numbers
    return found


def _numbering(logs: Sequence[Path], number: int, several: bool) -> str:
    """What is told of logs in which no line says which rank some number within a host is."""
    where = f"{named(logs)}: [default{number}]: tells a number within a host"
    if several:
        return f"{where}: lines that tell no global rank are not used"
    return f"{where}: taken for rank {number}, as it is where the job has one host"


def _empty(paths: Sequence[Path]) -> list[str]:
    """What to say of files without a byte."""
    if len(paths) < 2:
        return [f"{path}: empty: nothing was written to it" for path in paths]
    told = ", ".join(str(path) for path in paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")
    return [f"{len(paths)} files are empty: {told}"]


def _beside(
    error: UsageError, reader: Reader, files: Sequence[Path], inside: set[Path], known: Sequence[Reader]
) -> list[Found]:
    """What else there is where files of one format cannot be used. Raises `error` for files that were named, and for a
    dump, which may be hostile; of a folder that was taken for a run, the other files still tell.
    """
    if reader.name != STRICT and inside.issuperset(files):
        return []
    if not all(file.is_dir() for file in files):
        raise error
    try:
        return [_gather(files, [each for each in known if each is not reader])]
    except UsageError:
        raise error from None


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
    taken = _sort(files, known, chosen, silent, damaged)
    if not taken and (logs := logs_below(folder)) is not None:
        files, taken = [*logs.files], _sort(logs.files, known, chosen, silent, damaged)
        if not taken:
            said = "the logs of all its ranks are empty, or hold nothing that is known here"
            raise NoEvidence(f"{logs.attempt}: {said}: look at their processes, with --pid, or at a record")
        if logs.older:
            names = ", ".join(each.name for each in logs.older[-3:])
            damaged.insert(0, f"{names} of {logs.attempt.parent}, before {logs.attempt.name}")
    if not taken:
        if runs_ := [each for each in folders if has_rings(each)]:
            raise UsageError(f"{folder}: {several(runs_)}")
        if (begins := _begins(folder, folders)) is not None:
            raise NoEvidence(f"{folder}: {begins}")
        below = f"name one of its folders, such as {folders[0]}" if folders else "name the folder of the dumps or logs"
        raise NoEvidence(f"{folder}: holds no evidence that is known here: {below}")
    return {*files}


def _sort(
    files: Iterable[Path], known: Sequence[Reader], chosen: Chosen, silent: list[Path], damaged: list[str]
) -> set[Path]:
    """Choose who is to read each of the files of a folder; those for which there is somebody."""
    taken: set[Path] = set()
    empty: list[Path] = []
    for file in files:
        try:
            mine = _readers(file, known) if file.is_file() else []
        except Empty:
            empty.append(file)
            continue
        except Damaged as error:
            damaged.append(str(error))
            continue
        for reader in mine:
            _take(chosen, reader, file)
            taken.add(file)
        if not mine:
            silent.append(file)
    damaged += _empty(empty)
    return taken


def _begins(folder: Path, folders: Sequence[Path]) -> str | None:
    """What to say of a run's directory without a ring: of one that starts, that it does; None where it is no run's."""
    if (folder / "run.json").is_file():
        with suppress(OSError, ValueError, AttributeError):
            data = (folder / "run.json").read_bytes()[:BIGGEST]
            if plain_json.load(data).get("status") not in (None, "running"):
                return "its run has ended, and its ranks have recorded nothing: see what the command said"
    elif folder.name != "record" and "record" not in {each.name for each in folders}:
        return None
    return (
        "its ranks have recorded nothing yet: they may still start, or load: look again in a while, or name their"
        " processes with --pid"
    )


def _companions(chosen: Chosen, silent: Sequence[Path], inside: set[Path], ignored: list[str]) -> None:
    """Give files of no known format to the readers of logs that know others of the job and say that they belong there.
    The rest is ignored in a folder, and an error where it was named.
    """
    for path in silent:
        logs = [chosen[name] for name in LOGS if name in chosen and path.is_file()]
        mine = [files for reader, files in logs if getattr(reader, "belongs", lambda _: False)(path)]
        for files in mine:
            files.append(path)
        if not mine and path in inside:
            ignored.append(path.name)
        elif not mine:
            raise UsageError(
                f"{path}: no format that is known here ({', '.join(READERS)}): name another file, or its folder"
            )


def _once(files: Sequence[Path]) -> list[Path]:
    """Each file once, however often it was named, itself or by its folder."""
    return list({path.resolve(): path for path in reversed(files)}.values())[::-1]


def _take(chosen: Chosen, reader: Reader, path: Path) -> None:
    chosen.setdefault(reader.name, (reader, []))[1].append(path)


def _readers(path: Path, known: Iterable[Reader]) -> list[Reader]:
    """The readers of a file: one, or all that know lines of a log. Raises UsageError for what is no file, or cannot be
    read.
    """
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
        raise Empty(f"{path}: empty: nothing was written to it; leave it out")
    found: list[Reader] = []
    for reader in known:
        if (not found or reader.name in LOGS) and reader.recognises(path, head):
            found.append(reader)
            if reader.name not in LOGS:
                break
    return found


def _read(reader: Reader, files: Sequence[Path], inside: set[Path], damaged: list[str]) -> Found:
    """What the files of one format tell. Damaged ones are left out, with a line in `damaged`, if they lay `inside` a
    folder beside others: a job that hangs often has a dump half written.
    """
    if (sparing := getattr(reader, "read_sparing", None)) is not None:  # each file is read once, however many there are
        found: Found = sparing(files, inside, damaged)
        return found
    try:
        return _all(reader, files)
    except UsageError:
        whole: list[Path] = []
        odd: dict[Path, str] = {}
        for file in files if len(files) > 1 else ():
            try:
                reader.read(file)
            except Damaged as error:
                if file not in inside:
                    raise
                damaged.append(str(error))
                continue
            except UsageError as error:
                odd[file] = str(error)  # a log without a line of its own may still say something among others
            whole.append(file)
        sound = [file for file in whole if file not in odd]
        if not sound:
            raise
        try:
            return _all(reader, whole)
        except UsageError:
            if not odd or not inside.issuperset(odd):
                raise
            damaged += odd.values()
            return _all(reader, sound)


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
    found = outlived(widened(join(found)))
    present = frozenset[int]().union(*(each.present for each in found))
    whole = frozenset[int]().union(*(each.whole for each in found))
    # A record of everything says more than what else there is of a rank, and says it once.
    best = {rank: number for number, each in enumerate(found) for rank in each.whole}
    numbered = [(number, event) for number, each in enumerate(found) for event in each.events]
    events = [event for number, event in numbered if best.get(event.rank, number) == number]
    # A rank of which a log says how it left waits in none of the groups that its lines do not speak of.
    left = {event.rank for event in events if event.kind is Kind.EXIT and event.operation and not event.thread}
    return Found(
        source=", ".join(dict.fromkeys(each.source for each in found if each.source)),
        events=tuple(sorted(events, key=lambda event: event.kind is Kind.EXIT)),
        present=present,
        expected=frozenset[int]().union(*(each.expected for each in found)),
        stacks=tuple(stack for each in found for stack in each.stacks),
        unknown=tuple(dict.fromkeys(line for each in found for line in each.unknown)),
        moved_ns=max((each.moved_ns for each in found if each.moved_ns is not None), default=None),
        unsure=frozenset(
            (rank, name) for each in found for rank, name in each.unsure if not (each.loose and rank in left)
        ),
        whole=whole,
        lively=frozenset[int]().union(*(each.lively for each in found)),
        idle=frozenset[int]().union(*(each.idle for each in found)),
        orphaned=any(each.orphaned for each in found),
        remarks=tuple(remark for each in found for remark in each.remarks),
        doubt=_doubt(found),
        named=tuple(named for each in found for named in each.named),
        loose=tuple(named for each in found for named in each.loose),
        overdue=frozenset[int]().union(*(each.overdue for each in found)),
        timeout_s=max((each.timeout_s for each in found if each.timeout_s is not None), default=None),
        traced=frozenset[tuple[int, str]]().union(*(each.traced for each in found)),
        undated=frozenset[int]().union(*(each.undated for each in found)),
        deaf=frozenset[int]().union(*(each.deaf for each in found)) - whole,
        mixed=next((each.mixed for each in found if each.mixed), ""),
        earlier=frozenset[int]().union(*(each.earlier for each in found)) - whole,
        recorded=frozenset[int]().union(*(each.recorded for each in found)),
        waited=tuple(each for one in found for each in one.waited),
        damaged=tuple(each for one in found for each in one.damaged),
        inferred=frozenset[str]().union(*(each.inferred for each in found)),
    )


def _doubt(found: Sequence[Found]) -> str:
    """Why not everything is seen, unless dumps or records of the same ranks show it."""
    sure = [each for each in found if (each.named or each.whole) and not each.doubt]
    return next(
        (each.doubt for each in found if each.doubt and not any(each.present <= other.present for other in sure)), ""
    )
