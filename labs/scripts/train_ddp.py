"""Train a classifier of small images with DistributedDataParallel: alone, on a node, on many.

torchrun --nproc-per-node=4 train_ddp.py --epochs 10 --checkpoint run.pt --resume
torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 train_ddp.py

Ranks that start again meet the addresses of the killed ones in the store that they share with the
agents, and often fail ("connectFullMesh ... Connection refused"); so they get one of their own:
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nproc-per-node=4 --max-restarts=3 train_ddp.py --checkpoint run.pt --resume
"""

import argparse
import contextlib
import gc
import itertools
import math
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

AMP = {"off": None, "fp16": torch.float16, "bf16": torch.bfloat16}
ASKED = []  # filled by SIGUSR1, with which a job script asks to save and to end
LAB = sys.modules.get("labutils")  # where the lab has started this


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, natural, amount = parser.add_argument, at_least(1, int), at_least(0, float)
    add("--model", choices=["cnn", "mlp"], default="cnn")
    add("--width", type=natural, default=16, help="channels (cnn) or tens of units (mlp)")
    add("--data", choices=["digits", "fake"], default="digits")
    add("--epochs", type=natural, default=8)
    add("--max-steps", type=natural, default=sys.maxsize, help="optimizer steps in all")
    add("--batch-size", type=natural, default=32, help="per process and backward pass")
    add("--accumulate", type=natural, default=1, help="backward passes per optimizer step")
    add("--lr", type=amount, default=0.05, help="for a global batch of 64; scaled linearly")
    add("--warmup", type=amount, default=1.0, help="epochs in which the learning rate rises")
    add("--clip", type=amount, default=1.0, help="largest norm of the gradient")
    add("--amp", choices=AMP, default="off", help="mixed precision")
    add("--sync-bn", action="store_true", help="batch statistics over all processes (GPUs only)")
    add("--device", choices=["auto", "cpu", "cuda", "vgpu"], default="auto")
    add("--seed", type=int, default=0)
    add("--workers", type=at_least(0, int), default=0, help="processes per rank that load data")
    add("--checkpoint", metavar="FILE", help="written by rank 0 each epoch, and at SIGUSR1")
    add("--save-every", type=natural, default=sys.maxsize, help="optimizer steps; written then too")
    add("--log-every", type=natural, default=sys.maxsize, help="optimizer steps")
    add("--resume", action="store_true", help="go on from the checkpoint, where there is one")
    args = parser.parse_args(arguments)
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE, the file to go on from")
    return args


def at_least(least: int, kind: type):
    def number(text: str):
        if not least <= kind(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is no finite number of at least {least}")
        return kind(text)

    return number


def join_group(kind: str) -> torch.device:
    """Choose this rank's device, make it the current one, and join the process group."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))  # the rank on this node counts for its GPUs
    local_size, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if kind == "auto":  # in the lab, CPUs do where there are too few GPUs for the ranks
        kind = "cpu" if gpus == 0 or (LAB and gpus < local_size) else "cuda"
    if kind == "cuda" and gpus < local_size:
        sys.exit(f"{local_size} processes on this node, but {gpus} GPUs: or give --device cpu.")
    if kind == "vgpu":
        from labutils import virtual

        if not virtual.is_enabled():
            virtual.enable(local_size)
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    if kind != "cpu":
        torch.get_device_module(device).set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", **alone)
    return device


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """Name a stretch of work in the lab's timeline."""
    return LAB.span(name) if LAB else contextlib.nullcontext()


def load_data(name: str) -> tuple[TensorDataset, TensorDataset]:
    """1,440 training and 357 test images; the same on every rank, whatever its seed."""
    fixed = torch.Generator().manual_seed(0)
    if name == "digits":  # 8 × 8 pixels from 0 to 16; they come with scikit-learn
        from sklearn.datasets import load_digits

        pixels, digits = load_digits(return_X_y=True)
        images, labels = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(digits)
    else:  # ten patterns in noise
        labels = torch.randint(10, (1797,), generator=fixed)
        patterns = torch.randn(10, 1, 8, 8, generator=fixed)
        images = patterns[labels] + torch.randn(1797, 1, 8, 8, generator=fixed)
    train, test = torch.randperm(1797, generator=fixed).split([1440, 357])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class ResumableSampler(DistributedSampler):
    """Begins where ``start`` samples of the epoch, counted over all ranks, are done with."""

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start // self.num_replicas, None)


def build_model(name: str, width: int) -> nn.Module:
    if name == "mlp":
        hidden = [nn.Linear(64, 10 * width), nn.ReLU(), nn.Linear(10 * width, 10 * width)]
        return nn.Sequential(nn.Flatten(), *hidden, nn.ReLU(), nn.Linear(10 * width, 10))
    layers = []
    for i, o in itertools.pairwise((1, width, 2 * width, 4 * width)):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * width, 10)]
    return nn.Sequential(*layers, *head)


