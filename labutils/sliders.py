"""The controls of ``lab.what_if``: a slider or a list for each thing that can be changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

NO_LINK = "none"
"""What stands for a machine without a link to others."""

VIEW = "application/vnd.jupyter.widget-view+json"


WITHOUT_KERNEL = "Run this cell to have its sliders."
ALONE = f"""
<style>
.lab-alone {{ display: none }}
.jp-OutputArea:not(:has(.lm-Panel.jp-OutputArea-output > *)) .lab-alone {{ display: block }}
.jp-OutputArea:has(.lab-alone) > .jp-OutputArea-child:has(> .lm-Panel.jp-OutputArea-output):not(
  :has(> .jp-OutputArea-output > *)) {{ display: none }}
</style>
<p class="lab-alone"><em>{WITHOUT_KERNEL}</em></p>
"""
"""HTML beside a widget: where its kernel is gone, this sentence stands in its place, instead of
JupyterLab's "Loading widget" or "Error displaying widget".  (A widget's panel that has an element
in it is alive; with text alone it is one of these two.)"""


class Sliders:
    """A widget with all controls, and a line that says what is going on.

    ``moved(values)`` is called with the values of all controls when one of them has changed.
    """

    def __init__(
        self, choices: Mapping[str, Sequence[Any]], labels: Mapping[str, str],
        values: Mapping[str, Any], moved: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self.labels = labels
        self.options = {name: _options(choices[name], values[name]) for name in labels}
        self.widget = _widget_class()(
            controls=[self._control(name) for name in labels],
            chosen={name: self.options[name].index(values[name]) for name in labels},
            _view_count=0,  # let the browser count: it says when somebody is looking
        )
        self.widget.observe(lambda _: moved(self.values), "chosen")

    @property
    def values(self) -> dict[str, Any]:
        """What the controls stand at."""
        return {name: self.options[name][index] for name, index in self.widget.chosen.items()}

    def set(self, **values: Any) -> None:
        """Move some of the controls, and offer the values that they did not have."""
        stand = self.values | {name: v for name, v in values.items() if name in self.labels}
        self.options = {name: _options(self.options[name], stand[name]) for name in self.labels}
        with self.widget.hold_sync():
            self.widget.controls = [self._control(name) for name in self.labels]
            self.widget.chosen = {n: self.options[n].index(v) for n, v in stand.items()}

    @property
    def message(self) -> str:
        """The line under the controls; a screen reader reads it when it changes."""
        return str(self.widget.message)

    @message.setter
    def message(self, text: str) -> None:
        self.widget.message = text

    def when_seen(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once a browser shows the controls."""

        def look(change: dict[str, Any]) -> None:
            if change["new"]:
                self.widget.unobserve(look, "_view_count")
                tell()

        self.widget.observe(look, "_view_count")

    def bundle(self) -> dict[str, Any]:
        """The display data of the controls; in plain text where there are no widgets."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {VIEW: view, "text/plain": "sliders: " + ", ".join(self.labels.values())}

    def _control(self, name: str) -> dict[str, Any]:
        options = self.options[name]
        texts = [NO_LINK if option is None else str(option) for option in options]
        return {"name": name, "text": self.labels[name], "options": texts,
                "list": not _numbers(options)}  # fmt: skip


def _numbers(options: Sequence[Any]) -> bool:
    return all(isinstance(option, (int, float)) for option in options)


def _options(choices: Sequence[Any], value: Any) -> list[Any]:
    options = list(dict.fromkeys([*choices, value]))
    return sorted(options) if _numbers(options) else options


@lru_cache(maxsize=1)
def _widget_class() -> Any:
    try:
        import anywidget
        import traitlets
    except ImportError:
        raise ImportError("lab.what_if needs anywidget: pip install anywidget") from None

    class SlidersWidget(anywidget.AnyWidget):
        _esm = Path(__file__).with_suffix(".js").read_text("utf-8")
        controls: Any = traitlets.List().tag(sync=True)
        """Per control: its name, its text, the texts of its options, whether it is a list."""
        chosen: Any = traitlets.Dict().tag(sync=True)
        """Index of the chosen option by name."""
        message = traitlets.Unicode("").tag(sync=True)

    return SlidersWidget


__all__ = ["ALONE", "WITHOUT_KERNEL", "Sliders"]
