"""Does an export give the answers of the classifier it was made from? Compared on real images, before it is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.images import Images
from finessl.data.reading import reader
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.inference.audit import opened
from finessl.inference.evaluate import run_folder
from finessl.runs.directory import RunDirectory
from finessl.runs.inputs import open_source

IMAGES = 256
FIRST_BATCHES = (1, 2, 7)  # a graph that was traced for one batch size fails here
BATCH = 32

Logits = Callable[[np.ndarray], np.ndarray]  # uint8 [n, S, S, 3] → [n, C]


@dataclass(frozen=True)
class Gate:
    """What an export must reach to be kept. Its logits must be finite."""

    max_logit_difference: float
    min_agreement: float


LARGEST = sys.float_info.max
GATES = {
    "fp32": Gate(1e-3, 0.995),
    "fp16": Gate(LARGEST, 0.99),
    "int8": Gate(LARGEST, 0.98),
    "int8-dynamic": Gate(LARGEST, 0.98),
}


@dataclass(frozen=True)
class Agreement:
    images: int
    source: str  # what images
    max_logit_difference: float
    agreement: float  # share of images with the same most probable class

    def passes(self, gate: Gate) -> bool:
        return self.agreement >= gate.min_agreement and self.max_logit_difference <= gate.max_logit_difference

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"same class for {self.agreement:.2%} of {self.images:,} images ({self.source}); "
            f"largest difference of a logit {self.max_logit_difference:.1e}"
        )


def compare(reference: Logits, exported: Logits, pixels: np.ndarray, source: str) -> Agreement:
    """Both on the same pixels, in batches of 1, 2, 7 and then `BATCH`."""
    same, largest = 0, 0.0
    for batch in batches(pixels):
        wanted, given = reference(batch), exported(batch)
        if given.shape != wanted.shape:
            raise FinesslError(f"the export gives an output {list(given.shape)} instead of {list(wanted.shape)}.")
        difference = np.abs(wanted - given).max()
        largest = float("inf") if np.isnan(difference) else max(largest, float(difference))
        same += int((wanted.argmax(1) == given.argmax(1)).sum())
    return Agreement(len(pixels), source, largest, same / len(pixels))


def batches(pixels: np.ndarray) -> Iterator[np.ndarray]:
    start = 0
    for size in FIRST_BATCHES:
        if start + size <= len(pixels):
            yield pixels[start : start + size]
            start += size
    for first in range(start, len(pixels), BATCH):
        yield pixels[first : first + BATCH]


def real_images(run: str | Path, size: int, count: int = IMAGES) -> tuple[np.ndarray, str]:
    """Up to `count` images [n, S, S, 3], spread over the run's test images (or its training images, where there is no
    test set), or over the sample where the run's data cannot be read; and their name."""
    try:
        recipe = RunDirectory(run_folder(run)).recipe()
        dataset, name = open_source(recipe), recipe.data.source
        images, part = (dataset.train, "training") if dataset.test is None else (dataset.test, "test")
        pixels = read_some(images, size, count)
        if len(pixels):
            return pixels, f"{part} images of {name}"
    except (FinesslError, OSError):
        pass
    sample = open_dataset("sample")
    assert sample.test is not None
    return read_some(sample.test, size, count), "images of the sample"


def unlabeled_images(run: str | Path, size: int, count: int) -> tuple[np.ndarray, str]:
    """Up to `count` images [n, S, S, 3], spread over those that the run was trained on without their labels, and their
    name; never test images, nor images whose labels were used."""
    recipe = RunDirectory(run_folder(run)).recipe()
    dataset, split = opened(run_folder(run))
    pixels = read_some(dataset.train.take(np.setdiff1d(split.unlabeled, split.labeled)), size, count)
    if not len(pixels):
        raise FinesslError(f"{run} has no unlabeled image that can be read.")
    return pixels, f"unlabeled images of {recipe.data.source}"


def read_some(images: Images, size: int, count: int) -> np.ndarray:
    """`count` images at even distances, without those that cannot be read."""
    if not len(images):
        return np.empty((0, size, size, 3), np.uint8)
    read = reader(images, size)
    positions = np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).astype(np.int64))
    found = [image for i in positions.tolist() if isinstance(image := read(i), np.ndarray)]
    return np.stack(found) if found else np.empty((0, size, size, 3), np.uint8)
