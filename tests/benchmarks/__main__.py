"""``python tests/benchmarks [name ...]``: run every benchmark here and print one table.

A benchmark is a file ``bench_*.py`` with ``measure() -> list of (name, value, upper bound)``.  The
values are ratios taken in one run, or have a bound generous enough for a small machine.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

Row = tuple[str, float, float]


def measure(path: Path) -> list[Row]:
    """The rows of one benchmark; one that breaks counts as over, and shows where."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return list(module.measure())
    except Exception:
        traceback.print_exc()
        return [(f"{path.name} broke", float("nan"), 0.0)]


def main(words: Sequence[str], folder: Path = Path(__file__).parent) -> int:
    """Print the table; 1 if a value is over its bound, 2 if there is nothing to measure."""
    paths = sorted(folder.glob("bench_*.py"))
    chosen = [path for path in paths if not words or any(word in path.stem for word in words)]
    if not chosen:
        print(f"There is no benchmark in {folder} named {' or '.join(words) or 'bench_*.py'}.")
        return 2
    over = 0
    print(f"{'benchmark':<64} {'value':>10} {'at most':>10}")
    for path in chosen:
        for name, value, bound in measure(path):
            fine = value <= bound  # false for nan
            over += not fine
            row = f"{name:<64} {value:>10.3g} {bound:>10.3g}"
            print(f"{row}  {'ok' if fine else 'over'}", flush=True)
    return 1 if over else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1:]))
