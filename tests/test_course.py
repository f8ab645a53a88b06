"""The course around the labs: what the teacher's guide and the glossary promise is there."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

LABS = Path(__file__).resolve().parents[1] / "labs"
GUIDE = (LABS / "README.md").read_text(encoding="utf-8")
GLOSSARY = (LABS / "GLOSSARY.md").read_text(encoding="utf-8")
NOTEBOOKS = {path.stem[:2]: path for path in LABS.glob("[0-9][0-9]_*.ipynb")}


def _rows(text: str, heading: str) -> list[list[str]]:
    """The cells of each row of the table below a heading."""
    part = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def _headings_with_code(lab: str) -> dict[str, bool]:
    """Headings of a notebook, and whether a code cell that has shown something follows each."""
    found: dict[str, bool] = {}
    current: list[str] = []
    for cell in nbformat.read(NOTEBOOKS[lab], as_version=4).cells:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#+ +(.+?) *$", cell.source, re.MULTILINE)
            found |= dict.fromkeys(headings, False)
            current = headings or current
        elif current and cell.outputs:
            found |= dict.fromkeys(current[-1:], True)
    return found


MISCONCEPTIONS = _rows(GUIDE, "Sixteen misconceptions")
CLAIMS = _rows(GUIDE, "Claims in circulation")


def test_the_guide_lists_all_of_them() -> None:
    assert len(MISCONCEPTIONS) == 16
    assert len(CLAIMS) >= 12


@pytest.mark.parametrize("row", MISCONCEPTIONS + CLAIMS, ids=lambda row: row[0][:40])
def test_each_is_shown_by_a_cell(row: list[str]) -> None:
    _, lab, section, *_ = row
    headings = _headings_with_code(lab)
    assert section in headings, f"lab {lab} has no section {section!r}; it has {list(headings)}"
    assert headings[section], f"no code below {section!r} in lab {lab} has an output"


def test_every_lab_is_in_the_guides_plans() -> None:
    for lab in NOTEBOOKS:
        assert len(re.findall(rf"\b{lab}\b", GUIDE)) >= 3, f"lab {lab} is missing in the guide"


def test_the_half_days_plan_names_sections_that_are_there() -> None:
    plan = GUIDE.split("**Half a day", 1)[1].split("**Two days", 1)[0]
    parts = re.findall(r"^\| \d+ \| (\d\d), ([^|:]+)", plan, re.MULTILINE)
    named = {lab: re.findall(r"\d+", what) for lab, what in parts if what.startswith("sections ")}
    assert set(named) == {"01", "02", "03"}
    for lab, numbers in named.items():
        there = {heading.split(".")[0] for heading in _headings_with_code(lab)}
        assert set(numbers) <= there, f"lab {lab} has sections {sorted(there)}"


def test_the_terms_of_the_glossary() -> None:
    rows = [line.strip("|").split("|") for line in GLOSSARY.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in rows if row[0].strip() != "Term"]
    assert len(rows) >= 60
    for term, chinese, meaning, labs in rows:
        assert term and meaning, term
        assert re.search(r"[\u4e00-\u9fff]", chinese), f"{term} has no Chinese term"
        assert set(labs.split(", ")) <= set(NOTEBOOKS), f"{term} is shown in no lab"
    terms = [row[0] for row in rows]
    assert len(terms) == len(set(terms))
