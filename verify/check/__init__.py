"""`turnstile check`: prove a policy, a program of collectives or a recorded run, or show how it hangs.

Exit codes: 0 proved, 1 refuted (certain or conditional), 2 unusable input, 3 inconclusive.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from verify.check.args import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from verify.check.answer import Answer
    from verify.check.args import Options


def main(name: str, arguments: Sequence[str]) -> int:
    """Run the command; its exit code. Raises UsageError, and KeyboardInterrupt also when it is told to terminate."""
    options = parse(name, arguments)
    module = import_module(f"verify.check.{options.kind}")
    check: Callable[[Options], Answer] = getattr(module, f"check_{options.kind}")
    with _terminable():
        answer = check(options)
    print(answer.as_json() if options.json else answer.as_text())
    return answer.code


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a check as Ctrl-C does, so that no child is left behind."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt("terminated")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
