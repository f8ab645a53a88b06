"""``nn.DataParallel``'s forward, from the four functions that it is made of."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate, scatter

lab = "02"


def data_parallel_forward(
    module: nn.Module, batch: torch.Tensor, devices: list[torch.device]
) -> torch.Tensor:
    shards = scatter(batch, devices)
    replicas = replicate(module, devices[: len(shards)])
    outputs = parallel_apply(replicas, shards, devices=devices[: len(shards)])
    return gather(outputs, devices[0])


def run(answer: object, layers: int, batch: int, gpus: int) -> dict[str, object]:
    """Output and gradient of a small network on ``gpus`` GPUs, and the GPUs that it ran on."""
    from labutils.devices import in_use

    devices = in_use(gpus)
    torch.manual_seed(layers * 1000 + batch)
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers))).to(devices[0])
    ran_on: set[str] = set()
    module.register_forward_hook(lambda _, __, made: ran_on.add(str(made.device)))
    output = answer(module, torch.randn(batch, 6), devices)  # type: ignore[operator]
    if not isinstance(output, torch.Tensor):
        return output  # type: ignore[no-any-return]
    output.square().sum().backward()
    first = module[0].weight.grad
    gradient = torch.zeros(()) if first is None else first.cpu()
    return {
        "ran on": sorted(ran_on),
        "output": output.detach().cpu(),
        "output is on": output.device,
        "gradient": gradient,
    }


def cases(rng: random.Random) -> Iterator[tuple[int, int, int]]:
    yield from [(1, 4, 1), (1, 8, 2), (2, 10, 4), (2, 3, 4)]
    for _ in range(4):
        yield rng.randint(1, 3), rng.randint(1, 20), rng.randint(1, 4)


hints = [
    "Four lines, one a function: scatter the batch, replicate the module, apply, gather.",
    "A short batch makes fewer shards than there are GPUs: use devices[:len(shards)] from there.",
    "parallel_apply(replicas, shards, devices=...) gives a list of outputs, one on each GPU.",
    "gather(outputs, devices[0]) puts them one after the other on the first GPU.",
]
