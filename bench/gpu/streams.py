"""Work that one stream hands to another, with the edges that this needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


def handed_over(
    stream: Any,
    through: Any,
    work: Callable[[], None],
    *,
    current: Callable[[Any], AbstractContextManager[Any]],
    event: Callable[[], Any],
) -> None:
    """Enqueue `work` on `through`, behind all that `stream` holds; `stream` goes on behind it.

    So DeepEP hands work to a buffer's communication stream. current: makes a stream the current one. event: makes one.
    """
    over, back = event(), event()
    over.record(stream)
    through.wait_event(over)
    with current(through):
        work()
    back.record(through)
    stream.wait_event(back)