class Training:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.epoch = self.samples = self.step = 0  # samples of this epoch, steps since the start
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.global_batch = args.batch_size * args.accumulate * self.world_size
        if args.sync_bn and device.type == "cpu":
            sys.exit("--sync-bn: SyncBatchNorm works on GPUs only; without one try --device vgpu.")
        if self.rank == 0 and args.checkpoint:  # it would be found out after an epoch only
            folder = os.path.join(os.path.dirname(args.checkpoint) or ".", "")
            if os.path.isdir(args.checkpoint) or not os.access(folder, os.W_OK):
                sys.exit(f"--checkpoint {args.checkpoint}: no such file can be written in {folder}")
        torch.manual_seed(args.seed)  # the same first parameters everywhere ...
        self.model = build_model(args.model, args.width)
        torch.manual_seed(args.seed + 1 + self.rank)  # ... but each rank drops out other units
        self.random = [torch, torch.cuda] if device.type == "cuda" else [torch]
        if args.sync_bn:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.model.to(device)
        self.ddp = DistributedDataParallel(self.model, None if device.type == "cpu" else [device])
        more = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), args.lr, **more)
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
        self.train_set, test_set = load_data(args.data)
        self.sampler = ResumableSampler(self.train_set, seed=args.seed)
        more = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
        more["generator"] = torch.Generator()  # not the one that dropout draws from
        self.loader = DataLoader(self.train_set, args.batch_size, sampler=self.sampler, **more)
        mine = range(self.rank, len(test_set), self.world_size)  # no sample twice, so it is exact
        self.test_loader = DataLoader(Subset(test_set, mine), args.batch_size, **more)

    def run(self) -> None:
        args, batch, ranks = self.args, self.global_batch, f"{self.world_size} x {self.device.type}"
        say(f"{ranks}: {batch} samples/step, lr up to {args.lr * batch / 64:g}")
        if args.resume:
            self.resume()
        if self.epoch >= args.epochs or self.step >= args.max_steps:
            say(f"already finished: {self.epoch} epochs, {self.step} steps")
        while self.epoch < args.epochs and self.step < args.max_steps:
            seen, loss, seconds = self.train_epoch()
            correct, count = self.evaluate()
            accuracy = f"test accuracy {correct / count:.2%} ({correct} of {count})"
            place = f"epoch {self.epoch}, step {self.step}"
            say(f"{place}: loss {loss:.4f}, {accuracy}, {seen / seconds:.0f} samples/s")
            self.save()

    def rate(self) -> float:
        """Linear scaling and warm-up (Goyal et al., 2017), then a cosine, for any world size."""
        args, peak = self.args, self.args.lr * self.global_batch / 64
        done = self.epoch + (self.samples + self.global_batch) / len(self.train_set)
        if done < args.warmup:
            return peak * done / args.warmup
        rest = (done - args.warmup) / max(1e-9, args.epochs - args.warmup)
        return peak * max(1e-3, 0.5 + 0.5 * math.cos(math.pi * min(1.0, rest)))

    def train_epoch(self) -> tuple[int, float, float]:
        """What is left of the epoch; returns the samples seen, their mean loss, and seconds."""
        self.sampler.set_epoch(self.epoch)  # else every epoch has the same order
        self.sampler.start, begin = self.samples, time.perf_counter()
        self.loader.generator.manual_seed(self.args.seed + 1000 * self.epoch + self.rank)
        self.ddp.train()
        totals, batches = torch.zeros(2, device=self.device), iter(self.loader)
        while self.step < self.args.max_steps:
            totals += self.train_step(list(itertools.islice(batches, self.args.accumulate)))
            self.close_epoch()
            if self.step % self.args.log_every == 0:
                say(f"step {self.step}: mean loss on rank 0 {(totals[0] / totals[1]).item():.4f}")
            if self.step % self.args.save_every == 0:
                self.save()
            self.end_if_asked()
            if self.samples == 0:
                break
        dist.all_reduce(totals)
        loss, seen = totals.tolist()
        return int(seen), loss / seen, time.perf_counter() - begin

    def close_epoch(self) -> None:
        """Before a checkpoint is written, so that nobody resumes at an epoch that has no more."""
        if self.samples >= self.sampler.total_size:
            self.epoch, self.samples = self.epoch + 1, 0

    def end_if_asked(self) -> None:
        """End all ranks after the same step, once SIGUSR1 has come to any of them."""
        asked = torch.tensor(len(ASKED))
        dist.all_reduce(asked, dist.ReduceOp.MAX)  # of CPUs: some 0.1 ms, and no GPU waits for it
        if asked:
            self.save()
            say(f"ended by SIGUSR1 after step {self.step}{', saved' * bool(self.args.checkpoint)}")
            dist.barrier()  # once a rank has ended, torchrun ends the others: not while one writes
            sys.exit(128 + signal.SIGUSR1)  # not 0: tells a job script that there is more to do

    def train_step(self, batches) -> torch.Tensor:
        """One optimizer step; returns the sum of the losses and the number of samples."""
        count = sum(len(labels) for _, labels in batches)  # the same on all ranks
        total = torch.zeros((), device=self.device)
        for number, (images, labels) in enumerate(batches, 1):
            # Around forward as well: there DDP decides whether backward will synchronise.
            with contextlib.nullcontext() if number == len(batches) else self.ddp.no_sync():
                loss = self.loss(images, labels)
                with span("backward"):
                    self.scaler.scale(loss / count).backward()
            total += loss.detach()
        with span("optimizer"):
            self.update()
        self.samples, self.step = self.samples + count * self.world_size, self.step + 1
        return torch.stack([total, torch.full_like(total, count)])

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images, labels = (t.to(self.device, non_blocking=True) for t in (images, labels))
        low = AMP[self.args.amp]
        with span("forward"), torch.autocast(self.device.type, low, enabled=low is not None):
            return nn.functional.cross_entropy(self.ddp(images), labels, reduction="sum")

    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.scaler.unscale_(self.optimizer)  # so that the true gradient is clipped
        nn.utils.clip_grad_norm_(self.ddp.parameters(), self.args.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> tuple[int, int]:
        """Correct answers among how many: every test image counts once, over all ranks."""
        for buffer in self.model.buffers():  # batch statistics: each rank's last are its own
            dist.broadcast(buffer, src=0)
        self.model.eval()
        sums = torch.zeros(2, device=self.device, dtype=torch.int64)
        for images, labels in self.test_loader:  # not through DDP: some ranks make fewer calls
            right = self.model(images.to(self.device)).argmax(1) == labels.to(self.device)
            sums += torch.stack([right.sum(), torch.full_like(right.sum(), len(labels))])
        dist.all_reduce(sums)
        return tuple(sums.tolist())

    def save(self) -> None:
        """Rank 0 writes the checkpoint, with the random state of every rank."""
        if not self.args.checkpoint:
            return
        mine = [module.get_rng_state() for module in self.random]
        states = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(mine, states)
        if self.rank == 0:
            write_atomically({
                "model": self.model.state_dict(),  # the names of the model, without "module."
                "optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(),
                "epoch": self.epoch, "samples": self.samples, "step": self.step, "random": states,
            }, self.args.checkpoint)  # fmt: skip

    def resume(self) -> None:
        """Go on from the checkpoint; only rank 0 needs access to the file."""
        path, box = self.args.checkpoint, [None]
        if self.rank == 0 and os.path.exists(path):
            box = [{}]
            with contextlib.suppress(Exception):  # of many kinds: zip, pickle, the system's
                box = [torch.load(path, map_location="cpu")]
        dist.broadcast_object_list(box)
        if (state := box[0]) is None:
            return say("there is no checkpoint yet: from the beginning")
        try:
            for name in ("model", "optimizer", "scaler"):
                getattr(self, name).load_state_dict(state[name])
            places = [state[name] for name in ("epoch", "samples", "step")]
            self.epoch, self.samples, self.step = map(at_least(0, int), places)
            if self.rank < len(states := state["random"]):
                for module, random in zip(self.random, states[self.rank]):
                    module.set_rng_state(random)
        except Exception:  # of as many kinds
            sys.exit(f"--resume: {path} is damaged, or of another --model, --width or --amp.")
        self.close_epoch()
        return say(f"resumed at step {self.step}, written by {len(states)} ranks")


def write_atomically(state, path: str) -> None:
    """Whoever is killed meanwhile leaves the old file as it was."""
    try:
        with open(f"{path}.unfinished", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.unfinished", path)
    except (OSError, RuntimeError) as error:  # which torch makes of the system's
        sys.exit(f"--checkpoint {path} cannot be written: {error.__context__ or error}")
    finally:
        with contextlib.suppress(OSError):  # it is there after an error only, say on a full disk
            os.remove(f"{path}.unfinished")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if not LAB and hasattr(signal, "SIGUSR1"):  # the lab has ranks show with it where they hang
        signal.signal(signal.SIGUSR1, lambda *_: ASKED.append(True))
    device = join_group(args.device)
    try:
        Training(args, device).run()
    finally:  # a DDP model that outlives its process group may hang the process
        traceback.clear_frames(sys.exc_info()[2])  # the frames of an error hold it
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
