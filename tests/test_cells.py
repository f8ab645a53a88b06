"""``%%ranks`` in a real kernel, as a notebook uses it."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from rank_helpers import alive, processes_with, wait_until

LIMIT_S = 60


class Notebook:
    """A kernel, and what its cells print."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.tag = f"{os.getpid()}-{id(self)}"
        environment = {**os.environ, "LABUTILS_TEST_TAG": self.tag}
        self.manager, self.client = start_new_kernel(kernel_name="python3", env=environment)
        self.run("%load_ext labutils.launch.cells")

    def run(self, cell: str) -> str:
        """Run a cell; returns its output without colours, an error after the word ERROR."""
        said: list[str] = []

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                said.append(content["text"])
            elif message["msg_type"] == "error":
                said.append("ERROR " + "\n".join(content["traceback"]))
            elif message["msg_type"] in ("execute_result", "display_data", "update_display_data"):
                said.append(content["data"]["text/plain"])

        self.client.execute_interactive(cell, timeout=LIMIT_S, output_hook=take)
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(said))

    def interrupt_after(self, seconds: float) -> None:
        threading.Timer(seconds, self.manager.interrupt_kernel).start()

    def others(self) -> list[int]:
        """Processes that this kernel has started, directly or not."""
        kernel = self.manager.provisioner.pid
        return [pid for pid in processes_with(self.tag) if pid != kernel]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    yield notebook
    notebook.close()


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("Started ")]


def test_values_are_shown_by_rank_and_variables_stay(notebook: Notebook) -> None:
    text = notebook.run("%%ranks 3 --restart\nt = torch.ones(2) * rank\ndist.all_reduce(t)\nt")
    assert text.startswith("Started 3 ranks: gloo, 1 thread each.\n")
    assert _lines(text) == [f"[rank {r}] Out: tensor([3., 3.])" for r in range(3)]
    assert _lines(notebook.run("%%ranks\ndist.all_reduce(t)\n(rank, t.sum().item())")) == [
        f"[rank {r}] Out: ({r}, 18.0)" for r in range(3)
    ]
    assert notebook.run("%%ranks 3\nt;") == ""
    assert notebook.run("%%ranks\nNone") == ""


def test_output_while_it_runs_and_collected(notebook: Notebook) -> None:
    text = notebook.run("%%ranks 3\nfor i in range(3):\n    print('line', i, 'of', rank)")
    for rank in range(3):
        mine = [line for line in _lines(text) if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] line {i} of {rank}" for i in range(3)]
    cell = "%%ranks --collect\nimport time; time.sleep(0.1 * (3 - rank)); print('a'); print('b')"
    assert _lines(notebook.run(cell)) == [f"[rank {r}] {x}" for r in range(3) for x in "ab"]


def test_only_some_ranks(notebook: Notebook) -> None:
    notebook.run("%%ranks 3\nx = rank")
    notebook.run("%%ranks --only 0,2\nx += 10")
    assert _lines(notebook.run("%%ranks\nx")) == [
        "[rank 0] Out: 10", "[rank 1] Out: 1", "[rank 2] Out: 12"]  # fmt: skip
    assert "the ranks are 0 to 2" in notebook.run("%%ranks --only 3\nx")
    assert "not a list of ranks" in notebook.run("%%ranks --only a\nx")


def test_an_ordinary_mistake_costs_no_variables(notebook: Notebook) -> None:
    notebook.run("%%ranks 3\nkept = rank * 2")
    text = notebook.run("%%ranks\ny = kept + undefined_name")
    assert "RankFailure: Rank 0 failed: NameError: name 'undefined_name' is not defined" in text
    assert "%%ranks cell" in text
    assert "y = kept + undefined_name" in text
    assert "Ranks 1, 2 failed in the same way." in text
    assert "site-packages" not in text
    assert _lines(notebook.run("%%ranks\nkept")) == [f"[rank {r}] Out: {2 * r}" for r in range(3)]


