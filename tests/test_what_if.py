"""``lab.what_if`` as a Python object, and in a notebook that nobody looks at."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from labutils.timing.predict import predict
from labutils.what_if import CHOICES, LABELS, WhatIf, what_if


@pytest.fixture
def view() -> WhatIf:
    return what_if("mlp", batch=64, profile="DGX-1-V100")


def same(view: WhatIf, **asked: Any) -> bool:
    given = {"batch": 64, "profile": "DGX-1-V100", "gpus": 8, **asked}
    return bool(view.prediction.as_dict() == predict("mlp", **given).as_dict())


def test_it_shows_what_predict_says(view: WhatIf) -> None:
    assert same(view)
    assert [n for n, _ in view.curve][-1] == 1024
    assert dict(view.curve)[8] == pytest.approx(view.prediction.samples_per_s, rel=1e-3)


@pytest.mark.parametrize("change", [
    {"gpus": 2}, {"nodes": 4}, {"nodes": 2, "fabric": "eth-10g"}, {"bucket_cap_mb": 1},
    {"batch": 128}, {"accumulate": 4}, {"precision": "amp"}, {"precision": "tf32"},
])  # fmt: skip
def test_every_slider_changes_the_prediction(view: WhatIf, change: dict[str, Any]) -> None:
    view._controls()
    for name, value in change.items():
        view._sliders[name].value = value
    assert view._message.value == ""
    assert same(view, **change)


def test_all_positions_are_offered(view: WhatIf) -> None:
    view._controls()
    assert view._sliders.keys() == LABELS.keys()
    assert view._sliders["gpus"].options == tuple(range(1, 9))
    assert set(CHOICES["batch"]) <= set(view._sliders["batch"].options)


def test_an_impossible_position_is_explained_and_changes_nothing(view: WhatIf) -> None:
    view._controls()
    view.set(fabric="eth-10g", nodes=2)
    before = view.summary()
    view._sliders["fabric"].value = "ib-100g"
    view._answer = lambda asked: (_ for _ in ()).throw(ValueError("no such thing."))  # type: ignore[method-assign]
    after = view.summary()
    view._sliders["nodes"].value = 1
    assert view._message.value == "no such thing."
    assert view.summary() == after != before


def test_set_moves_the_sliders(view: WhatIf) -> None:
    view._controls()
    view.set(gpus=4, nodes=2)
    assert (view._sliders["gpus"].value, view._sliders["nodes"].value) == (4, 2)
    with pytest.raises(ValueError, match="Unknown fabric"):
        view.set(fabric="string")


def test_the_summary_is_the_same_every_time(view: WhatIf) -> None:
    text = view.summary()
    assert text.startswith("8 x V100-SXM2, batch 64 per GPU x 1, fp32, buckets of 25 MiB")
    assert view.set(gpus=2).set(gpus=8).summary() == text


def test_nothing_of_jupyter_is_imported_before_it_is_shown() -> None:
    code = (
        "import sys; from labutils.what_if import what_if; what_if('mlp');"
        "print({'ipywidgets', 'matplotlib', 'IPython'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_executed_notebook_keeps_pictures_and_numbers() -> None:
    code = (
        "from labutils.what_if import what_if\n"
        "view = what_if('mlp', profile='DGX-1-V100')\n"
        "view.show()\n"
        "_ = view.set(nodes=4)"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output["data"] for output in notebook.cells[0].outputs if "data" in output]
    pictures = [data for data in outputs if "image/png" in data]
    assert len(pictures) == 2 and "text/plain" in outputs[0]
    assert pictures[0]["text/plain"].startswith("32 x V100-SXM2 over ib-4x100g")
