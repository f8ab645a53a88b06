"""What all tests share: no test writes to this user's progress, and where the browser is."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NO_BROWSER = (
    "there is no Chromium to test with: `apt-get install chromium` on Debian, "
    "or CHROMIUM=/path/to/chrome"
)


@pytest.fixture(scope="session", autouse=True)
def _interrupts() -> None:
    """Under nohup, or in the background of a shell, signals are ignored, here and in children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_IGN:
        signal.signal(hangup, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _own_progress() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LABUTILS_DATA"] = folder
        yield
        del os.environ["LABUTILS_DATA"]


@pytest.fixture(scope="session")
def chromium() -> Path:
    """The browser for tests in tests/browser; without one they are skipped, and say so."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(NO_BROWSER)
    return Path(found)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests that train: small operations on many threads take long on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _no_virtual_gpus_left_over() -> None:
    """Each file of tests begins without virtual GPUs, whatever ran before it."""
    virtual = sys.modules.get("labutils.virtual")
    if virtual is not None:
        virtual.disable()
