"""The live view's cost in the kernel: a real kernel, 8 GPUs, 20,000 spans, 5 updates a second."""

from __future__ import annotations

import json
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

RUN = """
import json, sys, time
sys.path.insert(0, {repository!r})
from labutils.live import LiveView
from labutils.trace import KINDS, MemorySample, Span

UPDATES, SPANS, GPUS = 50, 20_000, 8
gpus = [f"GPU {{i}}" for i in range(GPUS)]
batches = []
for k in range(UPDATES):
    spans = [Span(f"op {{n % 40}}", 0.2 * k + n * 5e-4, 0.2 * k + n * 5e-4 + 4e-4, gpus[n % GPUS],
                  ("compute", "copy", "communication")[n // GPUS % 3], KINDS[n % len(KINDS)],
                  1 << 20, "float32") for n in range(SPANS // UPDATES)]
    memory = [MemorySample(span.end, span.device, n << 20) for n, span in enumerate(spans)]
    batches.append((spans, memory, 0.2 * (k + 1)))

view = LiveView("benchmark", gpus, {{gpu: 80 << 30 for gpu in gpus}}, "simulated", "A100")
view.show()
send, sizes = view._widget.send, []

def weigh(content, buffers):
    sizes.append(len(json.dumps(content)) + sum(map(len, buffers)))
    send(content, buffers)

view._widget.send = weigh
view._on_message(None, {{"type": "hello"}}, [])  # as the browser does
view.update(*batches[0])
begun, cpu = time.perf_counter(), time.process_time()
for batch in batches[1:]:
    view.update(*batch)
    time.sleep(0.2)
share = (time.process_time() - cpu) / (time.perf_counter() - begun)
cpu = time.process_time()
time.sleep(2.0)
share -= (time.process_time() - cpu) / 2.0  # what an idle kernel costs
print(json.dumps([100 * share, max(sizes[-10:]) / max(sizes[2:12]), max(sizes)]))
"""


def measure() -> list[tuple[str, float, float]]:
    """Per cent of one core, growth of an update over the run, and its size in kB."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    printed: list[str] = []
    try:
        reply = client.execute_interactive(
            RUN.format(repository=str(REPOSITORY)),
            timeout=120,
            output_hook=lambda message: printed.append(message["content"].get("text", "")),
        )
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    share, growth, largest = json.loads("".join(printed))
    return [
        ("live view: per cent of one core at 5 updates/s, 20,000 spans", share, 3.0),
        ("live view: last updates over first, in bytes", growth, 1.1),
        ("live view: largest update, in kB", largest / 1e3, 150.0),
    ]


if __name__ == "__main__":
    for name, value, bound in measure():
        print(name, f"{value:.3g}", bound, "ok" if value <= bound else "over")