def test_ranks_out_of_step_are_replaced(notebook: Notebook) -> None:
    text = notebook.run("%%ranks 3\nif rank == 1:\n    1 / 0\ndist.all_reduce(torch.ones(1))")
    assert "Rank 1 failed: ZeroDivisionError" in text
    assert "variables are gone" in text
    assert _lines(notebook.run("%%ranks\nrank")) == [f"[rank {r}] Out: {r}" for r in range(3)]


def test_a_crash_is_survived(notebook: Notebook) -> None:
    text = notebook.run(
        "%%ranks 3\nimport os\nif rank == 2:\n    os.kill(os.getpid(), 11)\ndist.barrier()"
    )
    assert "Rank 2 died: it was ended by SIGSEGV" in text
    assert _lines(notebook.run("%%ranks\nworld_size")) == [f"[rank {r}] Out: 3" for r in range(3)]


def test_time_limit(notebook: Notebook) -> None:
    text = notebook.run(
        "%%ranks 3 --timeout 1\nimport time\nif rank == 1:\n    time.sleep(60)\ndist.barrier()"
    )
    assert "RankTimeout: Ranks 0 and 2 waited more than 1 s in barrier #1" in text
    assert "time.sleep(60)" in text


@pytest.mark.parametrize("collective", [False, True])
def test_interrupt_leaves_ranks_usable(notebook: Notebook, collective: bool) -> None:
    notebook.run("%%ranks 3\nkept = 5")
    notebook.interrupt_after(1.0)
    wait = "dist.barrier() if rank else time.sleep(60)" if collective else "time.sleep(60)"
    start = time.monotonic()
    text = notebook.run(f"%%ranks\nimport time\n{wait}")
    assert "KeyboardInterrupt" in text
    assert time.monotonic() - start < 20
    shown = _lines(notebook.run("%%ranks\nglobals().get('kept')"))
    if not collective:  # nobody was in the middle of a collective, so nothing was lost
        assert shown == [f"[rank {r}] Out: 5" for r in range(3)]
    assert _lines(notebook.run("%%ranks\nrank")) == [f"[rank {r}] Out: {r}" for r in range(3)]


def test_push_and_pull(notebook: Notebook) -> None:
    notebook.run("%%ranks 3\npass")
    assert (
        notebook.run(
            "import torch\na, b = torch.arange(3), {'k': lambda x: x + 1}\n%ranks_push a b"
        )
        == ""
    )
    notebook.run("%%ranks\nc = a * rank\nd = b['k'](rank)")
    assert notebook.run("%ranks_pull c d").splitlines() == [
        "c: a list of 3 values, one per rank", "d: a list of 3 values, one per rank"]  # fmt: skip
    assert (
        notebook.run("[t.tolist() for t in c], d")
        == "([[0, 0, 0], [0, 1, 2], [0, 2, 4]], [1, 2, 3])"
    )
    assert "no variable named nothing" in notebook.run("%ranks_push nothing")
    assert "there is no variable named nothing here" in notebook.run("%ranks_pull nothing")
    assert "cannot travel" in notebook.run(
        "import threading\nlock = threading.Lock()\n%ranks_push lock"
    )


def test_mistakes_in_the_line_or_the_cell(notebook: Notebook) -> None:
    assert "unrecognized arguments: --wrong" in notebook.run("%%ranks --wrong\n1")
    assert "ranks=0 would run nothing" in notebook.run("%%ranks 0\n1")
    text = notebook.run("%%ranks 3\n1 +")
    assert "SyntaxError: invalid syntax" in text
    assert "site-packages" not in text


@pytest.mark.parametrize("line", ["%matplotlib inline", "!echo hello", "files = !ls", "%%time"])
def test_what_is_ipythons_is_named(notebook: Notebook, line: str) -> None:
    text = notebook.run(f"%%ranks 2\nx = 1\n{line}\nprint(x)")
    assert "Line 2 is for IPython: its magics (%) and commands (!) do not work on ranks." in text
    assert "for IPython" not in notebook.run("%%ranks 2\nx = 7 % 2 3")


