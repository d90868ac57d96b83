"""`explore`: the checker in a test suite of anybody's, as a call and as a decorator of a test.

    explored = explore(Calm, world=World(4, adp=2, ep=2), segments=(1, 2), capacity=2)
    explored.assert_proved()

    @explore(world=World(4, adp=2, ep=2), segments=(1, 2))
    def test_calm():
        return Calm

Needs no test framework. Under pytest, `verify.plugin` adds options, a test for each scope and short failures. Importing
this module loads nothing of the checker; running it does.
"""

from __future__ import annotations

import functools
import inspect
import unittest
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final, overload

from kernel.errors import UsageError

if TYPE_CHECKING:
    from kernel.sched.policy import Limits, Policy
    from kernel.topology import World
    from verify.blame import Certainty, Class
    from verify.explore.counterexample import Counterexample
    from verify.explore.policy import Report, Scope
    from verify.explore.result import Conclusion
    from verify.trial.monitor import Bound
    from verify.trial.scenario import Scenario

AnyPolicy = str | type | Callable[["Limits"], Any]
"""A spec as in `--policy`, a policy class, or what makes a policy of its limits, such as a `functools.partial`."""


class NotProved(AssertionError):
    """The policy does not keep what it claims, or it could not be shown that it does.

    headline: one line. explored: what was seen, None where a schedule was replayed.
    """

    def __init__(self, headline: str, text: str, explored: Explored | None = None) -> None:
        super().__init__(text)
        self.headline, self.explored = headline, explored


@dataclass(frozen=True)
class Asked:
    """What a test runner asks of explorations, see `verify.plugin`.

    budget: instead of the default or the test's own. replay: a token, to be run in place of exploring. test: the name
    by which the runner finds the test again. cell: the only one of the test's scopes to look at, by number.
    """

    budget: int | None = None
    replay: str = ""
    test: str = ""
    cell: int | None = None


ASKED: Final[ContextVar[Asked]] = ContextVar("turnstile_asked")
"""Set while a test runs."""


@dataclass(frozen=True)
class Explored:
    """The verdict on a policy in one scope or several.

    reports: one a scope, see `verify.explore.policy.Report`; none after the first that was refuted. Verdict, class,
    certainty and counterexample are those of the worst.
    """

    reports: tuple[Report, ...]
    allow_inconclusive: bool = False

    @property
    def worst(self) -> Report:
        """The report that decides."""
        order = ("refuted", "inconclusive", "proved")
        return min(self.reports, key=lambda report: order.index(report.verdict))

    @property
    def verdict(self) -> Conclusion:
        """`proved`, `refuted` or `inconclusive`."""
        return self.worst.verdict

    @property
    def proved(self) -> bool:
        """Whether everything holds, for every schedule of every scenario of every scope."""
        return self.verdict == "proved"

    @property
    def cls(self) -> Class:
        """Class of what was found, `none` where nothing was."""
        return self.worst.cls

    @property
    def certainty(self) -> Certainty:
        """`certain`, `conditional` (only if the kernels do not fit on a device together) or `undecided`."""
        return self.worst.certainty

    @property
    def counterexample(self) -> Counterexample | None:
        """The smallest failing schedule that was found; `str()` of it fits on a screen."""
        return self.worst.counterexample

    @property
    def executions(self) -> int:
        """How many there were, all scopes together."""
        return sum(report.executions for report in self.reports)

    def assert_proved(self) -> Explored:
        """Return this if everything is proved. Raises NotProved."""
        __tracebackhide__ = True
        report = self.worst
        if report.verdict == "refuted" or (report.verdict == "inconclusive" and not self.allow_inconclusive):
            raise NotProved(*_told(report), self)
        return self

    def __str__(self) -> str:
        scenarios = sum(report.scenarios for report in self.reports)
        return f"{self.verdict}: {self.worst.scope} ({scenarios} scenarios, {self.executions} executions)"


