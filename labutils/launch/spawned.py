"""Entry point of a rank that is started as a plain subprocess, or by torchrun."""

from __future__ import annotations

import os
import socket
import sys


def main() -> None:
    """``spawned CHANNEL_FD OUTPUT_FD``: be the rank behind these two sockets."""
    if sys.platform == "win32":  # shared handles come through standard input
        channel, output = (_shared() for _ in range(2))
    else:
        channel, output = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    _be_rank(channel, output)


def _shared() -> socket.socket:
    length = int.from_bytes(sys.stdin.buffer.read(4), "big")
    return socket.fromshare(sys.stdin.buffer.read(length))  # type: ignore[attr-defined]


def connect() -> None:
    """``spawned:connect PATH``: be a rank that torchrun started; the notebook listens at PATH."""
    ends = []
    for name in (b"C", b"O"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(sys.argv[1])
        sock.sendall(name + int(os.environ["RANK"]).to_bytes(4, "big"))
        ends.append(sock)
    _be_rank(*ends)


def _be_rank(channel: socket.socket, output: socket.socket) -> None:
    import labutils.launch.rank as rank

    os._exit(rank.main(channel, output))
