"""`finessl bench data`: images per second from files to views, compared with Pillow in the main process.

Each part separately: decoding into the store, fetching batches from it, the views of a training step, and a backbone, which
shows whether prediction is limited by the files or by the network.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from finessl.bench.augment import MEAN, STD, pillow_view
from finessl.bench.scale import write_originals, write_set
from finessl.bench.timing import milliseconds
from finessl.data.decoding import fitted, opened, resize
from finessl.data.images import ArrayImages, Images
from finessl.data.loader import Loader
from finessl.data.pixel_store import PixelStore
from finessl.data.sources import open_dataset
from finessl.data.views import STRONG, WEAK
from finessl.errors import FinesslError
from finessl.inference.encode import encode
from finessl.models.backbones import create_backbone
from finessl.training.experiment import RESIZE

FETCHES = 10  # batches


@dataclass(frozen=True)
class Rate:
    """Images per second of a part, and of its reference."""

    part: str
    rate: float  # images per second
    reference: str = ""
    reference_rate: float | None = None

    def as_dict(self) -> dict[str, Any]:
        about: dict[str, Any] = {"part": self.part, "rate": round(self.rate, 1)}
        if self.reference_rate is not None:
            about |= {"reference": self.reference, "reference_rate": round(self.reference_rate, 1)}
            about["ratio"] = round(self.rate / self.reference_rate, 3)
        return about


def bench_data(
    data: str,
    device: torch.device,
    *,
    root: str | None = None,
    options: Mapping[str, Any] | None = None,
    images: int = 256,
    size: int = 224,
    batch: int = 32,
    strong_views: int = 2,
    repeats: int = 3,
) -> list[Rate]:
    """data: "synthetic", or any data whose images are files.   images: at most this many, evenly spaced.   size: pixels.
    batch: images per batch.   repeats: rounds; the median counts."""
    if min(images, size, batch, strong_views, repeats) < 1:
        raise FinesslError("bench data: images, size, batch-size, strong-views and repeats should be at least 1.")
    with tempfile.TemporaryDirectory() as folder:
        if data == "synthetic":
            write_set(Path(folder) / "images", write_originals(Path(folder) / "originals", 64), max(images, 2))
        dataset = open_dataset(Path(folder) / "images" if data == "synthetic" else data, root=root, **(options or {}))
        if isinstance(dataset.train, ArrayImages):
            raise FinesslError(f"bench data: {data} is an array, with nothing to decode; give a folder or a table.")
        chosen = np.unique(np.linspace(0, len(dataset.train) - 1, images).astype(np.int64))
        return measure(dataset.train.take(chosen), Path(folder), device, size, batch, strong_views, repeats)


def measure(
    images: Images, scratch: Path, device: torch.device, size: int, batch: int, strong_views: int, repeats: int
) -> list[Rate]:
    shorter = round(size * RESIZE)
    build = partial(PixelStore.build, images, shorter=shorter, cache_dir=scratch / "pixels")
    store, mapped = build(), build(cache_dir=scratch / "map", memory_limit_bytes=0)
    good = np.flatnonzero(store.sizes[:, 0])
    if len(good) < 2:
        raise FinesslError("bench data: fewer than two of the images can be decoded.")

    def pillow_decode(i: int) -> Image.Image:
        with opened(images.content(i)) as file:
            picture = file.convert("RGB")
        return resize(picture, *fitted(picture.height, picture.width, shorter=shorter))

    batches = np.random.default_rng(0).choice(good, (FETCHES, batch))
    resident = build().to_device(device) if device.type == "cuda" else store  # as in training
    loader = Loader(
        resident, np.zeros(len(good), np.int64), good, good, weak_view=WEAK["crop-flip"](size),
        strong_view=STRONG["randaugment"](size), mean=MEAN, std=STD, batch_size=batch, mu=1, seed=0, device=device,
        weak="no_grad", strong_views=strong_views,
    )  # fmt: skip
    steps, pictures = count(), [Image.fromarray(store.image(int(i))) for i in good[:batch]]
    weak, strong = (pillow_view(size, strong) for strong in (False, True))
    backbone = create_backbone("embedded")
    encoder = backbone.encoder.to(device).eval()
    own = {"size": backbone.image_size, "mean": backbone.mean, "std": backbone.std}
    parts: dict[str, tuple[int, Callable[[], object]]] = {
        "decode": (len(images), build),
        "Pillow decode": (len(good), partial(each, pillow_decode, good.tolist())),
        "memory": (batches.size, partial(each, store.fetch, batches)),
        "map": (batches.size, partial(each, mapped.fetch, batches)),
        "views": (batch * (2 + strong_views), lambda: loader.load(next(steps))),
        "Pillow weak": (len(pictures), partial(each, weak, pictures)),
        "Pillow strong": (len(pictures), partial(each, strong, pictures)),
        "encode": (len(good), lambda: encode(encoder, store, device=device, indices=good, **own)),  # type: ignore[arg-type]
    }
    rounds = [  # all parts in every round, so that a slow phase of the machine affects all; the first round warms up
        [milliseconds(part, device, repeats=1, warmup=0) / number for number, part in parts.values()]
        for _ in range(repeats + 1)
    ][1:]
    rate = {name: 1e3 / median(times) for name, times in zip(parts, zip(*rounds, strict=True), strict=True)}
    pillow_views = (2 + strong_views) / (2 / rate["Pillow weak"] + strong_views / rate["Pillow strong"])
    return [
        Rate("decode", rate["decode"], "Pillow in a loop", rate["Pillow decode"]),
        Rate("fetch from memory", rate["memory"]),
        Rate("fetch from the map", rate["map"], "from memory", rate["memory"]),
        Rate("views of a step", rate["views"], "Pillow's transforms", pillow_views),
        Rate("embedded backbone", rate["encode"], "decode", rate["decode"]),
    ]


def each(function: Callable[[Any], object], items: Iterable[Any]) -> None:
    for item in items:
        function(item)
