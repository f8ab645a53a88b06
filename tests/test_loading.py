"""Pictures on disk, the traced loader against PyTorch's own, and the timeline of its workers."""

from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

import labutils as lab
from labutils.loading import progress
from labutils.loading.images import CLASSES, decode_jpeg
from labutils.loading.loader import Loader, twin
from labutils.loading.watching import idle_share
from labutils.trace import Span, Trace

METHODS = multiprocessing.get_all_start_methods()
each_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lab.make_images(tmp_path_factory.mktemp("data") / "images", 64, 48)


# -- pictures --------------------------------------------------------------------------------------


def test_pictures_are_files_that_others_read(images: Any) -> None:
    files = sorted(images.folder.glob("*/*.jpg"))
    assert len(files) == len(images) == 64
    assert {file.parent.name for file in files} == set(CLASSES)
    with Image.open(files[0]) as picture:
        assert picture.size == (48, 48) and picture.format == "JPEG"


def test_a_sample_is_the_file_decoded_and_normalised(images: Any) -> None:
    plain = lab.Images(images.folder, crop=48, augment=False)
    picture, label = plain[11]
    file = images.folder / CLASSES[11 % 8] / "000011.jpg"
    pixels = np.asarray(Image.open(file).convert("RGB"), dtype=np.float64) / 255
    expected = torch.from_numpy((pixels - 0.51) / 0.16).permute(2, 0, 1).float()
    assert label == 11 % 8
    torch.testing.assert_close(picture, expected, atol=1e-5, rtol=1e-5)
    assert decode_jpeg(file.read_bytes()).shape == (48, 48, 3)


@pytest.mark.parametrize("kind", ["jpeg", "array"])
def test_pictures_are_numbered_as_a_list_is(tmp_path: Path, kind: str) -> None:
    made = lab.make_images(tmp_path / "few", 9, 32, kind=kind)
    images = lab.Images(made.folder, augment=False)
    for number in (-1, -9, np.int64(-1), torch.tensor(-1)):
        picture, label = images[number]  # type: ignore[index]
        expected, known = images[9 + int(number)]
        assert label == known and torch.equal(picture, expected)
    for number in (9, -10):
        with pytest.raises(IndexError, match=f"no picture {number}: they are 0 to 8"):
            images[number]
    for wrong in (slice(0, 3), "0", 1.5, None):
        with pytest.raises(TypeError, match="one at a time, .*torch.utils.data.Subset"):
            images[wrong]  # type: ignore[index]


def test_the_array_holds_what_the_files_show(images: Any, tmp_path: Path) -> None:
    array = lab.make_images(tmp_path / "array", 16, 48, kind="array")
    files = lab.make_images(tmp_path / "files", 16, 48)
    shown, held = (np.stack([d.decode(d.read(i)) for i in range(16)]) for d in (files, array))
    lost = np.abs(shown.astype(int) - held).mean(axis=(1, 2, 3))
    between = np.abs(held[1:].astype(int) - held[:-1]).mean(axis=(1, 2, 3))
    assert lost.max() < 0.6 * between.min()  # JPEG loses detail of the noise, not the picture
    assert np.load(tmp_path / "array" / "labels.npy").tolist() == [i % 8 for i in range(16)]
    assert array[3][0].shape == (3, 42, 42)


def test_made_once_and_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab.make_images(tmp_path / "a", 8, 32)
    first = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in tmp_path.glob("a/*/*.jpg")}
    lab.make_images(tmp_path / "a", 8, 32)
    lab.make_images(tmp_path / "b", 8, 32)
    assert first == {
        f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in tmp_path.glob("a/*/*.jpg")
    }
    assert {n: data for n, (data, _) in first.items()} == {
        f.name: f.read_bytes() for f in tmp_path.glob("b/*/*.jpg")
    }
    assert capsys.readouterr().out == "8 pictures of 32×32 pixels (jpeg) are ready\n" * 2


def test_what_was_interrupted_is_completed(tmp_path: Path) -> None:
    lab.make_images(tmp_path / "a", 8, 32)
    facts = tmp_path / "a" / "images.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "complete": False}))
    (tmp_path / "a" / "circle" / "000000.jpg").unlink()
    with pytest.raises(ValueError, match="holds no pictures of lab.make_images"):
        lab.Images(tmp_path / "a")
    assert len(lab.make_images(tmp_path / "a", 8, 32)[0][0]) == 3


def test_removal_leaves_what_others_put_there(tmp_path: Path) -> None:
    lab.make_images(tmp_path / "a", 8, 32)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    lab.remove_images(tmp_path / "a")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["notes.txt"]
    (tmp_path / "b" / "circle").mkdir(parents=True)
    (tmp_path / "b" / "circle" / "1.jpg").write_text("not ours")
    lab.remove_images(tmp_path / "b")
    assert (tmp_path / "b" / "circle" / "1.jpg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "a number of pictures, 1 or more, not 0"),
        ({"size": 5}, "16 to 4096 pixels a side, not 5"),
        ({"kind": "png"}, "kind must be 'jpeg' or 'array'"),
        ({"size": 64}, "already holds 8 pictures of 32 pixels"),
    ],
)
def test_impossible_wishes_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    lab.make_images(tmp_path / "a", 8, 32)
    with pytest.raises(ValueError, match=message):
        lab.make_images(tmp_path / "a", **{"count": 8, "size": 32, **arguments})


