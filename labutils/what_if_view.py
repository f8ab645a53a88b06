"""``lab.what_if``: move a slider, see one training step on other hardware.

The sliders are widgets; the sentence and the pictures under them are ordinary output, so that they
stay in the notebook, and a notebook that is executed without a browser shows them as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labutils.timing import checks, profiles
from labutils.timing.library import NotRecorded
from labutils.timing.predict import ARGUMENTS, Prediction, Question
from labutils.timing.recording import CATEGORIES
from labutils.timing.scaled import recording
from labutils.virtual.memory import size

if TYPE_CHECKING:
    from labutils.figures import TraceFigure
    from labutils.sliders import Sliders
    from labutils.timing.aside import Ahead

WORLDS = (1, 2, 4, 8, 16, 64, 256, 1024)
"""GPUs at the points of the scaling curve."""

PAUSE_S = 0.15
"""From the answer to a slider to the slower of its pictures, if no other move comes between."""

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
    "batch": "batch per GPU",
    "accumulate": "accumulate",
    "bucket_cap_mb": "bucket [MiB]",
    "precision": "precision",
    "fabric": "link of nodes",
}


class WhatIf:
    """Sliders over a prediction; see :func:`what_if`.

    ``set(gpus=4, nodes=2)`` moves them from code.
    """

    def __init__(self, model: Any, **asked: Any) -> None:
        checks.keywords("lab.what_if", asked, ARGUMENTS)
        hardware = profiles.load(asked.setdefault("profile", "DGX-A100"))
        self.asked = {
            "gpus": hardware.gpus, "nodes": 1, "bucket_cap_mb": 25, "batch": 32, "accumulate": 1,
            "precision": "fp32", "fabric": hardware.fabric.name if hardware.fabric else None,
            **asked,
        }  # fmt: skip
        self.model, self.hardware = model, hardware
        self.prediction: Prediction
        self._asked_question: Question
        self._curve: list[tuple[int, float]] | None = None
        self._handles: list[Any] = []
        self._sliders: Sliders | None = None
        self._ahead: Ahead | None = None
        self._curve_later: asyncio.TimerHandle | None = None
        self._answer(self._question(self.asked), self.asked)

    def set(self, **changes: Any) -> WhatIf:
        """Change some of the arguments, and all that is shown.

        Raises:
            ValueError: as ``lab.predict``; what is shown stays as it was.
        """
        checks.keywords("set", changes, ARGUMENTS)
        asked = {**self.asked, **changes}
        self._answer(self._question(asked), asked)
        if self._sliders is not None:
            self._sliders.set(**changes)
        self._redraw(0, 1, 2)
        return self

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(GPUs, samples per second), full nodes."""
        if self._curve is None:
            self._curve = self._asked_question.curve(WORLDS)
        return self._curve

    def sentence(self) -> str:
        """What is shown, of what, and its main numbers."""
        asked, found = self.asked, self.prediction
        world, share = asked["gpus"] * asked["nodes"], found.memory_bytes["peak"]
        passes = f" × {asked['accumulate']} passes" if asked["accumulate"] > 1 else ""
        link = f" on {asked['nodes']} nodes over {asked['fabric']}" if asked["nodes"] > 1 else ""
        times = f"{world:,} times " if world > 1 else ""
        out = "" if found.fits else " It does not fit, so the times are what they would be."
        return (
            f"Simulated: one training step of {self._asked_question.name} in "
            f"DistributedDataParallel on {world:,} × {self.hardware.gpu.name}{link}, "
            f"batch {asked['batch']} per GPU{passes}, {asked['precision']}, buckets of "
            f"{asked['bucket_cap_mb']} MiB. It takes {found.step_s * 1e3:.1f} ms: "
            f"{found.samples_per_s:,.0f} samples/s, {found.efficiency:.0%} of {times}what one GPU "
            f"does without the buckets and hooks of DDP, with "
            f"{found.exposed_communication_s * 1e3:.1f} ms of communication that no computation "
            f"hides. Each GPU holds up to {size(share)} of "
            f"{size(self.hardware.gpu.memory_bytes)}.{out}"
        )

    def summary(self) -> str:
        """The sentence, and the numbers behind the pictures, in plain text."""
        memory = self.prediction.memory_bytes
        return "\n".join([
            self.sentence(),
            *self.prediction.notes,
            "memory per GPU: " + ", ".join(f"{name} {size(memory[name])}" for name in CATEGORIES),
            "GPUs       " + " ".join(f"{n:>9,}" for n, _ in self.curve),
            "samples/s  " + " ".join(f"{rate:>9,.0f}" for _, rate in self.curve),
        ])  # fmt: skip

    def pictures(self) -> tuple[TraceFigure, TraceFigure]:
        """The step on one GPU; its memory by category beside the scaling curve."""
        return self._step_picture(), self._below_picture()

    def show(self) -> None:
        """Display the sliders, the sentence and the pictures."""
        from IPython.display import display

        display(self._controls().bundle(), raw=True)
        self._handles = [
            display(data, raw=True, metadata=metadata, display_id=True)
            for data, metadata in (make() for make in self._parts())
        ]

    _ipython_display_ = show

    def __repr__(self) -> str:
        return self.summary()

    # ------------------------------------------------------------------------------------- answers

    def _question(self, asked: dict[str, Any], record: Any = recording) -> Question:
        return Question(self.model, strategy="ddp", record=record, **asked)

    def _answer(self, question: Question, asked: dict[str, Any]) -> None:
        self.prediction = question.answer()
        place = {"gpus": 0, "nodes": 0}  # the curve is the same wherever on it one stands
        if {**asked, **place} != {**self.asked, **place}:
            self._curve = None
        self._asked_question, self.asked = question, asked

    def _moved(self, values: dict[str, Any]) -> None:
        """A slider was moved: answer at once, or say that a recording has to be made first."""
        from labutils.timing.aside import stored

        sliders, asked = self._controls(), {**self.asked, **values}
        sliders.message = ""
        if asked == self.asked:
            return
        if self._curve_later is not None:
            self._curve_later.cancel()  # its picture would be of no use any more
        try:
            self._answer(self._question(asked, stored), asked)
        except NotRecorded:
            self._record(asked)
        except ValueError as error:
            sliders.message = f"{error} The pictures show the setting before."
        else:
            self._redraw(0, 1)
            self._curve_later = _after(PAUSE_S, lambda: self._redraw(2))

    # ---------------------------------------------------------------------------------- recordings

    def _record(self, asked: dict[str, Any]) -> None:
        """Have the recording of a setting made while the notebook goes on."""
        accumulating = ", accumulating" if asked["accumulate"] > 1 else ""
        self._controls().message = (
            f"Recording a step in {asked['precision']}{accumulating}, for the first time: some "
            "seconds. Until then the pictures show the setting before."
        )
        self._recorder().want({"model": self.model, "strategy": "ddp", **asked}, urgent=True)

    def _recorder(self) -> Ahead:
        from labutils.timing.aside import Ahead

        if self._ahead is None:
            loop = asyncio.get_running_loop()
            self._ahead = Ahead(lambda _, error: _tell(loop, self._recorded, error))
        return self._ahead

    def _recorded(self, error: Exception | None) -> None:
        """A setting has been recorded, or could not be; perhaps the one that is waited for."""
        sliders = self._controls()
        asked = {**self.asked, **sliders.values}
        if asked == self.asked:
            return
        if error is None:
            self._moved(sliders.values)
        elif isinstance(error, ValueError):
            sliders.message = f"{error} The pictures show the setting before."
        else:  # no other process can record this model: then this one does, while all wait
            self.set(**sliders.values)

    def _record_others(self) -> None:
        """Record what other positions of the sliders will need, since somebody is looking."""
        several = max(2, self.asked["accumulate"])
        for passes in (1, several):
            for precision in dict.fromkeys([self.asked["precision"], *CHOICES["precision"]]):
                asked = {**self.asked, "precision": precision, "accumulate": passes}
                self._recorder().want({"model": self.model, "strategy": "ddp", **asked})

    # ---------------------------------------------------------------------------------- the display

    def _controls(self) -> Sliders:
        if self._sliders is None:
            from labutils.sliders import Sliders

            choices = {
                "gpus": range(1, self.hardware.gpus + 1),
                "fabric": profiles.fabrics(),  # and none, where the machine has none
                **CHOICES,
            }
            self._sliders = Sliders(choices, LABELS, self.asked, self._moved)
            self._sliders.when_seen(self._record_others)
        return self._sliders

    def _redraw(self, *parts: int) -> None:
        """Draw some of the parts that are on display anew."""
        if self._handles:
            make = self._parts()
            made = [(self._handles[part], *make[part]()) for part in parts]
            for handle, data, metadata in made:  # together, so that they always agree
                handle.update(data, raw=True, metadata=metadata)

    def _parts(self) -> tuple[Callable[[], tuple[dict[str, Any], dict[str, Any]]], ...]:
        """What makes (data, metadata) of the sentence and of the pictures."""
        from labutils import curves

        return (
            self._words,
            lambda: curves.display_data(self._step_picture()),
            lambda: curves.display_data(self._below_picture()),
        )

    def _words(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from labutils.sliders import ALONE

        first, _, rest = self.sentence().partition(": ")
        notes = "".join(
            f'<p role="alert"><strong>{html.escape(note)}</strong></p>'
            for note in self.prediction.notes
        )
        text = f"{ALONE}<p><strong>{first}:</strong> {html.escape(rest)}</p>{notes}"
        return {"text/html": text, "text/plain": self.sentence()}, {}

    def _step_picture(self) -> TraceFigure:
        from labutils import figures

        world = self.asked["gpus"] * self.asked["nodes"]
        title = f"one step on {world:,} GPU{'s' * (world > 1)}, as GPU 0 has it"
        return figures.overview(self.prediction.trace, host=False, title=title)

    def _below_picture(self) -> TraceFigure:
        from labutils import curves

        world, found = self.asked["gpus"] * self.asked["nodes"], self.prediction
        return curves.memory_and_scaling(
            found.memory_bytes, self.hardware.gpu.memory_bytes, self.curve,
            (world, found.samples_per_s), found.samples_per_s / world / found.efficiency,
            self.hardware.name,
        )  # fmt: skip


def what_if(model: Any, **asked: Any) -> WhatIf:
    """Sliders for GPUs, nodes, link, bucket size, batch, accumulation and precision over one step
    of DistributedDataParallel, its memory, and a scaling curve to 1,024 GPUs.

    The first use of a precision, or of accumulation, needs a recording of its own.  It is made in
    another process, ahead of its need while somebody looks at the sliders.

    Args:
        model: as for ``lab.predict``.
        asked: where the sliders stand at first, and all other arguments of ``lab.predict``.

    Raises:
        ValueError: as ``lab.predict``.
    """
    return WhatIf(model, **asked)


def _tell(loop: asyncio.AbstractEventLoop, *call: Any) -> None:
    """Have the notebook's own thread do it, unless the notebook has ended meanwhile."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(*call)


def _after(pause: float, action: Callable[[], None]) -> asyncio.TimerHandle | None:
    """Do it a little later; at once where there is no event loop."""
    try:
        return asyncio.get_running_loop().call_later(pause, action)
    except RuntimeError:
        action()
        return None


__all__ = ["WhatIf", "what_if"]
