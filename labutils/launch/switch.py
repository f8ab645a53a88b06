"""The switch of a rehearsed network: a bridge, or a relay that hands packets on with a delay."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque

from labutils.launch.network import INTERFACE, MTU, NEWNET, run, unshare


def main(channel: socket.socket, delay: float) -> None:
    """Join the nodes that the notebook names on ``channel``, until it closes."""
    unshare(NEWNET)
    relay = Relay(delay) if delay else None
    if relay is None:
        run("ip", "link", "add", "dev", "bridge", "mtu", str(MTU), "type", "bridge")
        run("ip", "link", "set", "dev", "bridge", "up")
    channel.send(b"ready")
    while True:
        if relay is not None:
            relay.work(channel)
        message = channel.recv(64)
        if not message:
            return
        index, pid = message.decode().split()
        _plug_in(int(index), pid, relay)
        channel.send(b"done")


def _plug_in(index: int, pid: str, relay: Relay | None) -> None:
    """A link whose other end is the interface of the node that process ``pid`` has made."""
    port, mac = f"port{index}", f"02:00:00:00:00:{index:02x}"
    with contextlib.suppress(RuntimeError):  # of a node that has died
        run("ip", "link", "del", port)
    end = ("name", INTERFACE, "mtu", str(MTU), "address", mac, "netns", pid)
    run("ip", "link", "add", "dev", port, "mtu", str(MTU), "type", "veth", "peer", *end)
    if relay is None:
        run("ip", "link", "set", port, "master", "bridge")
    run("ip", "link", "set", port, "up")
    if relay is not None:
        relay.add(port, bytes.fromhex(mac.replace(":", "")))


class Relay:
    """Takes packets from each port and hands them on ``delay`` seconds later.

    Packets come and go with the kernel's own header (PACKET_VNET_HDR), so that large ones stay in
    one piece and checksums are still to be filled in.
    """

    _SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING, _RCVBUFFORCE = 263, 15, 23, 33
    _HEADER = 10  # bytes of struct virtio_net_hdr, before the packet's own destination

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.ports: dict[bytes, socket.socket] = {}
        self.waiting: deque[tuple[float, socket.socket, bytes]] = deque()

    def add(self, port: str, mac: bytes) -> None:
        """Serve ``port``, behind which is the interface with this address."""
        if mac in self.ports:
            self.ports.pop(mac).close()
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        sock.setsockopt(self._SOL_PACKET, self._VNET_HEADER, 1)
        sock.setsockopt(self._SOL_PACKET, self._IGNORE_OUTGOING, 1)
        sock.setsockopt(socket.SOL_SOCKET, self._RCVBUFFORCE, 1 << 24)
        sock.bind((port, 3))  # ETH_P_ALL
        sock.setblocking(False)
        self.ports[mac] = sock

    def work(self, channel: socket.socket) -> None:
        """Until there is something to read on ``channel``."""
        while True:
            pause = self.waiting[0][0] - time.monotonic() if self.waiting else None
            readable, _, _ = select.select(
                [channel, *self.ports.values()], [], [], None if pause is None else max(0.0, pause)
            )
            for sock in readable:
                if sock is channel:
                    return
                self._take(sock)
            self._hand_on()

    def _take(self, sock: socket.socket) -> None:
        due = time.monotonic() + self.delay
        with contextlib.suppress(OSError):
            while True:
                packet = sock.recv(1 << 17)
                mac = packet[self._HEADER : self._HEADER + 6]
                others = [port for port in self.ports.values() if port is not sock]
                for target in [self.ports[mac]] if mac in self.ports else others:
                    self.waiting.append((due, target, packet))

    def _hand_on(self) -> None:
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            _, target, packet = self.waiting.popleft()
            with contextlib.suppress(OSError):  # a node that has gone, or a full queue: it is lost
                target.send(packet)
