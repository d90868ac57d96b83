"""The live page: `turnstile top --web` serves it on the loopback interface, and the browser asks again and again."""

from __future__ import annotations

import ipaddress
import json
import threading
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError
from verify import html, words
from verify.top.lately import lately
from verify.top.screen import few, number, seconds, short

if TYPE_CHECKING:
    from verify.top.frame import Frame, Row, View

HOST: Final = "127.0.0.1"
TEXT: Final = ' class="text"'
BAD: Final = ' class="bad"'
ROWS: Final = 128
"""Ranks in the table; those that stand out come first where not all fit."""


def serve(view: View, port: int, every_s: float) -> int:
    """Serve until Ctrl-C; 0. Raises UsageError where the run is unusable or the port is taken."""
    view.look()  # what is unusable is said before anything is served
    server = make_server(view, port, every_s)
    print(f"http://{HOST}:{server.server_port}/  (Ctrl-C ends it; only this machine can open it)", flush=True)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


def make_server(view: View, port: int, every_s: float) -> ThreadingHTTPServer:
    """The server, bound and not yet serving: `/`, `/body` (what changes) and `/state.json` (as `--json`)."""
    lock = threading.Lock()  # several browsers may ask at once, and a view is one reader

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "turnstile", ""
        timeout = 30

        def do_GET(self) -> None:
            # A page elsewhere may resolve its own name to this machine: what it then asks for bears that name.
            if not local(self.headers.get("Host", "")):
                self._answer(403, "text/plain", "this page is for the machine it runs on\n")
                return
            path = self.path.partition("?")[0]
            if path not in ("/", "/body", "/state.json"):
                self._answer(404, "text/plain", "there are /, /body and /state.json\n")
                return
            try:
                with lock:
                    frame = view.look()
                    made = json.dumps(frame.to_dict()) if path == "/state.json" else frame_body(frame)
            except UsageError as error:
                self._answer(503, "text/plain", f"{error}\n")
                return
            if path == "/":
                made = html.page(f"turnstile top: {frame.run}", made, every_s)
            self._answer(200, "application/json" if path == "/state.json" else "text/html", made)

        def _answer(self, code: int, kind: str, text: str) -> None:
            data = text.encode(errors="replace")
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class names it so)
            """Nothing: the terminal is the user's."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that went away is no news."""

    try:
        return Server((HOST, port), Handler)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}: choose another one, or leave it out") from None


