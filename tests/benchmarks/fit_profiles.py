"""``python tests/benchmarks/fit_profiles.py [calibration.csv] [--fit]``: is the model right?

Prints, for every published measurement, what the model predicts and by how much it is off, and by
how much it would be off had that measurement (and those of the same run) not been used: the few
parameters below are fitted anew without it.  ``--fit`` fits them to all, and prints the values for
``profiles.toml``.

Every parameter is a property of library kernels and acts on all models, GPUs and precisions.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import calibration_rows as rows  # noqa: E402

from labutils.timing import profiles  # noqa: E402

PRIOR = {
    "memory_efficiency": (0.87, 0.05), "simt_efficiency": (0.85, 0.15),
    "tensor_efficiency": (0.60, 0.20), "conv_efficiency": (1.00, 0.15),
    "tensor_conv_efficiency": (1.00, 0.15), "gradient_efficiency": (0.80, 0.15),
    "winograd_gain": (1.50, 0.20), "norm_read_passes": (1.90, 0.10),
    "norm_read_passes_nhwc": (1.50, 0.20), "tile_seconds": (3e-6, 0.50),
    "pointwise_layout_share": (0.50, 0.50),
}  # fmt: skip
"""What is known of each parameter without the table, and by which share it may be wrong: 83 % of
the V100's bandwidth (Jia et al. 2018), 92 % of the H100's (an addition in the trace of the H100
row); shares of peak of cuBLAS on large products; a convolution is as quick as the product that it
amounts to, its gradients are less; Winograd saves 2.25 multiplications and pays for its transforms;
batch norm reads twice, and finds some of it in the cache, more of it channels last; a tile's first
loads take a few times the latency of memory; the layout changes around all 1 x 1 convolutions in
TF32 or around none, by the version of cuDNN."""
NOISE = 0.05
"""By which share a published measurement may differ from another of the same."""
ROUNDS = 4


@dataclass
class Line:
    """A row of the table, in the row's own unit."""

    name: str
    published: float
    predicted: float
    without: float | None
    """The prediction that did not use the row."""
    is_input: bool

    @property
    def error(self) -> float:
        """Of the prediction, as a share."""
        return self.predicted / self.published - 1

    @property
    def error_without(self) -> float | None:
        """Of the prediction that did not use the row."""
        return None if self.without is None else self.without / self.published - 1


def current() -> dict[str, float]:
    """The fitted parameters as ``profiles.toml`` has them."""
    model = profiles.load("V100-SXM2").model
    return {name: getattr(model, name) for name in PRIOR}


def fit(names: Sequence[str], published: dict[str, float]) -> dict[str, float]:
    """The most likely parameters: least squares of log errors and of what is known before."""
    values = {name: start for name, (start, _) in PRIOR.items()}
    for _ in range(ROUNDS):
        base, slopes = linearise(names, values)
        values = solve(names, published, values, base, slopes)
    return values


def linearise(names: Sequence[str], values: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Logs of the predictions (R,), and their derivatives (R, P) by logs of the parameters."""

    def logs(at: dict[str, float]) -> np.ndarray:
        return np.log([rows.predicted(name, at) for name in names])

    base, step = logs(values), 0.01
    columns = [(logs({**values, p: values[p] * math.exp(step)}) - base) / step for p in PRIOR]
    return base, np.stack(columns, axis=1)


def solve(
    names: Sequence[str],
    published: dict[str, float],
    values: dict[str, float],
    base: np.ndarray,
    slopes: np.ndarray,
) -> dict[str, float]:
    """One Gauss-Newton step; rows of one run count together as one."""
    groups = [rows.group(name) for name in names]
    weight = np.array([1 / NOISE / math.sqrt(groups.count(g)) for g in groups])
    off = np.log([published[name] for name in names]) - base
    known = [
        (math.log(start / values[p]) / share, 1 / share) for p, (start, share) in PRIOR.items()
    ]
    matrix = np.concatenate([slopes * weight[:, None], np.diag([w for _, w in known])])
    target = np.concatenate([off * weight, [t for t, _ in known]])
    moves = np.linalg.lstsq(matrix, target, rcond=None)[0]
    return {p: values[p] * math.exp(move) for p, move in zip(PRIOR, moves, strict=True)}


def table(path: Path) -> tuple[list[Line], dict[str, str]]:
    """The lines of the table, and the rows out of reach with the reason."""
    published = rows.read(path)
    outside = {n: why for n in published if (why := rows.reason(n))}
    inside = [n for n in published if n not in outside]
    names, values = [n for n in inside if rows.fitted(n)], current()
    base, slopes = linearise(names, values)
    refits = {}
    for group in {rows.group(n) for n in names}:
        kept = [i for i, n in enumerate(names) if rows.group(n) != group]
        chosen = [names[i] for i in kept]
        refits[group] = solve(chosen, published, values, base[kept], slopes[kept])
    lines = []
    for name in inside:
        if rows.is_input(name):
            without = rows.from_others(name, published)
        else:
            without = rows.predicted(name, refits[rows.group(name)])
        lines.append(
            Line(name, published[name], rows.predicted(name, {}), without, rows.is_input(name))
        )
    return lines, outside


def summary(lines: Sequence[Line]) -> tuple[float, float, float]:
    """Median and worst error of what is not an input, and the median of all left-out errors."""
    errors = [abs(line.error) for line in lines if not line.is_input]
    without = [abs(e) for line in lines if (e := line.error_without) is not None]
    return statistics.median(errors), max(errors), statistics.median(without)


def default_path() -> Path:
    """The shared table if it is there, else the one that comes with the package."""
    shared = ROOT.parent / "shared" / "calibration.csv"
    return shared if shared.exists() else rows.PACKAGED


def show(lines: Sequence[Line], outside: dict[str, str]) -> None:
    """Print everything."""
    print(f"{'row':<26}{'predicted':>11}{'published':>11}{'error %':>9}{'left out %':>12}")
    for line in lines:
        off = line.error_without
        left_out = f"{100 * off:+.1f}" if off is not None else "-"
        error = "input" if line.is_input else f"{100 * line.error:+.1f}"
        print(
            f"{line.name:<26}{line.predicted:>11.4g}{line.published:>11.4g}{error:>9}{left_out:>12}"
        )
    median, worst, without = summary(lines)
    computed = [e for line in lines if not line.is_input and (e := line.error_without) is not None]
    print(f"\nmedian error {median:.1%}, worst {worst:.1%}; left out: median {without:.1%}", end="")
    print(f" (without inputs {statistics.median(map(abs, computed)):.1%})")
    print("'input': a profile holds this number itself; only its left-out error says something.")
    print("\nOut of reach:")
    for name, why in outside.items():
        print(f"  {name:<26}{why}")
        point = rows.point(name)
        if point.asked:
            found = rows.predicted(name, {})
            print(f"  {'':<26}predicted {found:.3g}, published {point.value:.3g}")


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("path", nargs="?", type=Path, default=default_path())
    parser.add_argument("--fit", action="store_true", help="fit, and print the parameters")
    chosen = parser.parse_args(words)
    if chosen.fit:
        published = rows.read(chosen.path)
        names = [n for n in published if not rows.reason(n) and rows.fitted(n)]
        for name, value in fit(names, published).items():
            print(f"{name} = {value:.3g}")
        return 0
    show(*table(chosen.path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
