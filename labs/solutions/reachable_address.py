"""The address of a node at which another node can reach it."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Iterator

lab = "05"


def reachable_address(addresses: dict[str, str], other: str) -> str:
    for address in addresses.values():
        interface = ipaddress.ip_interface(address)
        if ipaddress.ip_address(other) in interface.network and not interface.is_loopback:
            return str(interface.ip)
    raise ValueError(f"no interface reaches {other}")


def run(answer: object, addresses: dict[str, str], other: str) -> str:
    """The answer as text; an address object is as good."""
    return str(answer(addresses, other))  # type: ignore[operator]


def cases(rng: random.Random) -> Iterator[tuple[dict[str, str], str]]:
    lo, docker = ("lo", "127.0.0.1/8"), ("docker0", "172.17.0.1/16")
    yield dict([lo, ("eth0", "10.77.0.1/24")]), "10.77.0.2"
    yield dict([lo, docker, ("ib0", "192.168.8.4/22")]), "192.168.10.9"
    yield dict([("eno1", "141.2.7.30/26"), docker, lo]), "141.2.7.60"
    yield dict([docker, ("eno1", "10.1.2.3/24"), ("ib0", "10.1.3.3/24"), lo]), "10.1.3.200"
    for _ in range(6):
        third, prefix = rng.randrange(1, 250), rng.choice([16, 24])
        near = [("eno1", f"10.{third}.7.{rng.randrange(1, 99)}/{prefix}"), lo, docker,
                ("ib0", f"10.{third + 1}.7.{rng.randrange(1, 99)}/{prefix}")]  # fmt: skip
        rng.shuffle(near)
        yield dict(near), f"10.{third + rng.randrange(2)}.7.{rng.randrange(100, 200)}"


hints = [
    "127.0.0.1 is on every machine, and means that machine itself: no other node reaches it.",
    "Two hosts reach each other directly when they are in the same network: the first bits of "
    "their addresses agree, as many as stand after the slash.",
    "ipaddress.ip_interface('10.77.0.1/24') has .network and .ip, and "
    "ipaddress.ip_address(other) in network says whether it belongs to it.",
]
