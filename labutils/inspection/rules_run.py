"""Mistakes with the run itself: group, devices, checkpoints, and how it ended."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from labutils.inspection.findings import Finding, Seen
from labutils.launch.run import RankTimeout
from labutils.launch.verdict import names

_NO_SUCH_GPU = re.compile(
    r"invalid device ordinal|no such device|there (is|are) only|vgpu:\d+ does not exist", re.I
)
_NEEDS_CUDA = re.compile(r"compiled with CUDA|_cuda_|NVIDIA driver|No CUDA GPUs", re.I)

_FINISHED = re.compile(r"waits in .* which has finished")


def find(seen: Seen) -> Iterator[Finding]:
    """All that is wrong with the run."""
    yield from _group(seen)
    yield from _devices(seen)
    yield from _splits(seen)
    yield from _saves(seen)
    yield from _ended(seen)


def _group(seen: Seen) -> Iterator[Finding]:
    made = [f for facts in seen.ranks for f in facts["groups"] if f["what"] == "made"]
    trained = any(facts["steps"] for facts in seen.ranks)
    for group in [f for f in made if f["replaced"]][:1]:
        yield Finding(
            "backend-replaced", f"gloo took the place of the backend {group['backend']!r}",
            "NCCL needs a GPU for each rank, and there is none here. What was seen holds for both; "
            "speed does not, nor what only NCCL refuses.",
            'Run it once where there are GPUs. For machines without: "nccl" if '
            'torch.cuda.is_available() else "gloo".', group["where"], mistake=False,
        )  # fmt: skip
    if seen.world > 1 and trained and not made and seen.run.failure is None:
        yield Finding(
            "no-group", "The ranks never join a process group",
            f"init_process_group was not called on any of {seen.world} ranks, so each did the same "
            "work on its own.",
            "Call torch.distributed.init_process_group() first; torchrun has set what it needs.",
        )  # fmt: skip


def _devices(seen: Seen) -> Iterator[Finding]:
    """GPUs chosen by the rank, which is right on the first node only; GPUs that ranks share."""
    chosen = {
        facts["rank"]: (facts, facts["models"][0]) for facts in seen.ranks if facts["models"]
    }  # fmt: skip
    failed = seen.run.failure.rank if seen.run.failure is not None else None
    facts = next((f for f in seen.ranks if f["rank"] == failed), None)
    text = str(seen.run.failure).split("\n")[0]
    if facts and facts["rank"] != facts["local_rank"] and _NO_SUCH_GPU.search(text):
        yield _rank_for_local_rank(facts, text, _failing_line(seen))
        return
    wrong = [
        (f, model) for f, model in chosen.values()
        if model["index"] == f["rank"] != f["local_rank"]
    ]  # fmt: skip
    if wrong:
        f, model = wrong[0]
        yield _rank_for_local_rank(f, f"its model is on {model['device']}", model["where"])
        return
    yield from _shared_gpu(list(chosen.values()))


def _rank_for_local_rank(facts: dict[str, Any], evidence: str, where: str) -> Finding:
    return Finding(
        "rank-for-local-rank", "The GPU is chosen by the rank instead of the local rank",
        f"Rank {facts['rank']} is local rank {facts['local_rank']} of its node, which has GPUs 0 "
        f"to {facts['local_size'] - 1}: {evidence}",
        'Choose the GPU by int(os.environ["LOCAL_RANK"]).', where, (facts["rank"],),
    )  # fmt: skip


def _failing_line(seen: Seen) -> str:
    found = re.search(
        r"^ +(?:at )?((?!rank \d)\S.*?, line \d+)", str(seen.run.failure), re.MULTILINE
    )
    return found[1] if found else ""


def _shared_gpu(chosen: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[Finding]:
    ranks = defaultdict(list)
    for facts, model in chosen:
        if model["index"] >= 0 and model["gpus"] >= facts["local_size"]:
            node = facts["rank"] // facts["local_size"]
            ranks[node, model["device"]].append((facts["rank"], model["where"]))
    for (_, device), users in ranks.items():
        if len(users) > 1:
            yield Finding(
                "shared-gpu", f"{len(users)} ranks compute on the same GPU",
                f"The models of ranks {', '.join(str(rank) for rank, _ in users)} are all on "
                f"{device}.",
                "Give each rank the GPU of its local rank: torch.cuda.set_device(local_rank).",
                users[0][1], tuple(rank for rank, _ in users),
            )  # fmt: skip
            return


def _splits(seen: Seen) -> Iterator[Finding]:
    for facts in seen.ranks:
        for made in facts["splits"]:
            if made["gpus"] < 2:
                found = "one GPU" if made["gpus"] else "no GPU"
                yield Finding(
                    "splits-nothing", f"nn.DataParallel has found {found}, so it splits nothing",
                    "It is the plain module then, and says nothing of it.",
                    "Print torch.cuda.device_count(); with GPUs, one process for each and "
                    "DistributedDataParallel.", made["where"], (facts["rank"],), mistake=False,
                )  # fmt: skip
                return


def _saves(seen: Seen) -> Iterator[Finding]:
    writers = defaultdict(list)
    for facts in seen.ranks:
        for save in facts["saves"]:
            writers[save["path"]].append((facts["rank"], save))
    for path, saves in writers.items():
        ranks = tuple(sorted({rank for rank, _ in saves}))
        if len(ranks) > 1:
            yield Finding(
                "saved-by-every-rank", f"{len(ranks)} ranks write the same checkpoint",
                f"torch.save wrote {path} on each of them; they may tear it, and all but one "
                "write in vain.",
                "Save on rank 0 only (if dist.get_rank() == 0), to a temporary name, then "
                "os.replace.", saves[0][1]["where"], ranks,
            )  # fmt: skip
            break
    prefixed = [s for facts in seen.ranks for s in facts["saves"] if s["prefixed"]]
    if prefixed:
        yield Finding(
            "module-prefix", 'The checkpoint has the names of DDP ("module.…")',
            f"{prefixed[0]['path']} loads into a DistributedDataParallel only.",
            "Save ddp.module.state_dict().", prefixed[0]["where"], mistake=False,
        )  # fmt: skip


def _forward_of_some(seen: Seen) -> tuple[str, tuple[int, ...]] | None:
    """Where some ranks, but not all, call DDP's forward pass, which makes collective calls.

    Lines that other ranks have never come to tell more than those where ranks are at the moment.
    """
    lines = [line for facts in seen.ranks for line in facts["forwards"] if line]
    for line in lines:
        ranks = tuple(f["rank"] for f in seen.ranks if line in f["forwards"])
        if len(ranks) < len(seen.ranks):
            return line, ranks
    inside = {f["rank"]: f["in_forward"] for f in seen.ranks if f["in_forward"]}
    if 0 < len(inside) < len(seen.ranks):
        return next(iter(inside.values())), tuple(inside)
    return None


def _ended(seen: Seen) -> Iterator[Finding]:
    failure = seen.run.failure
    if failure is None:
        if seen.stopped:
            yield Finding(
                "stopped", "The time limit ended the script; this is what was seen until then",
                "It was still getting on.", "Give it a smaller task, or a larger limit.",
                mistake=False,
            )  # fmt: skip
        return
    text = str(failure)
    first = text.split("\n")[0]
    if any(f.kind in ("rank-for-local-rank", "unequal-steps") for f in seen.findings):
        return  # that is why
    where = _failing_line(seen)
    ranks: tuple[int, ...] = (failure.rank,) if failure.rank is not None else ()
    left = {f["rank"]: f["left"] for f in seen.ranks if f["left"]}
    if isinstance(failure, RankTimeout) or _FINISHED.search(first):
        if 0 < len(left) < len(seen.ranks):
            ranks, where = tuple(left), next(iter(left.values()))
            text = f"{names(list(left))} left the script with sys.exit(). {text}"
        elif there := _forward_of_some(seen):
            where, ranks = there
            text = (
                f"{names(list(ranks))} called DDP there, where its forward pass makes collective "
                f"calls; others did not. {text}"
            )
    if isinstance(failure, RankTimeout) and first.startswith("Nothing moved on"):
        yield Finding(
            "hangs", "The script hangs, or takes very long over one step", text,
            "Look at the lines where the ranks were; a rank that waits in backward() waits for "
            "another one's gradients. Where not all ranks evaluate, call ddp.module, not ddp. If "
            "it was only slow, give a longer timeout.", where, ranks,
        )  # fmt: skip
    elif (
        "CollectiveMismatch" in first or _FINISHED.search(first) or isinstance(failure, RankTimeout)
    ):
        yield Finding(
            "collectives-differ", "The ranks do not make the same collective calls", text,
            "Every rank of the group must make the same calls in the same order: look for a "
            "collective inside an if on the rank, or in a loop of unequal length.", where, ranks,
        )  # fmt: skip
    else:
        remedy = "Mend the error; everything else here was seen before it."
        if _NEEDS_CUDA.search(first):
            remedy = (
                "The script insists on CUDA, and there is none here: bring_your_own(..., "
                "virtual=True) lets virtual GPUs stand in."
            )
        yield Finding("failed", "The script failed", text, remedy, where, ranks)