def test_nobodys_files_are_written_over(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="holds something else"):
        lab.make_images(tmp_path, 8, 32)


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"cannot write to .*pictures \(Not a directory: choose"):
        lab.make_images(tmp_path / "file" / "pictures", 8, 32)


@pytest.mark.usefixtures("one_thread")
def test_a_small_network_learns_the_classes(tmp_path: Path) -> None:
    """After a minute's worth of a laptop's epochs it is right far more often than by chance."""
    torch.manual_seed(0)
    train = lab.make_images(tmp_path / "train", 256, 32)
    held_out = lab.make_images(tmp_path / "test", 128, 32, seed=1)
    network = nn.Sequential(
        nn.Conv2d(3, 24, 3, 2), nn.ReLU(), nn.Conv2d(24, 32, 3, 2), nn.ReLU(),
        nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(128, 8),
    )  # fmt: skip
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(10):
        for x, y in DataLoader(train, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    plain = lab.Images(held_out.folder, augment=False)
    x, y = next(iter(DataLoader(plain, batch_size=128)))
    assert (network(x).argmax(1) == y).float().mean() > 0.6


def test_augmentation_is_random_and_seeded(images: Any) -> None:
    torch.manual_seed(4)
    one, other = images[5][0], images[5][0]
    torch.manual_seed(4)
    assert not torch.equal(one, other) and torch.equal(one, images[5][0])


def test_a_bar_in_a_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.bar([1, 2, 3], "doing", "done")) == [1, 2, 3]
    assert capsys.readouterr() == ("done\n", "")


# -- the loader ------------------------------------------------------------------------------------


class Indexed(Dataset[Any]):
    """Sample i says who made it."""

    def __init__(self) -> None:
        self.start = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        info = get_worker_info()
        return self.start + index, torch.rand(2), -1 if info is None else info.id


class Pieces(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from range(first, 10, step)


class InBatches(TensorDataset):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.tensors[0][i] * 2,) for i in indices]


