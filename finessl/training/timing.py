"""What training costs on this machine: a few steps and a few images, timed on random pixels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finessl.data.dataset import Dataset
from finessl.data.decoding import ImageError
from finessl.data.images import ArrayImages, Images
from finessl.frozen.features import FrozenEncoder
from finessl.models.build import store_frozen
from finessl.recipe import Recipe
from finessl.runtime.callbacks import no_progress
from finessl.runtime.device import synchronize
from finessl.runtime.distributed import Processes
from finessl.runtime.machine import usable_cores
from finessl.runtime.precision import DTYPES, autocast, resolve_precision
from finessl.training.experiment import Experiment, prepare
from finessl.training.feature_cache import CachedLoader
from finessl.training.step import TrainingStep

Clock = Callable[[], float]

STEPS = 2  # steps that are timed, after one that is not
SMALL = 2  # labeled images in a timed step on a CPU, where time grows with the images
SAMPLE = 8  # images that are read or encoded


@dataclass(frozen=True)
class Cost:
    """Seconds on this machine."""

    step: float  # of a training step
    image: float  # of encoding an image
    view: float = 0.0  # of making and encoding a view, where the features of views are kept


def time_training(recipe: Recipe, classes: int, device: torch.device, clock: Clock = time.perf_counter) -> Cost:
    """What `recipe` costs, with random weights: speed does not depend on them.

    On a CPU the step is timed with few images and scaled up. On a GPU it is timed as it is, but not compiled: a long
    run is faster.
    """
    small, scale = reduced(recipe, device)
    count = max(2 * classes, 2 * small.train.batch_size * small.train.mu)
    experiment = prepare(small, None, device, dataset=random_pixels(classes, count, 64))
    precision = resolve_precision(recipe.train.precision, device)
    network = experiment.network.train()
    store_frozen(network.encoder, precision)
    step = TrainingStep(network, experiment.method, experiment.optimizer(), small.train, device, precision, Processes())
    loader, view = experiment.loader(Processes(), DTYPES[precision]), 0.0
    if isinstance(loader, CachedLoader):
        begun = clock()
        loader.fill(network, 1, precision, no_progress)
        view, scale = (clock() - begun) / sum(len(kept.features) for kept in loader.kept), 1.0
    step(0, loader.load(0))
    synchronize(device)
    begun = clock()
    for number in range(1, STEPS + 1):
        step(number, loader.load(number))
    synchronize(device)
    seconds = scale * (clock() - begun) / STEPS
    return Cost(seconds, view or time_encoder(experiment, precision, clock), view)


def random_pixels(classes: int, images: int, side: int) -> Dataset:
    """A data set in memory, with as many images of each class.   side: of an image, pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (images, side, side, 3), dtype=np.uint8)
    names = [f"class {k}" for k in range(classes)]
    return Dataset("random pixels", names, ArrayImages(pixels, "train"), np.arange(images) % classes)


def reduced(recipe: Recipe, device: torch.device) -> tuple[Recipe, float]:
    """The recipe on random pixels and weights, with a small batch on a CPU; and how much larger its own batch is."""
    tree: dict[str, Any] = recipe.tree()
    batch = min(SMALL, recipe.train.batch_size) if device.type == "cpu" and not recipe.train.cache_features else None
    tree["model"] |= {"pretrained": False, "weights": None}
    tree["data"] |= {"source": "", "root": None, "test": None}
    tree |= {"source": {"name": "auto"}, "split": {"name": "per-class", "labels_per_class": 1}}
    tree["head"] = {"name": recipe.head.name}
    tree["train"] |= {"batch_size": batch or recipe.train.batch_size}
    return Recipe.from_tree(tree, check=False), recipe.train.batch_size / tree["train"]["batch_size"]


def time_encoder(experiment: Experiment, precision: str, clock: Clock) -> float:
    """Seconds per image of the network without gradient."""
    size, device = experiment.image_size, experiment.device
    images = torch.zeros(SAMPLE, 3, size, size, dtype=DTYPES[precision], device=device)
    with torch.no_grad(), autocast(device, precision):
        experiment.network.features(images)
        synchronize(device)
        begun = clock()
        experiment.network.features(images)
        synchronize(device)
    return (clock() - begun) / SAMPLE


def time_encoding(encoder: FrozenEncoder, clock: Clock = time.perf_counter) -> float:
    """Seconds per image of a frozen backbone, in batches as it encodes."""
    size = encoder.backbone.image_size
    pixels = np.zeros((SAMPLE if encoder.device.type == "cpu" else encoder.batch, size, size, 3), np.uint8)
    encoder.forward(pixels)
    begun = clock()
    encoder.forward(pixels)
    return (clock() - begun) / len(pixels)


def time_reading(images: Images, clock: Clock = time.perf_counter) -> float:
    """Seconds per image of decoding, by all cores together."""
    positions = np.linspace(0, len(images) - 1, min(SAMPLE, len(images))).astype(int)
    begun = clock()
    for i in positions.tolist():
        try:
            images.read(i)
        except ImageError:
            continue
    return (clock() - begun) / max(len(positions), 1) / usable_cores()
