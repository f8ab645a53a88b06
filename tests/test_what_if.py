"""``lab.what_if`` as a Python object, and in a notebook that nobody looks at."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from rank_helpers import alive, wait_until
from torch import nn

from labutils.timing.aside import Ahead, stored
from labutils.timing.library import NotRecorded
from labutils.timing.predict import Question, predict
from labutils.what_if_view import CHOICES, LABELS, WhatIf, what_if


@pytest.fixture
def view() -> WhatIf:
    return what_if("mlp", batch=64, profile="DGX-1-V100")


def same(view: WhatIf, **asked: Any) -> bool:
    given = {"batch": 64, "profile": "DGX-1-V100", "gpus": 8, **asked}
    return bool(view.prediction.as_dict() == predict("mlp", **given).as_dict())


def drag(view: WhatIf, **values: Any) -> None:
    """Move sliders as a browser does: by the numbers of their positions."""
    sliders = view._controls()
    for name, value in values.items():
        index = sliders.options[name].index(value)
        sliders.widget.chosen = {**sliders.widget.chosen, name: index}


def test_it_shows_what_predict_says(view: WhatIf) -> None:
    assert same(view)
    assert [n for n, _ in view.curve][-1] == 1024
    assert dict(view.curve)[8] == pytest.approx(view.prediction.samples_per_s, rel=1e-3)


@pytest.mark.parametrize("change", [
    {"gpus": 2}, {"nodes": 4}, {"nodes": 2, "fabric": "eth-10g"}, {"bucket_cap_mb": 1},
    {"batch": 128}, {"accumulate": 4}, {"precision": "amp"}, {"precision": "tf32"},
])  # fmt: skip
def test_every_slider_changes_the_prediction(view: WhatIf, change: dict[str, Any]) -> None:
    assert same(view.set(**change), **change)  # now it is recorded
    view.set(gpus=8, nodes=1, fabric=view.hardware.fabric.name, bucket_cap_mb=25, batch=64,
             accumulate=1, precision="fp32")  # fmt: skip
    drag(view, **change)
    assert view._controls().message == ""
    assert same(view, **change)


def test_all_positions_are_offered(view: WhatIf) -> None:
    sliders = view._controls()
    assert sliders.options.keys() == LABELS.keys()
    assert sliders.options["gpus"] == list(range(1, 9))
    assert set(CHOICES["batch"]) <= set(sliders.options["batch"])
    listed = [control["name"] for control in sliders.widget.controls if control["list"]]
    assert listed == ["precision", "fabric"]
    assert sliders.bundle()["text/plain"].startswith("sliders: GPUs per node, nodes, batch per GPU")


def test_an_impossible_position_is_explained_and_changes_nothing() -> None:
    view = what_if("mlp", profile="2080-Ti")
    before = view.summary()
    drag(view, nodes=2)
    assert "2 nodes need a fabric between them" in view._controls().message
    assert view._controls().values["nodes"] == 2  # where it was put
    assert view.summary() == before
    drag(view, nodes=1)
    assert view._controls().message == ""
    drag(view, fabric="eth-10g", nodes=2)
    assert view.prediction.as_dict() == predict(
        "mlp", profile="2080-Ti", gpus=8, nodes=2, fabric="eth-10g").as_dict()  # fmt: skip


def test_set_moves_the_sliders(view: WhatIf) -> None:
    sliders = view._controls()
    view.set(gpus=4, nodes=2, batch=100)  # which the slider did not have
    assert (sliders.values["gpus"], sliders.values["nodes"], sliders.values["batch"]) == (4, 2, 100)
    assert sliders.options["batch"] == sorted({*CHOICES["batch"], 100})
    drag(view, gpus=2)
    assert same(view, gpus=2, nodes=2, batch=100)
    with pytest.raises(ValueError, match="Unknown fabric"):
        view.set(fabric="string")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"strategy": "dp"}, "lab.what_if is about 'ddp' and takes no strategy: ask lab.predict"),
        ({"batch_size": 8}, "Unknown argument of lab.what_if 'batch_size'. Did you mean batch"),
        ({"profile": None}, "profile must be a name"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_a_sentence(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        what_if("mlp", **asked)


def test_the_sentence_says_what_the_share_is_of() -> None:
    view = what_if("mlp", batch=64, profile="DGX-1-V100", gpus=1)
    alone = predict("mlp", batch=64, profile="DGX-1-V100", gpus=1, strategy="single")
    one = view.prediction.samples_per_s / alone.samples_per_s
    assert one < 0.98
    assert f"{one:.0%} of what one GPU does without the buckets and hooks of DDP" in view.sentence()
    eight = view.set(gpus=8).prediction.samples_per_s / 8 / alone.samples_per_s
    assert f"{eight:.0%} of 8 times what one GPU does without the" in view.sentence()


def test_what_does_not_fit_is_said_in_a_sentence() -> None:
    view = what_if("resnet18", profile="2080-Ti", batch=512)
    assert "It does not fit, so the times are what they would be." in view.sentence()
    data, _ = view._words()
    assert 'role="alert"' in data["text/html"]
    assert "Out of memory: each GPU would hold" in data["text/html"]
    assert "<" not in data["text/plain"]


# -- recordings that are made meanwhile ------------------------------------------------------------


class Model(nn.Module):
    """Prints, and fails in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward")
        if x.dtype == torch.float16:
            raise RuntimeError("no half, please")
        return self.layer(x)


