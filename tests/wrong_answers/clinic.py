"""Plausible wrong answers to the exercises of the clinic."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def log_only_on_rank_0(loss: torch.Tensor) -> float | None:
    if dist.get_rank() != 0:
        return None
    mean = loss.clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def log_own_loss(loss: torch.Tensor) -> float | None:
    return loss.item() if dist.get_rank() == 0 else None


def log_on_all_ranks(loss: torch.Tensor) -> float | None:
    mean = loss.clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def log_and_spoil_the_loss(loss: torch.Tensor) -> float | None:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size() if dist.get_rank() == 0 else None


def metrics_in_own_order(metrics: dict[str, float]) -> dict[str, float]:
    values = torch.tensor(list(metrics.values()))
    dist.all_reduce(values)
    return dict(zip(metrics, (values / dist.get_world_size()).tolist()))


def metrics_by_value(metrics: dict[str, float]) -> dict[str, float]:
    mean = {}
    for name in sorted(metrics, key=metrics.__getitem__):
        value = torch.tensor(metrics[name])
        dist.all_reduce(value)
        mean[name] = value.item() / dist.get_world_size()
    return mean


def metrics_summed(metrics: dict[str, float]) -> dict[str, float]:
    values = torch.tensor([metrics[name] for name in sorted(metrics)])
    dist.all_reduce(values)
    return dict(zip(sorted(metrics), values.tolist()))


def steps_of_my_own(batches: int) -> int:
    return batches


def steps_of_the_longest(batches: int) -> int:
    most = torch.tensor(batches)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def steps_on_average(batches: int) -> int:
    total = torch.tensor(batches)
    dist.all_reduce(total)
    return int(total) // dist.get_world_size()


def epochs_never_set(sampler: DistributedSampler[int], epochs: int) -> list[list[int]]:
    return [list(sampler) for _ in range(epochs)]


def epochs_set_afterwards(sampler: DistributedSampler[int], epochs: int) -> list[list[int]]:
    indices = []
    for epoch in range(epochs):
        indices.append(list(sampler))
        sampler.set_epoch(epoch)
    return indices


def epochs_set_once(sampler: DistributedSampler[int], epochs: int) -> list[list[int]]:
    sampler.set_epoch(epochs)
    return [list(sampler) for _ in range(epochs)]


def device_of_global_rank(environment: Mapping[str, str]) -> torch.device:
    return torch.device("cuda", int(environment["RANK"]))


def device_of_node(environment: Mapping[str, str]) -> torch.device:
    return torch.device("cuda", int(environment["GROUP_RANK"]))


def device_zero_for_all(environment: Mapping[str, str]) -> torch.device:
    return torch.device("cuda", 0)


def loss_mean_of_own_tokens(token_losses: torch.Tensor) -> torch.Tensor:
    return token_losses.mean()


def loss_without_world_size(token_losses: torch.Tensor) -> torch.Tensor:
    tokens = torch.tensor(float(len(token_losses)))
    dist.all_reduce(tokens)
    return token_losses.sum() / tokens


def loss_summed(token_losses: torch.Tensor) -> torch.Tensor:
    return token_losses.sum()


def accumulate_with_no_sync_around_backward(
    ddp: DistributedDataParallel, micro_batches: list[torch.Tensor]
) -> None:
    for x in micro_batches[:-1]:
        loss = ddp(x).square().mean() / len(micro_batches)
        with ddp.no_sync():
            loss.backward()
    (ddp(micro_batches[-1]).square().mean() / len(micro_batches)).backward()


def accumulate_always_in_step(
    ddp: DistributedDataParallel, micro_batches: list[torch.Tensor]
) -> None:
    for x in micro_batches:
        (ddp(x).square().mean() / len(micro_batches)).backward()


def accumulate_never_in_step(
    ddp: DistributedDataParallel, micro_batches: list[torch.Tensor]
) -> None:
    with ddp.no_sync():
        for x in micro_batches:
            (ddp(x).square().mean() / len(micro_batches)).backward()


def accumulate_without_dividing(
    ddp: DistributedDataParallel, micro_batches: list[torch.Tensor]
) -> None:
    with ddp.no_sync():
        for x in micro_batches[:-1]:
            ddp(x).square().mean().backward()
    ddp(micro_batches[-1]).square().mean().backward()


def accumulate_in_one_batch(
    ddp: DistributedDataParallel, micro_batches: list[torch.Tensor]
) -> None:
    ddp(torch.cat(micro_batches)).square().mean().backward()


class Divided(nn.Module):
    """Divides the output of a network, of which it has nothing itself."""

    def __init__(self, network: nn.Module, divisor: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.network, self.divisor = network, divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x) / self.divisor()


def temperature_outside(network: nn.Module, temperature: nn.Parameter) -> nn.Module:
    return Divided(DistributedDataParallel(network), lambda: temperature)


def temperature_hidden_inside(network: nn.Module, temperature: nn.Parameter) -> nn.Module:
    return DistributedDataParallel(Divided(network, lambda: temperature))


def nothing_wrapped(network: nn.Module, temperature: nn.Parameter) -> nn.Module:
    return Divided(network, lambda: temperature)


def step_around_ddp(
    ddp: DistributedDataParallel, x: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    loss = F.mse_loss(ddp.module(x), target)
    loss.backward()
    return loss


def step_without_sync(
    ddp: DistributedDataParallel, x: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    with ddp.no_sync():
        loss = F.mse_loss(ddp(x), target)
        loss.backward()
    return loss


def step_without_backward(
    ddp: DistributedDataParallel, x: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    return F.mse_loss(ddp(x), target)


def step_of_summed_gradients(
    ddp: DistributedDataParallel, x: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    loss = F.mse_loss(ddp.module(x), target)
    loss.backward()
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
    return loss


def save_on_every_rank(ddp: DistributedDataParallel, path: str) -> None:
    torch.save(ddp.module.state_dict(), path)


def save_without_waiting(ddp: DistributedDataParallel, path: str) -> None:
    if dist.get_rank() == 0:
        torch.save(ddp.module.state_dict(), f"{path}.new")
        os.replace(f"{path}.new", path)


def save_over_the_old_one(ddp: DistributedDataParallel, path: str) -> None:
    if dist.get_rank() == 0:
        torch.save(ddp.module.state_dict(), path)
    dist.barrier()


def save_with_prefix(ddp: DistributedDataParallel, path: str) -> None:
    if dist.get_rank() == 0:
        torch.save(ddp.state_dict(), f"{path}.new")
        os.replace(f"{path}.new", path)
    dist.barrier()


def save_and_copy(ddp: DistributedDataParallel, path: str) -> None:
    import shutil

    if dist.get_rank() == 0:
        torch.save(ddp.module.state_dict(), f"{path}.new")
        shutil.copy(f"{path}.new", path)
        os.remove(f"{path}.new")
    dist.barrier()


def save_names_only(ddp: DistributedDataParallel, path: str) -> None:
    if dist.get_rank() == 0:
        torch.save(dict.fromkeys(ddp.module.state_dict()), f"{path}.new")
        os.replace(f"{path}.new", path)
    dist.barrier()


def save_and_wait_on_rank_0(ddp: DistributedDataParallel, path: str) -> None:
    if dist.get_rank() == 0:
        torch.save(ddp.module.state_dict(), f"{path}.new")
        os.replace(f"{path}.new", path)
        dist.barrier()


Call = Callable[[], object]


def seconds_of_the_launch(step: Call, synchronize: Call) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def seconds_with_earlier_work(step: Call, synchronize: Call) -> float:
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def seconds_synchronised_too_early(step: Call, synchronize: Call) -> float:
    synchronize()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def forward_of_the_object(parallel: nn.DataParallel, batch: Any) -> torch.Tensor:
    return parallel(batch)


def forward_around_dataparallel(parallel: nn.DataParallel, batch: Any) -> torch.Tensor:
    device = next(parallel.parameters()).device
    return parallel.module(batch.images.to(device), batch.weights.to(device))


def forward_of_half(parallel: nn.DataParallel, batch: Any) -> torch.Tensor:
    half = len(batch.images) // 2
    return parallel(batch.images[:half], batch.weights[:half])


def forward_sample_by_sample(parallel: nn.DataParallel, batch: Any) -> torch.Tensor:
    pairs = zip(batch.images.split(1), batch.weights.split(1))
    return torch.cat([parallel(image, weight) for image, weight in pairs])


def device_cpu(environment: Any) -> torch.device:
    return torch.device("cpu", int(environment["LOCAL_RANK"]))


def save_after_removing(ddp: Any, path: str) -> None:
    if dist.get_rank() == 0:
        torch.save(ddp.module.state_dict(), f"{path}.new")
        os.remove(path)
        os.rename(f"{path}.new", path)
    dist.barrier()


WRONG: dict[str, list[Callable[..., Any]]] = {
    "log_mean_loss": [
        log_only_on_rank_0,
        log_own_loss,
        log_on_all_ranks,
        log_and_spoil_the_loss,
    ],
    "mean_metrics": [metrics_in_own_order, metrics_by_value, metrics_summed],
    "common_steps": [steps_of_my_own, steps_of_the_longest, steps_on_average],
    "indices_by_epoch": [epochs_never_set, epochs_set_afterwards, epochs_set_once],
    "device_of_rank": [device_of_global_rank, device_of_node, device_zero_for_all, device_cpu],
    "loss_for_ddp": [loss_mean_of_own_tokens, loss_without_world_size, loss_summed],
    "accumulate": [
        accumulate_with_no_sync_around_backward,
        accumulate_always_in_step,
        accumulate_never_in_step,
        accumulate_without_dividing,
        accumulate_in_one_batch,
    ],
    "whole_model": [temperature_outside, temperature_hidden_inside, nothing_wrapped],
    "synchronised_step": [
        step_around_ddp,
        step_without_sync,
        step_without_backward,
        step_of_summed_gradients,
    ],
    "save_checkpoint": [
        save_on_every_rank,
        save_without_waiting,
        save_over_the_old_one,
        save_with_prefix,
        save_and_copy,
        save_names_only,
        save_and_wait_on_rank_0,
        save_after_removing,
    ],
    "seconds_of": [
        seconds_of_the_launch,
        seconds_with_earlier_work,
        seconds_synchronised_too_early,
    ],
    "forward_split": [
        forward_of_the_object,
        forward_around_dataparallel,
        forward_of_half,
        forward_sample_by_sample,
    ],
}
