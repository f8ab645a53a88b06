"""DDP scripts to inspect: one that is right, others in which a line or two are wrong."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

GOOD = """\
import contextlib, copy, os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
device = torch.device("cpu")
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
ddp = DDP(model)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Broken:
    """A change of the good script, and what is to be found in it."""

    name: str
    changes: dict[str, str]
    kinds: set[str]
    line: str = ""
    """What stands in the line that the first finding of the first kind (by name) points to."""
    says: str = ""
    """What its evidence or remedy says."""
    nodes: int = 1
    ranks: int = 2
    timeout: float = 30.0
    """Short where it is to hang."""

    def source(self) -> str:
        """The script; each change must really be one."""
        text = GOOD
        for old, new in self.changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


_UNEVEN = "Subset(data, range(40) if rank == 0 else range(40, 64))"
_LOADER = "loader = DataLoader(data, 8, sampler=sampler)\n"
_FORWARD = "loss = nn.functional.cross_entropy(ddp(x), y)"

BROKEN = [
    Broken(
        "no sampler",
        {"sampler=sampler": "shuffle=True", "    sampler.set_epoch(epoch)\n": ""},
        {"no-sampler"}, "DataLoader(data", "64 of 64 samples, and 64 of them",
    ),
    Broken(
        "no sampler, random images",
        {
            "data = TensorDataset(": "class Noisy(TensorDataset):\n"
            "    def __getitem__(self, i):\n"
            "        x, y = super().__getitem__(i)\n"
            "        return x + torch.randn(4) * (1 + dist.get_rank()), y\n"
            "data = Noisy(",
            "sampler=sampler": "shuffle=True",
        },
        {"no-sampler"}, "DataLoader(data",
    ),
    Broken(
        "no sampler, stopped early",
        {"sampler=sampler": "shuffle=True", "        optimizer.step()\n":
         "        optimizer.step()\n        if optimizer.param_groups[0].setdefault('n', 0) == 2:\n"
         "            break\n        optimizer.param_groups[0]['n'] += 1\n"},
        {"no-sampler"}, "DataLoader(data",
    ),
    Broken(
        "slices by hand, the same everywhere",
        {"in loader:": "in zip(data.tensors[0].split(8), data.tensors[1].split(8)):"},
        {"no-sampler"}, "optimizer.step()", "bit for bit",
    ),
    Broken(
        "sampler of the node",
        {"DistributedSampler(data)": 'DistributedSampler(data, int(os.environ["LOCAL_WORLD_SIZE"]),'
                                     ' int(os.environ["LOCAL_RANK"]))'},
        {"no-sampler"}, "DataLoader(data", "made for 2 replicas, but there are 4", nodes=2,
    ),
    Broken(
        "no set_epoch", {"    sampler.set_epoch(epoch)\n": ""},
        {"no-set-epoch"}, "in loader:", "the same 32 indices in the same order",
    ),
    Broken(
        "no set_epoch, a loader for each epoch",
        {"    sampler.set_epoch(epoch)\n": "", _LOADER: "",
         "    for x, y in loader:": f"    {_LOADER}    for x, y in loader:"},
        {"no-set-epoch"}, "in loader:", "the same 32 indices in the same order",
    ),
    Broken(
        "set_epoch always with the same number, a loader for each epoch",
        {"set_epoch(epoch)": "set_epoch(0)", _LOADER: "",
         "    for x, y in loader:": f"    {_LOADER}    for x, y in loader:"},
        {"no-set-epoch"}, "in loader:", "the same 32 indices in the same order",
    ),
    Broken(
        "no set_epoch, a sampler for each epoch",
        {"sampler = DistributedSampler(data)\n": "", _LOADER: "",
         "    sampler.set_epoch(epoch)\n": "    sampler = DistributedSampler(data)\n",
         "    for x, y in loader:": f"    {_LOADER}    for x, y in loader:"},
        {"no-set-epoch"}, "in loader:", "the same 32 indices in the same order",
    ),
    Broken(
        "no zero_grad", {"        optimizer.zero_grad()\n": ""},
        {"no-zero-grad"}, "optimizer.step()", "After 7 optimizer steps on rank 0",
    ),
    Broken(
        "learning rate 0", {"ddp.parameters(), 0.1": "ddp.parameters(), 0.0"},
        {"nothing-trained"}, "optimizer.step()", "learning rate was 0",
    ),
    Broken(
        "optimizer of a copy",
        {"SGD(ddp.parameters()": "SGD(copy.deepcopy(model).parameters()"},
        {"nothing-trained"}, "optimizer.step()", "Make the optimizer of the parameters",
    ),
    Broken(
        "detached loss", {_FORWARD: _FORWARD.replace("ddp(x)", "ddp(x).detach().requires_grad_()")},
        {"zero-gradients"}, "optimizer.step()", "no parameter had a gradient",
    ),
    Broken(
        "gradients cleared before the step",
        {"        loss.backward()\n": "        loss.backward()\n"
                                      "        optimizer.zero_grad(set_to_none=False)\n"},
        {"zero-gradients"}, "optimizer.step()", "every gradient was zero",
    ),
    Broken(
        "constant loss", {_FORWARD: "out = ddp(x).sum(); loss = out - out.detach() + 1"},
        {"loss-constant"}, "optimizer.step()", "It was 1 in all 8 backward passes",
    ),
    Broken(
        "not a number", {"0.1)": "1e38)"}, {"loss-not-finite"}, "optimizer.step()", "nan",
    ),
    Broken(
        "every rank saves", {"if rank == 0:\n": "if True:\n"},
        {"saved-by-every-rank"}, "torch.save", "model.pt",
    ),
    Broken(
        "around DDP", {"cross_entropy(ddp(x)": "cross_entropy(ddp.module(x)"},
        {"around-ddp", "diverged"}, "ddp.module(x)", "8 optimizer steps",
    ),
    Broken(
        "always no_sync",
        {f"        {_FORWARD}\n        loss.backward()\n":
         f"        with ddp.no_sync():\n            {_FORWARD}\n            loss.backward()\n"},
        {"no-sync-too-long", "diverged"}, "optimizer.step()", "they had not been synchronised",
    ),
    Broken(
        "no_sync around backward only",
        {"        loss.backward()\n": "        with ddp.no_sync():\n            loss.backward()\n"
                                      "        ddp(x).mean().backward()\n"},
        {"no-sync-backward-only"}, "loss.backward()", "DDP decides that in the forward pass",
    ),
    Broken(
        "no DDP", {"ddp = DDP(model)": "ddp = model"}, {"no-ddp"}, "optimizer.step()",
        "no DistributedDataParallel was made",
    ),
    Broken(
        "changed after DDP was made",
        {"ddp = DDP(model)\n": "ddp = DDP(model)\n"
                               "with torch.no_grad():\n    model[0].bias += rank\n"},
        {"diverged"}, "optimizer.step()", "after DDP was made. The first that differs is 0.bias",
    ),
    Broken(
        "learning rate by rank", {"ddp.parameters(), 0.1": "ddp.parameters(), 0.1 * (1 + rank)"},
        {"diverged"}, "optimizer.step()", "learning rates differ: 0.1 on rank 0, 0.2 on rank 1",
    ),
    Broken(
        "unequal numbers of batches",
        {"loader = DataLoader(data, 8, sampler=sampler)":
         f"loader = DataLoader({_UNEVEN}, 8, shuffle=True)"},
        {"unequal-steps"}, "loader = DataLoader", "rank 0: 5, rank 1: 3", timeout=4,
    ),
    Broken(
        "all-reduce on one rank",
        {"if rank == 0:\n": "if rank == 0:\n    dist.all_reduce(torch.ones(1))\n"},
        {"collectives-differ"}, "dist.all_reduce(torch.ones(1))", "rank 1",
    ),
    Broken(
        "rank for local rank", {'torch.device("cpu")': 'torch.device("vgpu", rank)'},
        {"rank-for-local-rank"}, ".to(device)", "Rank 1 is local rank 0", nodes=2, ranks=1,
    ),
    Broken(
        "one GPU for all", {'torch.device("cpu")': 'torch.device("vgpu", 0)'},
        {"shared-gpu"}, "DDP(model)", "ranks 0, 1 are all on vgpu:0",
    ),
    Broken(
        "no process group",
        {'dist.init_process_group("gloo")\n': "", "dist.get_rank(), dist.get_world_size()": "0, 1",
         "DDP(model)": "model", "sampler=sampler": "shuffle=True", "if rank == 0:": "if False:",
         "sampler = DistributedSampler(data)": "sampler = DistributedSampler(data, 1, 0)",
         "dist.barrier()\ndist.destroy_process_group()\n": ""},
        {"no-group", "no-sampler"}, "", "not called on any of 2 ranks",
    ),
    Broken(
        "weighted draws, the same everywhere",
        {"sampler = DistributedSampler(data)":
         "from torch.utils.data import WeightedRandomSampler as W\n"
         "sampler = W(torch.ones(64), 32, generator=torch.Generator().manual_seed(1))",
         "    sampler.set_epoch(epoch)\n": ""},
        {"no-sampler"}, "DataLoader(data",
    ),
    Broken(
        "set_epoch always with the same number", {"set_epoch(epoch)": "set_epoch(0)"},
        {"no-set-epoch"}, "in loader:", "the same 32 indices in the same order",
    ),
    Broken(
        "sampler seeded by rank",
        {"DistributedSampler(data)": "DistributedSampler(data, seed=rank)"},
        {"sampler-seeds-differ"}, "DataLoader(data", "The seeds are 0 on rank 0, 1 on rank 1",
    ),
    Broken(
        "split by rank",
        {"model = nn.Seq": "torch.manual_seed(rank)\n"
                           "data, _ = torch.utils.data.random_split(data, [48, 16])\n"
                           "model = nn.Seq"},
        {"splits-differ"}, "DataLoader(data", "trains on what another one tests on",
    ),
    Broken(
        "a head outside DDP",
        {"optimizer = torch.optim.SGD(ddp.parameters(), 0.1)":
         "head = nn.Linear(3, 3)\n"
         "optimizer = torch.optim.SGD([*ddp.parameters(), *head.parameters()], 0.1)",
         "cross_entropy(ddp(x)": "cross_entropy(head(ddp(x))"},
        {"diverged"}, "optimizer.step()", "parameter 4 (not inside DDP",
    ),
    Broken(
        "one step left out on a rank",
        {"        optimizer.step()\n": "        n = ddp.n = getattr(ddp, 'n', 0) + 1\n"
                                       "        if rank == 0 or n != 3:\n"
                                       "            optimizer.step()\n"},
        {"diverged"}, "optimizer.step()", "rank 1 made 7, others 8",
    ),
    Broken(
        "the last step left out on a rank",
        {"        optimizer.step()\n": "        n = ddp.n = getattr(ddp, 'n', 0) + 1\n"
                                       "        if rank == 0 or n < 8:\n"
                                       "            optimizer.step()\n"},
        {"diverged"}, "optimizer.step()", "rank 1 made 7, others 8",
    ),
    Broken(
        "no step at all", {"        optimizer.step()\n": ""},
        {"nothing-trained"}, "", "No optimizer made a step",
    ),
    Broken(
        "one rank leaves early",
        {"        optimizer.zero_grad()\n": "        optimizer.zero_grad()\n"
         "        if rank == 1 and epoch == 1:\n            raise SystemExit(0)\n"},
        {"collectives-differ"}, "raise SystemExit(0)", "Rank 1 left the script", timeout=6,
    ),
    Broken(
        "evaluation through DDP on rank 0 only",
        {"nn.Tanh()": "nn.BatchNorm1d(8), nn.Tanh()",
         "        optimizer.step()\n": "        optimizer.step()\n"
         "    if rank == 0:\n        ddp(x)\n"},
        {"hangs"}, "        ddp(x)", "Rank 0 called DDP there", timeout=6,
    ),
    Broken(
        "an error on one rank",
        {"        optimizer.step()\n": "        optimizer.step()\n"
         "        if rank == 1 and epoch == 1:\n            raise ValueError('bad sample')\n"},
        {"failed"}, "raise ValueError", "bad sample",
    ),
]  # fmt: skip

