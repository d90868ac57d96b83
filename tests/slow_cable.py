"""One end of a cable between two network namespaces that can be made slow: what a kernel with netem does by itself.

    ip netns exec NAME python slow_cable.py DEVICE SOCKET SETTINGS

Makes the tun device DEVICE in its namespace. Packets that leave by it go to the other end over the datagram socket of
file descriptor SOCKET, each after the delay that the shared memory of descriptor SETTINGS says at that moment
(`QUALITY`: milliseconds, as many more at random, share of packets lost). Their order is kept.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress

QUALITY = struct.Struct("ddd")
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001


def main(device: str, peer_fd: int, quality_fd: int) -> None:
    """Carry packets until killed."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN_WITHOUT_HEADER))
    peer, quality, draws = socket.socket(fileno=peer_fd), mmap.mmap(quality_fd, QUALITY.size), random.Random(1)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            peer.send(waiting.popleft()[1])
        ready, _, _ = select.select([tun, peer], [], [], waiting[0][0] - now if waiting else None)
        if peer in ready:
            packet = peer.recv(1 << 16)
            if not packet:
                return
            with suppress(OSError):  # a device that is down takes nothing, as a socket nobody plugged in
                os.write(tun, packet)
        if tun in ready:
            packet = os.read(tun, 1 << 16)
            delay, jitter, loss = QUALITY.unpack_from(quality)
            if draws.random() >= loss:
                due = time.monotonic() + (delay + jitter * draws.random()) / 1e3
                waiting.append((max(due, waiting[-1][0]) if waiting else due, packet))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
