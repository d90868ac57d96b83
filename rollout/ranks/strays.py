"""What tasks and callbacks raise that a policy has started in its rank and does not look after.

asyncio logs such an exception when it happens to be collected, and the run goes on; here it is the policy's failure,
with its line, as what its hooks raise is: at once where nobody holds the task any more, else when the policy's time is
over.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

from kernel.errors import TurnstileError
from kernel.sched import hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.sched.policy import Policy


class Strays:
    """Hears of a loop's exceptions, a policy's among them until it is closed. policy: the one that is in use. fail:
    called once, with the first that is a policy's."""

    def __init__(self, policy: Callable[[], Policy], fail: Callable[[BaseException], None]) -> None:
        self._policy, self._fail, self._closed = policy, fail, False
        asyncio.get_running_loop().set_exception_handler(self._heard)

    def _heard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, TurnstileError):
            return  # a task that awaited what ended the run, which has its line
        if isinstance(error, Exception) and self._is_policys(error):
            if not self._closed:
                self._closed = True
                self._fail(error)
        else:
            loop.default_exception_handler(context)

    def _is_policys(self, error: BaseException) -> bool:
        if hooks.line_in(error, type(self._policy())):
            return True
        from verify.sources import foreign

        trace = error.__traceback__
        while trace is not None:
            if foreign(trace.tb_frame.f_code.co_filename):
                return True
            trace = trace.tb_next
        return False

    def close(self) -> None:
        """The rank ends, and what it ends with has been said."""
        self._closed = True

    def check(self, where: str) -> None:
        """Raise PolicyError for a task that ended with an exception at which nobody has looked. where: rank, round."""
        for each in gc.get_objects():
            # `isinstance` would ask objects for their class, which some compute.
            if issubclass(type(each), asyncio.Future) and each.done() and getattr(each, "_log_traceback", False):
                error = each.exception()  # from now on it has been looked at
                if isinstance(error, Exception) and self._is_policys(error):
                    hooks.raised(error, self._policy(), "turn", where)
