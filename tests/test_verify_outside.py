"""What the simulated loop refuses: everything that would touch the outside, with the call site."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import pytest

from verify.sim.errors import Outside
from verify.sim.loop import RankLoop


def test_every_method_of_a_loop_is_there_or_refused() -> None:
    """A method that a new Python adds is neither silently missing nor silently inherited."""
    abstract = {name for name, _ in inspect.getmembers(asyncio.AbstractEventLoop, callable) if not name.startswith("_")}
    missing = [name for name in sorted(abstract) if getattr(RankLoop, name) is getattr(asyncio.AbstractEventLoop, name)]
    assert missing == []


METHODS = vars(RankLoop).items()
REFUSED = sorted(name for name, value in METHODS if getattr(value, "__qualname__", "").startswith("_outside"))


def test_all_of_the_outside_is_refused() -> None:
    assert len(REFUSED) == 31


@pytest.mark.parametrize("name", REFUSED)
def test_the_outside_is_refused_with_the_call_site(name: str) -> None:
    async def main() -> None:
        getattr(asyncio.get_running_loop(), name)(None)

    with (
        asyncio.Runner(loop_factory=RankLoop) as runner,
        pytest.raises(
            Outside,
            match=rf"rank 0 called {name} at tests/test_verify_outside.py:\d+: the simulated|a rank",
        ),
    ):
        runner.run(main())


@pytest.mark.parametrize(
    "reach",
    [
        lambda: asyncio.to_thread(print),
        lambda: asyncio.open_connection("localhost", 1),
        lambda: asyncio.create_subprocess_exec("true"),
        lambda: asyncio.start_server(print, "localhost", 1),
    ],
)
def test_asyncio_helpers_are_refused_where_the_program_called_them(reach: Any) -> None:
    async def main() -> None:
        await reach()

    with (
        asyncio.Runner(loop_factory=RankLoop) as runner,
        pytest.raises(Outside, match=r"at tests/test_verify_outside.py"),
    ):
        runner.run(main())


def test_a_call_from_another_thread_is_refused() -> None:
    raised: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def reach() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except Outside as error:
                raised.append(str(error))

        thread = threading.Thread(target=reach)
        thread.start()
        thread.join()

    with asyncio.Runner(loop_factory=RankLoop) as runner:
        runner.run(main())
    assert "there is one thread" in raised[0]
