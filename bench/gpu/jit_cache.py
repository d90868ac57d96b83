"""Compiled kernels that outlive a machine: FlashInfer's, Triton's and Inductor's caches as parts of an archive.

    python -m bench.gpu.jit_cache unpack FOLDER CACHE      parts in FOLDER -> CACHE; prints the variables to export
    python -m bench.gpu.jit_cache pack CACHE FOLDER        CACHE -> FOLDER/jit-cache.tar.gz.000, ...

Times of files are kept, because ninja compares them, but cut to seconds: an object that looks a nanosecond younger than
ninja's own notes of it is built again, and archives round. The sources of an installed FlashInfer are made older than
what was built from them, since an installation anew would otherwise build everything again.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
import tarfile
from pathlib import Path

PART = 15 << 20
NAME = "jit-cache.tar.gz"
LONG_AGO = 1_000_000_000
VARIABLES = (
    ("FLASHINFER_WORKSPACE_BASE", "flashinfer"),
    ("TRITON_CACHE_DIR", "triton"),
    ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
)


def environment(cache: Path) -> dict[str, str]:
    """The variables that put all caches under `cache`, made if missing."""
    found = {}
    for variable, folder in VARIABLES:
        (cache / folder).mkdir(parents=True, exist_ok=True)
        found[variable] = str((cache / folder).resolve())
    return found


def pack(cache: Path, out: Path, part: int = PART) -> list[Path]:
    """Write `cache` as parts of at most `part` bytes into `out`; the parts, in order. Locks are left out."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"{NAME}.*"):
        old.unlink()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        archive.add(cache, arcname=".", filter=_kept)
    parts = []
    for number, start in enumerate(range(0, data.getbuffer().nbytes, part)):
        parts.append(out / f"{NAME}.{number:03d}")
        parts[-1].write_bytes(data.getbuffer()[start : start + part])
    return parts


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.mtime = int(member.mtime - 1e-6)  # it has been rounded once already
    return None if member.name.endswith(".lock") else member


def unpack(folder: Path, cache: Path) -> int:
    """Restore `cache` from the parts in `folder`; how many there were (0: nothing to restore)."""
    parts = sorted(folder.glob(f"{NAME}.*"))
    cache.mkdir(parents=True, exist_ok=True)
    if parts:
        data = io.BytesIO(b"".join(path.read_bytes() for path in parts))
        with tarfile.open(fileobj=data, mode="r:gz") as archive:
            archive.extractall(cache, filter="data")
    return len(parts)


def age(package: str) -> int:
    """Make the files of an installed package old; how many."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return 0
    count = 0
    for root in spec.submodule_search_locations:
        for path in Path(root).rglob("*"):
            if path.is_file() and not path.is_symlink():
                os.utime(path, (LONG_AGO, LONG_AGO))
                count += 1
    return count


def main() -> int:
    """The command."""
    made = argparse.ArgumentParser(prog="python -m bench.gpu.jit_cache")
    made.add_argument("what", choices=("pack", "unpack"))
    made.add_argument("source", type=Path)
    made.add_argument("target", type=Path)
    given = made.parse_args()
    if given.what == "pack":
        print(*pack(given.source, given.target), sep="\n")
        return 0
    unpack(given.source, given.target)
    age("flashinfer")
    for name, value in environment(given.target).items():
        print(f"export {name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
