"""Errors of the timing model against published measurements (``fit_profiles.py`` prints them)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def measure() -> list[tuple[str, float, float]]:
    """(name, error as a share, at most)."""
    path = Path(__file__).with_name("fit_profiles.py")
    spec = importlib.util.spec_from_file_location("fit_profiles", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_profiles"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    lines, _ = module.table(module.default_path())
    median, worst, without = module.summary(lines)
    return [
        ("calibration: median error", median, 0.05),
        ("calibration: worst error", worst, 0.15),
        ("calibration: median error of left-out rows", without, 0.08),
    ]
