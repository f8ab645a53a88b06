"""At which address and port nodes meet, and which of its own addresses a node uses for that.

As a program, for job scripts::

    python -m labutils.cluster.address --meet node001 --seed "$SLURM_JOB_ID"    # 10.0.0.1 23456
    python -m labutils.cluster.address --towards 10.0.0.1                       # 10.0.0.2 eth0

The answer goes to standard output, how it was found to standard error.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
from collections.abc import Sequence

FIRST_PORT, PORTS = 20_000, 10_000
"""Where a job's port lies: below the range from which systems lend ports (32768 on Linux)."""
TRIES = 100
_ELSEWHERE = "192.0.2.1"  # an address that RFC 5737 gives to nobody: the default route leads there


def resolve(name: str) -> list[str]:
    """The IPv4 addresses of a host's name, as this machine sees them; ``[]`` if there are none."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def own_addresses() -> dict[str, str]:
    """This machine's IPv4 addresses and the interface of each, those of loopback left out."""
    import psutil

    return {
        entry.address: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not is_loopback(entry.address)
    }


def is_loopback(address: str) -> bool:
    """Is this an address at which a machine reaches nobody but itself?"""
    return ipaddress.ip_address(address).is_loopback


def meeting_address(name: str, interface: str = "") -> str:
    """The address of this machine, called ``name``, that other machines are to use.

    It is the address of ``interface``, if one is named; else what the name resolves to; else, where
    that is only the machine itself (Debian's 127.0.1.1), the address of its way out.
    """
    own = own_addresses()
    if interface:
        return _of_interface(interface, own)
    resolved = resolve(name)
    say(f"{name} resolves to {', '.join(resolved) or 'nothing'}")
    for address in resolved:
        if address in own:
            return address
    if not own:
        raise ValueError(f"{socket.gethostname()} has no address but loopback: no node can come.")
    try:
        address, of = towards(_ELSEWHERE)
    except ValueError:
        address, of = next(iter(own.items()))
    say(f"which is no address of {socket.gethostname()}'s network; taking {address} of {of}")
    return address


def towards(address: str, interface: str = "") -> tuple[str, str]:
    """This machine's own address and interface on the way to another one; nothing is sent."""
    own = own_addresses()
    if interface:
        return _of_interface(interface, own), interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise ValueError(
                f"{socket.gethostname()} has no way to {address}: {error.strerror}."
            ) from None
        source = str(probe.getsockname()[0])
    if source not in own:
        raise ValueError(
            f"{socket.gethostname()} reaches {address} only by itself ({source}): that address is "
            "no other machine's."
        )
    return source, own[source]


def free_port(seed: int) -> int:
    """A port that is free on this machine; the same seed (a job's id) asks for the same one first.

    Ports lie at 20000 + seed modulo 10000 and, where that is taken, right above.
    """
    for step in range(TRIES):
        port = FIRST_PORT + (seed + step) % PORTS
        if is_free(port):
            return port
    raise ValueError(f"{TRIES} ports from {FIRST_PORT + seed % PORTS} are all taken here.")


def is_free(port: int) -> bool:
    """Can a server listen on this port, on all interfaces?"""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def say(text: str) -> None:
    """Tell the reader of the job's log, not the script."""
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print an address and a port, or an address and an interface."""
    parser = argparse.ArgumentParser(prog="python -m labutils.cluster.address")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--meet", metavar="NAME", help="where others reach this machine")
    what.add_argument("--towards", metavar="ADDRESS", help="this machine's side of the way there")
    parser.add_argument("--seed", type=int, default=0, help="the job's id, for the port")
    parser.add_argument("--interface", default="", help="take this interface's address")
    arguments = parser.parse_args(argv)
    try:
        if arguments.towards:
            print(*towards(arguments.towards, arguments.interface))
        else:
            address = meeting_address(arguments.meet, arguments.interface)
            print(address, free_port(arguments.seed))
    except ValueError as error:
        say(str(error))
        return 1
    return 0


def _of_interface(interface: str, own: dict[str, str]) -> str:
    for address, of in own.items():
        if of == interface:
            return address
    known = ", ".join(f"{of} ({address})" for address, of in own.items()) or "none"
    raise ValueError(
        f"{socket.gethostname()} has no IPv4 address on interface {interface!r}; it has: {known}."
    )


if __name__ == "__main__":
    sys.exit(main())
