"""Figures: the bars and lines that are drawn are those of the data, and the files are PNGs."""

from __future__ import annotations

import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollout.report import plots
from verify.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

pytest.importorskip("matplotlib")
MS = 1_000_000
RUN = [
    Interval(0, "D", "D 0", 0, 4 * MS),
    Interval(0, "wait", "decode", 4 * MS, 6 * MS),
    Interval(0, "D", "D 1", 6 * MS, 10 * MS),
    Interval(2, "P", "P e0 [0,1)", 1 * MS, 12 * MS),
    Interval(2, "rendezvous", "pre-d", 0, 1 * MS),
]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, kept instead of written."""
    drawn: list[Figure] = []

    def keep(figure: Figure) -> bytes:
        drawn.append(figure)
        return b"png"

    monkeypatch.setattr(plots, "_png", keep)
    return drawn


def bars(figure: Figure) -> set[tuple[float, float, int, str]]:
    """(start, length, lane, colour) of every bar."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_hex

    found = set()
    for collection in figure.axes[0].collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            box = path.get_extents()
            red, green, blue, _ = np.asarray(collection.get_facecolor())[0]
            colour = to_hex((red, green, blue)).upper()
            found.add((round(box.x0, 6), round(box.width, 6), round((box.y0 + box.y1) / 2), colour))
    return found


def test_lanes_draw_each_interval_of_the_stretch_on_its_rank(figures: list[Figure]) -> None:
    assert plots.lanes(RUN, "fine", "the slice", (0, 10 * MS)) == b"png"
    fill = {name: colour.upper() for name, colour in plots.FILL.items()}
    assert bars(figures[0]) == {
        (0, 4, 0, fill["D"]),
        (4, 2, 0, fill["decode"]),
        (6, 4, 0, fill["D"]),
        (1, 9, 1, fill["P"]),  # cut at the end of the stretch
        (0, 1, 1, fill["rendezvous"]),
    }
    axes = figures[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 2"]
    shown = {text.get_text() for text in figures[0].legends[0].get_texts()}
    assert shown == {plots.NAMES[kind] for kind in ("D", "decode", "P", "rendezvous")}
    assert {"0", "1", "[0,1)"} <= {text.get_text() for text in axes.texts}


def test_completion_lines_are_the_share_not_finished(figures: list[Figure]) -> None:
    plots.completion({"fine": ([3.0, 1.0, 2.0, 4.0], [9.0]), "normal": ([], [])}, "the slice")
    left, right = figures[0].axes
    assert np.asarray(left.lines[0].get_xydata()).tolist() == [[0, 1], [1, 0.75], [2, 0.5], [3, 0.25], [4, 0.25]]
    assert left.lines[0].get_drawstyle() == "steps-post"
    assert np.asarray(right.lines[0].get_xydata())[:, 0].tolist() == [0, 9]
    assert left.get_yscale() == "log"
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["fine"]


def test_what_is_written_is_a_png_of_a_readable_size() -> None:
    for data in (plots.lanes(RUN, "fine", "s"), plots.completion({"fine": ([1.0], [2.0])}, "s")):
        assert data is not None
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 1200
        assert height > 300


def test_nothing_recorded_is_no_picture() -> None:
    assert plots.lanes([], "fine", "s") is None


def test_matplotlib_loads_only_when_a_figure_is_drawn() -> None:
    code = (
        "import sys, rollout.report.plots, rollout.campaign;"
        " sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
