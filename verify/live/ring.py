"""A ring that is read while it grows, for as long as a run goes on: what is over is forgotten."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from verify.events import Communicator, State
from verify.readers.record import RENDEZVOUS, Ring, queue_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class LiveRing(Ring):
    """One rank's ring, taken again and again."""

    def forget(self, keep: int) -> None:
        """Drop finished calls but the newest `keep` of each group, and what is known of their submissions."""
        kept: Counter[str] = Counter()
        for calls in (self._calls, self._early):
            for key in reversed(list(calls)):
                if calls[key].state is State.COMPLETED:
                    kept[key[0]] += 1
                    if kept[key[0]] > keep:
                        del calls[key]
                        self._submission.pop(key, None)
                        self._sizes.pop(key, None)
        for label in [label for label in self._members if label not in self.flying][:-keep]:
            del self._members[label]

    def of_world(self, world: Sequence[int]) -> None:
        """All ranks are these: what takes part in its exchanges from now on."""
        if self.everybody.members != tuple(world):
            self.everybody = Communicator(tuple(world), RENDEZVOUS)
            for key, call in self._calls.items():
                if key[0] == RENDEZVOUS:
                    self._calls[key] = replace(call, communicator=self.everybody)

    @property
    def busy(self) -> bool:
        """Whether it may still move by itself, though its host waits in something or calls of it are queued.

        So it is while code of a submission runs that has no call open, and where a turn waits in several tasks, of
        which one waits for something else than the device.
        """
        calls = {**self._early, **self._calls}
        open_ = [call for call in calls.values() if call.state is not State.COMPLETED]
        if any(not any(label in call.queues for call in open_) for label in self.flying):
            return True
        waits = [text for text in self.waits if not any(queue_of(text) in call.queues for call in open_)]
        return len(waits) + any(call.blocking for call in open_) > 1 or (bool(waits) and len(self.waits) > 1)