def local(host: str) -> bool:
    """Whether a Host header names this machine as seen from itself."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def frame_body(frame: Frame) -> str:
    """What changes on the page, as HTML."""
    standing = [row for row in frame.rows if row.rank in frame.stalled]
    graph = frame.graph if standing or frame.cycle else None
    diagnosis = frame.check.to_dict() if frame.check is not None else _diagnosis(frame) if standing else None
    state = "ended" if frame.ended else "running"
    state += "; live check: " + ("a certain fault" if frame.check is not None else "nothing certain is wrong")
    about = f"{frame.about}; {len(frame.rows)} ranks; {state}" if frame.about else f"{len(frame.rows)} ranks; {state}"
    return html.body(
        frame.run, diagnosis, graph, frame.cycle if graph is not None else (), lately(frame), about=about,
        more=_table(frame),
    )  # fmt: skip


def _diagnosis(frame: Frame) -> dict[str, Any]:
    """What the records alone say about ranks that stand still while no fault is certain; `turnstile hang` says more."""
    blockers = [row.rank for row in frame.rows if row.blocks]
    failed = [row for row in frame.rows if row.exception]
    chain = [f"rank {row.rank} left by {row.exception}" for row in failed] + list(frame.waits)
    standing = [row.rank for row in frame.rows if row.rank in frame.stalled]
    say = f"{words.ranks(standing).capitalize()} {'stands' if len(standing) == 1 else 'stand'} still."
    if stopped := [row.rank for row in frame.rows if row.status == "stopped"]:
        verb = "is" if len(stopped) == 1 else "are"
        say += f" {words.ranks(stopped).capitalize()} {verb} stopped, by a signal or a debugger."
    if blockers:
        say += f" {words.ranks(blockers).capitalize()} {'keeps' if len(blockers) == 1 else 'keep'} others waiting."
    fix = "" if frame.ended else f"turnstile hang {frame.run}"
    return {"class": "standing still", "ranks": blockers, "say": say, "chain": chain[:16], "fix": fix}


def _table(frame: Frame) -> str:
    rows = sorted(frame.rows, key=lambda row: (row.rank not in frame.stalled, row.rank))[:ROWS]
    if frame.installed:
        return _table_installed(frame, rows)
    head = ("rank", "state", "round", "in flight", "epoch", "boundary", "permit", "last operation", "age", "quiet for")
    cells = "".join(f"<th{_left(name)}>{name}</th>" for name in (*head, "longest gap", "submitted", "calls left"))
    lines = "".join(_line(row, row.rank in frame.stalled) for row in sorted(rows, key=lambda row: row.rank))
    return _around(frame, len(frame.rows) - len(rows), cells, lines)


def _around(frame: Frame, rest: int, cells: str, lines: str) -> str:
    more = f'<p class="faint">and {rest} more ranks</p>' if rest else ""
    silent = "".join(f"<p><strong>{escape(line)}</strong></p>" for line in (*frame.hosts, *few(frame.stale)))
    lost = silent
    lost += f"<p><strong>No record of {words.ranks(frame.missing)}.</strong></p>" if frame.missing else ""
    return f'<h2>Ranks</h2>{lost}<div class="picture"><table><tr>{cells}</tr>{lines}</table></div>{more}'


def _table_installed(frame: Frame, rows: list[Row]) -> str:
    head = ("rank", "state", "last operation", "age", "quiet for", "open", "at", "waits in", "decided last")
    text = ("state", "last operation", "at", "waits in", "decided last")
    cells = "".join(f"<th{TEXT if name in text else ''}>{name}</th>" for name in head)
    lines = ""
    for row in sorted(rows, key=lambda row: row.rank):
        values = (
            str(row.rank), row.status + (", others wait for it" if row.blocks else ""),
            ("in " if row.open else "") + (row.operation or "-"), seconds(row.age_s), seconds(row.quiet_s),
            str(row.pending), short(row.site), row.waits or "-", row.decision or "-",
        )  # fmt: skip
        told = "".join(
            f"<td{TEXT if name in text else ''}>{escape(value)}</td>"
            for name, value in zip(head, values, strict=True)
        )
        lines += f"<tr{BAD if row.rank in frame.stalled else ''}>{told}</tr>"
    return _around(frame, len(frame.rows) - len(rows), cells, lines)


def _left(name: str) -> str:
    return ' class="text"' if name in ("state", "in flight", "last operation") else ""


def _line(row: Row, stands_out: bool) -> str:
    cells = [
        f"<td>{row.rank}</td>",
        f'<td class="text">{row.status}{", others wait for it" if row.blocks else ""}</td>',
        f"<td>{number(row.round)}</td>",
        f'<td class="text">{row.phase or "-"}</td>',
        f"<td>{f'e{row.epoch}' if row.epoch >= 0 else '-'}</td>",
        f"<td>{number(row.boundary)}</td>",
        f"<td>{number(row.permit)}</td>",
        f'<td class="text" title="{escape(row.site)}">{"in " if row.open else ""}{escape(row.operation) or "-"}</td>',
        f"<td>{seconds(row.age_s)}</td>",
        f"<td>{seconds(row.quiet_s)}</td>",
        f"<td>{f'{row.gap_ms:,.0f} ms' if row.gap_ms is not None else '-'}</td>",
        f"<td>D {row.d_queue} P {row.p_queue}</td>",
        f"<td>{row.pending}</td>",
    ]
    style = ' class="bad"' if stands_out else ""
    return f"<tr{style}>{''.join(cells)}</tr>"
