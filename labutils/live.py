"""The live view: per-GPU memory and timelines in the notebook while something runs.

The picture is drawn by ``live.js`` in the browser; Python only sends what is new.  Bytes and time
per update do not grow with the length of the run: at most :data:`MAX_PER_UPDATE` records go out at
once, and the newest :data:`KEEP` are kept for a front end that comes late.  When the run ends a
static picture takes the widget's place, so that the saved notebook shows it everywhere.
"""

from __future__ import annotations

import base64
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labutils import colours
from labutils.packing import SAMPLE, SPAN, Log, Tables, pack_samples, pack_spans, unpack
from labutils.trace import KINDS, MemorySample, Span, Trace

if TYPE_CHECKING:
    from labutils.figures import TraceFigure

KEEP = 50_000
"""Spans (and as many samples) that a view holds; older ones give way, and the view says so."""

MAX_PER_UPDATE = 2_500
"""Spans (and samples) in one message: 120 kB, well under Jupyter's 1 MB/s at 5 updates a second."""


class LiveView:
    """A view that ``update`` feeds with increments and ``close`` turns into a picture.

    ``devices`` are rows to show before anything happens on them, ``capacity`` bytes per device,
    ``source`` is "measured" or "simulated" and ``hardware`` says of what.  ``stop`` ends what is
    watched: a button calls it, which a busy kernel would not hear.  Every method may be called from
    any thread.  Without a notebook or without anywidget nothing is drawn while the run goes on, and
    nothing fails.
    """

    def __init__(
        self,
        title: str,
        devices: Sequence[str] = (),
        capacity: Mapping[str, int] | None = None,
        source: str = "measured",
        hardware: str = "",
        stop: Callable[[], None] | None = None,
    ) -> None:
        self._stop = stop
        self.trace = Trace(source, hardware, title, capacity=dict(capacity or {}))
        self.text = f"timeline: {title}"
        self._lock = threading.Lock()
        self._tables = Tables()
        self._spans, self._samples = Log(SPAN.size, KEEP), Log(SAMPLE.size, KEEP)
        self._sent = {"spans": 0, "samples": 0, "texts": 0, "rows": 0}
        self._now = 0.0
        self._greeted = self._closed = False
        self._widget: Any = None
        self._handle: Any = None
        for device in devices:
            self._tables.row(device)

    def show(self) -> None:
        """Display the view under the running cell."""
        if not _in_notebook():
            return
        self._widget = _widget(
            _config(self.trace, live=True) | {"stoppable": self._stop is not None}
        )
        if self._widget is not None:
            self._widget.on_msg(self._on_message)
            self._handle = _display({"text/plain": self.text} | _widget_bundle(self._widget))
            self._send()

    def update(
        self, spans: Sequence[Span] = (), memory: Sequence[MemorySample] = (), now: float = 0.0
    ) -> None:
        """Add what is new since the last call; ``now`` is seconds since the trace's start."""
        with self._lock:
            if self._closed:
                return
            self._spans.append(pack_spans(spans, self._tables))
            self._samples.append(pack_samples(memory, self._tables))
            self._now = max(self._now, now)
        self._send()

    def close(self, trace: Trace | None = None) -> None:
        """End the view: the picture of ``trace`` (or of what was received) takes its place."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.trace = trace or self._received()
        if not _in_notebook():
            return
        picture = _png(self.trace)
        bundle = _picture_bundle(self.text, picture)
        if self._handle is not None:
            self._handle.update(bundle, raw=True, metadata=_metadata(bundle))
            _retire(self._widget, picture)
        else:
            _display(bundle)

    def picture(self) -> TraceFigure:
        """The static picture: of the finished run, or of what has arrived so far."""
        from labutils import figures

        return figures.overview(self.trace if self._closed else self._received())

    def _received(self) -> Trace:
        with self._lock:
            spans, memory = unpack(bytes(self._spans.data), bytes(self._samples.data), self._tables)
            about = self.trace
            return Trace(about.source, about.hardware, about.title, spans, memory,
                         about.capacity, about.dropped + self._spans.first)  # fmt: skip

    def _send(self) -> None:
        with self._lock:
            if self._widget is None or self._closed:
                return
            if not self._greeted:
                # Messages sent before the browser has loaded live.js are lost, and a busy kernel
                # hears nothing from it: until then each message holds all that it may need.
                self._sent = {"texts": 0, "rows": 0, "spans": self._spans.end - MAX_PER_UPDATE,
                              "samples": self._samples.end - MAX_PER_UPDATE}  # fmt: skip
            content, buffers = self._increment()
            self._widget.send(content, buffers)

    def _increment(self) -> tuple[dict[str, Any], list[bytes]]:
        sent = self._sent
        first_span, spans = self._spans.since(sent["spans"], MAX_PER_UPDATE)
        first_sample, samples = self._samples.since(sent["samples"], MAX_PER_UPDATE)
        texts, rows = list(self._tables.texts), list(self._tables.rows)
        content = {
            "type": "increment", "now": self._now,
            "spans": first_span, "samples": first_sample,
            "texts": [sent["texts"], texts[sent["texts"] :]],
            "rows": [sent["rows"], rows[sent["rows"] :]],
        }  # fmt: skip
        self._sent = {
            "spans": first_span + len(spans) // SPAN.size,
            "samples": first_sample + len(samples) // SAMPLE.size,
            "texts": len(texts), "rows": len(rows),
        }  # fmt: skip
        return content, [spans, samples]

    def _on_message(self, _: Any, content: dict[str, Any], __: Any) -> None:
        """A front end says hello, and how much it already has: go on from there.  Or "stop"."""
        if content.get("type") == "stop" and self._stop is not None:
            self._stop()
        if content.get("type") != "hello":
            return
        with self._lock:
            self._greeted = True
            self._sent = {key: int(content.get(key, 0)) for key in self._sent}
        self._send()


def explore(trace: Trace) -> None:
    """Show a finished or loaded trace with zoom and hover (without anywidget: its picture)."""
    if not _in_notebook():
        return
    tables = Tables()
    newest = sorted(trace.spans, key=lambda span: span.end)[-4 * KEEP :]
    left_out = len(trace.spans) - len(newest)
    state: dict[str, Any] = {
        "spans": pack_spans(newest, tables),
        "samples": pack_samples(trace.memory[-4 * KEEP :], tables),
    }
    for device in trace.devices:
        tables.row(device)
    state["tables"] = {"texts": list(tables.texts), "rows": list(tables.rows)}
    config = _config(trace, live=False) | {"left_out": left_out, "duration": trace.duration}
    widget = _widget(config, **state)
    bundle = _picture_bundle(f"timeline: {trace.title}", _png(trace))
    _display(bundle | (_widget_bundle(widget) if widget is not None else {}))


# -- the notebook ----------------------------------------------------------------------------------


def _config(trace: Trace, *, live: bool) -> dict[str, Any]:
    return {
        "title": trace.title, "source": trace.source, "hardware": trace.hardware,
        "capacity": trace.capacity, "live": live, "keep": KEEP if live else 8 * KEEP,
        "kinds": [colours.KIND_STYLES[kind]._asdict() for kind in KINDS],
        "memory": [colours.MEMORY, colours.MEMORY_DARK],
        "limit": [colours.CAPACITY, colours.CAPACITY_DARK],
        "labels": colours.LANE_LABELS,
    }  # fmt: skip


@lru_cache(maxsize=1)
def _widget_class() -> Any:
    """The widget's class, or None (with a warning, once) where anywidget is not installed."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        warnings.warn(
            "The live view needs anywidget (pip install anywidget); "
            "a picture will appear when the run ends.",
            stacklevel=2,
        )
        return None

    class TimelineWidget(anywidget.AnyWidget):
        _esm = "".join(
            Path(__file__).with_name(name).read_text("utf-8")
            for name in ("live_store.js", "live.js")
        )
        config = traitlets.Dict().tag(sync=True)
        tables = traitlets.Dict().tag(sync=True)
        spans = traitlets.Bytes(b"").tag(sync=True)
        samples = traitlets.Bytes(b"").tag(sync=True)
        picture = traitlets.Bytes(b"").tag(sync=True)

    return TimelineWidget


def _widget(config: dict[str, Any], **state: Any) -> Any:
    make = _widget_class()
    return None if make is None else make(config=config, **state)


def _widget_bundle(widget: Any) -> dict[str, Any]:
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view}


def _in_notebook() -> bool:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def _display(bundle: dict[str, Any]) -> Any:
    from IPython.display import display

    return display(bundle, raw=True, display_id=True, metadata=_metadata(bundle))


def _picture_bundle(text: str, picture: bytes) -> dict[str, Any]:
    return {"text/plain": text, "image/png": base64.b64encode(picture).decode()}


def _png(trace: Trace) -> bytes:
    from labutils import figures

    return figures.png(figures.overview(trace))


def _metadata(bundle: dict[str, Any]) -> dict[str, Any]:
    if "image/png" not in bundle:
        return {}
    from labutils import figures

    return {"image/png": figures.png_metadata(bundle["text/plain"])}


def _retire(widget: Any, picture: bytes) -> None:
    """Keep the last widgets a while: a page reloaded during the run only knows the widget."""
    widget.picture = picture
    _retired.append(widget)
    if len(_retired) > 16:
        _retired.popleft().close()


_retired: deque[Any] = deque()
