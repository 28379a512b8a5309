"""`finessl bench augment`: milliseconds per view, compared with torchvision's Pillow transforms in the main process (as in
the released code)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
from PIL import Image

from finessl.bench.timing import milliseconds
from finessl.data.pixel_store import PixelStore
from finessl.data.views import STRONG, WEAK, normalise

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


@dataclass(frozen=True)
class ViewCost:
    view: str
    ours: float  # milliseconds per view
    pillow: float

    @property
    def ratio(self) -> float:
        return self.pillow / self.ours


def bench_augment(device: torch.device, *, size: int = 224, source_size: int = 32, batch: int = 64) -> list[ViewCost]:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (batch, source_size, source_size, 3), dtype=np.uint8)
    store = PixelStore.from_array(pixels)
    if device.type == "cuda":
        store.to_device(device)
    weak, strong = WEAK["crop-flip"](size), STRONG["randaugment"](size)
    indices = np.arange(batch)

    def make(with_strong: bool) -> torch.Tensor:
        images = store.batch(indices, device)
        views = weak.apply(images, weak.draw(rng, store.sizes))
        if with_strong:
            views = strong.apply(views, strong.draw(rng, batch))
        return normalise(views, MEAN, STD)

    pictures = [Image.fromarray(image) for image in pixels]
    rows = []
    for name, with_strong in (("weak", False), ("strong", True)):
        ours = milliseconds(partial(make, with_strong), device) / batch
        rows.append(ViewCost(name, ours, pillow_time(pillow_view(size, with_strong), pictures)))
    return rows


def pillow_view(size: int, strong: bool) -> Callable[[Image.Image], torch.Tensor]:
    """The equivalent view by torchvision's transforms."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.Resize(round(size * 256 / 224)),
            transforms.RandomCrop(size, padding=round(size * 28 / 224), padding_mode="reflect"),
            transforms.RandomHorizontalFlip(),
            *([transforms.RandAugment(2, 10)] if strong else []),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def pillow_time(transform: Callable[[Image.Image], torch.Tensor], pictures: list[Image.Image]) -> float:
    times = []
    for picture in pictures:
        start = time.perf_counter()
        transform(picture)
        times.append(1000 * (time.perf_counter() - start))
    return median(times)
