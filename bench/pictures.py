"""The pictures of docs/debugging.md, made by a headless Chromium from pages of real examples: python bench/pictures.py

Each is what `turnstile hang --html` writes for the evidence named here. Needs `chromium` on the path.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

HOUSE: Final = Path(__file__).resolve().parent.parent
DATA: Final = HOUSE / "tests" / "data"
LARGEST: Final = 200_000


class Picture(NamedTuple):
    """name: of the file in docs/images. evidence: what it shows. width, height: of the window, in pixels."""

    name: str
    evidence: tuple[Path, ...]
    width: int
    height: int


PICTURES: Final = (
    Picture("hang-missing", (DATA / "fr" / "megatron16" / "lock_gil",), 1080, 640),
    Picture("hang-cycle", (DATA / "fr" / "h200" / "host_blocked", DATA / "joined" / "host_blocked"), 1080, 1060),
)


def draw(picture: Picture, out: Path, browser: str) -> Path:
    """Draw one; the file. Raises CalledProcessError where the browser fails."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        command = [sys.executable, "-m", "turnstile", "hang", *map(str, picture.evidence), "--html", str(page)]
        subprocess.run(command, cwd=HOUSE, stdout=subprocess.DEVNULL, check=False)
        file = out / f"{picture.name}.png"
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--window-size={picture.width},{picture.height}", f"--user-data-dir={folder}/profile",
             f"--screenshot={file}", page.as_uri()],
            capture_output=True, timeout=120, check=True,
        )  # fmt: skip
    return file


def main() -> int:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HOUSE / "docs" / "images")
    out = parser.parse_args().out
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium on the path: install chromium", file=sys.stderr)
        return 2
    for picture in PICTURES:
        file = draw(picture, out, browser)
        size = file.stat().st_size
        print(f"{file}: {size / 1000:.0f} kB" + (", too large" if size > LARGEST else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
