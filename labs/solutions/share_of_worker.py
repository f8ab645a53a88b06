"""Which samples of a stream each worker yields, so that every sample comes exactly once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

lab = "01"


def share_of_worker(samples: Iterable[Any], worker: int, workers: int) -> Iterable[Any]:
    return islice(samples, worker, None, workers)


def run(answer: Callable[..., Iterable[Any]], count: int, workers: int) -> dict[str, list[Any]]:
    """What the workers yield together, of a stream that can only be read forwards."""
    shares = [list(answer(iter(range(count)), w, workers)) for w in range(workers)]
    sizes = [len(share) for share in shares]
    return {
        "all samples, sorted": sorted(sample for share in shares for sample in share),
        "largest share minus smallest, at most 1": [max(sizes) - min(sizes) <= 1],
    }


def cases(rng: random.Random) -> Iterator[tuple[int, int]]:
    yield from [(4, 1), (4, 2), (5, 2), (2, 3), (0, 2)]
    for _ in range(6):
        yield rng.randint(1, 60), rng.randint(1, 8)


hints = [
    "Worker w of W can take samples w, w + W, w + 2·W, …",
    "A stream has no length and no index: itertools.islice(samples, start, None, step) reads it "
    "forwards.",
]