@overload
def explore(
    policy: AnyPolicy,
    /,
    *,
    world: World | Iterable[World] | None = None,
    segments: int | Iterable[int] = 2,
    rounds: int | Iterable[int] = 3,
    capacity: int | Iterable[int | None] | None = None,
    depth: int | None = None,
    bound: Bound | None = None,
    budget: int | None = None,
    scenarios: Iterable[Scenario] | None = None,
    allow_inconclusive: bool = False,
    explained: bool = True,
) -> Explored: ...
@overload
def explore(
    policy: None = None,
    /,
    *,
    world: World | Iterable[World] | None = None,
    segments: int | Iterable[int] = 2,
    rounds: int | Iterable[int] = 3,
    capacity: int | Iterable[int | None] | None = None,
    depth: int | None = None,
    bound: Bound | None = None,
    budget: int | None = None,
    scenarios: Iterable[Scenario] | None = None,
    allow_inconclusive: bool = False,
    explained: bool = True,
) -> Callable[[Callable[..., AnyPolicy]], Callable[..., None]]: ...
def explore(
    policy: AnyPolicy | None = None,
    /,
    *,
    world: World | Iterable[World] | None = None,
    segments: int | Iterable[int] = 2,
    rounds: int | Iterable[int] = 3,
    capacity: int | Iterable[int | None] | None = None,
    depth: int | None = None,
    bound: Bound | None = None,
    budget: int | None = None,
    scenarios: Iterable[Scenario] | None = None,
    allow_inconclusive: bool = False,
    explained: bool = True,
) -> Any:
    """Explore all schedules of a policy, scenario by scenario, until one is refuted.

    With a policy: now, and the result is an Explored. Without: a decorator of a test function that returns its policy;
    the test fails unless it is proved.

    world: ranks (default: 2, of two replicas). segments: safe boundaries of an epoch. rounds: D iterations of the turns
    that decode. capacity: collectives that fit on a device at once, None for all. Of these four several may be given:
    every combination is a scope, and under pytest a test of its own. depth: of launch queues, None for endless. bound:
    of the wait of a ready D, instead of what the policy claims: a number of boundaries, `span`, `epoch` or `backlog`.
    budget: executions of a scenario. scenarios: instead of those of `verify.trial.family`. allow_inconclusive: a budget
    that is spent without a verdict is no failure. explained: whether a failure is made small and told, which takes
    seconds.

    Raises UsageError for a policy or sizes that cannot be used, and TypeError for arguments of another kind.
    """
    __tracebackhide__ = True
    grid = Grid.of(world, segments, rounds, capacity, depth, bound, budget, scenarios, allow_inconclusive, explained)
    if policy is not None:
        return grid.run(policy)

    def decorate(test: Callable[..., AnyPolicy]) -> Callable[..., None]:
        if not callable(test) or inspect.iscoroutinefunction(test):
            raise TypeError("@explore(...) decorates a plain function that returns a policy; explore(POLICY, ...) runs")

        @functools.wraps(test)
        def explored(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            made = test(*args, **kwargs)
            if made is None:
                raise UsageError(f"{test.__qualname__} returns no policy: return a class, a spec, or what makes one")
            grid.run(made).assert_proved()

        explored.turnstile = grid  # type: ignore[attr-defined]
        return explored

    return decorate


@dataclass(frozen=True)
class Grid:
    """Scopes to explore a policy in. cells: (name, scope without its policy), one each."""

    cells: tuple[tuple[str, Scope], ...]
    budget: int | None = None
    scenarios: tuple[Scenario, ...] | None = None
    allow_inconclusive: bool = False
    explained: bool = True

    @classmethod
    def of(
        cls, world: Any, segments: Any, rounds: Any, capacity: Any, depth: int | None, bound: Bound | None,
        budget: int | None, scenarios: Iterable[Scenario] | None, allow_inconclusive: bool, explained: bool,
    ) -> Grid:  # fmt: skip
        """See `explore`."""
        from kernel.topology import World
        from verify.check.worlds import refusal
        from verify.explore.policy import Scope
        from verify.sim.world import WIDE

        axes = {
            "world": _several(World(2, adp=2, ep=2) if world is None else world, World, "world"),
            "segments": _several(segments, int, "segments"),
            "rounds": _several(rounds, int, "rounds"),
            "capacity": _several(WIDE if capacity is None else capacity, int, "capacity", none=WIDE),
        }
        for each in axes["world"]:
            if each.exchange == "split" and (why := refusal(each)) is not None:
                raise UsageError(f"world={each}, exchange='split': {why}")
        for name, value in (("depth", depth), ("budget", budget)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r}: must be a whole number of at least 1")
        if bound is not None and bound not in ("span", "epoch", "backlog") and not isinstance(bound, int):
            raise UsageError(f"bound={bound!r}: a number of boundaries, 'span', 'epoch' or 'backlog'")
        cells = []
        for values in product(*axes.values()):
            named = dict(zip(axes, values, strict=True))
            parts = [_part(name, value, WIDE) for name, value in named.items() if len(axes[name]) > 1]
            cells.append((" ".join(parts), Scope(policy="", depth=depth, bound=bound, **named)))
        chosen = None if scenarios is None else tuple(scenarios)
        return cls(tuple(cells), budget, chosen, allow_inconclusive, explained)

    def run(self, policy: AnyPolicy) -> Explored:
        """Explore `policy` in every scope, or in the one that the runner asks for."""
        __tracebackhide__ = True
        from verify.explore.certify import BUDGET

        spec, make = maker(policy)
        asked = ASKED.get(Asked())
        if asked.replay:
            _replay(asked.replay, spec, make)
        budget = asked.budget or self.budget or BUDGET
        cells = [scope for number, (_, scope) in enumerate(self.cells) if asked.cell in (None, number)]
        reports: list[Report] = []
        for scope in cells:
            reports.append(_report(replace(scope, policy=spec, budget=budget), make, self.scenarios, self.explained))
            if reports[-1].verdict == "refuted":
                break
        return Explored(tuple(reports), self.allow_inconclusive)


def maker(policy: AnyPolicy) -> tuple[str, Callable[[str, Limits], Policy]]:
    """(spec, what makes policies of a spec and limits) of whatever names a policy.

    The spec of a class in a file is `path/file.py:Class`, by which `turnstile check` finds it too. Raises UsageError
    for a spec that cannot be loaded, TypeError for what is no policy.
    """
    from kernel.sched import registry

    if isinstance(policy, str):
        registry.load(policy)
        return policy, registry.create
    if not callable(policy):
        raise TypeError(f"{policy!r} is no policy: give its class, a spec such as 'fine:span=2', or what makes one")
    if isinstance(policy, type) and not (hasattr(policy, "plan") and hasattr(policy, "turn")):
        raise UsageError(f"{policy.__qualname__} has no `plan` and `turn`: subclass kernel.sched.planner.Planner")
    own = spec_of(policy)

    def make(spec: str, limits: Limits) -> Policy:
        if spec != own:
            return registry.create(spec, limits)
        try:
            made: Policy = policy(limits)
        except UsageError:
            raise
        except Exception as error:
            from kernel.errors import said
            from verify.sources import raised_at

            say = f"{type(error).__name__}: {said(error)}"
            raise UsageError(f"policy {own} cannot be made, {raised_at(error)}: {say}") from error
        if made is None or not hasattr(made, "plan"):
            raise UsageError(f"policy {own}: {made!r} is no policy")
        return made

    return own, make


def spec_of(policy: Callable[..., Any]) -> str:
    """The spec by which a policy can be loaded again, as far as there is one; else a name."""
    import dataclasses
    import sys
    from pathlib import Path

    if isinstance(policy, functools.partial):
        config = policy.keywords.get("config")
        given = dataclasses.is_dataclass(config) and not isinstance(config, type)
        options = dataclasses.asdict(config) if given else {}  # type: ignore[arg-type]
        plain = ("+".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in options.values())
        told = ",".join(f"{name}={value}" for name, value in zip(options, plain, strict=True))
        return spec_of(policy.func) + (f":{told}" if told else "")
    name = getattr(policy, "__qualname__", type(policy).__qualname__)
    file = getattr(sys.modules.get(getattr(policy, "__module__", "")), "__file__", None)
    if not isinstance(policy, type) or file is None or "." in name:
        return str(name)
    from kernel.sched import registry

    if policy in registry.BUILTIN:
        return str(policy.name)
    path = Path(file)
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{short}:{name}"


# -- inside ----------------------------------------------------------------------------------------------------------


def _several(given: Any, kind: type, name: str, none: Any = None) -> tuple[Any, ...]:
    values = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | kind) else (given,)
    values = tuple(none if value is None else value for value in values)
    if not values:
        raise UsageError(f"{name}: give at least one")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: a {kind.__name__} or several")
        if isinstance(value, int) and value < 1:
            raise UsageError(f"{name}={value}: must be at least 1")
    return values


