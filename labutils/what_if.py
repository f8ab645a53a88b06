"""``lab.what_if``: move a slider, see one training step on other hardware.

The sliders are widgets; the pictures beside them are ordinary output, so that they stay in the
notebook, and a notebook that is executed without a browser shows them as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labutils.timing import profiles
from labutils.timing.predict import Prediction, Question
from labutils.timing.scaled import recording

if TYPE_CHECKING:
    from labutils.figures import TraceFigure

WORLDS = (1, 2, 4, 8, 16, 64, 256, 1024)
"""GPUs at the points of the scaling curve."""

IDLE_S = 0.5
"""Pause between two recordings that nobody waits for."""

CHOICES: dict[str, Sequence[Any]] = {
    "nodes": (1, 2, 4, 8, 16, 32, 64, 128),
    "bucket_cap_mb": (1, 2, 5, 10, 25, 50, 100, 250, 1000),
    "batch": (2, 4, 8, 16, 32, 64, 128, 256, 512),
    "accumulate": (1, 2, 3, 4, 6, 8),
    "precision": ("fp32", "tf32", "amp", "bf16", "fp16"),
}
LABELS = {
    "gpus": "GPUs per node",
    "nodes": "nodes",
    "fabric": "link",
    "bucket_cap_mb": "bucket [MiB]",
    "batch": "batch per GPU",
    "accumulate": "accumulate",
    "precision": "precision",
}
CONTROLS = "sliders: " + ", ".join(LABELS.values())
"""What stands in place of the sliders where there are no widgets."""


class WhatIf:
    """Sliders over a prediction; see :func:`what_if`.

    ``set(gpus=4, nodes=2)`` moves them from code.
    """

    def __init__(self, model: Any, **asked: Any) -> None:
        hardware = profiles.load(asked.setdefault("profile", "DGX-A100"))
        self.asked = {
            "gpus": hardware.gpus, "nodes": 1, "bucket_cap_mb": 25, "batch": 32, "accumulate": 1,
            "precision": "fp32", "fabric": hardware.fabric.name if hardware.fabric else None,
            **asked,
        }  # fmt: skip
        self.model, self.hardware = model, hardware
        self.prediction: Prediction
        self.curve: list[tuple[int, float]] = []
        """(GPUs, samples per second), full nodes."""
        self._handles: list[Any] = []
        self._sliders: dict[str, Any] = {}
        self._waiting: list[tuple[str, int]] | None = None
        self._answer(self.asked)

    def set(self, **changes: Any) -> WhatIf:
        """Change some of the arguments, and all that is shown.

        Raises:
            ValueError: as ``lab.predict``; what is shown stays as it was.
        """
        self._answer({**self.asked, **changes})
        for name, value in changes.items():
            if name in self._sliders and self._sliders[name].value != value:
                self._sliders[name].value = value
        self._redraw()
        return self

    def summary(self) -> str:
        """The numbers behind the pictures, in plain text."""
        asked, world = self.asked, self.asked["gpus"] * self.asked["nodes"]
        link = f" over {asked['fabric']}" if asked["nodes"] > 1 else ""
        lines = [
            f"{world} x {self.hardware.gpu.name}{link}, batch {asked['batch']} per GPU x "
            f"{asked['accumulate']}, {asked['precision']}, buckets of {asked['bucket_cap_mb']} MiB",
            repr(self.prediction),
            *self.prediction.notes,
            "GPUs       " + " ".join(f"{n:>9,}" for n, _ in self.curve),
            "samples/s  " + " ".join(f"{rate:>9,.0f}" for _, rate in self.curve),
        ]
        return "\n".join(lines)

    def pictures(self) -> tuple[TraceFigure, TraceFigure]:
        """The step on one GPU with its memory, and the scaling curve."""
        from labutils import curves, figures

        asked = self.asked
        title = f"one step on {asked['gpus'] * asked['nodes']:,} GPUs, as GPU 0 has it"
        here = asked["gpus"] * asked["nodes"], self.prediction.samples_per_s
        step = figures.overview(self.prediction.trace, host=False, title=title)
        return step, curves.scaling(self.curve, here, self.hardware.name)

    def show(self) -> None:
        """Display the sliders and the pictures."""
        from IPython.display import display

        display(self._controls(), raw=True)
        self._handles = [
            display(bundle, raw=True, metadata=metadata, display_id=True)
            for bundle, metadata in self._bundles()
        ]

    _ipython_display_ = show

    def __repr__(self) -> str:
        return self.summary()

    def _answer(self, asked: dict[str, Any]) -> None:
        question = Question(self.model, strategy="ddp", record=recording, **asked)
        self.prediction = question.answer()
        place = {"gpus": 0, "nodes": 0}  # the curve is the same wherever on it one stands
        if {**asked, **place} != {**self.asked, **place} or not self.curve:
            self.curve = question.curve(WORLDS)
        self.asked = asked

    def _redraw(self) -> None:
        if self._handles:
            for handle, (bundle, metadata) in zip(self._handles, self._bundles(), strict=True):
                handle.update(bundle, raw=True, metadata=metadata)

    def _bundles(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(data, metadata) of the two pictures; the text is that of the numbers."""
        from labutils.figures import png_metadata

        found = []
        for figure, text in zip(self.pictures(), (self.summary(), "scaling curve"), strict=True):
            data = {"image/png": _quick_png(figure), "text/plain": text}
            found.append((data, {"image/png": png_metadata(figure.description)}))
        return found

    def _controls(self) -> dict[str, Any]:
        """The display data of the sliders."""
        widgets = _ipywidgets()
        choices = {
            "gpus": tuple(range(1, self.hardware.gpus + 1)),
            "fabric": (None, *profiles.fabrics()),
            **CHOICES,
        }
        for name, label in LABELS.items():
            options = list(dict.fromkeys([*choices[name], self.asked[name]]))
            if all(isinstance(option, (int, float)) for option in options):
                options.sort()
            style: dict[str, Any] = {"style": {"description_width": "110px"}}
            kind = widgets.Dropdown
            if name not in ("fabric", "precision"):
                kind, style = widgets.SelectionSlider, {**style, "continuous_update": False}
            self._sliders[name] = kind(
                options=options, value=self.asked[name], description=label, **style
            )
            self._sliders[name].observe(self._moved, "value")
        self._message = widgets.Label()
        box = widgets.VBox([*self._sliders.values(), self._message])
        view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": CONTROLS}

    def _moved(self, change: dict[str, Any]) -> None:
        """A slider was moved."""
        values = {name: slider.value for name, slider in self._sliders.items()}
        if all(self.asked[name] == value for name, value in values.items()):
            return
        self._message.value = "recording …"
        try:
            self._answer({**self.asked, **values})
            self._message.value = ""
        except ValueError as error:
            self._message.value = str(error)
            return
        self._redraw()
        self._ahead()

    def _ahead(self) -> None:
        """Record, when the kernel is idle, what other positions of the sliders will need."""
        if self._waiting is not None:
            return
        self._waiting = [(p, n) for p in CHOICES["precision"] for n in (1, 2) if p != "tf32"]
        with contextlib.suppress(RuntimeError):  # without an event loop there is no idle time
            asyncio.get_running_loop().call_later(IDLE_S, self._record_one)

    def _record_one(self) -> None:
        if not self._waiting:
            return
        precision, passes = self._waiting.pop(0)
        with contextlib.suppress(ValueError):  # what fails is told when it is asked for
            asked = {**self.asked, "precision": precision, "accumulate": passes}
            Question(self.model, strategy="ddp", record=recording, **asked)
        asyncio.get_running_loop().call_later(IDLE_S, self._record_one)


def what_if(model: Any, **asked: Any) -> WhatIf:
    """Sliders for GPUs, nodes, link, bucket size, batch, accumulation and precision over one step
    of DistributedDataParallel, its memory, and a scaling curve to 1,024 GPUs.

    Args:
        model: as for ``lab.predict``.
        asked: where the sliders stand at first, and all other arguments of ``lab.predict``.

    Raises:
        ValueError: as ``lab.predict``.
    """
    return WhatIf(model, **asked)


def _quick_png(figure: TraceFigure) -> bytes:
    """Coarser than the other figures and hardly compressed: a slider should answer at once."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="png", dpi=100, metadata={"Software": None},
        pil_kwargs={"compress_level": 1},
    )  # fmt: skip
    return buffer.getvalue()


def _ipywidgets() -> Any:
    try:
        import ipywidgets
    except ImportError:
        raise ImportError("lab.what_if needs ipywidgets: pip install ipywidgets") from None
    return ipywidgets


__all__ = ["WhatIf", "what_if"]
