"""Programs in a text file, judged one by one: by the wait-for graph of where they end, and by the order certificate.

    # a comment, up to the end of the line
    [H05]                               a heading begins a program and names it; an X after the name means that its
    r0: dp.AR{0,1} ep.RS{0,1}           device holds one communication kernel at a time, in order of issue, as with
    r1: ep.RS{0,1}; dp.AR{0,1}          --capacity 1. A rank begins on a new line or behind a `;`

Without headings an empty line before a rank that already has a part begins the next program. The notation of calls is
that of `verify.notation`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel.errors import UsageError
from verify.blame import Class, Verdict, severity
from verify.check.answer import Answer, conclusion, told, worst, wrapped
from verify.events import Site
from verify.explore.result import Conclusion
from verify.notation import NotationError, parse_program
from verify.order import certify, from_notation
from verify.waitgraph import diagnose_program

if TYPE_CHECKING:
    from verify.check.args import Options
    from verify.events import Program
    from verify.order import Result

_HEADING = re.compile(r"\[([^\[\]]*)\]\s*")
_RANK = re.compile(r"\s*(r\d+(?:/[A-Za-z_][\w-]*)?)\s*:")


@dataclass(frozen=True)
class Text:
    """One program of a file. start: number of its first line, from 1. lines: without comments, as wide as they were."""

    name: str
    exclusive: bool
    start: int
    lines: tuple[str, ...]

    def parse(self, file: str) -> Program:
        """Its events, each with file, line and column. Raises UsageError that names them."""
        rows = list(self.lines)
        for number in range(1, len(rows)):
            if _RANK.match(rows[number]) and number:
                rows[number - 1] += ";"
        whole = "\n".join(rows)
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row) + 1)

        def place(at: int) -> tuple[int, int]:
            row = max(n for n, start in enumerate(starts[:-1]) if start <= at) if rows else 0
            return self.start + row, at - starts[row] + 1

        def site(at: int) -> Site:
            line, column = place(at)
            return Site(f"{Path(file).name}:{line}", column)

        try:
            return parse_program(whole, site)
        except NotationError as error:
            line, column = place(min(error.column - 1, max(0, len(whole.rstrip()) - 1)))
            what = str(error).partition(": ")[2]
            raise UsageError(f"{file}:{line}:{column}: {what}") from error


def check_program(options: Options) -> Answer:
    """The answer about a file of programs. Raises UsageError, with line and column, for what is no program."""
    file = options.target
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"{file}: {why}: give a policy, a file of programs or a run directory") from error
    programs = [(each, each.parse(file)) for each in split(text)]
    if not programs:
        raise UsageError(f"{file}: no program in it: write `r0: <calls>` on one line, `r1: <calls>` on the next")
    answers = [_judged(options, each, program) for each, program in programs]
    first = answers[worst([(answer.verdict, answer.certainty) for answer in answers])]
    count = f"{len(answers)} programs of " if len(answers) > 1 else ""
    body: list[str] = []
    for answer in answers:
        body += [*answer.body, ""]
    where = f"{Path(file).name}" + (f", {_room(options, None)}" if count else f", {first.scope}")
    return Answer(
        first.verdict, first.cls, first.certainty, f"{count}{where}", None, counterexample=first.counterexample,
        more={"programs": [answer.more for answer in answers]}, body=tuple(body),
        reason=f"the first such is {first.more['name']}" if count and first.verdict is not Conclusion.PROVED else "",
    )  # fmt: skip


def split(text: str) -> list[Text]:
    """The programs of a file."""
    found: list[Text] = []
    name, exclusive, start = "", False, 1
    lines: list[str] = []
    have: set[str] = set()
    headed = empty = False

    def end() -> None:
        if any(line.strip() for line in lines) or headed:
            found.append(Text(name or f"program {len(found) + 1}", exclusive, start, tuple(lines)))

    for number, whole in enumerate(text.splitlines(), start=1):
        line = re.sub(r"(?:^|(?<=\s))#.*", lambda comment: " " * len(comment[0]), whole)
        heading = _HEADING.fullmatch(line.strip())
        labels = set(re.findall(r"(?:^|;)\s*(r\d+(?:/[A-Za-z_][\w-]*)?)\s*:", line))
        if heading is not None or (empty and not headed and labels & have):
            end()
            name, exclusive, start, lines, have = "", False, number, [], set()
            headed = heading is not None
        if heading is not None:
            words = heading[1].split()
            exclusive = words[-1:] == ["X"]
            name = " ".join(words[:-1] if exclusive else words)
            line = " " * len(line)
        lines.append(line)
        have |= labels
        empty = not whole.strip() or (empty and not line.strip())
    end()
    return found


def _judged(options: Options, text: Text, program: Program) -> Answer:
    exclusive = text.exclusive or options.capacity == 1
    verdict = diagnose_program(program, exclusive)
    result = certify(from_notation(program), options.capacity, issue_order=text.exclusive)
    # With room the search of all orders of a rank's threads decides what the certificate leaves open.
    decided = conclusion(verdict) is not Conclusion.INCONCLUSIVE and (options.capacity is None or exclusive)
    open_ = conclusion(result.verdict) is Conclusion.INCONCLUSIVE
    both = [verdict] if decided and open_ else [verdict, result.verdict]
    chosen = both[worst([(conclusion(each), each.certainty) for each in both])]
    if verdict.cls is not Class.NONE and conclusion(verdict) is conclusion(chosen):
        chosen = verdict  # it says more: where everybody stands
    scope = f"{len(program.ranks)} ranks, {_room(options, text)}"
    more: dict[str, Any] = {
        "name": text.name, "line": text.start, "verdict": str(conclusion(chosen)), "scope": scope, **told(chosen),
        "certificate": _certificate(result),
    }  # fmt: skip
    return Answer(
        conclusion(chosen), chosen.cls, chosen.certainty, scope, more=more,
        counterexample=None if chosen.cls is Class.NONE else {"name": text.name, **told(chosen)},
        body=tuple(_lines(text, chosen, result, scope)),
    )  # fmt: skip


def _room(options: Options, text: Text | None) -> str:
    if text is not None and text.exclusive:
        return "one kernel at a time on a device, in order of issue"
    return "room for every kernel" if options.capacity is None else f"capacity {options.capacity}"


def _certificate(result: Result) -> dict[str, Any]:
    room = result.residency.say if result.residency is not None else ""
    verdict = result.verdict
    return {"verdict": str(conclusion(verdict)), "scope": result.scope, "room": room, **told(verdict)}


def _lines(text: Text, verdict: Verdict, result: Result, scope: str) -> list[str]:
    said = str(conclusion(verdict))
    head = f"{text.name}: {said}" + (f" ({verdict.cls}, {verdict.certainty})" if verdict.cls is not Class.NONE else "")
    lines = [*wrapped(f"{head}: {scope}", 10), *wrapped(f"  {verdict.say}", 2, 8)]
    cited = verdict.cls is Class.CYCLE and result.verdict.cls is Class.CYCLE
    chain = result.verdict.chain if cited else verdict.chain  # the certificate's says in which lines
    shown = [line for line in chain if line not in verdict.say]
    for line in shown[:8]:
        lines += wrapped(f"  - {line}", 4, 3)
    if len(shown) > 8:
        lines.append(f"  - and {len(shown) - 8} more")
    if verdict.fix:
        lines += wrapped(f"  fix: {verdict.fix}", 7)
    if result.residency is not None and verdict.cls is Class.NONE:
        lines += wrapped(f"  order: a common order exists. {result.residency.say}", 9)
    elif result.findings and severity(result.verdict) != severity(verdict):
        lines += wrapped(f"  order: {result.verdict.say}", 9, 4)
    return lines
