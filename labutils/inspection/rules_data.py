"""Mistakes with data: what the ranks read, seen by index and by content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from labutils.inspection.findings import Finding, Seen

_ENOUGH = 8  # common samples that must agree before two data sets are taken to be the same
_SHARED = 0.3  # of a rank's samples also read by another one: more than padding explains

_ONCE = 0.9  # of a rank's samples are different where none is drawn twice, but for padding


def find(seen: Seen) -> Iterator[Finding]:
    """All that is wrong with the data."""
    if len(seen.ranks) > 1:
        yield from _parts(seen) or _shared(seen)
        yield from _unequal(seen)
    yield from _same_order(seen)
    yield from _padded_evaluation(seen)


def _passes(facts: dict[str, Any], training: bool = True) -> list[dict[str, Any]]:
    return [epoch for epoch in facts["epochs"] if (epoch["steps"] > 0) == training]


def _loader(facts: dict[str, Any], epoch: dict[str, Any]) -> dict[str, Any]:
    loader: dict[str, Any] = facts["loaders"][epoch["loader"]]
    return loader


def _parts(seen: Seen) -> list[Finding]:
    """Samplers that do share out the data, but not the same data in the same order."""
    first = [next(iter(_passes(facts)), None) for facts in seen.ranks]
    epochs: list[dict[str, Any]] = [epoch for epoch in first if epoch]
    loaders = [_loader(facts, epoch) for facts, epoch in zip(seen.ranks, epochs)]
    shared_out = all(loader["replicas"] == seen.world for loader in loaders)
    if len(epochs) < len(seen.ranks) or not shared_out:
        return []
    if len({(loader["subset"] or {}).get("checksum") for loader in loaders}) > 1:
        return [_other_splits(seen, loaders)]
    drawn = [index for epoch in epochs for index in epoch["indices"]]
    overlap = len(drawn) - len(set(drawn)) > seen.world  # more than padding
    if overlap and len({loader["seed"] for loader in loaders}) > 1 and None not in drawn:
        return [_other_seeds(seen, loaders, drawn)]
    return []


def _other_splits(seen: Seen, loaders: list[dict[str, Any]]) -> Finding:
    begins = "; ".join(
        f"{', '.join(map(str, (loader['subset'] or {}).get('first', [])))}, … on rank {f['rank']}"
        for f, loader in zip(seen.ranks, loaders)
    )
    return Finding(
        "splits-differ", "The ranks have split the data differently",
        f"The Subset that each rank trains on begins with the indices {begins}. So a rank trains on"
        " what another one tests on, and some samples are read twice and others never.",
        "Split alike on all ranks, before any seed that depends on the rank: random_split(data, "
        "lengths, generator=torch.Generator().manual_seed(0)).",
        loaders[0]["where"], seen.all_ranks,
    )  # fmt: skip


def _other_seeds(seen: Seen, loaders: list[dict[str, Any]], drawn: list[int]) -> Finding:
    seeds = ", ".join(f"{x['seed']} on rank {f['rank']}" for f, x in zip(seen.ranks, loaders))
    return Finding(
        "sampler-seeds-differ", "The samplers of the ranks shuffle with different seeds",
        f"The seeds are {seeds}; so their parts overlap: of {len(drawn)} samples that the ranks "
        f"read in the first epoch, {len(set(drawn))} are different.",
        "Give DistributedSampler the same seed on all ranks (it is told the rank by itself).",
        loaders[0]["where"], seen.all_ranks,
    )  # fmt: skip


def _shared(seen: Seen) -> Iterator[Finding]:
    """Ranks that read the same samples."""
    first = [next(iter(_passes(facts)), None) for facts in seen.ranks]
    if None in first:
        yield from _same_inputs(seen) if not any(first) else ()
        return
    epochs: list[dict[str, Any]] = [epoch for epoch in first if epoch]
    pairs = [
        (a, b) for a, b in combinations(range(len(epochs)), 2)
        if _same_samples(seen.ranks[a], epochs[a], seen.ranks[b], epochs[b])
    ]  # fmt: skip
    if not pairs:
        return
    one, other = pairs[0]
    ranks = tuple(sorted({seen.ranks[i]["rank"] for pair in pairs for i in pair}))
    loader = _loader(seen.ranks[one], epochs[one])
    yield Finding(
        "no-sampler",
        f"Ranks {ranks[0]} and {ranks[1]} read the same training samples"
        if len(ranks) == 2 else "Ranks read the same training samples",
        _evidence(seen, loader, epochs[one], epochs[other], (one, other)),
        _remedy(seen, loader), loader["where"], ranks,
    )  # fmt: skip


def _remedy(seen: Seen, loader: dict[str, Any]) -> str:
    if loader["replicas"] is None:
        return (
            "Give the DataLoader sampler=DistributedSampler(dataset) (and no shuffle), so that "
            "each rank reads its own part."
        )
    return (
        f"The sampler was made for {loader['replicas']} replicas, but there are {seen.world} "
        "ranks: leave out num_replicas and rank, or give it WORLD_SIZE and RANK (not the local "
        "ones)."
    )


def _evidence(
    seen: Seen, loader: dict[str, Any], one: dict[str, Any], other: dict[str, Any],
    pair: tuple[int, int],
) -> str:  # fmt: skip
    a, b = (seen.ranks[i]["rank"] for i in pair)
    common = set(map(_key, _samples(one))) & set(map(_key, _samples(other)))
    of = f" of {loader['size']}" if loader["size"] >= 0 else ""
    drawn = [i for i in one["indices"][:5] if i is not None]
    first = f"; rank {a} begins with {', '.join(map(str, drawn))}" if drawn else ""
    theirs = [i for i in other["indices"][:5] if i is not None]
    first += f", rank {b} with {', '.join(map(str, theirs))}" if theirs else ""
    return (
        f"In the first epoch rank {a} read {len(one['indices'])}{of} samples, and {len(common)} of "
        f"them were read by rank {b} as well (sampler: {loader['sampler']}){first}."
    )


def _samples(epoch: dict[str, Any]) -> list[tuple[Any, Any]]:
    return list(zip(epoch["indices"], map(tuple, epoch["rows"])))


def _key(sample: tuple[Any, Any]) -> Any:
    """What identifies a sample: its index, or its content where there is none."""
    return sample[1] if sample[0] is None else sample[0]


def _same_samples(
    facts: dict[str, Any], one: dict[str, Any], others: dict[str, Any], other: dict[str, Any]
) -> bool:
    mine, theirs = dict(_named(one)), dict(_named(other))
    common = mine.keys() & theirs.keys()
    if not common or not _same_content([(mine[key], theirs[key]) for key in common]):
        return False
    loader, their_loader = _loader(facts, one), _loader(others, other)
    if loader["plain"] and their_loader["plain"] and loader["size"] == their_loader["size"]:
        return True
    if _with_replacement(loader, one) or _with_replacement(their_loader, other):
        length = min(len(one["indices"]), len(other["indices"]))
        return bool(one["indices"][:length] == other["indices"][:length])
    shared = len(common) / max(1, min(len(mine), len(theirs)))
    padding = (loader["batch_size"] or 1) * facts["world"]
    drawn = len(one["indices"]) + len(other["indices"])
    size = loader["size"]
    # Two of W ranks need 2/W of the samples between them.
    needed = 2 * size / facts["world"] + padding if size >= 0 else 0
    return shared > _SHARED and (size < 0 or drawn > needed or shared > 0.9)


def _with_replacement(loader: dict[str, Any], epoch: dict[str, Any]) -> bool:
    """Whether samples may come twice; then ranks have some in common by chance."""
    known = [index for index in epoch["indices"] if index is not None]
    return bool(loader["replacement"]) or len(set(known)) < _ONCE * len(known)


def _named(epoch: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(_key(sample), sample[1]) for sample in _samples(epoch)]


def _same_content(rows: Sequence[tuple[Any, Any]]) -> bool:
    """Whether samples of the same index are the same: in one tensor at least, say the labels."""
    if not all(a and b and len(a) == len(b) for a, b in rows):
        return True  # what a data set delivers cannot be compared: the indices decide
    leaves = range(min(len(a) for a, _ in rows))
    equal = [all(a[leaf] == b[leaf] for a, b in rows) for leaf in leaves]
    varied = [len({a[leaf] for a, _ in rows}) > 1 for leaf in leaves]
    if len(rows) < _ENOUGH:
        return all(equal)
    return any(e and v for e, v in zip(equal, varied)) or all(equal)


def _same_inputs(seen: Seen) -> Iterator[Finding]:
    """No DataLoader trains: compare what goes into the model."""
    steps = [step for step in seen.steps() if all(s["inputs"] for s in step)]
    same = [step for step in steps if all(s["inputs"] == step[0]["inputs"] for s in step)]
    if len(steps) < 2 or len(same) < len(steps):
        return
    yield Finding(
        "no-sampler", "All ranks train on the same batches",
        f"In each of {len(steps)} steps the input of the model was the same on all ranks, bit for "
        "bit.",
        "Let each rank take its own part of the data, by its rank, e.g. x[rank::world_size], or "
        "use a DataLoader with a DistributedSampler.", steps[0][0]["where"], seen.all_ranks,
    )  # fmt: skip


def _unequal(seen: Seen) -> Iterator[Finding]:
    """Ranks whose epochs have different numbers of batches."""
    made = {len(facts["steps"]) for facts in seen.ranks}
    if any(facts["joined"] for facts in seen.ranks) or (seen.run.failure is None and len(made) < 2):
        return
    first = [next(iter(_passes(facts)), None) for facts in seen.ranks]
    if None in first:
        return
    loaders = [_loader(facts, epoch) for facts, epoch in zip(seen.ranks, first) if epoch]
    batches = [loader["batches"] for loader in loaders]
    if len(set(batches)) > 1 and min(batches) >= 0:
        counts = ", ".join(f"rank {f['rank']}: {b}" for f, b in zip(seen.ranks, batches))
        yield Finding(
            "unequal-steps", "The ranks do not have the same number of training batches",
            f"Batches per epoch: {counts}. The rank with more waits for ever in its next "
            "all-reduce.",
            "Use DistributedSampler, which fills the ranks up to equal numbers, or train inside "
            "torch.distributed.algorithms.Join.", loaders[0]["where"], seen.all_ranks,
        )  # fmt: skip


def _same_order(seen: Seen) -> Iterator[Finding]:
    """Epochs in the same order although the sampler shuffles."""
    for facts in seen.ranks[:1]:
        for number, loader in enumerate(facts["loaders"]):
            epochs = [e for e in _passes(facts) if e["loader"] == number]
            if len(epochs) < 2 or not loader["set_epoch"] or loader["shuffle"] is False:
                continue
            if epochs[0]["told"] != epochs[1]["told"]:
                continue  # an order that is meant to stay, say from easy to hard
            one, two = epochs[0]["indices"], epochs[1]["indices"]
            length = min(len(one), len(two))
            if length < 4 or None in one or one[:length] != two[:length]:
                continue
            yield Finding(
                "no-set-epoch", "Every epoch has the same order",
                f"Epochs 0 and 1 drew the same {length} indices in the same order: "
                f"{', '.join(map(str, one[:6]))}, … on rank {facts['rank']}.",
                "Call sampler.set_epoch(epoch) at the start of each epoch.", epochs[0]["where"],
                seen.all_ranks,
            )  # fmt: skip


def _padded_evaluation(seen: Seen) -> Iterator[Finding]:
    """A DistributedSampler in evaluation reads some samples twice."""
    last = [_passes(facts, training=False)[-1:] for facts in seen.ranks]
    if not all(last) or len(last) < 2:
        return
    loader = _loader(seen.ranks[0], last[0][0])
    indices = [i for (epoch,) in last for i in epoch["indices"]]
    twice = len(indices) - len(set(indices))
    if loader["sampler"] == "DistributedSampler" and twice > 0 and None not in indices:
        yield Finding(
            "padded-evaluation", f"The evaluation counts {twice} samples twice",
            f"The ranks read {len(indices)} samples, of which {len(set(indices))} are different.",
            "Read range(rank, len(dataset), world_size) on each rank and add up correct answers "
            "and counts with all_reduce.", loader["where"], mistake=False,
        )  # fmt: skip
