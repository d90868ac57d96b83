"""The pytest plugin, loaded by pytest itself through the entry point `turnstile`: what `explore` gets from pytest.

    --turnstile-budget N       executions of a scenario, instead of the default or a test's own
    --turnstile-replay TOKEN   run the schedule of a counterexample again, in the tests of its policy
    -m turnstile               tests that are decorated with `@explore(...)`

A decorated test is collected once for each of its scopes. A failure is printed as the counterexample and how to replay
it, without a traceback (`--tb=long` and `--tb=native` show one). Loads nothing of the checker: suites that do not use
it pay for an option parser.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from verify.testing import Asked, Grid

CELL = "turnstile_scope"
_SHORT = ("auto", "short", "line")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Our options."""
    group = parser.getgroup("turnstile", "policies explored by turnstile")
    group.addoption("--turnstile-budget", type=_positive, metavar="N", help="executions of a scenario at most")
    group.addoption("--turnstile-replay", metavar="TOKEN", help="run the schedule of a counterexample again")


def pytest_configure(config: pytest.Config) -> None:
    """Our marker."""
    config.addinivalue_line("markers", "turnstile: explores a policy (set by @explore of turnstile)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a scope."""
    grid = _grid(metafunc.function)
    if grid is not None and len(grid.cells) > 1:
        metafunc.fixturenames.append(CELL)
        ids = [name.replace(" ", "-") for name, _ in grid.cells]
        metafunc.parametrize(CELL, range(len(grid.cells)), ids=ids)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Decorated tests can be selected by marker."""
    if _grid(getattr(item, "function", None)) is not None:
        item.add_marker("turnstile")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A token has a scope of its own: to replay it, one test of each decorated function is enough."""
    if not config.getoption("turnstile_replay"):
        return
    seen: set[str] = set()
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        again = item.get_closest_marker("turnstile") is not None and _only_scopes(item) and name in seen
        (dropped if again else kept).append(item)
        seen.add(name)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Tell explorations what was asked for."""
    budget, replay = item.config.getoption("turnstile_budget"), item.config.getoption("turnstile_replay")
    decorated = _grid(getattr(item, "function", None)) is not None
    if not (budget or replay or decorated or "verify.testing" in sys.modules):
        return (yield)
    from verify.testing import ASKED, Asked

    params = getattr(getattr(item, "callspec", None), "params", {})
    asked: Asked = Asked(budget, replay or "", shlex.quote(item.nodeid), params.get(CELL) if not replay else None)
    token = ASKED.set(asked)
    try:
        return (yield)
    finally:
        ASKED.reset(token)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print what was found in place of a traceback."""
    report = yield
    if call.excinfo is None or not report.failed or item.config.getoption("tbstyle") not in _SHORT:
        return report
    error = call.excinfo.value
    headline = getattr(error, "headline", None)
    if "verify.testing" in sys.modules and type(error).__module__ == "verify.testing" and headline is not None:
        path, line = _place(item, call.excinfo)
        report.longrepr = Told(str(error), Crash(path, line, headline))  # type: ignore[assignment]
    elif type(error).__module__ == "kernel.errors" and _grid(getattr(item, "function", None)) is not None:
        path, line = _place(item, call.excinfo)
        say = f"{type(error).__name__}: {' '.join(str(error).split())}"
        report.longrepr = Told(say, Crash(path, line, say))  # type: ignore[assignment]
    return report


class Crash:
    """Where a test failed, and why, as pytest's summary takes it. lineno: from 1."""

    def __init__(self, path: str, lineno: int, message: str) -> None:
        self.path, self.lineno, self.message = path, lineno, message

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}: {self.message}"


class Told:
    """A failure as pytest prints it."""

    def __init__(self, text: str, reprcrash: Crash) -> None:
        self.text, self.reprcrash = text, reprcrash

    def toterminal(self, tw: Any) -> None:
        """Write it to pytest's terminal writer."""
        for line in self.text.splitlines():
            tw.line(line, red=line.lstrip().startswith("-->"))
        tw.line("")
        tw.line(f"{self.reprcrash.path}:{self.reprcrash.lineno}: {self.reprcrash.message.partition(':')[0]}")

    def __str__(self) -> str:
        return f"{self.text}\n\n{self.reprcrash.path}:{self.reprcrash.lineno}"


def _place(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> tuple[str, int]:
    """The line of the test, as pytest names files; where a decorated one is written, since the decorator raises."""
    path, line, _ = item.reportinfo()
    at = (line or 0) + 1
    for entry in excinfo.traceback:
        if str(entry.path) == str(path):
            at = entry.lineno + 1
    return item.nodeid.partition("::")[0], at


def _grid(function: Any) -> Grid | None:
    grid: Grid | None = getattr(function, "turnstile", None)
    return grid if type(grid).__module__ == "verify.testing" else None


def _only_scopes(item: pytest.Item) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return set(params) <= {CELL}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
