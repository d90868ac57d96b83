"""Wrappers of DeepEP's buffers: dispatch and combine, in the normal and the low-latency mode.

The package is looked for when the program imports it; it is never imported from here.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from kernel.record.foreign import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from kernel.comm.tap.device import Device
    from kernel.comm.tap.notes import Known, Note, Notes
    from kernel.comm.tap.patches import Patches

MODULE: Final = "deep_ep"
BUFFERS: Final = ("Buffer", "ElasticBuffer")
OPERATIONS: Final = {
    "dispatch": "dispatch",
    "combine": "combine",
    "low_latency_dispatch": "low-latency dispatch",
    "low_latency_combine": "low-latency combine",
    "clean_low_latency_buffer": "cleaning of the low-latency buffer",
}
MEDIUM: Final = "deep_ep"


class DeepEP:
    """See the module."""

    def __init__(self, notes: Notes, device: Device) -> None:
        self.notes, self.device, self.local = notes, device, notes.local
        self.off = False
        self._groups: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()
        self._made: dict[str, int] = {}
        self._patches: Patches | None = None
        self._finder: _Finder | None = None

    def put(self, patches: Patches) -> None:
        """Wrap the buffers of the package, now or when it is imported."""
        self._patches = patches
        if (module := sys.modules.get(MODULE)) is not None:
            self.loaded(module)
        else:
            self._finder = _Finder(self.loaded)
            sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        """Await the package no longer. Idempotent."""
        if self._finder is not None and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder = None

    def loaded(self, module: ModuleType) -> None:
        """Wrap the buffers of a module."""
        if self.off or self._patches is None:
            return
        for name in BUFFERS:
            if isinstance(owner := getattr(module, name, None), type):
                self._patches.method(owner, "__init__", self._init)
                for method, operation in OPERATIONS.items():
                    self._patches.method(owner, method, partial(self._method, op=operation))

    def _init(self, original: Any) -> Callable[..., Any]:
        def init(buffer: Any, *args: Any, **named: Any) -> None:
            original(buffer, *args, **named)
            try:
                if not self.off:
                    self._groups[buffer] = self._known(named.get("group", args[0] if args else None))
            except Exception as error:
                self.notes.broken("a DeepEP buffer", error)

        return init

    def _known(self, group: Any) -> Known:
        base = self.notes.group(group)
        number = self._made[base.group.name] = self._made.get(base.group.name, 0) + 1
        name = f"DeepEP buffer {number} of {base.group.name}"
        return self.notes.plain(name, base.group.ranks, MEDIUM, key=(name, number))

    def _method(self, original: Any, op: str) -> Callable[..., Any]:
        def call(buffer: Any, *args: Any, **named: Any) -> Any:
            if self.off or getattr(self.local, "busy", False):
                return original(buffer, *args, **named)
            note = self._before(buffer, op, args, named)
            # Internode calls go through methods of the same buffer: these are the same call.
            self.local.busy = True
            try:
                result = original(buffer, *args, **named)
            except BaseException as error:
                if note is not None:
                    self.notes.done(note, error)
                raise
            finally:
                self.local.busy = False
            self._after(note)
            return result

        return call

    def _before(self, buffer: Any, op: str, args: Sequence[Any], named: dict[str, Any]) -> Note | None:
        try:
            known = self._groups.get(buffer)
            if known is None:
                # Made before the record began.
                known = self._groups[buffer] = self._known(buffer.group)
            x = named.get("x", args[0] if args else None)
            tensor = x[0] if isinstance(x, tuple) else x
            third = args[2] if op == "low-latency dispatch" and len(args) > 2 else ""
            most = named.get("num_max_dispatch_tokens_per_rank", third)
            on_device = getattr(getattr(tensor, "device", None), "type", "") == "cuda"
            call = Call(
                op,
                dtype=str(getattr(tensor, "dtype", "")).removeprefix("torch."),
                tag=str(most),
                stream=self.device.stream() if on_device else "",
                asynchronous=bool(named.get("async_finish", False) or named.get("return_recv_hook", False)),
                medium=MEDIUM,
            )
            if on_device and self.device.captures(known, call, 0, 0):
                return None
            note = self.notes.call(known, call, int(getattr(tensor, "numel", int)()), 0, (), ())
            # In the normal mode the host waits until it knows how much it will receive.
            self.notes.wait(note)
            return note
        except Exception as error:
            self.notes.broken(op, error)
            return None

    def _after(self, note: Note | None) -> None:
        if note is None:
            return
        try:
            if note.call.stream:
                self.notes.wait(note, over=True)
                self.device.launched(note)
            else:
                self.notes.done(note)
        except Exception as error:
            self.notes.broken("a DeepEP call", error)


class _Finder(MetaPathFinder):
    """Says when the package has been imported, and is out of the way otherwise."""

    def __init__(self, loaded: Callable[[ModuleType], None]) -> None:
        self._loaded = loaded

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The package's own spec, with a loader that tells."""
        if name != MODULE or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Any, loaded: Callable[[ModuleType], None]) -> None:
        self._loader, self._loaded = loader, loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the package's own loader does."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As the package's own loader does; then tell."""
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._loaded(module)
