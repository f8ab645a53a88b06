"""Published rows: all of the table, each once, and the questions that belong to them."""

from __future__ import annotations

import csv

import pytest

import labutils as lab
from labutils.timing import published
from labutils.timing.predict import Question


def test_every_row_belongs_to_one_publication() -> None:
    with published.TABLE.open(newline="", encoding="utf-8") as file:
        values = {row["id"]: float(row["value"]) for row in csv.DictReader(file)}
    found = [point for name in published.names() for point in published.rows(name)]
    assert len(found) == len(values)
    assert {point.name: point.value for point in found} == values
    assert all(point.source and point.unit for point in found)


def test_every_question_belongs_to_a_row_and_can_be_asked() -> None:
    names = {point.name for point in published.points()}
    assert set(published.ASKED) <= names
    for asked in published.ASKED.values():
        assert asked.keys() <= Question.__dataclass_fields__.keys()


def test_the_bucket_sweep_of_the_ddp_paper() -> None:
    (point,) = published.rows("ddp_paper_fig8")
    assert (point.value, point.unit) == (0.121, "s")
    assert point.asked["bucket_cap_mb"] == 25 and point.asked["gpus"] * point.asked["nodes"] == 32
    assert "batch 32" in point.assumed and "Li et al." in point.source


def test_predictions_come_in_the_rows_own_unit() -> None:
    asked = {"profile": "V100-SXM2", "strategy": "single"}
    made = lab.predict("small_cnn", 8, **asked)  # type: ignore[arg-type]
    by_name = {point.name: point for point in published.points()}
    assert by_name["rn50-v100-1"].of(made) == made.step_s
    assert by_name["rn50-dgx1-amp-1"].of(made) == made.samples_per_s
    assert by_name["txl-dgx1-1"].of(made) == 192 * made.samples_per_s
    forward = by_name["h100-rn50-128-fwd"].of(made)
    assert forward == pytest.approx(1e3 * published.busy(made, "forward"))
    assert 0 < forward < 1e3 * made.step_s
    shares = [point.of(made) for point in published.rows("ddp_paper_fig6")]
    assert sum(shares) == pytest.approx(1) and shares[2] == 0  # nobody to communicate with


def test_what_is_no_step_is_not_predicted() -> None:
    made = lab.predict("small_cnn", 8, "single", profile="V100-SXM2")
    with pytest.raises(ValueError, match="h2d-pinned is no step of training"):
        published.rows("host_to_device")[1].of(made)


def test_unknown_publications_are_a_sentence() -> None:
    with pytest.raises(ValueError, match="Did you mean ddp_paper_fig9"):
        published.rows("ddp_paper_fig10")
