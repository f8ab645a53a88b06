"""Pictures to load: a labelled data set of coloured shapes, drawn here, as JPEG files or an array.

Reading, decoding and augmenting them is real work for a CPU, and a small convolutional network
learns to tell the classes apart: each has its shape, and a colour that is not far from others'.
"""

from __future__ import annotations

import colorsys
import importlib
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Dataset

from labutils.loading.progress import bar
from labutils.telemetry import span

if TYPE_CHECKING:
    from PIL.Image import Image

CLASSES = ("circle", "cross", "pentagon", "ring", "square", "star", "stripes", "triangle")
MEAN, STD = 0.51, 0.16
"""Of all values of all pictures, from 0 to 1; near enough for normalising."""

_SCALE, _SHIFT = np.float32(1 / (255 * STD)), np.float32(MEAN / STD)

_FACTS = "images.json"
_KINDS = ("jpeg", "array")
_QUALITY = 90
_LEAST, _MOST = 16, 4096


def make_images(
    path: str | Path, count: int = 512, size: int = 160, *, kind: str = "jpeg", seed: int = 0
) -> Images:
    """Write ``count`` labelled pictures of ``size`` × ``size`` pixels into the folder ``path``.

    The same arguments give the same files; what is there already is not drawn again.

    Args:
        kind: "jpeg" writes a file for each picture in a folder for each class (as torchvision's
            ``ImageFolder`` reads them), "array" all pixels into one ``.npy`` file.

    Returns:
        The data set, see :class:`Images`; :func:`remove_images` removes the files.

    Raises:
        ValueError: the arguments are impossible, or the folder holds something else.
        OSError: the folder cannot be written to, or the disk is full.
    """
    folder, facts = Path(path), _facts(count, size, kind, seed)
    if _made(folder) != {**facts, "complete": True}:
        _refuse_foreign(folder, facts)
        try:
            _write(folder, facts)
        except OSError as error:
            why = f"{error.strerror}: choose another folder, or make room"
            raise OSError(error.errno, f"make_images cannot write to {path} ({why})") from None
    return Images(folder)


def _write(folder: Path, facts: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FACTS).write_text(json.dumps({**facts, "complete": False}))
    (_write_array if facts["kind"] == "array" else _write_files)(folder, facts)
    (folder / _FACTS).write_text(json.dumps({**facts, "complete": True}))


def remove_images(path: str | Path) -> None:
    """Remove what :func:`make_images` wrote there; whatever else is in the folder stays."""
    folder = Path(path)
    if _made(folder) is None:
        return
    for name in CLASSES:
        for file in (folder / name).glob("[0-9]*.jpg"):
            file.unlink()
    for file in (folder / "images.npy", folder / "labels.npy", folder / _FACTS):
        file.unlink(missing_ok=True)
    for place in (*(folder / name for name in CLASSES), folder):
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


class Images(Dataset[tuple[torch.Tensor, int]]):
    """The pictures of a folder that :func:`make_images` wrote.

    Sample ``i`` is ``(picture, label)``: a float32 tensor ``[3, crop, crop]``, normalised, and the
    number of its class.  With ``augment`` a random part of the picture is taken and mirrored every
    other time; random numbers come from torch, so that workers and epochs have their own.

    Args:
        path: the folder.
        crop: pixels per side of what comes out; seven eighths of the pictures' by default.
        augment: False takes the middle of the picture.
    """

    classes = CLASSES

    def __init__(self, path: str | Path, crop: int | None = None, augment: bool = True) -> None:
        self.folder = Path(path)
        facts = _made(self.folder)
        if facts is None or not facts["complete"]:
            raise ValueError(f"{path} holds no pictures of lab.make_images: call that first.")
        self.size = int(facts["size"])
        self.crop = crop or self.size * 7 // 8
        self.augment_on = augment
        self._count = int(facts["count"])
        self._array = facts["kind"] == "array"
        self._pixels: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not isinstance(index, SupportsIndex):
            raise TypeError(
                f"pictures are taken one at a time, images[0], not by {index!r}; several are "
                "torch.utils.data.Subset(images, range(8))."
            )
        if not -self._count <= index < self._count:
            raise IndexError(f"there is no picture {index}: they are 0 to {self._count - 1}.")
        index = int(index) % self._count  # -1 is the last one, as of a list
        with span("read"):
            data = self.read(index)
        with span("decode"):
            picture = self.decode(data)
        with span("augment"):
            return self.augment(picture), index % len(CLASSES)

    def read(self, index: int) -> Any:
        """The picture as it lies on the disk: bytes of a JPEG file, or pixels of the array."""
        if self._array:
            if self._pixels is None:  # opened at first use, so that each worker opens its own
                self._pixels = np.load(self.folder / "images.npy", mmap_mode="r")
            return np.array(self._pixels[index])
        return _file(self.folder, index).read_bytes()

    def decode(self, data: Any) -> Any:
        """Pixels as a uint8 array ``[size, size, 3]``."""
        return data if self._array else decode_jpeg(data)

    def augment(self, pixels: Any) -> torch.Tensor:
        """A part of the picture as a float32 tensor ``[3, crop, crop]``, normalised.

        Pillow and NumPy do it on one core, also in the main process, where PyTorch would use all.
        """
        from PIL import Image

        side, top, left, mirror = self._choose()
        box = (left, top, left + side, top + side)
        part = Image.fromarray(pixels).resize((self.crop,) * 2, Image.Resampling.BILINEAR, box)
        values = np.asarray(part)[:, ::-1] if mirror else np.asarray(part)
        normal = (values.transpose(2, 0, 1) * _SCALE - _SHIFT).astype(np.float32, order="C")
        return torch.from_numpy(normal)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pixels": None}

    def _choose(self) -> tuple[int, int, int, bool]:
        """Side, top, left of the part (pixels), and whether to mirror it."""
        if not self.augment_on:
            margin = (self.size - self.crop) // 2
            return self.size - 2 * margin, margin, margin, False
        scale, down, right, coin = torch.rand(4).tolist()
        side = round(self.size * (0.7 + 0.3 * scale))
        room = self.size - side
        return side, round(down * room), round(right * room), coin < 0.5


