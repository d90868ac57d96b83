"""Where torchrun put this process, and the store through which its processes find each other."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from kernel.errors import UsageError

_SIOCGIFADDR: Final = 0x8915


@dataclass(frozen=True, slots=True)
class Place:
    """This process's place in the world that torchrun started. local: its number on its host, and that of its GPU."""

    rank: int
    size: int
    host: str
    port: int
    run: str
    local: int = 0


def place() -> Place | None:
    """What torchrun says of this process; None when something else started it. Raises UsageError if incomplete."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    found = {name: os.environ.get(name, "") for name in names}
    if not found["TORCHELASTIC_RUN_ID"]:
        return None
    missing = [name for name in names if not found[name]]
    if missing:
        raise UsageError(f"torchrun left {', '.join(missing)} unset: start ranks with torchrun or the command itself")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(
        rank=int(found["RANK"]),
        size=int(found["WORLD_SIZE"]),
        host=found["MASTER_ADDR"],
        port=int(found["MASTER_PORT"]),
        run=f"turnstile/{found['TORCHELASTIC_RUN_ID']}/{attempt}",
        local=int(os.environ.get("LOCAL_RANK") or 0),
    )


def store_at(where: dict[str, Any]) -> Any:
    """A client of torchrun's key-value store, or of our own launcher's, under this run's prefix."""
    import torch.distributed

    dist: Any = torch.distributed  # its stores are not exported for type checkers
    return dist.PrefixStore(where["run"], dist.TCPStore(where["host"], where["port"], is_master=False))


def serve_store() -> tuple[Any, dict[str, Any]]:
    """A key-value store for the ranks of one host, on loopback, and where it is; it ends with the object."""
    import torch.distributed

    dist: Any = torch.distributed
    # Left to itself it would listen on every interface, whatever its address.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, listening = server.getsockname()[1], server.detach()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    return store, {"host": "127.0.0.1", "port": store.port, "run": "turnstile"}


def interface(address: str) -> str | None:
    """The name of this host's network interface with this IPv4 address; None where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


async def join(here: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A rank's side: connect to the launcher."""
    store = await asyncio.to_thread(store_at, {"host": here.host, "port": here.port, "run": here.run})
    port, token = (await asyncio.to_thread(store.get, "control")).decode().split()
    reader, writer = await asyncio.open_connection(here.host, int(port))
    writer.write(f"{token} {here.rank}\n".encode())
    return reader, writer
