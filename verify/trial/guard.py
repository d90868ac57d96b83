"""A policy's own code, watched while it runs: an endless loop or a call that blocks is found, and never hangs a check.

Only around a policy's callbacks, and only for code outside this package:

- lines of policy code in one callback are counted (`sys.settrace` in 3.11, `sys.monitoring` from 3.12); an endless loop
  has spent its budget after some milliseconds;
- files, sockets, processes, the terminal and sleeping are seen by an audit hook and by the calls themselves.

What neither can see, such as a wait inside C code, is found by `verify.trial.supervise`.
"""

from __future__ import annotations

import asyncio
import datetime
import dis
import random
import sys
import time
from functools import cache
from pathlib import Path, PurePath
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from verify.blame import Class
from verify.sources import counted, foreign, policy_site
from verify.trial.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_LOOKS = (
    frozenset(name for name in vars(Path) if not name.startswith("_"))
    - vars(PurePath).keys()
    - {"open", "read_text", "read_bytes", "write_text", "write_bytes", "iterdir", "glob", "rglob", "walk", "touch"}
)
"""Methods of a path that look at files; the audit hook hears of those that open one."""

BUDGET = 200_000
"""Lines that one callback of a policy may run; a plan of the shipped policies takes under a hundred."""

TOOL = 4
"""Our number at `sys.monitoring`; debuggers, coverage and profilers have others."""


class Halt(BaseException):
    """Thrown into a policy's code to end it. The guard remembers why, should the policy swallow this."""


_WAITS: dict[Any, str] = {time.sleep: "sleeps", input: "reads the terminal"}
_EVENTS = {
    "open": "opens {0!r}", "builtins.input": "reads the terminal", "time.sleep": "sleeps", "subprocess.Popen":
    "starts {0!r}", "os.system": "runs {0!r}", "os.fork": "forks", "os.posix_spawn": "starts {0!r}", "os.exec":
    "runs {0!r}", "os.listdir": "lists {0!r}", "os.scandir": "lists {0!r}", "sqlite3.connect": "opens {0!r}",
    "_thread.start_new_thread": "starts a thread", "_thread.start_joinable_thread": "starts a thread",
    "urllib.Request": "fetches {0!r}", "signal.pthread_kill": "signals",
}  # fmt: skip


_TIMES = frozenset(
    f"{clock}{unit}"
    for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
) | {"localtime", "gmtime", "ctime", "asctime", "strftime", "clock_gettime", "clock_gettime_ns", "times"}
_HEARD = {"open", "listdir", "scandir", "fork", "system", "posix_spawn", "posix_spawnp", "popen", "walk", "makedirs"}
"""Of `os`: what the audit hook tells better."""
_PURE = {"fspath", "fsencode", "fsdecode", "_path_normpath", "strerror", "_exit", "abort", "kill", "_Environ"}
"""Of `os`: what asks the system for nothing, or ends the process."""
_SYSTEMS = {"posix", "os", "platform", "locale", "_locale", "getpass", "resource", "pwd", "grp"}
"""Modules that ask the process, the host or the system."""
_PATHS = {"abspath", "realpath", "expanduser", "expandvars", "islink", "lexists", "ismount"}
"""Of `posixpath`: what is not only about text. All of `genericpath` but the common prefix looks at files."""
_OF_PROCESS = {"getnode", "get_ident", "get_native_id", "getrefcount", "getallocatedblocks", "get_objects", "get_count"}


def _private(function: Any, owner: Any) -> str:
    """What a call learns that another rank would not, in words; "" for most calls."""
    return _asks(getattr(function, "__module__", None), getattr(function, "__name__", ""), function, owner)


def _asks(module: str | None, name: str, function: Any, owner: Any) -> str:
    """See `_private`. function: None where only its names are known."""
    if module == "time" and name in _TIMES:
        return "asks for the time"
    if name == "time" and isinstance(owner, asyncio.AbstractEventLoop):
        return "asks for the time of its loop"
    if (
        (module in _SYSTEMS and name not in _PURE | _HEARD)
        or (module == "posixpath" and name in _PATHS)
        or (module == "genericpath" and name != "commonprefix")
        or ((module or "").startswith("pathlib") and isinstance(owner, Path) and name in _LOOKS)
        or (owner is Path and name in ("cwd", "home"))
    ):
        return f"asks for what is its process's own, or its host's ({name})"
    if name in ("now", "today", "utcnow") and isinstance(owner, type) and issubclass(owner, datetime.date):
        return "asks for the time"
    if isinstance(owner, random.Random) or module in ("random", "secrets", "uuid"):
        return "decides by chance"
    if name in _OF_PROCESS or type(owner).__name__ == "_Environ":
        return f"asks for what is its process's own ({name})"
    if function is not None and (function is hash or function is id):
        return f"calls {name}(), whose answer differs from process to process"
    return ""


