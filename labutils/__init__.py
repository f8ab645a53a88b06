"""The names that the notebooks use: ``import labutils as lab``.

Everything is loaded at its first use, so that importing this package stays quick and light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Images": "loading.images",
    "Loader": "loading.loader",
    "LoaderError": "loading.sentences",
    "MemorySample": "trace",
    "Prediction": "timing.predict",
    "RankFailure": "launch",
    "RankTimeout": "launch",
    "Run": "launch",
    "StartError": "launch",
    "Span": "trace",
    "Trace": "trace",
    "bring_your_own": "inspection",
    "check": "exercises",
    "check_replicas": "replicas",
    "coverage": "shards",
    "before_after": "holdings",
    "describe": "devices",
    "device": "launch",
    "exercise": "exercises",
    "explore": "live",
    "gpus": "devices",
    "hint": "exercises",
    "key_figure": "key_figures",
    "launch": "launch",
    "loader_report": "loading.report",
    "loading": "loading",
    "load_ipython_extension": "launch.cells",
    "make_images": "loading.images",
    "models": "models",
    "figures": "figures",
    "predict": "timing.predict",
    "profiles": "timing.profiles",
    "progress": "exercises",
    "rehearse": "launch.nodes",
    "remove_images": "loading.images",
    "scaling": "timing.predict",
    "solution": "exercises",
    "span": "telemetry",
    "torchrun": "launch",
    "unload_ipython_extension": "launch.cells",
    "virtual": "virtual",
    "watch": "watching",
    "watch_loading": "loading.watching",
    "what_if": "what_if_view",
    "who_am_i": "places",
}
"""Where each public name lives."""

_MODULES = {"figures", "launch", "loading", "models", "profiles", "virtual"}
"""Names that are modules themselves."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'labutils' has no attribute {name!r}")
    module = importlib.import_module(f"labutils.{_HOME[name]}")
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


if TYPE_CHECKING:
    from labutils import figures, launch, loading, models, virtual
    from labutils.devices import describe, gpus
    from labutils.exercises import check, exercise, hint, progress, solution
    from labutils.holdings import before_after
    from labutils.inspection import bring_your_own
    from labutils.key_figures import key_figure
    from labutils.launch import RankFailure, RankTimeout, Run, StartError, device, torchrun
    from labutils.launch.cells import load_ipython_extension, unload_ipython_extension
    from labutils.launch.nodes import rehearse
    from labutils.live import explore
    from labutils.loading.images import Images, make_images, remove_images
    from labutils.loading.loader import Loader
    from labutils.loading.report import loader_report
    from labutils.loading.sentences import LoaderError
    from labutils.loading.watching import watch_loading
    from labutils.places import who_am_i
    from labutils.replicas import check_replicas
    from labutils.shards import coverage
    from labutils.telemetry import span
    from labutils.timing import profiles
    from labutils.timing.predict import Prediction, predict, scaling
    from labutils.trace import MemorySample, Span, Trace
    from labutils.watching import watch
    from labutils.what_if_view import what_if
