"""The table of published measurements: every row is predicted or says why not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "benchmarks"))
import calibration_rows as rows

PUBLISHED = rows.read(rows.PACKAGED)


def test_every_row_is_predicted_or_has_a_reason() -> None:
    for name in PUBLISHED:
        known = rows.fitted(name) or rows.is_input(name)
        assert known != bool(rows.reason(name)), name


@pytest.mark.parametrize("name", [n for n in PUBLISHED if rows.is_input(n) and not rows.reason(n)])
def test_a_profile_meets_the_numbers_that_it_holds(name: str) -> None:
    assert rows.predicted(name, {}) == pytest.approx(PUBLISHED[name], rel=0.01)


def test_a_left_out_point_of_the_curve_is_not_met_exactly() -> None:
    """It is found from its neighbours alone, so that it says something about the points between."""
    for name in ("allreduce-a100-32M", "allreduce-a100-256M"):
        found = rows.without_point(name)
        assert found != pytest.approx(PUBLISHED[name], rel=1e-4)
        assert found == pytest.approx(PUBLISHED[name], rel=0.1)


def test_a_slower_memory_makes_every_step_longer() -> None:
    slow = {"memory_efficiency": 0.4}
    assert rows.predicted("rn50-v100-noddp", slow) > 1.2 * rows.predicted("rn50-v100-noddp", {})


def test_an_unknown_row_is_named() -> None:
    with pytest.raises(KeyError, match="a row 'nonsense'"):
        rows.predicted("nonsense", {})


@pytest.mark.parametrize("name", ["rn50-v100-2", "h100-rn50-128-fwd", "busbw-v100-ib"])
def test_the_page_shows_what_the_model_predicts(name: str) -> None:
    page = Path(__file__).parents[1] / "docs" / "accuracy.md"
    (line,) = [s for s in page.read_text(encoding="utf-8").splitlines() if s.startswith(name)]
    shown, published = map(float, line.split()[1:3])
    assert shown == pytest.approx(rows.predicted(name, {}), rel=1e-3)
    assert published == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.parametrize(
    "name", ["rn50-v100-2", "h100-rn50-128-fwd", "rn50-dgx1-amp-1", "rn101-v100-1"]
)
def test_published_steps_are_predicted_within_the_bound(name: str) -> None:
    assert rows.predicted(name, {}) == pytest.approx(PUBLISHED[name], rel=0.15)