def test_classes_and_functions_of_a_cell(notebook: Notebook) -> None:
    notebook.run(
        "%%ranks 3\nclass Point:\n    def __init__(self, x):\n        self.x = x\np = Point(rank)"
    )
    notebook.run("%ranks_pull p")
    assert notebook.run("[q.x for q in p]") == "[0, 1, 2]"
    text = notebook.run("%%ranks\nfrom torch.utils.data import DataLoader, Dataset\n"
                        "class Data(Dataset):\n"
                        "    def __len__(self): return 4\n"
                        "    def __getitem__(self, i): return i * 10\n"
                        "[int(x) for x in DataLoader(Data(), num_workers=1)]")  # fmt: skip
    assert _lines(text) == [f"[rank {r}] Out: [0, 10, 20, 30]" for r in range(3)]


def test_launch_takes_functions_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("from labutils.launch import launch\nimport torch\n"
                 "import torch.distributed as dist\nscale = 3\n"
                 "class Job:\n    def work(self): return scale * dist.get_rank()")  # fmt: skip
    notebook.run("def train():\n    print('working')\n    return Job().work()")
    text = notebook.run("launch(train, ranks=2).results")
    assert sorted(_lines(text)) == ["[0, 3]", "[rank 0] working", "[rank 1] working"]
    notebook.run("def broken():\n    return undefined_name")
    text = notebook.run("launch(broken, ranks=2)")
    assert re.search(r"Cell In\[\d+\], line 2, in broken\n    return undefined_name", text)


def test_background_run_shows_its_output_in_its_cell(notebook: Notebook) -> None:
    text = notebook.run("run = launch(lambda: print('from behind'), ranks=2, block=False)")
    assert text.startswith("Running in the background. To end it: run.stop()")
    assert notebook.run("run.wait(30).logs").endswith("['from behind\\n', 'from behind\\n']")
    notebook.run("import time\nrun = launch(lambda: time.sleep(60), ranks=2, block=False)")
    assert "stopped" in notebook.run("run.stop()\nrun")


def test_trace_of_a_cell_is_its_own(notebook: Notebook) -> None:
    notebook.run("magics = get_ipython().magics_manager.registry['RanksMagics']")
    notebook.run("%%ranks 3\ndist.all_reduce(torch.ones(1))")
    notebook.run("%%ranks\ndist.barrier()")
    assert (
        notebook.run("sorted({s.name for s in magics.last.trace.spans} - {'wait for the others'})")
        == "['barrier']"
    )


def test_an_answer_from_warm_ranks_needs_no_new_process(notebook: Notebook) -> None:
    first = notebook.run("%%ranks 3\nimport os; os.getpid()").splitlines()[-3:]
    assert notebook.run("%%ranks\nimport os; os.getpid()").splitlines() == first


def test_unloading_ends_the_ranks(notebook: Notebook) -> None:
    text = notebook.run("%%ranks 2\nimport os; os.getpid()")
    pids = [int(pid) for pid in re.findall(r"Out: (\d+)", text)]
    assert len(pids) == 2
    notebook.run("%unload_ext labutils.launch.cells")
    assert wait_until(lambda: not alive(*pids), 2.0)
    notebook.run("%load_ext labutils.launch.cells")


def test_restarting_and_killing_the_kernel() -> None:
    notebook = Notebook()
    try:
        notebook.run("%%ranks 2\nimport time")
        assert len(notebook.others()) == 3  # the server and two ranks
        notebook.manager.restart_kernel(now=False)
        notebook.client.wait_for_ready(LIMIT_S)
        assert wait_until(lambda: not notebook.others(), 2.0), notebook.others()
        notebook.run("%load_ext labutils.launch.cells")
        notebook.run("%%ranks 2\nrank")
        psutil.Process(notebook.manager.provisioner.pid).kill()
        assert wait_until(lambda: not notebook.others(), 2.0), notebook.others()
    finally:
        notebook.close()
