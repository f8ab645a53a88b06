"""The live view as Python sees it: what is sent, what is kept, and what stays in the notebook.

``live_store.js`` is checked against Python too, where node is installed: it must read from the
messages what was put into them.
"""

from __future__ import annotations

import base64
import builtins
import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from labutils import live, packing
from labutils.live import KEEP, MAX_PER_UPDATE, LiveView
from labutils.trace import MemorySample, Span, Trace

VIEW = "application/vnd.jupyter.widget-view+json"


class Notebook:
    """Stands for the front end: keeps what is displayed, updated, and sent by widgets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.displayed: list[dict[str, Any]] = []
        self.updated: list[dict[str, Any]] = []
        self.sent: list[tuple[dict[str, Any], list[bytes]]] = []
        self.closed = 0
        monkeypatch.setattr(live, "_in_notebook", lambda: True)
        monkeypatch.setattr("IPython.display.display", self._display)
        live._widget_class.cache_clear()
        make = live._widget_class()
        if make is not None:
            monkeypatch.setattr(
                make, "send", lambda _, content, buffers: self._send(content, buffers)
            )
            monkeypatch.setattr(make, "close", lambda _: self._close())

    def _display(self, bundle: dict[str, Any], **how: Any) -> Notebook:
        assert how["raw"]
        assert how["display_id"]
        self.displayed.append(bundle)
        return self

    def update(self, bundle: dict[str, Any], **how: Any) -> None:
        assert how["raw"]
        self.updated.append(bundle)

    def _send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self.sent.append((json.loads(json.dumps(content)), buffers))

    def _close(self) -> None:
        self.closed += 1


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    pytest.importorskip("anywidget")
    return Notebook(monkeypatch)


def some(count: int, begin: int = 0) -> tuple[list[Span], list[MemorySample]]:
    numbers = range(begin, begin + count)
    spans = [Span(f"op {n % 7}", n * 1e-3, n * 1e-3 + 5e-4, f"GPU {n % 2}", "compute", "forward",
                  n, "float32") for n in numbers]  # fmt: skip
    return spans, [MemorySample(n * 1e-3, f"GPU {n % 2}", n) for n in numbers]


def size(message: tuple[dict[str, Any], list[bytes]]) -> int:
    return len(json.dumps(message[0])) + sum(map(len, message[1]))


def greet(view: LiveView, **has: int) -> None:
    view._on_message(None, {"type": "hello", **has}, [])


# -- what is sent ----------------------------------------------------------------------------------


def test_an_update_is_an_increment(notebook: Notebook) -> None:
    view = LiveView("run", ["GPU 0", "GPU 1"])
    view.show()
    greet(view)
    sizes = []
    for k in range(50):
        view.update(*some(20, 20 * k), now=0.02 * (k + 1))
        content, (spans, samples) = notebook.sent[-1]
        assert content["spans"] == content["samples"] == 20 * k
        assert (len(spans), len(samples)) == (20 * packing.SPAN.size, 20 * packing.SAMPLE.size)
        sizes.append(size(notebook.sent[-1]))
    assert max(sizes[1:]) - min(sizes[1:]) < 40  # only the digits of a few numbers
    assert "op 3" in notebook.sent[2][0]["texts"][1]
    assert notebook.sent[-1][0]["texts"][1] == []


def test_a_burst_is_spread_over_updates(notebook: Notebook) -> None:
    view = LiveView("run")
    view.show()
    greet(view)
    view.update(*some(3 * MAX_PER_UPDATE))
    for _ in range(3):
        view.update()
    numbers = [content["spans"] for content, _ in notebook.sent[-4:]]
    assert numbers == [0, MAX_PER_UPDATE, 2 * MAX_PER_UPDATE, 3 * MAX_PER_UPDATE]
    assert max(map(size, notebook.sent)) < 200_000


def test_before_the_browser_answers_nothing_recent_is_missing(notebook: Notebook) -> None:
    view = LiveView("run")
    view.show()
    for k in range(4):
        view.update(*some(1000, 1000 * k))
    content, (spans, _) = notebook.sent[-1]
    assert content["spans"] + len(spans) // packing.SPAN.size == 4000
    assert len(spans) == MAX_PER_UPDATE * packing.SPAN.size
    assert content["rows"][0] == content["texts"][0] == 0
    assert len(content["rows"][1]) == 4


def test_a_late_front_end_gets_everything_kept(notebook: Notebook) -> None:
    view = LiveView("run")
    view.show()
    greet(view)
    for k in range(5):
        view.update(*some(1000, 1000 * k))
    greet(view)  # a second page: it has nothing
    view.update()
    assert [content["spans"] for content, _ in notebook.sent[-2:]] == [0, MAX_PER_UPDATE]
    assert {"GPU 0", "GPU 1"} == {device for device, _ in notebook.sent[-2][0]["rows"][1]}
    assert "op 6" in notebook.sent[-2][0]["texts"][1]
    assert notebook.sent[-1][0]["texts"][1] == []


def test_a_long_run_stays_bounded(notebook: Notebook) -> None:
    view = LiveView("run")
    view.show()
    for k in range(7):
        view.update(*some(10_000, 10_000 * k))
    assert len(view._spans.data) == KEEP * packing.SPAN.size
    received = view._received()
    assert received.dropped == 20_000
    assert len(received.spans) == KEEP
    assert received.spans[-1].name == f"op {69_999 % 7}"


def test_different_names_and_rows_are_bounded() -> None:
    tables = packing.Tables()
    for n in range(10_000):
        tables.text(f"name {n}" + "x" * 1000)
        tables.row("GPU 0", f"stream {n}")
    assert len(tables.texts) == packing.MAX_TEXTS
    assert max(map(len, tables.texts)) == packing.MAX_TEXT
    assert len(tables.rows) == packing.MAX_ROWS


def test_packing_round_trip() -> None:
    spans, samples = some(100)
    tables = packing.Tables()
    data = packing.pack_spans(spans, tables), packing.pack_samples(samples, tables)
    assert packing.unpack(*data, tables) == (spans, samples)


def test_threads_may_update_at_once(notebook: Notebook) -> None:
    view = LiveView("run")
    view.show()
    greet(view)

    def feed() -> None:
        for _ in range(100):
            view.update(*some(5))

    threads = [threading.Thread(target=feed) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = 0
    for content, (spans, _) in notebook.sent[1:]:
        assert content["spans"] == expected
        expected += len(spans) // packing.SPAN.size
    assert expected == 2000


# -- what stays ------------------------------------------------------------------------------------


def test_close_puts_a_picture_in_the_widgets_place(notebook: Notebook) -> None:
    view = LiveView("my run", capacity={"GPU 0": 2**30}, source="simulated", hardware="T4")
    view.show()
    assert set(notebook.displayed[0]) == {"text/plain", VIEW}
    view.update(*some(10), now=1.0)
    trace = Trace("simulated", "T4", "my run", *some(10))
    view.close(trace)
    (bundle,) = notebook.updated
    assert set(bundle) == {"text/plain", "image/png"}
    assert bundle["text/plain"] == notebook.displayed[0]["text/plain"] == "timeline: my run"
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert view._widget.picture == base64.b64decode(bundle["image/png"])
    assert view.trace is trace

    messages = len(notebook.sent)
    view.update(*some(10))
    view.close()
    assert (len(notebook.sent), len(notebook.updated)) == (messages, 1)


def test_a_front_end_may_end_what_is_watched(notebook: Notebook) -> None:
    stopped: list[str] = []
    for stop in (None, lambda: stopped.append("now")):
        view = LiveView("run", stop=stop)
        view.show()
        assert view._widget.config["stoppable"] == (stop is not None)
        greet(view)
        view._on_message(None, {"type": "stop"}, [])
    assert stopped == ["now"]


def test_only_the_last_widgets_are_kept(notebook: Notebook) -> None:
    live._retired.clear()
    for _ in range(18):
        view = LiveView("run")
        view.show()
        view.close()
    assert len(live._retired) == 16
    assert notebook.closed == 2


def test_picture_at_any_time(notebook: Notebook) -> None:
    view = LiveView("my run", source="simulated", hardware="T4")
    view.update(*some(10))
    assert repr(view.picture()) == "<my run · simulated · T4>"
    view.close()
    assert len(view.trace.spans) == 10
    assert view.picture()._repr_png_()[0].startswith(b"\x89PNG")


def test_explore_holds_the_whole_trace(notebook: Notebook, monkeypatch: Any) -> None:
    made: list[Any] = []
    make = live._widget

    def remember(*arguments: Any, **state: Any) -> Any:
        made.append(make(*arguments, **state))
        return made[-1]

    monkeypatch.setattr(live, "_widget", remember)
    spans, samples = some(500)
    live.explore(Trace("measured", "CPU", "t", spans, samples))
    (bundle,) = notebook.displayed
    assert set(bundle) == {"text/plain", "image/png", VIEW}
    assert len(made[0].spans) == 500 * packing.SPAN.size
    assert ["GPU 1", "compute"] in [list(row) for row in made[0].tables["rows"]]
    assert made[0].config["live"] is False


def test_without_anywidget_a_picture_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "anywidget":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.warns(UserWarning, match="pip install anywidget"):
        notebook = Notebook(monkeypatch)
    view = LiveView("run")
    view.show()
    view.update(*some(10), now=1.0)
    view.close()
    live.explore(Trace("measured", "CPU", "t", *some(5)))
    assert [set(bundle) for bundle in notebook.displayed] == [{"text/plain", "image/png"}] * 2
    live._widget_class.cache_clear()


def test_without_a_notebook_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    view = LiveView("run")
    view.show()
    view.update(*some(10))
    view.close()
    live.explore(view.trace)
    assert capsys.readouterr().out == ""


# -- the browser's side ----------------------------------------------------------------------------

READ_BACK = """
const fs = require("fs"), messages = JSON.parse(fs.readFileSync(0));
const store = new Store({ keep: KEEP, kinds: [] });
const asked = messages.map((m) => store.add(m.content, m.buffers.map((b) => {
  const bytes = Buffer.from(b, "base64");
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
})));
console.log(JSON.stringify({
  asked, counts: store.counts(), forgotten: store.forgotten, devices: store.devices(),
  spans: store.rows.flatMap((row) => row.spans.map(
    (s) => [s.name, s.start, s.end, row.device, row.lane, s.bytes, s.detail])),
  memory: [...store.samples].map(([device, m]) => [device, m.time, m.held, m.peak]),
}));
"""


def read_back(messages: list[Any], keep: int = KEEP) -> Any:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, e.g. apt-get install nodejs")
    store = Path(live.__file__).with_name("live_store.js").read_text()
    encoded = [{"content": content, "buffers": [base64.b64encode(b).decode() for b in buffers]}
               for content, buffers in messages]  # fmt: skip
    script = store + READ_BACK.replace("KEEP", str(keep))
    done = subprocess.run([node, "-e", script], input=json.dumps(encoded), text=True, timeout=60,
                          capture_output=True, check=True)  # fmt: skip
    return json.loads(done.stdout)


def test_the_browser_reads_what_was_sent(notebook: Notebook) -> None:
    view = LiveView("run", ["GPU 10", "GPU 9", "host"])
    view.show()
    view.update(*some(30))
    view.update(*some(30, 30))  # repeats the first thirty: nobody has said hello
    greet(view, spans=60, samples=60, texts=9, rows=7)
    view.update(*some(30, 60))
    read = read_back(notebook.sent)
    spans, samples = some(90)
    expected = [[s.name, s.start, s.end, s.device, s.lane, s.bytes, s.detail] for s in spans]
    assert sorted(read["spans"], key=lambda s: s[1]) == expected
    assert read["devices"] == ["GPU 0", "GPU 1", "GPU 9", "GPU 10", "host"]
    for device, time, held, peak in read["memory"]:
        mine = [s for s in samples if s.device == device]
        assert (time, held) == ([s.time for s in mine], [s.allocated for s in mine])
        assert peak == max(held)


def test_the_browser_asks_once_for_what_it_missed(notebook: Notebook) -> None:
    view = LiveView("run")
    view.show()
    greet(view)
    for k in range(3):
        view.update(*some(10, 10 * k))
    read = read_back(notebook.sent[-2:])  # the message with the names was lost
    assert read["asked"] == [False, True]
    assert read["spans"] == []


def test_the_browser_forgets_the_oldest(notebook: Notebook) -> None:
    view = LiveView("run")
    view.show()
    greet(view)
    for k in range(3):
        view.update(*some(100, 100 * k))
    read = read_back(notebook.sent, keep=150)
    assert len(read["spans"]) + read["forgotten"] == 300
    assert len(read["spans"]) <= 165
    assert max(s[1] for s in read["spans"]) == pytest.approx(0.299)
