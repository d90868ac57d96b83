"""One self-contained HTML page about a stuck or running job: the diagnosis, who waits for whom, and the timetable.

The page loads nothing: no font, no script from elsewhere, no image. All text from outside is escaped, and its content
security policy would stop what were not.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

from verify.blame import Class, shortest_cycle
from verify.html import graph as drawing
from verify.html import timetable as timetables
from verify.html.style import CSS
from verify.waitgraph import stuck, wait_graph

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import networkx as nx

    from verify.html.timetable import Timetable
    from verify.matching import Situation
    from verify.readers.found import Stack

__all__ = ["diagnosis_page", "page"]

POLICY: Final = (
    "default-src 'none'; img-src data:; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
REFRESH: Final = """
(function () {
  var every = %d;
  function again() {
    fetch("body", {cache: "no-store"}).then(function (answer) {
      if (!answer.ok) throw new Error(answer.status);
      return answer.text();
    }).then(function (text) {
      var open = Array.from(document.querySelectorAll("details[open]")).map(function (one) { return one.id; });
      document.querySelector("main").innerHTML = text;
      open.forEach(function (id) { var one = document.getElementById(id); if (one) one.open = true; });
      setTimeout(again, every);
    }).catch(function () {
      var note = document.getElementById("note");
      if (note) note.textContent = "This page is no longer refreshed: turnstile top has ended.";
      setTimeout(again, 5 * every);
    });
  }
  setTimeout(again, every);
})();
"""


def diagnosis_page(
    diagnosis: Mapping[str, Any],
    situation: Situation,
    *,
    title: str = "",
    stacks: Sequence[Stack] = (),
    dark: Collection[int] = (),
) -> str:
    """The page of a diagnosis and the situation that it was made from.

    diagnosis: the keys that `turnstile hang --json` prints (class, certainty, ranks, chain, say, fix, unknown); those
    that are missing are left out. dark: ranks without a record of calls.
    """
    graph = wait_graph(situation)
    core = stuck(graph, free=[node for node in graph if not graph.out_degree(node)])
    cycle = shortest_cycle(graph.subgraph(core)) if core and diagnosis.get("class") == Class.CYCLE else []
    marked = [node[1] for node in cycle if node[0] == "op"]
    timetable = timetables.of_situation(situation, marked, diagnosis.get("ranks", ()), dark)
    return page(title or "turnstile hang", body(title or "turnstile hang", diagnosis, graph, cycle, timetable, stacks))


def page(title: str, content: str, refresh_s: float = 0.0) -> str:
    """A whole page around `content`, which is HTML. refresh_s: fetch `body` beside it so often; 0 for never."""
    script = f"<script>{REFRESH % max(100, int(refresh_s * 1000))}</script>" if refresh_s else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{CSS}</style></head><body><main>{content}</main>{script}</body></html>\n"
    )


def body(
    title: str,
    diagnosis: Mapping[str, Any] | None,
    graph: nx.DiGraph[Any] | None,
    cycle: Sequence[Any],
    timetable: Timetable | None,
    stacks: Sequence[Stack] = (),
    *,
    about: str = "",
    more: str = "",
) -> str:
    """What stands on the page, as HTML. about: a line below the title. more: HTML, after the diagnosis."""
    blamed = diagnosis.get("ranks", ()) if diagnosis is not None else ()
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="faint" id="note">{escape(about)}</p>']
    if diagnosis is not None:
        parts.append(_verdict(diagnosis))
    parts.append(more)
    if graph is not None:
        if picture := drawing.ring(graph, cycle):
            parts.append(_section("The ring", "Each waits for the next one, so none of them can go on.", picture))
        if picture := drawing.table(graph, cycle, blamed):
            about = "Red on the right: is waited for and waits for nobody, or is part of the ring."
            parts.append(_section("Who waits for whom", about, picture))
    if timetable is not None and (picture := timetables.draw(timetable)):
        parts.append(_section("Timetable", _how_to_read(timetable), picture + _legend(timetable)))
    if stacks:
        parts.append("<h2>Stacks</h2>" + "".join(_stack(at, stack, blamed) for at, stack in enumerate(stacks[:256])))
    if diagnosis is not None and diagnosis.get("unknown"):
        lines = "".join(f"<li>{escape(str(line))}</li>" for line in _lines(diagnosis["unknown"]))
        parts.append(f"<h2>What the evidence does not show</h2><ul>{lines}</ul>")
    return "\n".join(parts)


def _section(title: str, about: str, picture: str) -> str:
    return f'<h2>{title}</h2><p class="faint">{escape(about)}</p><div class="picture">{picture}</div>'


def _verdict(diagnosis: Mapping[str, Any]) -> str:
    cls, certainty = str(diagnosis.get("class", "")), str(diagnosis.get("certainty", ""))
    parts = [f'<p><strong class="class">{escape(cls)}</strong> <span class="faint">{escape(certainty)}</span></p>']
    say, chain = str(diagnosis.get("say", "")), _lines(diagnosis.get("chain", ()))
    parts.append(f"<p><strong>{escape(say)}</strong></p>")
    if news := [line for line in chain if line.lower() not in say.lower()]:
        parts.append("<ol>" + "".join(f"<li>{escape(line)}</li>" for line in news[:32]) + "</ol>")
    if diagnosis.get("fix"):
        parts.append(f'<p class="fix">{escape(str(diagnosis["fix"]))}</p>')
    return f'<div class="verdict{"" if cls == Class.NONE else " bad"}">{"".join(parts)}</div>'


def _lines(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(line) for line in value]


def _how_to_read(timetable: Timetable) -> str:
    how = "A line joins what one operation is on each of its ranks; a ring at its end: that rank has not called it."
    if not timetable.unit:
        how += (
            " Lines that cross between two ranks are calls in opposite order. Only the order counts, not the distance."
        )
    return how + (f" Not drawn: {timetable.left_out}." if timetable.left_out else "")


def _legend(timetable: Timetable) -> str:
    if timetable.unit:
        keys = [("done", "doneline", "decode"), ("open", "openline", "prefill"), ("paper", "ink", "still open")]
    else:
        keys = [("done", "doneline", "done"), ("open", "openline", "waits")]
    if timetable.marked:
        keys.append(("badfill", "bad", "in the ring"))
    spans = "".join(
        f'<span><span class="key" style="background: var(--{fill}); border-color: var(--{line})"></span>{text}</span>'
        for fill, line, text in keys
    )
    return f'<p class="legend faint">{spans}</p>'


def _stack(at: int, stack: Stack, blamed: Sequence[int]) -> str:
    name = f"rank {stack.rank}" if stack.rank is not None else f"process {stack.pid}"
    told = [name, stack.thread, "holds the GIL" if stack.holds_gil else ""]
    frames = "\n".join(escape(str(frame)) for frame in stack.frames[:64])
    opened = " open" if stack.rank in blamed else ""
    summary = escape(", ".join(filter(None, told)))
    return f'<details id="stack{at}"{opened}><summary>{summary}</summary><pre>{frames}</pre></details>'
