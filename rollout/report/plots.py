"""PNG figures: who finished when, and what each rank did in a stretch of the run. matplotlib loads when drawing."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

from rollout.report.lanes import window
from verify.intervals import DECODE, PERMIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rollout.report.lanes import Span
    from verify.intervals import Interval

# Okabe and Ito's colours, told apart by colour-blind readers; dashes tell them apart in print.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)))
INK: Final = "#333333"
FILL: Final = {"D": "#0072B2", "P": "#E69F00", DECODE: "#F3B0A6", PERMIT: "#FBE6B8", "rendezvous": "#8A8A8A"}
NAMES: Final = {
    "D": "decode iteration",
    "P": "prefill segment",
    DECODE: "decode waits (rows ready)",
    PERMIT: "prefill waits for its permit",
    "rendezvous": "rendezvous (CPU)",
}
SHARES: Final = (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
STYLE: Final[Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "hatch.linewidth": 0.6,
}


def completion(policies: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str) -> bytes:
    """PNG of two complementary CDFs, one line a policy: the share not finished after a time.

    policies: name -> (request completions, trajectory completions), in seconds.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 5))
        left, right = figure.subplots(1, 2, sharey=True)
        for at, (name, (requests, trajectories)) in enumerate(policies.items()):
            line: dict[str, Any] = {
                "color": COLOURS[at % len(COLOURS)],
                "linestyle": DASHES[at % len(DASHES)],
                "linewidth": 1.8,
            }
            _survival(left, requests, name, line)
            _survival(right, trajectories, name, line)
        counts = [len(lane) for pair in policies.values() for lane in pair if lane]
        for axes, what in ((left, "Request completion (s)"), (right, "Trajectory completion (s), waits included")):
            axes.set_xlabel(what)
            axes.set_yscale("log")
            axes.set_ylim(0.7 / max(counts, default=1), 1.15)
            axes.yaxis.set_major_locator(FixedLocator(SHARES))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(_share)
            axes.grid(visible=True, which="major", color="#DDDDDD", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.set_xlim(left=0)
        left.set_ylabel("Share not finished yet")
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(6, len(names) or 1), frameon=False,
                      handlelength=3)  # fmt: skip
        _titles(figure, "Completion by policy (complementary CDF)", title)
        return _png(figure)


def lanes(intervals: Sequence[Interval], policy: str, title: str, span: Span | None = None) -> bytes | None:
    """PNG with one lane a rank: its D iterations above its P segments, and what each waits for.

    span: the stretch to show, in ns; by default `rollout.report.lanes.window`. None when no work was recorded.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    span = span or window(intervals)
    if span is None:
        return None
    start, end = span
    shown = [one for one in intervals if one.end_ns >= start and one.start_ns <= end]
    ranks = sorted({one.rank for one in intervals})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 1.9 + 0.95 * len(ranks)))
        axes = figure.subplots()
        for at, rank in enumerate(ranks):
            if at % 2:
                axes.axhspan(at - 0.5, at + 0.5, color="#F5F5F5", zorder=0)
            _lane(axes, [one for one in shown if one.rank == rank], at, start, end)
        length = (end - start) / 1e6
        axes.set_xlim(0, length)
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], fontsize=11)
        axes.tick_params(axis="y", length=0, pad=22)
        for at in range(len(ranks)):
            for phase in ("D", "P"):
                _beside(axes, at + _TOP[phase] + _HEIGHT / 2, phase)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"ms since {_seconds(start, intervals)} s of the record")
        seen = {name for one in shown if one.end_ns > one.start_ns for name in (one.lane, one.label)}
        kinds = [kind for kind in FILL if kind in seen]
        handles = [Patch(**_paint(kind), label=NAMES[kind]) for kind in kinds]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)
        _titles(figure, f"{policy}: order and waits, rank by rank", title)
        return _png(figure)


_TOP: Final = {"D": -0.42, "P": 0.04}
_HEIGHT: Final = 0.38


def _lane(axes: Axes, shown: Sequence[Interval], at: int, start: int, end: int) -> None:
    """One rank's bars, cut to the stretch and in ms since its start: one collection a kind, which draws fast."""
    bars: dict[str, list[tuple[float, float]]] = {kind: [] for kind in FILL}
    for one in shown:
        kind = one.label if one.lane == "wait" else one.lane
        left, right = max(one.start_ns, start) - start, min(one.end_ns, end) - start
        bars[kind].append((left / 1e6, (right - left) / 1e6))
        text = one.label.rpartition(" ")[2] if one.lane in ("P", "D") else ""
        if text and right - left > (end - start) * 0.0075 * (len(text) + 1):
            colour = "white" if one.lane == "D" else INK
            middle = at + _TOP[one.lane] + _HEIGHT / 2
            axes.text(
                (left + right) / 2e6, middle, text, ha="center", va="center", fontsize=7.5, color=colour, zorder=4
            )  # fmt: skip
    for kind, spans in bars.items():
        if kind == "rendezvous":
            place = (at - 0.035, 0.07)
        else:
            place = (at + _TOP["D" if kind in ("D", DECODE) else "P"], _HEIGHT)
        axes.broken_barh(spans, place, zorder=3 if kind == "rendezvous" else 2, **_paint(kind))


def _paint(kind: str) -> dict[str, Any]:
    if kind in (DECODE, PERMIT):
        return {"facecolor": FILL[kind], "edgecolor": "#C8685A" if kind == DECODE else "#C9A24B", "linewidth": 0.0,
                "hatch": "////"}  # fmt: skip
    return {"facecolor": FILL[kind], "edgecolor": "white", "linewidth": 0.0 if kind == "rendezvous" else 0.6}


def _beside(axes: Axes, y: float, phase: str) -> None:
    place = axes.get_yaxis_transform()
    style: dict[str, Any] = {"fontsize": 8.5, "fontweight": "bold", "color": FILL[phase]}
    axes.text(-0.008, y, phase, transform=place, ha="right", va="center", **style)


def _survival(axes: Axes, seconds: Sequence[float], name: str, line: dict[str, Any]) -> None:
    """Step down by 1/n at each completion; the last step would be to 0, which a log axis has not."""
    ordered = sorted(seconds)
    count = len(ordered)
    if count:
        axes.step(
            [0.0, *ordered], [1.0, *((count - done) / count for done in range(1, count)), 1 / count],
            where="post", label=name, **line,
        )  # fmt: skip
        axes.plot(ordered[-1], 1 / count, marker="o", markersize=4, color=line["color"])


def _share(value: float, _: int | None = None) -> str:
    return f"{100 * value:g} %"


def _seconds(start: int, intervals: Sequence[Interval]) -> str:
    return f"{(start - min(one.start_ns for one in intervals)) / 1e9:.3f}"


def _titles(figure: Figure, title: str, below: str) -> None:
    """A title and a line under it, in a strip of fixed height that the layout leaves free."""
    height = figure.get_figheight()
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - 0.66 / height))
    figure.text(0.012, 1 - 0.16 / height, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.012, 1 - 0.44 / height, below, fontsize=8.5, color="#666666", va="top")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