CUDA = """\
import os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).cuda()
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
ddp = DDP(model, device_ids=[local_rank], output_device=local_rank)
optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cuda")
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler, pin_memory=True)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.to(f"cuda:{local_rank}", non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(ddp(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    total = torch.zeros(1, device="cuda")
    total += loss.detach()
    dist.all_reduce(total)
    torch.cuda.synchronize()
    if rank == 0:
        print(epoch, total.item(), torch.cuda.max_memory_allocated(), torch.cuda.get_device_name())
        torch.save(model.state_dict(), "model.pt")
dist.barrier()
state = torch.load("model.pt", map_location=f"cuda:{local_rank}")
state = torch.load("model.pt", map_location={"cuda:0": f"cuda:{local_rank}"})
model.load_state_dict(state)
dist.destroy_process_group()
"""
"""Written for real GPUs, without a way out."""

SPAWN = """\
import torch, torch.multiprocessing as mp

def train(rank, world):
    raise AssertionError("never runs")

if __name__ == "__main__":
    world = torch.cuda.device_count()
    mp.spawn(train, args=(world,), nprocs=world)
"""

_HEAD, _BODY = GOOD.split('dist.init_process_group("gloo")\n')
SPAWN_GOOD = (
    _HEAD
    + "def train(rank, world):\n"
    + '    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"\n'
    + '    dist.init_process_group("nccl", rank=rank, world_size=world)\n'
    + textwrap.indent(_BODY, "    ")
    + 'if __name__ == "__main__":\n    torch.multiprocessing.spawn(train, args=(2,), nprocs=2)\n'
)
"""The same as people write it who start the processes themselves."""

