"""What a CPU device's streams tell of the work on them, and when."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from kernel.request import Phase
from tests.test_device_cpu import BOUND_S, CALLS, device, route_one

if TYPE_CHECKING:
    from kernel.device.worker import Completion


async def test_the_watch_sees_every_start_and_finish_on_its_stream() -> None:
    seen: list[tuple[str, str, str, str]] = []

    def watch(phase: Phase, label: str, what: str) -> None:
        seen.append((threading.current_thread().name, phase, label, what))

    async with device(watch=watch) as it:
        await it.stream(Phase.D).submit(lambda: None, "D 17").wait()
        await route_one(it, CALLS[5], lambda: None)
        failed = it.stream(Phase.D).submit(lambda: 1 // 0, "D 18")
        with pytest.raises(ZeroDivisionError):
            await failed.wait()
        await it.stream(Phase.D).submit(lambda: None, "D 19").wait()
    on_d = [(label, what) for name, phase, label, what in seen if (name, phase) == ("rank0 D", "D")]
    on_p = [(label, what) for name, phase, label, what in seen if (name, phase) == ("rank0 P", "P")]
    assert len(on_d) + len(on_p) == len(seen)
    ends = {"D 17": "finish", "AR[TP] routed at gather 5": "finish", "D 18": "fail", "D 19": "finish"}
    assert on_d == [(label, what) for label, end in ends.items() for what in ("start", end)]
    assert on_p == [("P", "start"), ("P", "finish")]


@pytest.mark.parametrize("well", [True, False])
@pytest.mark.parametrize("routed", [False, True])
async def test_an_end_is_watched_before_anybody_learns_of_it(routed: bool, well: bool) -> None:
    """A record may not say that work began before the work that it had waited for was over."""
    ended = {"fail", "finish"}
    watched, learned = threading.Event(), threading.Event()
    early: list[bool] = []

    def watch(phase: Phase, label: str, what: str, time_ns: int = 0) -> None:
        if what in ended and phase is Phase.D:
            watched.set()
            early.append(learned.wait(0.05))

    def work() -> int:
        return 1 if well else 1 // 0

    async with device(watch=watch) as it:
        route = it.route()

        def segment() -> None:
            try:
                route.run(CALLS[0], work)
            finally:
                learned.set()

        if routed:
            route.reserve(CALLS[:1])
            event = it.stream(Phase.P).submit(segment, "P")
        else:
            event = it.stream(Phase.D).submit(work, "D 1")
            threading.Thread(target=_learn, args=(event, watched, learned)).start()
        with contextlib.suppress(ZeroDivisionError):
            await event.wait()
    assert early == [False]


def _learn(event: Completion[Any], watched: threading.Event, learned: threading.Event) -> None:
    watched.wait(BOUND_S)
    if event.done():
        learned.set()
