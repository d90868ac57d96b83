"""`python -m turnstile` and the `turnstile` command. First it makes sure that the packages it runs are its own."""

from __future__ import annotations

# What takes time to load is loaded in `main`, where an interrupt ends in one line.
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OWN: Final = {"kernel": "turnstile.py", "models": "config.py", "rollout": "cli.py", "verify": "__init__.py"}
"""Our top-level packages, and a file that each holds. Other distributions and folders use such names too."""


def intruder(home: Path) -> str | None:
    """One line about a package of another origin that takes the place of ours; None if all lie in `home`."""
    from importlib.metadata import packages_distributions
    from importlib.util import find_spec
    from pathlib import Path

    for name, file in OWN.items():
        spec = find_spec(name)
        if spec is None:
            return f"the package `{name}` is missing beside {home / 'turnstile'}: install turnstile again"
        places = [Path(place).resolve() for place in spec.submodule_search_locations or [spec.origin or ""]]
        if places != [home / name] or not (home / name / file).is_file():
            owners = [owner for owner in packages_distributions().get(name, []) if owner != "turnstile"]
            whose = f"of the distribution {' and '.join(sorted(set(owners)))}" if owners else "another package"
            cure = f"pip uninstall {owners[0]}" if owners else "rename it, or run from another directory"
            return f"`{name}` at {places[0]} is {whose}, not turnstile's: {cure}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default the process's own, which then ends at its first interrupt; its exit code.

    2 when a package is not ours, 130 when interrupted.
    """
    try:
        if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
            sys.unraisablehook = _unraisable
        _open_standard()
        from pathlib import Path

        if line := intruder(Path(__file__).resolve().parent.parent):
            print("turnstile:", line, file=sys.stderr)
            return 2
        from rollout.cli import main as command

        code = command(argv)
    except KeyboardInterrupt:  # while modules are loaded
        print("turnstile: interrupted", file=sys.stderr)
        code = 130
    if code == 130:
        # CPython remembers an interrupt that came inside `exec` of a string, as a dataclass's, whoever caught it, and
        # would end by the signal in place of this code. The next such call makes it forget.
        exec("")
    return code


def _interrupt(number: int, _: Any) -> None:
    """Of SIGINT. An impatient second one must not take the exit code away, nor end what is being cleaned up."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _unraisable(told: Any) -> None:
    """Of exceptions that nobody can receive: an interrupt that came inside a finaliser or a callback comes again."""
    if told.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(told)
        return
    import threading

    signal.signal(signal.SIGINT, _interrupt)
    again_s = 0.05  # by then this has returned
    timer = threading.Timer(again_s, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.daemon = True
    timer.start()


def _open_standard() -> None:
    """Give a command that was started without a standard stream /dev/null: else its next file takes that place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


if __name__ == "__main__":
    sys.exit(main())
