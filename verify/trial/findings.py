"""What is found wrong with one execution of a scenario: the class, the rule that was broken, and one line in words."""

from __future__ import annotations

from dataclasses import dataclass

from kernel.errors import (
    Divergence,
    ExchangeError,
    LeaseExpired,
    ModelError,
    OrderViolation,
    PolicyError,
    ProtocolError,
    RankLost,
    TurnstileError,
    said,
)
from verify.blame import Class
from verify.sim.errors import Deadlock, Livelock, Mismatch, Outside

GUARANTEES = ("deadlock_free", "epochs_complete", "decode_bound")
"""Rules that a policy may claim (`kernel.sched.policy.Guarantees`); findings of other rules break the seam."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    rule: a name of `GUARANTEES`, or the rule of the seam or of the kernel that was broken. say: one line. rank, round:
    where it showed, -1 for nowhere in particular. where: `directory/file.py:line` of the policy, where there is one.
    """

    cls: Class
    rule: str
    say: str
    rank: int = -1
    round: int = -1
    where: str = ""

    def __str__(self) -> str:
        return f"{self.cls}: {self.say}" + (f" [{self.where}]" if self.where and self.where not in self.say else "")

    def __reduce__(self) -> tuple[type[Finding], tuple[Class, str, str, int, int, str]]:
        return Finding, (self.cls, self.rule, self.say, self.rank, self.round, self.where)


class Found(TurnstileError):
    """Ends an execution in which something was found. finding: what."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def one_line(text: str) -> str:
    """`text` without line breaks, whatever somebody's exception says."""
    return " ".join(text.split())


_KINDS: tuple[tuple[type[TurnstileError], Class, str], ...] = (
    (PolicyError, Class.EXCEPTION, "policy"),
    (Livelock, Class.STARVATION, "epochs_complete"),
    (Outside, Class.OUTSIDE, "outside"),
    (Mismatch, Class.MISMATCH, "order"),
    (Divergence, Class.RULE, "shared plan"),
    (OrderViolation, Class.RULE, "order"),
    (ProtocolError, Class.RULE, "turnstile"),
    (ExchangeError, Class.RULE, "exchange"),
    (LeaseExpired, Class.INVARIANT, "lease"),
    (ModelError, Class.INVARIANT, "kv"),
    (RankLost, Class.MISSING, "deadlock_free"),
)


def from_error(error: BaseException, rank: int = -1, round_: int = -1) -> Finding:
    """What an execution that ended with `error` shows.

    A Deadlock is class cycle here, or timeout where only timers could fire; whoever has its wait-for graph knows more.
    """
    if isinstance(error, Found):
        return error.finding
    say = said(error) or type(error).__name__
    if isinstance(error, Deadlock):
        return Finding(Class.TIMEOUT if error.only_timers else Class.CYCLE, "deadlock_free", say, rank, round_)
    for kind, cls, rule in _KINDS:
        if isinstance(error, kind):
            if isinstance(error, Divergence):
                rank, round_ = (error.ranks[0] if len(error.ranks) == 1 else -1), error.round
            elif isinstance(error, ProtocolError | ExchangeError):
                rank = error.rank
            return Finding(cls, rule, say, rank, round_)
    return Finding(Class.EXCEPTION, "kernel", f"{type(error).__name__}: {say}", rank, round_)