def shift(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.start = 100


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "map": (Indexed(), {"batch_size": 3}),
    "shuffled": (Indexed(), {"batch_size": 3, "shuffle": True, "drop_last": True}),
    "no batches": (Indexed(), {"batch_size": None}),
    "batch sampler": (
        Indexed(),
        {"batch_sampler": BatchSampler(RandomSampler(range(20)), 4, False)},
    ),
    "init": (Indexed(), {"batch_size": 3, "worker_init_fn": shift}),
    "collate": (Indexed(), {"batch_size": 3, "collate_fn": list}),
    "stream": (Pieces(), {"batch_size": 4}),
    "batched reading": (InBatches(torch.arange(9)), {"batch_size": 2}),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_batches_as_dataloader(variant: str, workers: int) -> None:
    data, options = VARIANTS[variant]
    if workers:
        options = {**options, "num_workers": workers}
    batches = []
    for kind in (DataLoader, Loader):
        torch.manual_seed(7)
        batches.append(list(kind(data, **options)))
        batches.append(torch.rand(3))  # neither used more random numbers than the other
    same(batches[:2], batches[2:])


@pytest.mark.parametrize(
    ("method", "workers"),
    [(m, n) for m in METHODS for n in ((2,) if m == "spawn" else (1, 2, 4))],
)
def test_classes_and_lambdas_of_a_notebook_under_every_start_method(
    method: str, workers: int
) -> None:
    class Local(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index

    options = {"num_workers": workers, "multiprocessing_context": method}
    loader = Loader(Local(), batch_size=2, collate_fn=lambda pair: [10 * i for i in pair],
                    worker_init_fn=lambda worker: None, **options)  # fmt: skip
    assert list(loader) == [[0, 10], [20, 30], [40, 50], [60, 70]]


def test_persistent_workers_go_on(images: Any) -> None:
    loader = Loader(images, batch_size=16, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert sum(len(y) for _, y in loader) == 64
    assert {made.worker for made in loader.made} == {0, 1}
    assert all(made.ended_ns > made.started_ns for made in loader.made)


def test_what_a_batch_took_is_told() -> None:
    class Sleeps(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            time.sleep(0.02)
            return index

    for workers in (0, 1):
        loader = Loader(Sleeps(), batch_size=2, num_workers=workers)
        list(loader)
        for made in loader.made:
            assert made.ended_ns - made.started_ns >= 40e6
            assert made.cpu_ns < 20e6  # it slept


def test_a_twin_leaves_the_loader_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Indexed(), batch_size=3, shuffle=True, generator=generator)
    expected = list(DataLoader(Indexed(), batch_size=3, shuffle=True,
                               generator=torch.Generator().manual_seed(5)))  # fmt: skip
    assert len(list(twin(loader, 30, num_workers=0))) == 30  # several epochs on end
    same([batch[0] for batch in loader], [batch[0] for batch in expected])
    assert twin(loader).dataset.inner is loader.dataset


# -- the timeline ----------------------------------------------------------------------------------


def lanes(trace: Trace, lane: str) -> list[Span]:
    return [s for s in trace.spans if s.device == "host" and s.lane == lane]


@each_method
def test_each_worker_has_a_lane_with_its_steps(images: Any, method: str) -> None:
    loader = Loader(images, batch_size=8, num_workers=2, multiprocessing_context=method)
    with lab.watch_loading("two workers", show=False) as w:
        made = [len(y) for _, y in loader]
    assert made == [8] * 8
    for worker in ("worker 0", "worker 1"):
        names = [span.name for span in lanes(w.trace, worker)]
        assert {n: names.count(n) for n in set(names)} == {
            "read": 32, "decode": 32, "augment": 32, "collate": 4,
        }  # fmt: skip
    assert sum(s.name == "wait for batch" for s in lanes(w.trace, "main")) == 9
    assert all(0 <= s.start <= s.end <= w.trace.duration for s in w.trace.spans)


def test_a_batch_is_collated_in_its_worker_before_it_is_waited_for(images: Any) -> None:
    loader = Loader(images, batch_size=8, num_workers=1)
    with lab.watch_loading(show=False) as w:
        list(loader)
    ends = sorted(s.end for s in lanes(w.trace, "worker 0") if s.name == "collate")
    got = sorted(s.end for s in lanes(w.trace, "main") if s.name == "wait for batch")
    assert len(ends) == 8 and all(e <= g for e, g in zip(ends, got))


def test_without_workers_the_main_thread_does_the_work(images: Any) -> None:
    with lab.watch_loading(show=False) as w:
        list(Loader(images, batch_size=32))
    assert w.trace.lanes("host") == ["main"]
    assert sum(s.name == "decode" for s in w.trace.spans) == 64


def test_a_plain_data_loader_shows_nothing_and_the_trace_says_why() -> None:
    with lab.watch_loading(show=False) as w:
        list(torch.utils.data.DataLoader(Indexed(), batch_size=5))
    assert not w.trace.spans
    assert "a plain DataLoader tells nothing" in w.trace.notes[0]


def test_a_data_set_that_names_nothing_shows_samples() -> None:
    with lab.watch_loading(show=False) as w:
        list(Loader(Indexed(), batch_size=5, num_workers=2))
    names = [s.name for s in w.trace.spans if s.lane.startswith("worker")]
    assert names.count("sample") == 20 and names.count("collate") == 4


def test_nothing_is_written_unless_watched(images: Any) -> None:
    loader = Loader(images, batch_size=8, num_workers=1, persistent_workers=True)
    list(loader)
    folder = Path(loader.run_directory)
    assert list(folder.glob("rank-*.jsonl")) == []
    with lab.watch_loading(show=False) as w:
        list(loader)
    assert lanes(w.trace, "worker 0")
    del loader
    assert not folder.exists()


def test_pin_thread_and_gpu_share_the_axis(images: Any) -> None:
    gpu = lab.virtual.enable(2, profile="V100-SXM2", pace="wall")[0]
    weight = torch.ones(3 * 42 * 42, 512, device=gpu)
    loader = Loader(images, batch_size=8, num_workers=2, pin_memory=True)
    with lab.watch_loading(show=False) as w:
        for x, _ in loader:
            assert x.is_pinned()
            x.to(gpu, non_blocking=True).flatten(1) @ weight
        torch.vgpu.synchronize()
    lab.virtual.disable()
    assert [s.name for s in lanes(w.trace, "pin thread")] == ["pin"] * 8
    assert w.trace.devices == ["GPU 0", "host"]  # GPU 1 did nothing
    copies = [s for s in w.trace.spans if (s.device, s.lane) == ("GPU 0", "copy")]
    pins = lanes(w.trace, "pin thread")
    assert len(copies) == 8 and all(p.end <= c.start for p, c in zip(pins, copies))
    assert any(note.startswith("GPU 0 idle") for note in w.trace.notes)


def test_idle_share_counts_from_first_to_last_work() -> None:
    work = [(1.0, 2.0), (3.0, 4.0), (4.5, 5.0)]
    spans = [Span("k", a, b, "GPU 0", "compute", "forward") for a, b in work]
    assert idle_share(Trace(spans=spans)) == pytest.approx(1.5 / 4)
    assert idle_share(Trace()) == 1.0


def test_simulated_time_cannot_stand_beside_workers() -> None:
    lab.virtual.enable(1)
    try:
        with pytest.raises(ValueError, match='pace="wall"'):
            lab.watch_loading()
    finally:
        lab.virtual.disable()


def test_workers_import_little() -> None:
    """A worker that is spawned or preloaded must not pull in what only the notebook needs."""
    code = (
        "import sys, labutils.loading.worker, labutils.loading.images; "
        "print([m for m in ('matplotlib', 'IPython', 'ipywidgets', 'torch.distributed.rpc') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "['torch.distributed.rpc']")


def test_random_numbers_of_python_go_on_in_the_process() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    list(Loader(Indexed(), batch_size=5, num_workers=1))
    assert random.random() == expected