ACCELERATE = """\
import contextlib
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset


class BatchSamplerShard(BatchSampler):
    # Every rank draws the same batches, and keeps each world-th; the last round is filled up.
    def __init__(self, inner, world, rank):
        self.inner, self.world, self.rank = inner, world, rank
        self.batch_size, self.drop_last, self.sampler = inner.batch_size, False, inner.sampler

    def __len__(self):
        return -(-len(self.inner) // self.world)

    def __iter__(self):
        batches = list(self.inner)
        first = [index for batch in batches for index in batch]
        batches[-1] = (batches[-1] + first)[: self.batch_size]
        while len(batches) % self.world:
            batches.append(first[: self.batch_size])
        yield from batches[self.rank :: self.world]


class SeedableRandomSampler(RandomSampler):
    epoch = 0

    def __iter__(self):
        self.generator = torch.Generator().manual_seed(42 + self.epoch)
        self.epoch += 1
        yield from super().__iter__()

    def set_epoch(self, epoch):
        self.epoch = epoch


class DataLoaderShard(DataLoader):
    def __iter__(self):
        iterator = super().__iter__()
        try:
            current = next(iterator)
        except StopIteration:
            return
        while True:  # one batch ahead, to know the last one
            try:
                following = next(iterator)
            except StopIteration:
                yield current, True
                return
            yield current, False
            current = following


class Accelerator:
    def __init__(self, accumulate):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.accumulate, self.calls = accumulate, 0

    def prepare_loader(self, loader):
        shard = BatchSamplerShard(loader.batch_sampler, self.world, self.rank)
        return DataLoaderShard(loader.dataset, batch_sampler=shard)

    @contextlib.contextmanager
    def accumulating(self, model, last):
        self.calls += 1
        self.sync = last or self.calls % self.accumulate == 0
        with contextlib.nullcontext() if self.sync else model.no_sync():
            yield

    def gather_for_metrics(self, values, rest):
        parts = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(parts, values)
        return torch.cat(parts)[:rest]


accelerator = Accelerator(accumulate=3)
torch.manual_seed(7)
train = TensorDataset(torch.randn(101, 4), torch.randint(3, (101,)))
test = TensorDataset(torch.randn(37, 4), torch.randint(3, (37,)))
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
    )
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
loader = accelerator.prepare_loader(DataLoader(train, 8, sampler=SeedableRandomSampler(train)))
test_loader = accelerator.prepare_loader(DataLoader(test, 8))
for epoch in range(3):
    model.train()
    for (x, y), last in loader:
        with accelerator.accumulating(model, last):
            loss = nn.functional.cross_entropy(model(x), y) / accelerator.accumulate
            loss.backward()
            if accelerator.sync:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    model.eval()
    seen = correct = 0
    for (x, y), _ in test_loader:
        with torch.no_grad():
            right = (model(x).argmax(1) == y).float()
        right = accelerator.gather_for_metrics(right, len(test) - seen)
        seen, correct = seen + len(right), correct + right.sum().item()
    assert seen == len(test), seen
if accelerator.rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.barrier()
dist.destroy_process_group()
"""

