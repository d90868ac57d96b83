"""The wait-for graph as SVG: a ring as a ring, and each operation between who waits in it and whom it waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from verify import words

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import networkx as nx

LARGEST: Final = 16
"""Nodes of a ring that is drawn; a longer one is told in words."""
ROWS: Final = 16
"""Operations that are drawn."""
CHARACTER: Final = 7.0
"""Pixels of one at the size that is used."""


@dataclass(frozen=True, slots=True)
class Box:
    """A node on the picture. x, y: its middle."""

    x: float
    y: float
    text: str
    kind: str
    title: str = ""
    least: float = 0.0

    @property
    def width(self) -> float:
        """As wide as its text."""
        return max(self.least, CHARACTER * len(self.text) + 22)

    def svg(self) -> str:
        """The box with its text."""
        left = self.x - self.width / 2
        radius = 4 if self.kind.startswith("op") else 15
        return (
            f'<g class="node {self.kind}"><title>{escape(self.title or self.text)}</title>'
            f'<rect x="{left:.1f}" y="{self.y - 15:.1f}" width="{self.width:.1f}" height="30" rx="{radius}"/>'
            f'<text x="{self.x:.1f}" y="{self.y + 4.5:.1f}">{escape(self.text)}</text></g>'
        )

    def border(self, towards: Box) -> tuple[float, float]:
        """Where a line from the middle of this box to that of another one leaves it."""
        dx, dy = towards.x - self.x, towards.y - self.y
        scale = min((self.width / 2 + 3) / abs(dx) if dx else math.inf, 18 / abs(dy) if dy else math.inf, 1.0)
        return self.x + dx * scale, self.y + dy * scale


def arrow(one: Box, other: Box, style: str, text: str = "") -> str:
    """From one box to another; text stands beside its middle."""
    (x1, y1), (x2, y2) = one.border(other), other.border(one)
    found = f'<line class="edge {style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
    if text:
        found += f'<text class="note" x="{(x1 + x2) / 2:.1f}" y="{(y1 + y2) / 2 - 5:.1f}">{escape(text)}</text>'
    return found


def svg(width: float, height: float, parts: Iterable[str], label: str) -> str:
    """An SVG element that is as wide as the page allows, and has arrow heads."""
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path class="head {name}" d="M0 1 L10 5 L0 9 z"/></marker>'
        for name in ("plain", "bad")
    )
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
        f' height="{height:.0f}"><defs>{heads}</defs>{"".join(parts)}</svg>'
    )


def ring(graph: nx.DiGraph[Any], cycle: Sequence[Any]) -> str:
    """A cycle, clockwise: each rank points to the operation it waits in, and that to the rank it lacks."""
    if not cycle or len(cycle) > LARGEST:
        return ""
    boxes = [_box(graph, node, "bad") for node in cycle]
    widest = max(box.width for box in boxes)
    across, up = widest / 2 + 60 + 14 * len(boxes), 26.0 * len(boxes)
    middle, height = across + widest / 2 + 12, 2 * up + 60
    placed = []
    for at, box in enumerate(boxes):
        angle = 2 * math.pi * at / len(boxes) - math.pi / 2
        x, y = middle + across * math.cos(angle), up + 30 + up * math.sin(angle)
        placed.append(Box(x, y, box.text, box.kind, box.title))
    parts = []
    for at, box in enumerate(placed):
        after = placed[(at + 1) % len(placed)]
        parts.append(arrow(box, after, "bad", "needs" if box.kind.startswith("op") else "waits in"))
    return svg(2 * middle, height, [*parts, *(box.svg() for box in placed)], "ranks that wait in a ring")


def table(graph: nx.DiGraph[Any], cycle: Collection[Any] = (), blamed: Collection[int] = ()) -> str:
    """One line for each operation: who waits in it, what it is, and for whom it waits. Of a ring, the edges are marked.

    Ranks that wait for nobody, and those blamed, stand out: they are where to look.
    """
    ops = [node for node in graph if node[0] == "op" and graph.in_degree(node) and graph.out_degree(node)]
    # What somebody waits in first, and then what is behind that.
    front = {op for op in ops if graph.nodes[op].get("active")}
    ops.sort(key=lambda op: (op not in cycle, op not in front, not _roots(graph, op), -graph.in_degree(op), str(op)))
    if not ops:
        return ""
    parts: list[str] = []
    lines = [
        (_side(graph, graph.predecessors(op)), _box(graph, op), _side(graph, _needed(graph, op, blamed)))
        for op in ops[:ROWS]
    ]
    widths = [max(line[column].width for line in lines) for column in range(3)]
    starts = [12.0, 12 + widths[0] + 90, 12 + widths[0] + widths[1] + 180]
    for at, (op, line) in enumerate(zip(ops, lines, strict=False)):
        y = 52.0 + 44 * at
        marked = op in cycle
        bad = bool(_roots(graph, op)) or bool({graph.nodes[n]["rank"] for n in graph.successors(op)} & set(blamed))
        kinds = ("rank", "op bad" if marked else "op", "rank bad" if bad or marked else "rank")
        boxes = [
            Box(start + width / 2, y, box.text, kind, box.title, width)
            for start, width, box, kind in zip(starts, widths, line, kinds, strict=True)
        ]
        style = "bad" if marked else "plain"
        parts += [arrow(boxes[0], boxes[1], style), arrow(boxes[1], boxes[2], style), *(box.svg() for box in boxes)]
    heads = zip(starts, widths, ("waits", "in", "for"), strict=True)
    parts += [f'<text class="head" x="{start + width / 2:.1f}" y="20">{word}</text>' for start, width, word in heads]
    height = 40.0 + 44 * min(len(ops), ROWS)
    if len(ops) > ROWS:
        parts.append(f'<text class="note left" x="12" y="{height + 16}">and {len(ops) - ROWS} more operations</text>')
        height += 28
    return svg(starts[2] + widths[2] + 12, height, parts, "who waits for whom")


def _roots(graph: nx.DiGraph[Any], op: Any) -> list[Any]:
    """Hosts that an operation waits for and that wait for nobody. What a stream waits for may not be known."""
    return [node for node in graph.successors(op) if node[0] != "device" and not graph.out_degree(node)]


def _needed(graph: nx.DiGraph[Any], op: Any, blamed: Collection[int]) -> list[Any]:
    """Whom an operation waits for: those who wait for nobody or are blamed, where there are such ones; else all."""
    found = list(graph.successors(op))
    chosen = [node for node in _roots(graph, op) if not blamed or graph.nodes[node]["rank"] in blamed]
    return chosen or [node for node in found if graph.nodes[node]["rank"] in blamed] or found


def _side(graph: nx.DiGraph[Any], nodes: Iterable[Any]) -> Box:
    """Several actors as one box."""
    found = sorted(nodes, key=str)
    titles = "; ".join(words_of(graph, node)[1] for node in found[:32])
    if len(found) == 1:
        return Box(0, 0, words_of(graph, found[0])[0], "rank", titles)
    return Box(0, 0, words.ranks(graph.nodes[node]["rank"] for node in found), "rank", titles)


def _box(graph: nx.DiGraph[Any], node: Any, style: str = "") -> Box:
    text, title = words_of(graph, node)
    return Box(0, 0, text, f"{'op' if node[0] == 'op' else 'rank'} {style}".strip(), title)


def words_of(graph: nx.DiGraph[Any], node: Any) -> tuple[str, str]:
    """What a node is called, and more about it. Of `verify.waitgraph.wait_graph`, or one whose nodes have a label."""
    data = graph.nodes[node]
    if "label" in data:
        return _cut(data["label"]), " ".join(filter(None, (data["label"], data.get("site", ""))))
    if node[0] == "op":
        meeting = data["meeting"]
        return _cut(words.operation(meeting)), words.waiters(meeting)
    name = f"rank {node[1]}"
    if node[0] == "queue":
        launch = data["launch"]
        operations = " with ".join(map(words.operation, launch.meetings))
        return f"{name}'s queue", f"{name}: {operations}{words.at(launch.event)} is queued"
    host = data.get("host")
    thread = f" ({node[2]})" if node[2] else ""
    return name + thread, words.standing(host) if host is not None and not host.waits else (
        name + thread + words.at(host.event if host is not None else None)
    )


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
