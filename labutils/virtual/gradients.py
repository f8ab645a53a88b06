"""``backward`` on virtual GPUs: what it refuses, and what it leaves behind when it fails."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import autograd

from labutils.virtual import errors
from labutils.virtual.tensor import VirtualTensor


def install() -> None:
    """Replace the two functions below ``Tensor.backward`` and ``torch.autograd.grad``."""
    autograd._make_grads = _checked(autograd._make_grads)
    autograd._engine_run_backward = _cleared(autograd._engine_run_backward)


def _checked(original: Any) -> Any:
    """``backward(gradient)`` refuses a gradient on another device."""

    @functools.wraps(original)
    def make_grads(outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        for output, grad in zip(outputs, grads):
            if type(output) is VirtualTensor and isinstance(grad, torch.Tensor):
                _check_same_device(output, grad)
        return original(outputs, grads, *args, **kwargs)

    return make_grads


def _check_same_device(output: VirtualTensor, grad: torch.Tensor) -> None:
    if grad.device != output.device:
        plain = [] if type(grad) is VirtualTensor else [grad]
        virtual = [output, grad] if type(grad) is VirtualTensor else [output]
        raise RuntimeError(errors.mixed_devices("backward", virtual, plain))


def _cleared(original: Any) -> Any:
    """A backward that fails, by an interrupt or for lack of memory, frees what it held."""

    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(outputs, *args, **kwargs)
        except BaseException:
            if any(type(t) is VirtualTensor for t in outputs):
                _clear_queue()
            raise

    return run_backward


def _clear_queue() -> None:
    """Let the engine drop the steps of a failed backward that wait in this thread's queue.

    On the CPU they stay there, with all the tensors that they hold, until the queue comes to them;
    and it takes the steps of younger graphs first.  One that a new thread makes counts as older
    than any, so when the engine comes to that, it has passed all others.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    made: list[torch.Tensor] = []

    def make() -> None:
        made.append(torch.zeros((), requires_grad=True) * 1)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    made[0].backward()
