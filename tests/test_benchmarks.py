"""The runner of ``make bench``: what is over its bound, or broken, is never a success."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

RUNNER = Path(__file__).parent / "benchmarks" / "__main__.py"


@pytest.fixture
def runner() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_runner", RUNNER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        ("return [('a', 1.0, 1.0)]", 0, "ok"),
        ("return [('a', 1.0, 2.0), ('b', 2.1, 2.0)]", 1, "over"),
        ("return [('a', float('nan'), 2.0)]", 1, "over"),
        ("raise RuntimeError", 1, "bench_x.py broke"),
    ],
)
def test_exit_code(
    runner: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    body: str,
    code: int,
    word: str,
) -> None:
    (tmp_path / "bench_x.py").write_text(f"def measure():\n    {body}\n")
    assert runner.main([], tmp_path) == code
    assert word in capsys.readouterr().out


def test_nothing_to_measure(runner: Any, tmp_path: Path) -> None:
    assert runner.main([], tmp_path) == 2
    (tmp_path / "bench_x.py").write_text("def measure(): return [('a', 0.0, 1.0)]")
    assert runner.main(["y"], tmp_path) == 2
    assert runner.main(["x"], tmp_path) == 0