def decode_jpeg(data: bytes) -> Any:
    """A JPEG file's bytes as a uint8 array ``[height, width, 3]``; by torchvision's decoder if it
    is there, else by Pillow's."""
    try:
        io_of = importlib.import_module("torchvision.io")
    except (ImportError, RuntimeError):
        from PIL import Image

        return np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return io_of.decode_jpeg(raw, mode=io_of.ImageReadMode.RGB).permute(1, 2, 0).numpy()


def draw(index: int, size: int, seed: int = 0) -> Image:
    """Picture number ``index``, whose class is ``index`` modulo the number of classes."""
    from PIL import Image, ImageDraw

    rng = np.random.default_rng([seed, index])
    label = index % len(CLASSES)
    ground = rng.normal(110 + 50 * rng.random(3), 22, (size, size, 3))
    picture = Image.fromarray(ground.clip(0, 255).astype(np.uint8))
    hue = (label + rng.normal(0, 0.35)) / len(CLASSES)
    red, green, blue = colorsys.hsv_to_rgb(hue % 1, 0.85, 0.6 + 0.4 * rng.random())
    colour = (round(255 * red), round(255 * green), round(255 * blue))
    radius = size * rng.uniform(0.18, 0.34)
    x, y = rng.uniform(radius, size - radius, 2)
    _shape(ImageDraw.Draw(picture), CLASSES[label], x, y, radius, rng.uniform(0, 2), colour)
    return picture


def _shape(
    canvas: Any, name: str, x: float, y: float, radius: float, turn: float, colour: Any
) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if name == "circle":
        canvas.ellipse(box, fill=colour)
    elif name == "ring":
        canvas.ellipse(box, outline=colour, width=max(2, round(radius / 3)))
    elif name == "stripes":
        for top in np.linspace(y - radius, y + radius, 5)[:-1]:
            canvas.rectangle((x - radius, top, x + radius, top + radius / 4), fill=colour)
    elif name == "cross":
        arm = radius / 3.5
        canvas.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
        canvas.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
    else:
        corners, inner = {"triangle": (3, 1.0), "square": (4, 1.0), "pentagon": (5, 1.0),
                          "star": (5, 0.4)}[name]  # fmt: skip
        points = _corners(x, y, radius, turn, corners, inner)
        canvas.polygon(points, fill=colour)


def _corners(
    x: float, y: float, radius: float, turn: float, corners: int, inner: float
) -> list[tuple[float, float]]:
    """Corners of a regular polygon, or of a star if every other one lies further inside."""
    radii = [radius] if inner == 1.0 else [radius, inner * radius]
    number = corners * len(radii)
    angles = [turn + 2 * math.pi * k / number for k in range(number)]
    return [
        (x + radii[k % len(radii)] * math.cos(a), y + radii[k % len(radii)] * math.sin(a))
        for k, a in enumerate(angles)
    ]


def _facts(count: int, size: int, kind: str, seed: int) -> dict[str, Any]:
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"make_images needs a number of pictures, 1 or more, not {count!r}.")
    if not isinstance(size, int) or not _LEAST <= size <= _MOST:
        raise ValueError(f"pictures can have {_LEAST} to {_MOST} pixels a side, not {size!r}.")
    if kind not in _KINDS:
        raise ValueError(f"kind must be {' or '.join(map(repr, _KINDS))}, not {kind!r}.")
    return {"count": count, "size": size, "kind": kind, "seed": seed, "version": 1}


def _made(folder: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads((folder / _FACTS).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def _refuse_foreign(folder: Path, facts: dict[str, Any]) -> None:
    """Neither another set of pictures nor anybody's files are written over."""
    made = _made(folder)
    if made is not None and {**made, "complete": True} == {**facts, "complete": True}:
        return  # drawing them was interrupted
    if made is not None:
        has = f"{made.get('count')} pictures of {made.get('size')} pixels ({made.get('kind')})"
        raise ValueError(
            f"{folder.name} already holds {has}: choose another folder, or remove them with "
            "lab.remove_images(path)."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder.name} holds something else: choose an empty or a new folder.")


def _file(folder: Path, index: int) -> Path:
    return folder / CLASSES[index % len(CLASSES)] / f"{index:06d}.jpg"


def _write_files(folder: Path, facts: dict[str, Any]) -> None:
    for name in CLASSES:
        (folder / name).mkdir(exist_ok=True)
    for index in _each(facts):
        picture = draw(index, facts["size"], facts["seed"])
        picture.save(_file(folder, index), quality=_QUALITY)


def _write_array(folder: Path, facts: dict[str, Any]) -> None:
    count, size, seed = facts["count"], facts["size"], facts["seed"]
    shape = (count, size, size, 3)
    pixels = np.lib.format.open_memmap(
        folder / "images.npy", mode="w+", dtype=np.uint8, shape=shape
    )
    for index in _each(facts):
        pixels[index] = np.asarray(draw(index, size, seed))
    pixels.flush()
    np.save(folder / "labels.npy", np.arange(count) % len(CLASSES))


def _each(facts: dict[str, Any]) -> Any:
    what = f"{facts['count']} pictures of {facts['size']}×{facts['size']} pixels ({facts['kind']})"
    return bar(range(facts["count"]), "drawing", f"{what} are ready")
