"""A rank that raised while a call of its own was open, and all others have come: the call is not at fault."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verify.blame import Certainty, Class
from verify.events import Communicator, Event, Kind, State
from verify.hang.diagnosis import diagnose_found
from verify.readers.found import Found


@given(
    ranks=st.integers(2, 6), data=st.data(), before=st.integers(0, 3), raises=st.booleans(), blocking=st.booleans()
)
def test_who_raised_in_an_open_call_is_blamed_and_nobody_where_all_are_there(
    ranks: int, data: st.DataObject, before: int, raises: bool, blocking: bool
) -> None:
    group = Communicator(tuple(range(ranks)), "dp")
    victim = data.draw(st.integers(0, ranks - 1))
    done = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 2)) - {victim}

    def call(rank: int, sequence: int, state: State) -> Event:
        waits = blocking or rank != victim
        return Event(
            rank, Kind.COLLECTIVE, "all_reduce", communicator=group, sequence=sequence, blocking=waits, state=state
        )

    events = [call(rank, n, State.COMPLETED) for n in range(before) for rank in range(ranks)]
    events += [call(rank, before, State.COMPLETED if rank in done else State.STARTED) for rank in range(ranks)]
    if raises:
        events.append(Event(victim, Kind.EXIT, "ValueError: boom", state=State.COMPLETED))
    everybody = frozenset(range(ranks))
    verdict = diagnose_found(Found("run", tuple(events), everybody, everybody, whole=everybody)).verdict
    waiting = everybody - done - {victim}
    if raises and waiting:
        assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.EXCEPTION, Certainty.CERTAIN, (victim,))
        assert "left by ValueError: boom" in verdict.say
    elif not raises:
        assert verdict.cls is not Class.EXCEPTION
