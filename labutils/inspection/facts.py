"""What is seen of a script in one rank: plain data, kept in a file that outlives the rank."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from labutils.launch.calls import user_lines

WRITTEN_EVERY_S = 0.25
_SAMPLE = 1 << 16
"""Elements of a tensor that are looked at; a larger one is sampled evenly."""


def facts_file(directory: str, rank: int) -> Path:
    """Where the facts of ``rank`` are."""
    return Path(directory) / f"facts-{rank}.json"


class Facts:
    """Collects facts, and has a thread write them down while the script runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.changed = path, True
        self.data: dict[str, Any] = {
            "rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]),
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "local_size": int(os.environ["LOCAL_WORLD_SIZE"]),
            "groups": [], "models": [], "loaders": [], "epochs": [], "steps": [], "losses": [],
            "saves": [], "spawns": [], "splits": [], "calls": {}, "joined": False, "ended": False,
            "unmatched_no_sync": [], "optimizers": 0, "forwards": [],
            "in_forward": "", "left": "", "waited_s": 0.0, "cleared": False, "kept": 0,
        }  # fmt: skip
        threading.Thread(target=self._write_for_ever, name="facts", daemon=True).start()

    def add(self, kind: str, **fact: Any) -> dict[str, Any]:
        """Keep one more fact; it may be completed later."""
        self.data[kind].append(fact)
        self.changed = True
        return fact

    def write(self) -> None:
        """Write all of it; facts that change meanwhile are written the next time."""
        unfinished = self.path.with_suffix(".unfinished")
        with contextlib.suppress(OSError, RuntimeError):
            self.changed = False
            unfinished.write_text(json.dumps(self.data))
            os.replace(unfinished, self.path)

    def _write_for_ever(self) -> None:
        pause = WRITTEN_EVERY_S
        while not self.data["ended"]:
            time.sleep(pause)
            start = time.monotonic()
            if self.changed:
                self.write()
            pause = max(WRITTEN_EVERY_S, 20 * (time.monotonic() - start))


def where() -> str:
    """The user's line that is being run: ``file, line n``."""
    lines = user_lines(sys._getframe(1), limit=1)
    return lines[0] if lines else ""


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have ``owner.name`` call ``around``, with the original before its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def checksum(tensor: torch.Tensor, most: int = _SAMPLE) -> int:
    """CRC-32 of a tensor's bits, or of evenly spaced elements of a large one."""
    return zlib.crc32(_elements(tensor, most).view(torch.uint8).numpy().tobytes())


def fingerprint(tensor: torch.Tensor) -> list[float]:
    """Checksum, and the sum of the elements, which tells people more."""
    elements = _elements(tensor, _SAMPLE)
    return [
        zlib.crc32(elements.view(torch.uint8).numpy().tobytes()),
        elements.double().sum().item(),
    ]


def _elements(tensor: torch.Tensor, most: int) -> torch.Tensor:
    plain = getattr(tensor, "raw", tensor).detach().reshape(-1)  # a virtual GPU logs nothing
    step = -(-plain.numel() // most) or 1
    return plain[::step].cpu().contiguous()