class _Listener:
    """The process's one audit hook, which hears nothing unless a guard listens. (A hook cannot be taken out again.)"""

    def __init__(self) -> None:
        self.guard: Guard | None = None
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        guard = self.guard
        if guard is not None and (event in _EVENTS or event.startswith("socket.")):
            guard.audited(event, args)


@cache
def _listener() -> _Listener:
    return _Listener()


class Guard:
    """Watches the policies of one execution at a time. Use as a context manager around each.

    budget: lines of policy code in one callback. beat: called at each callback, to show that things go on.
    found: what was found, if anything; whoever entered must look after leaving.
    """

    def __init__(self, budget: int = BUDGET, beat: Callable[[], None] | None = None) -> None:
        self.budget, self.beat = budget, beat
        self.found: Finding | None = None
        self._active = False
        self._left = budget
        self._rank = self._round = -1
        self._what = ""
        self._listener = _listener()
        self._codes: dict[int, CodeType] = {}
        self._tool = False
        self._before: Any = None
        self._profile: Any = None

    def __enter__(self) -> Guard:
        self.found = None  # one guard may watch many executions, one after the other
        self._codes.clear()
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            if monitoring.get_tool(TOOL) is None:
                monitoring.use_tool_id(TOOL, "turnstile")
                self._tool = True
                events = monitoring.events
                monitoring.register_callback(TOOL, events.LINE, self._line)
                monitoring.register_callback(TOOL, events.JUMP, self._line)
                monitoring.register_callback(TOOL, events.CALL, self._call)
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        if sys.version_info >= (3, 12) and self._tool:
            monitoring = sys.monitoring
            for code in self._codes.values():
                monitoring.set_local_events(TOOL, code, 0)
            for event in (monitoring.events.LINE, monitoring.events.JUMP, monitoring.events.CALL):
                monitoring.register_callback(TOOL, event, None)
            monitoring.free_tool_id(TOOL)
            self._tool = False

    def knows(self, policy: object) -> bool:
        """Get ready to watch a policy. False, and nothing to do, for one whose code is all ours."""
        classes = [cls for cls in type(policy).__mro__ if foreign(_file_of(cls))]
        if sys.version_info >= (3, 12) and self._tool:
            wanted = sys.monitoring.events.LINE | sys.monitoring.events.JUMP | sys.monitoring.events.CALL
            for cls in classes:
                for code in _codes_of(cls):
                    if id(code) not in self._codes:  # equal code of another rank's module is not the same code
                        self._codes[id(code)] = code
                        sys.monitoring.set_local_events(TOOL, code, wanted)
        return bool(classes)

    # -- around policy code -------------------------------------------------------------------------------------

    def enter(self, what: str, rank: int, round_: int, fresh: bool = True) -> None:
        """Policy code runs from here. fresh: a new callback, with a new budget."""
        if fresh:
            self._left = self.budget
            if self.beat is not None:
                self.beat()
        self._what, self._rank, self._round = what, rank, round_
        self._active = True
        self._listener.guard = self
        if sys.version_info < (3, 12):
            self._before, self._profile = sys.gettrace(), sys.getprofile()
            sys.setprofile(self._profiled)
            sys.settrace(self._trace)

    def leave(self) -> bool:
        """Policy code ends here, or calls into the kernel. Whether any was running."""
        if not self._active:
            return False
        self._active = False
        self._listener.guard = None
        if sys.version_info < (3, 12):
            sys.settrace(self._before)
            sys.setprofile(self._profile)
        return True

    # -- what is heard ------------------------------------------------------------------------------------------

    def audited(self, event: str, args: tuple[Any, ...]) -> None:
        """The audit hook heard something while policy code was running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not foreign(frame.f_code.co_filename):
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return  # A module that policy code imports when first used.
            frame = frame.f_back
        text = _EVENTS.get(event, f"uses a socket ({event})")
        self._blocks(text.format(*args) if args else text, sys._getframe(1))

    def _blocks(self, does: str, frame: FrameType) -> None:
        self._stop(f"{does}: a policy must not touch the outside", frame)

    def _stop(self, does: str, frame: FrameType) -> None:
        where = policy_site(frame)
        self.leave()
        if self.found is None:
            say = f"policy code in {self._what} at {where} {does} (rank {self._rank}, round {self._round})"
            self.found = Finding(Class.OUTSIDE, "outside", say, self._rank, self._round, where)
        raise Halt(self.found.say)

    def _spend(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left < 0:
            self._stop(f"has run {self.budget} lines in one step: an endless loop", frame)

    def _check(self, function: Any, owner: Any, frame: FrameType) -> None:
        name = _WAITS.get(function) if _hashable(function) else None
        if name is not None:
            self._blocks(name, frame)
        file = frame.f_code.co_filename
        # The library asks for its process's own things too; of chance it makes no other use than its caller's.
        private = _private(function, owner) if foreign(file) or file == random.__file__ else ""
        if private:
            self._stop(f"{private}: ranks would not decide alike", frame)
        called = getattr(function, "__name__", "")
        if called in ("start_new_thread", "start_joinable_thread"):
            self._blocks("starts a thread", frame)
        if called == "acquire":
            locked = getattr(owner, "locked", None)
            if locked is not None and locked():
                self._blocks("waits for a lock", frame)
        elif called == "get" and type(owner).__name__ == "SimpleQueue" and owner.empty():
            self._blocks("waits for a queue", frame)

    # sys.monitoring: only code of the policy has these events.

    def _line(self, code: CodeType, *_: int) -> None:
        if self._active:
            self._spend(sys._getframe(1))

    def _call(self, code: CodeType, offset: int, function: Any, first: Any) -> None:
        if self._active:
            owner = getattr(function, "__self__", None)
            self._check(function, first if owner is None else owner, sys._getframe(1))

    # sys.settrace and sys.setprofile

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not counted(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = _spins(frame.f_code)
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._active and (event == "line" or event == "opcode"):
            self._spend(frame)
        return self._trace_line

    def _profiled(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self._active:
            return
        if event == "c_call":
            self._check(arg, getattr(arg, "__self__", None), frame)
        elif event == "call" and frame.f_back is not None and foreign(frame.f_back.f_code.co_filename):
            code = frame.f_code  # of a library: what it does by itself is its own affair
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            private = _asks(frame.f_globals.get("__name__"), code.co_name, None, owner)
            if private:
                self._stop(f"{private}: ranks would not decide alike", frame)


@cache
def _spins(code: CodeType) -> bool:
    """Whether an instruction jumps to itself, as in `while True: pass`, which is no new line to a tracer."""
    return any(each.opname.startswith("JUMP") and each.argval == each.offset for each in dis.get_instructions(code))


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


def _file_of(cls: type) -> str:
    """Where a class is written; the file that its functions say."""
    for value in vars(cls).values():
        function = _function(value)
        if function is not None:
            return function.__code__.co_filename
    module = sys.modules.get(cls.__module__)
    return getattr(module, "__file__", None) or "<unknown>"


def _function(value: Any) -> FunctionType | None:
    value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    value = getattr(value, "__wrapped__", None) or value
    return value if isinstance(value, FunctionType) else None


def _codes_of(cls: type) -> Iterator[CodeType]:
    """All code of the file of a class that can be reached from the class."""
    todo: list[CodeType] = []
    filename, spaces = _file_of(cls), []
    for value in vars(cls).values():
        function = _function(value)
        if function is not None:
            todo.append(function.__code__)
            if function.__globals__ not in spaces:
                spaces.append(function.__globals__)
    for space in spaces:
        for value in list(space.values()):
            parts = list(vars(value).values()) if isinstance(value, type) else [value]
            for part in parts:
                function = _function(part)
                if function is not None and function.__code__.co_filename == filename:
                    todo.append(function.__code__)
    seen: set[int] = set()
    while todo:
        code = todo.pop()
        if id(code) not in seen:
            seen.add(id(code))
            yield code
            todo += [const for const in code.co_consts if isinstance(const, CodeType)]
