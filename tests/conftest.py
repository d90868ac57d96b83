"""Hypothesis profiles for the whole suite, and async tests where pytest-asyncio is missing.

`ci` is the default, `deep` (`--hypothesis-profile=deep`) searches longer. Neither has a deadline.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from rollout.ranks.nursery import Nursery

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile("ci", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", settings.get_profile("ci"), max_examples=200)
settings.load_profile("ci")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where ranks are forked: torch is imported once for the whole session."""
    with Nursery() as shared:
        yield shared


if importlib.util.find_spec("pytest_asyncio") is None:
    # `make test-gpu` runs in an interpreter that it may not add packages to.

    def pytest_addoption(parser: pytest.Parser) -> None:
        """Know pytest-asyncio's settings."""
        parser.addini("asyncio_mode", "")
        parser.addini("asyncio_default_fixture_loop_scope", "")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
        """Run a coroutine test on a loop of its own."""
        if not inspect.iscoroutinefunction(pyfuncitem.obj):
            return None
        names = pyfuncitem._fixtureinfo.argnames
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True
