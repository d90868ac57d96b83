"""`turnstile top --check`: watch a run until it ends or a fault is certain, and say which."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from verify import runs, words
from verify.blame import Class, Verdict
from verify.hang.diagnosis import Diagnosis
from verify.hang.text import as_text
from verify.top.follow import Follower

if TYPE_CHECKING:
    from verify.live.rings import Look
    from verify.top.frame import View


def check_run(path: str, every_s: float, as_json: bool) -> int:
    """Check the newest run in a directory, and those that a command with several policies begins there after it.

    Prints the report; the exit code: 1 for a certain fault or a run that failed, else 0. Raises UsageError for what is
    no run.
    """
    folder = runs.find(path, newest=True)
    while True:
        found = watch(Follower(folder), every_s)
        following = runs.find(path, newest=True)
        if found.code or following == folder:
            return _tell(found, as_json)
        folder = following


def check_view(view: View, every_s: float, as_json: bool) -> int:
    """The same for whatever `view` shows, until that has ended."""
    return _tell(watch(view, every_s), as_json)


def watch(view: View, every_s: float) -> Diagnosis:
    """Look until a fault is certain or the run has ended; what is wrong."""
    while True:
        look = view.read()
        ended = look.ended
        found = view.check.take(look)
        if ended and found is None:
            # What stands in one look and in the next is certain; the last events were written meanwhile.
            look = view.read()
            found = view.check.take(look)
        if found is not None:
            return found
        if ended:
            return _outcome(look)
        time.sleep(every_s)


def _outcome(look: Look) -> Diagnosis:
    """Of a run that has ended with no rank waiting for one that is to blame."""
    failed = sorted(rank for rank, facts in look.facts.items() if facts.failed)
    source, unknown = look.found.source, look.found.unknown
    if not failed:
        verdict = Verdict(Class.NONE, say="The run has ended, and no fault was certain while it was watched.")
        return Diagnosis(verdict, source)
    own = [rank for rank in failed if not look.facts[rank].gave_up]
    if own:
        say = f"{words.ranks(own).capitalize()} failed, and the run has ended."
    else:
        say = f"{words.ranks(failed).capitalize()} gave up, and the run has ended: the cause is outside these records."
    fix = words.FIXES["exception"] if own else "See what ended the command, and what `turnstile hang` says of this run."
    return Diagnosis(Verdict(Class.EXCEPTION, ranks=tuple(own), say=say, fix=fix), source, unknown)


def _tell(found: Diagnosis, as_json: bool) -> int:
    print(json.dumps(found.to_dict()) if as_json else as_text(found))
    return found.code
