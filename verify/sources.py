"""Whose code a file holds: this package's, a library's, or the policy's that is under test; and how a line is named."""

from __future__ import annotations

import importlib.util
import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import kernel
from kernel.sched import registry

if TYPE_CHECKING:
    from types import FrameType, TracebackType

Site = tuple[str, int]
"""A file and a line."""


def place(site: Site) -> str:
    """`directory/file.py:line`, short and the same on every machine."""
    path = Path(site[0])
    return f"{path.parent.name}/{path.name}:{site[1]}" if path.parent.name else f"{path.name}:{site[1]}"


@cache
def _ours() -> tuple[str, ...]:
    spec = importlib.util.find_spec("kernel")
    rooms = list(spec.submodule_search_locations or ()) if spec is not None else list(kernel.__path__)
    return (*(f"{room}/" for room in rooms), f"{Path(__file__).parent}/")


@cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({f"{paths[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def ours(filename: str) -> bool:
    """Whether a file belongs to the kernel or to verify."""
    return filename.startswith(_ours())


@cache
def foreign(filename: str) -> bool:
    """Whether a file belongs to neither this package nor a library: then it is the policy's own code.

    So is an installed package that offers a policy, wherever it lies.
    """
    if filename.startswith((*_ours(), "<")):
        return False
    return filename.startswith(registry.homes()) or not filename.startswith(_libraries())


@cache
def counted(filename: str) -> bool:
    """Whether a file has code that a policy runs: its own or a library's."""
    return not filename.startswith((*_ours(), "<"))


def policy_site(frame: FrameType | None) -> str:
    """`directory/file.py:line` of the innermost frame of the policy's own code; "" where there is none."""
    outermost = frame
    while frame is not None:
        if foreign(frame.f_code.co_filename):
            return place((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    while outermost is not None and not counted(outermost.f_code.co_filename):
        outermost = outermost.f_back
    return place((outermost.f_code.co_filename, outermost.f_lineno)) if outermost is not None else ""


def raised_at(error: BaseException) -> str:
    """Where in the policy's code an exception was raised; the innermost frame of all where no policy is in it."""
    trace: TracebackType | None = error.__traceback__
    own = last = ""
    while trace is not None:
        site = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        last = place(site)
        own = last if foreign(site[0]) else own
        trace = trace.tb_next
    return own or last
