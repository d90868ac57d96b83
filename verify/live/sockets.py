"""Sockets of this host as Linux lists them: where each is connected to, and which one is its other end.

Internet sockets come from /proc/PID/net/tcp and tcp6 (proc(5)), in the network namespace of the process. Which two Unix
sockets belong together only sock_diag(7) says, and only of the namespace in which it is asked.
"""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

LISTENS: Final = "0A"
"""State of a socket that waits for somebody to connect (include/net/tcp_states.h)."""
CONNECTS: Final = "02"
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_DUMP: Final = 0x301
"""NLM_F_REQUEST | NLM_F_DUMP."""
_DONE: Final = 3
_ERROR: Final = 2
_SHOW_PEER: Final = 4
_PEER: Final = 2
"""UDIAG_SHOW_PEER, and the attribute UNIX_DIAG_PEER that it asks for (linux/unix_diag.h)."""
_ANSWER_S: Final = 2.0


class Inet(NamedTuple):
    """An internet socket. local, remote: `127.0.0.1:29500`. state: two hexadecimal digits."""

    inode: int
    local: str
    remote: str
    state: str


def inet_sockets(pid: int) -> dict[int, Inet]:
    """Those of TCP that the network namespace of a process has, by inode."""
    found: dict[int, Inet] = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/net/{name}", errors="replace") as lines:
            next(lines, None)
            for line in lines:
                fields = line.split()
                one = Inet(int(fields[9]), _address(fields[1]), _address(fields[2]), fields[3])
                if one.inode:  # what nobody has accepted yet has none
                    found[one.inode] = one
    return found


def other_end(mine: Inet, known: dict[int, Inet]) -> int | None:
    """The inode of the socket that this one is connected to, if that is on this host."""
    return next((each.inode for each in known.values() if (each.local, each.remote) == (mine.remote, mine.local)), None)


def _address(text: str) -> str:
    """`0100007F:1F90` -> `127.0.0.1:8080`: words of 32 bits, each in the byte order of the machine."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8)]
    data = b"".join(words)
    if len(data) == 16 and data[:12] == b"\0" * 10 + b"\xff\xff":
        data = data[12:]
    if len(data) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, data)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, data)}]:{int(port, 16)}"


def unix_peers(pid: int) -> dict[int, int]:
    """The other end of each connected Unix socket, by inode; empty where a process is in another network namespace
    than we are, or the system does not tell.
    """
    peers: dict[int, int] = {}
    with suppress(OSError, struct.error):
        if Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink():
            return {}
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asked:
            asked.settimeout(_ANSWER_S)
            body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_PEER, 0xFFFFFFFF, 0xFFFFFFFF)
            asked.send(struct.pack("=IHHII", 16 + len(body), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0) + body)
            while _take(asked.recv(1 << 18), peers):
                pass
    return peers


def _take(data: bytes, peers: dict[int, int]) -> bool:
    """Take the messages of one answer; whether more of them are to come."""
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        if kind in (_DONE, _ERROR) or length < 16:
            return False
        inode = struct.unpack_from("=I", data, at + 20)[0]
        attribute, end = at + 32, at + length
        while attribute + 4 <= end:
            size, what = struct.unpack_from("=HH", data, attribute)
            if what == _PEER:
                peers[inode] = struct.unpack_from("=I", data, attribute + 4)[0]
            attribute += max(4, -(-size // 4) * 4)
        at += -(-length // 4) * 4
    return True