GOOD_CHANGES = {
    "as it is": {},
    "workers, random images": {
        "data = TensorDataset(": "class Noisy(TensorDataset):\n"
        "    def __getitem__(self, i):\n"
        "        x, y = super().__getitem__(i)\n"
        "        return x + torch.randn(4), y\n"
        "data = Noisy(",
        "sampler=sampler)": "sampler=sampler, num_workers=1, persistent_workers=True)",
    },
    "own shards, by index": {
        "loader = DataLoader(data, 8, sampler=sampler)":
        "loader = DataLoader(Subset(data, range(rank, 64, world)), 8, shuffle=True)",
    },
    "own shards, by content": {
        "loader = DataLoader(data, 8, sampler=sampler)":
        "mine = TensorDataset(*(t[rank::world] for t in data.tensors))\n"
        "loader = DataLoader(mine, 8, shuffle=True)",
    },
    "an iterable data set for each rank": {
        "loader = DataLoader(data, 8, sampler=sampler)":
        "from torch.utils.data import IterableDataset\n"
        "class Shard(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return iter([data[i] for i in range(rank, 64, world)])\n"
        "loader = DataLoader(Shard(), 8)",
    },
    "weighted draws, seeded by rank": {
        "sampler = DistributedSampler(data)":
        "from torch.utils.data import WeightedRandomSampler as W\n"
        "sampler = W(torch.ones(64), 96, generator=torch.Generator().manual_seed(rank))",
        "    sampler.set_epoch(epoch)\n": "",
    },
    "own shards, shuffled with own seeds": {
        "sampler = DistributedSampler(data)":
        "class Own(DistributedSampler):\n"
        "    def __iter__(self):\n"
        "        g = torch.Generator().manual_seed(self.seed + self.epoch)\n"
        "        return iter((rank + world * torch.randperm(32, generator=g)).tolist())\n"
        "sampler = Own(data, seed=rank)",
    },
    "an order that stays": {
        "sampler = DistributedSampler(data)":
        "class Curriculum:\n"
        "    def __len__(self):\n        return 32\n"
        "    def set_epoch(self, epoch):\n        self.epoch = epoch\n"
        "    def __iter__(self):\n        return iter(range(rank, 64, world))\n"
        "sampler = Curriculum()",
    },
    "the same split everywhere": {
        "model = nn.Seq": "data, _ = torch.utils.data.random_split(data, [48, 16])\nmodel = nn.Seq",
    },
    "gradients averaged by hand": {
        "ddp = DDP(model)": "ddp = model",
        "        loss.backward()\n": "        loss.backward()\n"
        "        for p in model.parameters():\n"
        "            dist.all_reduce(p.grad)\n"
        "            p.grad /= world\n",
    },
    "a loader for each epoch": {
        _LOADER: "", "    for x, y in loader:": f"    {_LOADER}    for x, y in loader:",
    },
    "loaders of a tensor and of a list": {
        "for epoch in range(2):\n": "for epoch in range(2):\n"
        "    for other in (data.tensors[0], list(range(64))):\n"
        "        assert len(list(DataLoader(other, 8))) == 8\n",
    },
    "a sampler for each epoch": {
        "sampler = DistributedSampler(data)\n": "", _LOADER: "",
        "    sampler.set_epoch(epoch)\n":
        f"    sampler = DistributedSampler(data)\n    sampler.set_epoch(epoch)\n    {_LOADER}",
    },
    "other data in each epoch": {
        "    sampler.set_epoch(epoch)\n":
        "    data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))\n"
        f"    sampler = DistributedSampler(data)\n    {_LOADER}",
    },
    "gradients set to None": {
        "optimizer.zero_grad()": "[setattr(p, 'grad', None) for p in ddp.parameters()]",
    },
    "gradients set to zero": {
        "optimizer.zero_grad()":
        "[p.grad.zero_() for p in ddp.parameters() if p.grad is not None]",
    },
    "gradients cleared in every third step": {
        "        optimizer.zero_grad()\n": "        n = ddp.n = getattr(ddp, 'n', 0) + 1\n"
        "        if n % 3 == 1:\n            optimizer.zero_grad()\n",
    },
    "gradients that fade": {
        "optimizer.zero_grad()":
        "[p.grad.mul_(0.5) for p in ddp.parameters() if p.grad is not None]",
    },
    "accumulation, gradients set to None": {
        "        optimizer.zero_grad()\n": "",
        f"        {_FORWARD}\n        loss.backward()\n        optimizer.step()\n":
        "        n = ddp.n = getattr(ddp, 'n', 0) + 1\n"
        "        with contextlib.nullcontext() if n % 2 == 0 else ddp.no_sync():\n"
        "            nn.functional.cross_entropy(ddp(x), y).backward()\n"
        "        if n % 2 == 0:\n            optimizer.step()\n"
        "            for p in ddp.parameters():\n                p.grad = None\n",
    },
    "accumulation": {
        "        optimizer.zero_grad()\n": "",
        "        loss = nn.functional.cross_entropy(ddp(x), y)\n        loss.backward()\n"
        "        optimizer.step()\n":
        "        n = ddp.n = getattr(ddp, 'n', 0) + 1\n"
        "        with contextlib.nullcontext() if n % 2 == 0 else ddp.no_sync():\n"
        "            nn.functional.cross_entropy(ddp(x), y).backward()\n"
        "        if n % 2 == 0:\n"
        "            optimizer.step()\n"
        "            optimizer.zero_grad()\n",
    },
    "uneven inputs inside Join": {
        "loader = DataLoader(data, 8, sampler=sampler)": f"loader = DataLoader({_UNEVEN}, 8)",
        "    for x, y in loader:\n": "    from torch.distributed.algorithms.join import Join\n"
        "    for x, y in Joined(Join([ddp]), loader):\n",
        "for epoch in range(2):\n": "def Joined(join, batches):\n"
        "    with join:\n        yield from batches\n"
        "for epoch in range(2):\n",
    },
    "sharded optimizer": {
        "torch.optim.SGD(ddp.parameters(), 0.1)":
        "__import__('torch.distributed.optim').distributed.optim.ZeroRedundancyOptimizer("
        "ddp.parameters(), torch.optim.Adam, lr=0.1)",
    },
    "a closure": {
        "        optimizer.zero_grad()\n        loss = nn.functional.cross_entropy(ddp(x), y)\n"
        "        loss.backward()\n        optimizer.step()\n": "        def closure():\n"
        "            optimizer.zero_grad()\n"
        "            loss = nn.functional.cross_entropy(ddp(x), y)\n"
        "            loss.backward()\n"
        "            return loss\n"
        "        optimizer.step(closure)\n",
        "SGD(ddp.parameters(), 0.1)": "LBFGS(ddp.parameters(), 0.1, max_iter=3)",
    },
    "static graph, compressed gradients": {
        "ddp = DDP(model)\n": "ddp = DDP(model, static_graph=True, gradient_as_bucket_view=True)\n"
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        "ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)\n",
    },
    "two models": {
        "optimizer = torch.optim.SGD(ddp.parameters(), 0.1)":
        "critic = DDP(nn.Linear(3, 1))\n"
        "other = torch.optim.Adam(critic.parameters(), 0.01)\n"
        "optimizer = torch.optim.SGD(ddp.parameters(), 0.1)",
        "        optimizer.step()\n": "        optimizer.step()\n"
        "        other.zero_grad()\n"
        "        critic(ddp(x).detach()).square().mean().backward()\n"
        "        other.step()\n",
    },
    "two models, gradients set to None": {
        "optimizer.zero_grad()": "[setattr(p, 'grad', None) for p in ddp.parameters()]",
        "optimizer = torch.optim.SGD(ddp.parameters(), 0.1)":
        "critic = DDP(nn.Linear(3, 1))\n"
        "other = torch.optim.Adam(critic.parameters(), 0.01)\n"
        "optimizer = torch.optim.SGD(ddp.parameters(), 0.1)",
        "        optimizer.step()\n": "        optimizer.step()\n"
        "        [setattr(p, 'grad', None) for p in critic.parameters()]\n"
        "        critic(ddp(x).detach()).square().mean().backward()\n"
        "        other.step()\n",
    },
    "virtual GPUs": {
        'torch.device("cpu")': 'torch.device("vgpu", int(os.environ["LOCAL_RANK"]))',
        "ddp = DDP(model)": "ddp = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model), [device])",
        "nn.Tanh()": "nn.BatchNorm1d(8), nn.Tanh()",
    },
}  # fmt: skip
"""Changes after which the script is as right as before."""


def changed(changes: dict[str, str]) -> str:
    """The good script with these changes."""
    return Broken("", changes, set()).source()