def _part(name: str, value: Any, wide: int) -> str:
    if name == "world":
        return f"g{value.size} adp{value.adp} ep{value.ep}" + ("" if value.gather == "cross" else f" {value.gather}")
    return f"{name}={'all' if value == wide else value}"


def _report(
    scope: Scope,
    make: Callable[[str, Limits], Policy],
    scenarios: tuple[Scenario, ...] | None,
    explained: bool,
) -> Report:
    """One scope, up to the first scenario that is refuted."""
    from verify.explore.policy import check
    from verify.trial.family import family

    if scenarios is None:
        made = family(scope.world, scope.policy, scope.segments, scope.rounds, capacity=scope.capacity)
        wish = getattr(make(scope.policy, made[0].limits), "route", None)
        scenarios = tuple(replace(each, world=scope.world.under(wish)) for each in made)
    if not scenarios:
        raise UsageError("scenarios: give at least one")
    reports: list[Report] = []
    for each in scenarios:
        scenario = replace(each, policy=scope.policy)
        report = check(scope, make, [scenario], explained=False)
        if explained and report.verdict != "proved":
            report = replace(report, counterexample=_explained(report, scenario, make))
        reports.append(report)
        if report.verdict == "refuted":
            break
    worst = Explored(tuple(reports)).worst
    results = {rule: result for report in (*reports, worst) for rule, result in report.guarantees.items()}
    for report in reports:
        for rule, result in report.guarantees.items():
            if result.verdict != "proved" and results[rule].verdict == "proved":
                results[rule] = result
    return replace(
        worst,
        guarantees=results,
        scenarios=len(reports),
        executions=sum(report.executions for report in reports),
        steps=sum(report.steps for report in reports),
    )


