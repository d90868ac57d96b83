"""What `turnstile check` answers: the object that `--json` prints, the text for people, and the exit code."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from verify.blame import Certainty, Class, Verdict
from verify.explore.result import Conclusion

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH: Final = 120
CODES: Final = {Conclusion.PROVED: 0, Conclusion.REFUTED: 1, Conclusion.INCONCLUSIVE: 3}


@dataclass(frozen=True)
class Answer:
    """One check.

    executions: of the code under test; None where nothing was executed. counterexample: as JSON takes it, and replay:
    its token. more: further keys of the JSON form. body: lines of text above the verdict line; below: after it.
    """

    verdict: Conclusion
    cls: Class
    certainty: Certainty
    scope: str
    executions: int | None = None
    replay: str | None = None
    counterexample: dict[str, Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    body: tuple[str, ...] = ()
    reason: str = ""

    @property
    def code(self) -> int:
        """The exit code of the command."""
        return CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "verdict": str(self.verdict), "class": str(self.cls), "certainty": str(self.certainty),
            "scope": self.scope, "executions": self.executions, "replay": self.replay,
            "counterexample": self.counterexample, **self.more,
        }  # fmt: skip

    def as_json(self) -> str:
        """One line."""
        return json.dumps(self.to_dict())

    def as_text(self) -> str:
        """The body, and last the verdict with its scope."""
        head = str(self.verdict)
        if self.verdict is Conclusion.REFUTED:
            head += f" ({self.cls}, {self.certainty})"
        reason = f": {self.reason}" if self.reason else ""
        return "\n".join([*self.body, *wrapped(f"{head}: {self.scope}{reason}")])


def wrapped(text: str, indent: int = 0, most: int = 6) -> list[str]:
    """Lines of at most WIDTH columns; from the second on they stand `indent` further in."""
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, max_lines=most, placeholder=" ..."
    )


def worst(verdicts: Iterable[tuple[Conclusion, Certainty]]) -> int:
    """The place of the verdict that counts for all: refuted before inconclusive before proved, certain first."""
    order = (Conclusion.REFUTED, Conclusion.INCONCLUSIVE, Conclusion.PROVED)
    sure = (Certainty.CERTAIN, Certainty.CONDITIONAL, Certainty.UNDECIDED)
    ranked = [(order.index(verdict), sure.index(certainty)) for verdict, certainty in verdicts]
    return ranked.index(min(ranked))


def conclusion(verdict: Verdict) -> Conclusion:
    """What a verdict of the wait-for graph or of the order certificate says."""
    if verdict.certainty is Certainty.UNDECIDED:
        return Conclusion.INCONCLUSIVE
    return Conclusion.PROVED if verdict.cls is Class.NONE else Conclusion.REFUTED


def told(verdict: Verdict) -> dict[str, Any]:
    """A finding as JSON takes it."""
    return {
        "class": str(verdict.cls), "certainty": str(verdict.certainty), "ranks": list(verdict.ranks),
        "chain": list(verdict.chain), "say": verdict.say, "fix": verdict.fix, "condition": verdict.condition,
    }  # fmt: skip
