"""The `turnstile` command: finds the subcommand, and turns what happens into an exit code and at most one line.

Exit codes: 0 done, 1 the run failed or something was refuted, 2 unusable input, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, NamedTuple

from kernel.errors import TurnstileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Command(NamedTuple):
    """A subcommand. main: `module:function` that takes (name, arguments) and returns an exit code; loaded when used."""

    name: str
    about: str
    main: str


COMMANDS: Final = (
    Command(
        "rollout", "replay a trace of trajectories on real ranks: table, JSON, PNG, record", "rollout.campaign:main"
    ),
    Command("compare", "several policies on the same trace, side by side, ranks kept up", "rollout.campaign:main"),
    Command("plot", "draw the figures of a run that is complete again", "rollout.report.again:main"),
    Command("check", "prove a policy, a program or a run, or show the schedule that hangs it", "verify.check:main"),
    Command("hang", "explain a stuck job from its dumps, logs, stacks or processes", "verify.hang:main"),
    Command("top", "live view of a run: where each rank stands, and who waits for whom", "verify.top:main"),
    Command("trace", "a run's record as a timeline for Perfetto and chrome://tracing", "verify.trace:main"),
)

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing that a person can do something about."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name; by default the process's own); its exit code."""
    try:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as end:  # argparse, after --help
            code = int(end.code or 0)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _say(error, 2)
    except TurnstileError as error:
        return _say(error, 1)
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C must not take the exit code away
        return _say(interrupt if interrupt.args else "interrupted", 130)
    except BrokenPipeError:
        # Whoever read our output has gone.
        _silence()
        return 1
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return _say(f"too many files are open ({error.strerror}): raise the limit, as `ulimit -n 1024` does", 2)
        if error.errno == errno.ENAMETOOLONG:
            return _say(f"{str(error.filename)[:60]}...: no file system takes so long a name: name another path", 2)
        if error.errno not in FULL:
            raise
        _silence()
        return _say(f"the output cannot be written ({error.strerror}): make room, or send it elsewhere", 2)


def _silence() -> None:
    """What is still buffered for standard output must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"turnstile {_version()}")
        return 0
    command = next((command for command in COMMANDS if command.name == argv[0]), None)
    if command is None:
        names = [command.name for command in COMMANDS]
        near = difflib.get_close_matches(argv[0], names, n=2, cutoff=0.65) or names
        what = "option" if argv[0].startswith("-") else "command"
        raise UsageError(
            f"unknown {what} {argv[0]!r}: did you mean {' or '.join(f'`turnstile {name}`' for name in near)}?"
        )
    if os.environ.get("TORCHELASTIC_RUN_ID") and os.environ.get("RANK", "0") != "0":
        # torchrun runs the same command in every process; its first one is the launcher, the others are ranks.
        from rollout.ranks.worker import join_world

        return join_world()
    module, _, function = command.main.partition(":")
    run: Callable[[str, Sequence[str]], int] = getattr(import_module(module), function)
    return run(command.name, argv[1:])


def _help() -> str:
    lines = [f"  {command.name:<10} {command.about}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: turnstile COMMAND [OPTIONS]",
            "",
            "Rollouts of MoE models whose prefill and decode share the same ranks, without deadlock.",
            "",
            *lines,
            "",
            "`turnstile COMMAND --help` lists a command's options.",
        ]
    )


def _version() -> str:
    try:
        return version("turnstile")
    except PackageNotFoundError:
        return "(not installed)"


def _say(what: object, code: int) -> int:
    try:
        print("turnstile:", " ".join(str(what).split()), file=sys.stderr)
    except OSError:  # its terminal was closed; nor must what is buffered fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code