def _explained(report: Report, scenario: Scenario, make: Callable[[str, Limits], Policy]) -> Counterexample | None:
    """The counterexample to the rule that decides. With less effort than `turnstile check` takes: a test is waiting."""
    from verify.explore.counterexample import Effort, explain
    from verify.explore.smaller import case_of

    result = next(each for each in report.guarantees.values() if each.verdict == report.verdict)
    evidence, scope = result.evidence, report.scope
    if evidence.execution is None or evidence.failure is None:
        return None
    launch = {"depth": scope.depth, "graphs": scope.graphs} if scope.depth is not None else {}
    certainty = result.certainty if report.verdict == "refuted" else None
    return explain(
        case_of(scenario, make, scope.bound, **launch), evidence.execution, fifo=evidence.fidelity == "fifo",
        rule=evidence.failure.rule, certainty=certainty,
        effort=Effort(scenario=8, scenarios=12, decisions=30, critical=6, fifo=60),
    )  # fmt: skip


def _replay(text: str, spec: str, make: Callable[[str, Limits], Policy]) -> None:
    """Run the schedule of a token. Raises NotProved if it fails again, unittest.SkipTest if not."""
    __tracebackhide__ = True
    from verify.explore.counterexample import Effort, explain
    from verify.explore.smaller import case_of_token
    from verify.explore.token import Token, rerun

    token = Token.parse(text)
    recorded = str(token.scenario.get("policy", ""))
    if recorded.rpartition("/")[2] != spec.rpartition("/")[2]:
        raise unittest.SkipTest(f"the token to replay is of {recorded}, this test is of {spec}")
    token = replace(token, scenario={**token.scenario, "policy": spec})
    case = case_of_token(token, make)
    again = rerun(token, case.program(case.scenario), notes=True)
    failure = again.execution.fails(token.rule) or again.execution.failure
    if failure is None:
        raise unittest.SkipTest(f"replayed: {again.say}; this one schedule only, run without a token for a verdict")
    as_it_is = Effort(scenario=0, scenarios=0, decisions=0)
    found = explain(case, again.execution, fifo=token.fidelity == "fifo", rule=failure.rule, effort=as_it_is)
    raise NotProved(f"replayed: {found.cls} ({found.rule})", f"{_text(found)}\nreplayed  {again.say}")


def _told(report: Report) -> tuple[str, str]:
    """(headline, text) of a verdict that is not PROVED."""
    found = report.counterexample
    if report.verdict == "refuted" and found is not None:
        return f"refuted: {found.cls} ({found.rule} is broken), {found.certainty}", _text(found)
    rule, result = next((rule, each) for rule, each in report.guarantees.items() if each.verdict == report.verdict)
    headline = f"{report.verdict}: {rule}: {result.reason}"
    lines = [headline, f"scope     {report.scope}", f"scenario  {result.scope}"]
    if report.verdict == "inconclusive":
        budget = report.scope.budget
        lines.append(f"to do     a larger budget (it is {budget}: --turnstile-budget {4 * budget}), a smaller scope,")
        lines.append("          or allow_inconclusive=True")
    if found is not None:
        lines += ["", _text(found)]
    return headline, "\n".join(lines)


def _text(found: Counterexample) -> str:
    """The counterexample with the line that replays it here."""
    test = ASKED.get(Asked()).test
    if not test:
        return str(found)
    body = str(found).partition("turnstile check --replay")[0].rstrip()
    return f"{body}\nreplay    pytest {test} --turnstile-replay {found.token}"
