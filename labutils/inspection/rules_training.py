"""Mistakes with training: nothing learned, gradients not synchronised, replicas that part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from labutils.inspection.findings import Finding, Seen, alike

_FEW = 6  # losses that may be equal by chance
_KEPT = 3  # steps after which gradients that are still there are no longer meant to be


def find(seen: Seen) -> Iterator[Finding]:
    """All that is wrong with the training."""
    trained = [facts for facts in seen.ranks if facts["steps"]]
    if not trained:
        yield from _nothing(seen)
        return
    yield from _unchanged(seen)
    yield from _never_cleared(seen)
    yield from _losses(seen)
    if seen.world > 1:
        yield from _around(seen)
        yield from _no_sync(seen)
        yield from _diverged(seen)
        yield from _wasted(seen)


def _nothing(seen: Seen) -> Iterator[Finding]:
    if seen.run.failure is not None or seen.stopped:
        return
    spawned = [fact for facts in seen.ranks for fact in facts["spawns"]]
    evidence = "No optimizer made a step on any rank, and the script ended without an error."
    remedy = "Check that the training function is called, and that the data set is not empty."
    if any(f["losses"] or f["calls"] for f in seen.ranks) and not any(
        f["optimizers"] for f in seen.ranks
    ):
        yield _by_hand()
        return
    if any(fact["nprocs"] < 1 for fact in spawned):
        evidence += " mp.spawn was asked for 0 processes: torch.cuda.device_count() is 0 here."
        remedy = "Choose the number of processes so that it is at least 1, and refuse 0."
    where = spawned[0]["where"] if spawned else ""
    yield Finding("nothing-trained", "Nothing was trained", evidence, remedy, where)


def _by_hand() -> Finding:
    return Finding(
        "no-optimizer", "No optimizer of torch.optim made a step",
        "Backward passes or collectives were seen, but no optimizer was made. Updates written by "
        "hand cannot be seen, so whether the model learns, and whether the replicas stay equal, "
        "was not looked at.",
        "Call lab.check_replicas(model) on all ranks after a few updates.", mistake=False,
    )  # fmt: skip


def _unchanged(seen: Seen) -> Iterator[Finding]:
    """Steps that leave the parameters as they were."""
    for facts in seen.ranks[:1]:
        steps = [s for s in facts["steps"] if s.get("after") is not None]
        if not steps or len(facts["steps"]) < 2:
            return
        if all(s["none"] for s in steps):
            yield _zero(seen, facts, "no parameter had a gradient (all were None)")
        elif all(s["zero"] for s in steps):
            yield _zero(seen, facts, "every gradient was zero")
        elif steps[0]["before"] and steps[-1]["after"] == steps[0]["before"]:
            yield _still(seen, steps)


def _zero(seen: Seen, facts: dict[str, Any], evidence: str) -> Finding:
    return Finding(
        "zero-gradients", "The gradients are zero, so nothing is learned",
        f"In all {len(facts['steps'])} optimizer steps {evidence}.",
        "Check that the loss depends on the model's output (no detach, no no_grad, no .item() on "
        "the way), that backward() comes before step() and zero_grad() not between them, and that "
        "the parameters require gradients.", facts["steps"][0]["where"], seen.all_ranks,
    )  # fmt: skip


def _still(seen: Seen, steps: list[dict[str, Any]]) -> Finding:
    rates = sorted({rate for step in steps for rate in step["rate"]})
    zero = rates == [0.0]
    why = "the learning rate was 0" if zero else (
        f"their gradients were not zero (learning rates {', '.join(f'{r:g}' for r in rates)})"
    )  # fmt: skip
    return Finding(
        "nothing-trained", "The optimizer changes nothing",
        f"After {len(steps)} steps the parameters of the model are what they were, bit for bit; "
        f"{why}.",
        "Set a learning rate above 0; a schedule may have made it 0." if zero else
        "Make the optimizer of the parameters of the model that is trained: "
        "optimizer(ddp.parameters()), after the model was moved or replaced.",
        steps[0]["where"], seen.all_ranks,
    )  # fmt: skip


def _never_cleared(seen: Seen) -> Iterator[Finding]:
    """Gradients to which every backward pass of the run adds."""
    facts = next((f for f in seen.ranks if f["kept"] >= _KEPT and not f["cleared"]), None)
    if facts is not None:
        yield Finding(
            "no-zero-grad", "The gradients are never cleared",
            f"After {facts['kept']} optimizer steps on rank {facts['rank']} the next backward() "
            "added to the gradients that were left; zero_grad() was not called, and nothing else "
            "cleared them. So each step goes along the sum of all gradients so far.",
            "Call optimizer.zero_grad() after each optimizer.step(), or before the next backward "
            "pass.", facts["steps"][0]["where"], seen.all_ranks,
        )  # fmt: skip


def _losses(seen: Seen) -> Iterator[Finding]:
    if any(f.kind in ("zero-gradients", "nothing-trained") for f in seen.findings):
        return
    for facts in seen.ranks:
        losses = facts["losses"]
        bad = next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if bad is not None:
            step = facts["steps"][min(bad, len(facts["steps"]) - 1)]
            yield Finding(
                "loss-not-finite", "The loss is no longer a number",
                f"It was {losses[bad]} in backward pass {bad + 1} on rank {facts['rank']}.",
                "Lower the learning rate, warm up, clip the gradients, look for log(0) and 0/0.",
                step["where"], (facts["rank"],),
            )  # fmt: skip
            return
        if len(losses) >= _FEW and len(set(losses)) == 1:
            yield Finding(
                "loss-constant", "The loss does not change",
                f"It was {losses[0]:.6g} in all {len(losses)} backward passes on rank "
                f"{facts['rank']}.",
                "Check what the loss is computed from: it should depend on the batch and on the "
                "parameters that the optimizer changes.", facts["steps"][0]["where"],
                (facts["rank"],),
            )  # fmt: skip
            return


def _around(seen: Seen) -> Iterator[Finding]:
    """Training passes through ``ddp.module``, which DDP never hears of."""
    steps = [
        (facts, s) for facts in seen.ranks for s in facts["steps"]
        if s["around"] and not s["forwards"] and not s["by_hand"]
    ]  # fmt: skip
    if steps:
        first, step = steps[0]
        count = sum(facts is first for facts, _ in steps)
        yield Finding(
            "around-ddp", "The model inside DDP is trained, around DDP",
            f"Before {count} optimizer steps the forward pass called the "
            "module itself, not the DistributedDataParallel; so its gradients stay on each rank.",
            "Call ddp(x) in training; ddp.module is for saving and for evaluation.",
            step["around"][0], tuple(sorted({f["rank"] for f, _ in steps})),
        )  # fmt: skip


def _no_sync(seen: Seen) -> Iterator[Finding]:
    last = [
        (facts, s) for facts in seen.ranks for s in facts["steps"]
        if s["passes"] and not s["passes"][-1][0]
    ]  # fmt: skip
    if last and seen.diverged:
        count = len(last[0][0]["steps"])
        yield Finding(
            "no-sync-too-long", "The last backward pass before a step is not synchronised",
            f"{len(last) // len(seen.ranks) or 1} of {count} optimizer steps used gradients whose "
            "last forward pass was inside no_sync().",
            "Leave no_sync() for forward and backward of the last batch before optimizer.step().",
            last[0][1]["where"], tuple(sorted({f["rank"] for f, _ in last})),
        )  # fmt: skip
    unmatched = [fact for facts in seen.ranks for fact in facts["unmatched_no_sync"]]
    if unmatched:
        yield Finding(
            "no-sync-backward-only", "no_sync() is around backward only, and has no effect",
            f"{len(unmatched)} backward passes inside no_sync() reduced their gradients all the "
            "same: DDP decides that in the forward pass.",
            "Put the forward pass inside no_sync() too.", unmatched[0]["where"], seen.all_ranks,
        )  # fmt: skip


def _diverged(seen: Seen) -> Iterator[Finding]:
    """Parameters that differ at the end, from when on, and why."""
    fewer = _fewer(seen)
    if not seen.diverged:
        yield from _last_left_out(seen, fewer) if fewer else ()
        return
    steps = [(n, step) for n, step in enumerate(seen.steps()) if step[0]["after"] is not None]
    number, step = next((n, step) for n, step in steps if not alike(step, "after"))
    models = [facts["models"] for facts in seen.ranks]
    without = not any(models)
    place = step[0]["where"]
    if without:
        yield Finding(
            "no-ddp", "Each rank trains a model of its own",
            f"The parameters differ after step {number + 1}, and no DistributedDataParallel was "
            f"made on any rank.{_which(seen, step)}",
            "Wrap the model: ddp = DistributedDataParallel(model), and train ddp.", place,
            seen.all_ranks,
        )  # fmt: skip
        return
    yield Finding(
        "diverged", "The replicas are no longer equal",
        f"Their parameters differ {_when(seen, number)}.{_which(seen, step)}"
        f"{fewer or _why(seen, step)}",
        "Synchronise every gradient (forward through ddp), use the same optimizer settings on all "
        "ranks, and change parameters only before DDP is made; lab.check_replicas(ddp) finds the "
        "moment.", place, seen.all_ranks,
    )  # fmt: skip


def _fewer(seen: Seen) -> str:
    """Which ranks made fewer optimizer steps; empty where all made equally many."""
    made = {f["rank"]: len(f["steps"]) for f in seen.ranks}
    cut_short = seen.stopped or seen.run.failure is not None
    if cut_short or len(set(made.values())) < 2 or any(f["joined"] for f in seen.ranks):
        return ""
    most = max(made.values())
    few = ", ".join(f"rank {rank} made {n}" for rank, n in made.items() if n < most)
    return f" The ranks did not make equally many optimizer steps: {few}, others {most}."


def _last_left_out(seen: Seen, fewer: str) -> Iterator[Finding]:
    """Steps that only some ranks made, after all those that can be compared."""
    models = [facts["models"] for facts in seen.ranks]
    if all(models) and not any(s["sharded"] for facts in seen.ranks for s in facts["steps"]):
        yield Finding(
            "diverged", "The replicas are no longer equal",
            f"They were equal as long as all ranks made steps.{fewer}",
            "Call optimizer.step() equally often on all ranks, after each synchronised backward "
            "pass.", seen.places("steps"), seen.all_ranks,
        )  # fmt: skip


def _when(seen: Seen, number: int) -> str:
    before = [m["before"] for facts in seen.ranks for m in facts["models"][:1]]
    if any(b != before[0] for b in before):
        return "before the first step: they were changed on some ranks after DDP was made"
    return f"since optimizer step {number + 1}"


def _which(seen: Seen, step: list[dict[str, Any]]) -> str:
    """The first parameter that differs, with the sums of its elements."""
    columns = list(zip(*(s["after"] for s in step)))
    place = next((i for i, c in enumerate(columns) if any(v != c[0] for v in c)), None)
    if place is None:
        return ""
    models = seen.ranks[0]["models"]
    names = [name for model in models for name in model["names"]]
    name = names[place] if place < len(names) else f"parameter {place}"
    name += " (not inside DDP, so nothing synchronises it)" * (len(names) <= place)
    sums = ", ".join(f"{c[1]:.6g} on rank {f['rank']}" for c, f in zip(columns[place], seen.ranks))
    return f" The first that differs is {name}: its elements add up to {sums}."


def _why(seen: Seen, step: list[dict[str, Any]]) -> str:
    if not alike(step, "rate"):
        rates = ", ".join(f"{s['rate'][0]:g} on rank {f['rank']}" for s, f in zip(step, seen.ranks))
        return f" The learning rates differ: {rates}."
    if not alike(step, "forwards"):
        passes = ", ".join(f"{s['forwards']} on rank {f['rank']}" for s, f in zip(step, seen.ranks))
        return f" The forward passes before that step were {passes}: a step was left out."
    if alike(step, "gradients"):
        return " The gradients of that step were equal, so it was not they."
    return " The gradients of that step were different: they had not been synchronised."


def _wasted(seen: Seen) -> Iterator[Finding]:
    """Accumulation that reduces after every backward pass."""
    steps = seen.ranks[0]["steps"]
    many = [
        s for s in steps if len(s["passes"]) > 1 and all(p == [True, True] for p in s["passes"])
    ]
    if len(many) > len(steps) // 2:
        extra = sum(len(s["passes"]) - 1 for s in many)
        yield Finding(
            "accumulation-reduces", "Accumulation reduces the gradients after every batch",
            f"{extra} all-reduces of all gradients were made whose result the next one replaced.",
            "Put all but the last forward and backward pass of a step inside ddp.no_sync().",
            many[0]["where"], mistake=False,
        )  # fmt: skip
