"""What a node tells about itself before training, as plain values that travel as JSON."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labutils.cluster import address


@dataclass
class Facts:
    """One node's answer in the preflight."""

    rank: int
    """Number of the node, 0 for the one where the others meet."""
    host: str
    trouble: str = ""
    """What kept the node from looking at itself; then there is nothing below."""
    address: str = ""
    interface: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    shared_memory: int | None = None
    """Bytes of ``/dev/shm``; None where there is no such place."""
    cores: int | None = None
    """Cores that the ranks may keep busy here."""
    unresolved: list[str] = field(default_factory=list)
    """Names of nodes that mean nothing here, or only this machine itself."""
    clock_ahead: float = 0.0
    """Seconds by which this node's clock is ahead of node 0's."""
    clock_error: float = 0.0
    """How far that may be wrong: half the time of the quickest exchange, seconds."""
    unreachable: dict[str, str] = field(default_factory=dict)
    """Nodes that this one cannot connect to, and why."""
    port: int = 0
    """Where this node listens while others try to reach it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def collect(rank: int, hosts: list[str], meeting: str, interface: str, script: str) -> Facts:
    """Look at this node; what goes wrong meanwhile becomes its ``trouble``.

    Imports torch, so that a broken installation shows here.
    """
    # The others' name for this node; what the machine calls itself need not be the same.
    facts = Facts(rank, hosts[rank])
    try:
        _look(facts, hosts, meeting, interface)
        if script:
            content = Path(script).read_bytes()
            facts.versions[Path(script).name] = hashlib.sha256(content).hexdigest()[:8]
    except Exception as error:
        facts.trouble = str(error) if isinstance(error, ValueError) else repr(error)
    return facts


def _look(facts: Facts, hosts: list[str], meeting: str, interface: str) -> None:
    from labutils import hardware

    if len(hosts) > 1:
        facts.address, facts.interface = address.towards(meeting, interface)
    facts.unresolved = [name for name in hosts if not _resolves(name, name == facts.host)]
    facts.cores = hardware.usable_cores()
    facts.shared_memory = hardware.shared_memory()
    import torch

    facts.versions = {
        "Python": platform.python_version(),
        "PyTorch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        "NCCL": _nccl(torch),
    }
    facts.gpus = [gpu.name for gpu in hardware.gpus()]


def _nccl(torch: Any) -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "None"


def _resolves(name: str, itself: bool) -> bool:
    """Another node's name must lead to another machine; its own may be loopback."""
    found = address.resolve(name)
    return bool(found) and (itself or not all(map(address.is_loopback, found)))
