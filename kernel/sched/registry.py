"""Finding a policy by name, by entry point (`turnstile.policies`) or as `path/file.py:Class`, with its config.

A spec is `NAME` or `NAME:key=value,key=value`; values are numbers, or numbers joined by `+` for a tuple.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel.errors import TurnstileError, UsageError, said
from kernel.sched import hooks
from kernel.sched.adaptive import Adaptive
from kernel.sched.fine import Fine
from kernel.sched.global_complete import GlobalComplete
from kernel.sched.global_enqueue import GlobalEnqueue
from kernel.sched.lean import Lean
from kernel.sched.normal import Normal
from kernel.sched.policy import Guarantees
from kernel.sched.unordered import Unordered
from kernel.topology import ROUTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.sched.policy import Limits, Policy

GROUP = "turnstile.policies"
BUILTIN: tuple[type[Any], ...] = (Normal, GlobalComplete, GlobalEnqueue, Fine, Lean, Adaptive, Unordered)


def names() -> tuple[str, ...]:
    """Names that `--policy` accepts besides `path/file.py:Class`."""
    return (*(cls.name for cls in BUILTIN), *(entry.name for entry in entry_points(group=GROUP)))


def load(spec: str) -> type[Any]:
    """The policy class that `spec` names. Raises UsageError: unknown (with nearest names), or a file that fails."""
    name, _ = split(spec)
    for cls in BUILTIN:
        if cls.name == name:
            return cls
    if ".py:" in name:
        return _from_file(name)
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            try:
                return _checked(entry.load(), name)
            except BaseException as error:
                if isinstance(error, TurnstileError) or hooks.interrupts(error):
                    raise
                say = str(error) if isinstance(error, ImportError | AttributeError) else hooks.told(error)
                raise UsageError(f"policy {name}: entry point {entry.value} does not load: {say}") from error
    if name.endswith(".py"):
        raise UsageError(f"policy {name!r} names a file: add its class, as in {name}:Class")
    near = difflib.get_close_matches(name, names(), n=3) or list(names())
    raise UsageError(f"unknown policy {name!r}: did you mean {', '.join(near)}? (or path/file.py:Class)")


def create(spec: str, limits: Limits) -> Policy:
    """A policy object for one rank. Raises UsageError as `load`, for a config that does not fit, and for a policy that
    fails while it is made, with its line."""
    cls = load(spec)
    name, options = split(spec)
    config_type: Any = getattr(cls, "Config", None)
    if options and config_type is None:
        raise UsageError(f"policy {name} takes no options, but got {', '.join(options)}")
    if options:
        fields = [field.name for field in dataclasses.fields(config_type)]
        for key in options:
            if key not in fields:
                raise UsageError(f"policy {name} has no option {key!r}: it has {', '.join(fields)}")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what it prints is no part of a command's output
            policy: Policy = cls(limits, config_type(**options)) if options else cls(limits)
    except TurnstileError:
        raise
    except BaseException as error:
        if hooks.interrupts(error):
            raise
        where = hooks.line_in(error, cls) or hooks.defined(cls, "__init__")
        raise UsageError(f"policy {spec} cannot be made, {where}: {hooks.told(error)}") from error
    _fits(policy, spec)
    return policy


def _fits(policy: Any, spec: str) -> None:
    """Raise UsageError unless a policy has what every policy has."""
    for attribute in ("name", "limits"):
        if not hasattr(policy, attribute):
            raise UsageError(f"policy {spec} has no {attribute!r}: subclass kernel.sched.planner.Planner")
    if not isinstance(policy.name, str):
        raise UsageError(f"policy {spec} has the name {policy.name!r:.60}: it must be text")
    if not isinstance(getattr(policy, "guarantees", None), Guarantees):
        raise UsageError(f"policy {spec} has no guarantees: subclass kernel.sched.planner.Planner")
    route = getattr(policy, "route", None)
    if route is not None and route not in ROUTES:
        raise UsageError(f"policy {spec} has the route {route!r:.60}: choose one of {', '.join(ROUTES)}, or None")


@functools.cache
def homes() -> tuple[str, ...]:
    """Where the installed packages lie that offer policies: directories with a slash at the end, or single files.

    Nothing of them is imported for it. They may stand among libraries, and are a policy's own code all the same.
    """
    found = []
    for entry in entry_points(group=GROUP):
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(entry.module.partition(".")[0])
            if spec is not None and spec.submodule_search_locations:
                found += [f"{place}/" for place in spec.submodule_search_locations]
            elif spec is not None and spec.origin:
                found.append(spec.origin)
    return tuple(found)


def shipped(spec: str) -> bool:
    """Whether `spec` names a policy of this package, whose code needs no watching."""
    return split(spec)[0] in {cls.name for cls in BUILTIN}


def split(spec: str) -> tuple[str, dict[str, Any]]:
    """(name, options) of a spec. Raises UsageError for options that are not key=value."""
    head, _, tail = spec.rpartition(":")
    if not head or "=" not in tail:
        return spec, {}
    options: dict[str, Any] = {}
    for item in tail.split(","):
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"policy option {item!r} in {spec!r}: write key=value")
        options[key.strip()] = _value(value, spec)
    return head, options


def _value(text: str, spec: str) -> Any:
    if "+" in text:
        return tuple(_value(part, spec) for part in text.split("+"))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise UsageError(f"policy option value {text!r} in {spec!r}: write a number, or numbers joined by +")


def _from_file(name: str) -> type[Any]:
    path, _, attribute = name.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"policy file {path}: {'not a regular file' if file.exists() else 'there is no such file'}")
    label = f"turnstile_policy_{file.stem}"
    spec = importlib.util.spec_from_file_location(label, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"policy file {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    try:
        with _one_process(), contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except BaseException as error:
        if hooks.interrupts(error):
            raise
        # The loader compiles under the absolute path; a SyntaxError may be of another file that this one imports.
        origin = spec.origin or str(file)
        own = isinstance(error, SyntaxError) and error.filename == origin
        line = error.lineno if own and isinstance(error, SyntaxError) else _last_line(error, origin)
        say = f"{type(error).__name__}: {said(error)}".removesuffix(": ")
        raise UsageError(f"policy file {path}:{line}: {say}") from error
    if not hasattr(module, attribute):
        found = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == label]
        raise UsageError(f"policy file {path} has no class {attribute!r}: it has {', '.join(found) or 'none'}")
    return _checked(getattr(module, attribute), name)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Leaving at once, and splitting in two, raise SystemExit meanwhile: there would be nobody to say why, or two."""
    before = {name: getattr(os, name) for name in ("_exit", "fork", "forkpty", "abort") if hasattr(os, name)}
    loading = True

    def instead(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not loading:
                return before[name](*args)
            told = ", ".join(map(str, args))
            raise SystemExit(f"a policy must not call os.{name}({told}) while it is imported")

        return call

    for name in before:
        setattr(os, name, instead(name))
    try:
        yield
    finally:
        loading = False
        for name, original in before.items():
            setattr(os, name, original)


def _last_line(error: BaseException, file: str) -> int:
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _checked(cls: Any, name: str) -> type[Any]:
    if (
        not isinstance(cls, type)
        or not callable(getattr(cls, "plan", None))
        or not callable(getattr(cls, "turn", None))
    ):
        raise UsageError(f"policy {name} is not a class with `plan` and `turn`: subclass kernel.sched.planner.Planner")
    return cls
