"""How the page looks. Colours are Okabe and Ito's; what is red is also drawn thicker, or said."""

from __future__ import annotations

from typing import Final

CSS: Final = """
:root { --ink: #1c2329; --faint: #66707a; --line: #c9d0d6; --paper: #fff; --panel: #f5f7f9; --bad: #b8000f;
  --badfill: #ffe8e6;
  --good: #00755e;
  --open: #fff3d6;
  --openline: #b07a00;
  --done: #e6eff6;
  --doneline: #7fa3bf;
  --t0: #0072b2; --t1: #8a5a00; --t2: #00755e; --t3: #a5487f; --t4: #4a4fb5; --t5: #5b6770; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee;
  --faint: #98a3ad;
  --line: #46505a;
  --paper: #14181c;
  --panel: #1d2328; --bad: #ff7b72; --badfill: #4a1d1c; --good: #4fd1b0; --open: #463a17; --openline: #e3b341;
  --done: #1f2f3b;
  --doneline: #5b87a8;
  --t0: #5db4ea;
  --t1: #e0ac4c;
  --t2: #4fd1b0;
  --t3: #e39cc5;
  --t4: #a3a7ff;
  --t5: #a9b3bc; } }
* { box-sizing: border-box; }
body { margin: 0;
  background: var(--paper);
  color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif;
  }
main { max-width: 1240px; margin: 0 auto; padding: 20px 24px 48px; }
h1 { font-size: 21px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 30px 0 8px; }
p { margin: 4px 0; max-width: 100ch; }
.faint { color: var(--faint); }
code, pre { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
.verdict { border-left: 5px solid var(--good); background: var(--panel); padding: 12px 16px; margin: 16px 0; }
.verdict.bad { border-color: var(--bad); }
.verdict strong { font-size: 16px; }
.verdict.bad strong.class { color: var(--bad); }
.verdict ol { margin: 8px 0 8px 1.4em; padding: 0; } .fix::before { content: "To do: "; font-weight: 600; }
.picture { overflow-x: auto; background: var(--panel); padding: 10px; border-radius: 6px; }
svg { display: block; }
svg text { fill: var(--ink); font: 12.5px system-ui, "DejaVu Sans", sans-serif; text-anchor: middle; }
svg .node rect { fill: var(--paper); stroke: var(--doneline); stroke-width: 1.3; }
svg .node.op rect { fill: var(--done); }
svg .node.bad rect { fill: var(--badfill); stroke: var(--bad); stroke-width: 2.4; }
svg .edge { stroke: var(--faint); stroke-width: 1.5; marker-end: url(#plain); }
svg .edge.bad { stroke: var(--bad); stroke-width: 2.6; marker-end: url(#bad); }
svg path.plain { fill: var(--faint); } svg path.bad { fill: var(--bad); }
svg text.head { fill: var(--faint); font-weight: 600; }
svg text.note { fill: var(--faint); font-size: 11.5px; }
svg text.note { paint-order: stroke; stroke: var(--panel); stroke-width: 4px; }
svg text.left { text-anchor: start; } svg .station { text-anchor: end; font-weight: 600; }
svg .track { stroke: var(--line); stroke-width: 1.2; }
svg .train { fill: none; stroke-width: 2.2; opacity: .85; }
svg .train.bad { stroke: var(--bad); stroke-width: 3.4; opacity: 1; }
svg .lacking { stroke-dasharray: 5 4; }
svg .lacks { fill: var(--paper); stroke: var(--bad); stroke-width: 2.4; }
svg .stop rect { fill: var(--done); stroke: var(--doneline); }
svg .stop.open rect { fill: var(--open); stroke: var(--openline); stroke-width: 1.6; }
svg .stop.outside rect { fill: var(--paper); stroke: var(--faint); stroke-dasharray: 3 3; }
svg .stop.still rect { fill: var(--paper); stroke: var(--ink); stroke-width: 2; }
svg .stop.p rect { fill: var(--open); stroke: var(--openline); }
svg .stop.bad rect { fill: var(--badfill); stroke: var(--bad); stroke-width: 2.4; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th, td { text-align: right; padding: 4px 10px; white-space: nowrap; }
th { color: var(--faint); border-bottom: 1px solid var(--line); } td.text, th.text { text-align: left; }
tr.bad td { background: var(--badfill); } tr.bad td:nth-child(2) { color: var(--bad); font-weight: 600; }
details { margin: 6px 0; }
summary { cursor: pointer; }
pre { overflow-x: auto; background: var(--panel); padding: 8px 12px; margin: 4px 0; }
.legend span { margin-right: 18px; }
.key { display: inline-block;
  width: 22px;
  height: 12px;
  margin-right: 6px;
  border: 1.5px solid;
  vertical-align: -1px;
  border-radius: 3px;
  }
""" + "".join(f"svg .train.t{n} {{ stroke: var(--t{n}); }}\n" for n in range(6))
