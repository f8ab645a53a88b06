"""Tests that need a real GPU; elsewhere each is skipped, and says why."""

from __future__ import annotations

import pytest
import torch

NO_GPU = (
    f"needs a CUDA GPU: torch {torch.__version__} sees none here "
    f"({'a CPU build' if torch.version.cuda is None else 'torch.cuda.is_available() is False'})"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what stands in this folder where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(autouse=True)
def _exact() -> None:
    """Products in full float32, as the CPU has them."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