def arrivals() -> tuple[Ahead, queue.Queue[tuple[dict[str, Any], Exception | None]]]:
    arrived: queue.Queue[tuple[dict[str, Any], Exception | None]] = queue.Queue()
    return Ahead(lambda asked, error: arrived.put((asked, error))), arrived


def test_another_process_records_the_same() -> None:
    model, example = Model(), (torch.zeros(2, 64), torch.zeros(2, dtype=torch.long))
    asked = {"model": model, "example": example, "batch": 16, "strategy": "ddp", "gpus": 4,
             "profile": "DGX-1-V100"}  # fmt: skip
    with pytest.raises(NotRecorded):
        Question(record=stored, **asked)
    ahead, arrived = arrivals()
    ahead.want({**asked, "precision": "bf16"})
    ahead.want(asked, urgent=True)
    assert arrived.get(timeout=120) == (asked, None)
    there = Question(record=stored, **asked).answer().as_dict()
    assert there == predict(Model(), **{k: v for k, v in asked.items() if k != "model"}).as_dict()
    assert arrived.get(timeout=120)[1] is None

    ahead.want({**asked, "precision": "fp16"})
    _, error = arrived.get(timeout=120)
    assert isinstance(error, ValueError) and "no half, please" in str(error)


def test_the_process_ends_with_the_notebook() -> None:
    code = (
        "import os, torch; from labutils.timing import aside, library; "
        "from labutils.timing.recording import Setting; import torch.nn.functional as F\n"
        "p = aside.Process(); p.record(library.source('mlp', None, F.cross_entropy, None), "
        "Setting(batch=2)); print(p._process.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert wait_until(lambda: not alive(int(done.stdout)), 10)


def test_a_first_use_is_told_and_follows(view: WhatIf, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[dict[str, Any]] = []

    class Never:
        def want(self, asked: dict[str, Any], urgent: bool = False) -> None:
            wanted.append(asked)

    view._ahead = Never()  # type: ignore[assignment]
    before = view.summary()
    drag(view, batch=512, precision="bf16", accumulate=3)
    sliders = view._controls()
    assert sliders.message.startswith("Recording a step in bf16, accumulating")
    assert (wanted[-1]["precision"], wanted[-1]["accumulate"]) == ("bf16", 3)
    assert "batch 512 per GPU, fp32" in view.summary() != before  # the last one that was known
    view._recorded(ValueError("The step of mlp fails: it is tired."))
    assert sliders.message.startswith("The step of mlp fails: it is tired.")
    assert (sliders.values["precision"], sliders.values["batch"]) == ("bf16", 512)
    view._recorded(OSError("no process"))  # then it is recorded here
    assert same(view, batch=512, precision="bf16", accumulate=3)


def test_the_summary_is_the_same_every_time(view: WhatIf) -> None:
    text = view.summary()
    assert text.startswith("Simulated: one training step of mlp in DistributedDataParallel on 8 ×")
    assert "batch 64 per GPU, fp32, buckets of 25 MiB" in text
    assert view.set(gpus=2).set(gpus=8).summary() == text


def test_nothing_of_jupyter_is_imported_before_it_is_shown() -> None:
    code = (
        "import sys; from labutils.what_if_view import what_if; what_if('mlp');"
        "print({'ipywidgets', 'matplotlib', 'IPython'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_executed_notebook_keeps_pictures_and_numbers() -> None:
    code = (
        "from labutils.what_if_view import what_if\n"
        "view = what_if('mlp', profile='DGX-1-V100')\n"
        "view.show()\n"
        "_ = view.set(nodes=4)"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output["data"] for output in notebook.cells[0].outputs if "data" in output]
    pictures = [data for data in outputs if "image/png" in data]
    assert len(pictures) == 2 and "text/plain" in outputs[0]
    words = next(data for data in outputs if "text/html" in data)
    assert "on 32 × V100-SXM2 on 4 nodes over ib-4x100g" in words["text/plain"]
    assert words["text/plain"] in re.sub("<[^>]*>", "", words["text/html"])
    assert pictures[0]["text/plain"].startswith("one step on 32 GPUs, as GPU 0 has it · simulated")
