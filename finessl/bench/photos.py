"""`finessl bench data --step`: does a training step on photos of many sizes take as long as on images of one size?

JPEGs are written and decoded as for training. One compiled step is then fed in turn from three stores: images of one size and
of many sizes in the device's memory, and of many sizes in the host's. All of them are measured in every round, so that a slow
phase of the machine affects all; the medians count.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from finessl.bench.scale import write_originals, write_set
from finessl.bench.step import run_steps
from finessl.data.loader import Loader, Prefetcher
from finessl.data.pixel_store import PixelStore
from finessl.data.sources import open_dataset
from finessl.data.views import WEAK, create_view
from finessl.errors import FinesslError
from finessl.models.build import store_frozen
from finessl.recipe import Recipe
from finessl.runtime.callbacks import Progress, no_progress
from finessl.runtime.device import describe_device, synchronize
from finessl.runtime.distributed import Processes
from finessl.runtime.precision import DTYPES, resolve_precision
from finessl.training.cuda_graph import compile_and_capture
from finessl.training.experiment import RESIZE, Experiment, prepare
from finessl.training.step import TrainingStep

SIZES, ONE_SIZE = 256, 10_000  # different photos of many sizes; images of one size at most
SHORTER, ASPECT = (280, 520), (1.0, 16 / 9)  # of photos: shorter side in pixels, longer to shorter side
WARMUP = 12  # steps of each store, with compilation and capture
ROOM = 0.8  # of the device's free memory that images may take here


@dataclass(frozen=True)
class PhotoSteps:
    """Milliseconds per step, and how they were measured."""

    steps: dict[str, float]  # what → median of the rounds; the first is what the others are compared with
    rounds: dict[str, list[float]]
    seconds: dict[str, float]  # of the parts before the steps
    about: dict[str, Any]

    def ratios(self) -> dict[str, float]:
        first = next(iter(self.steps.values()))
        return {name: value / first for name, value in self.steps.items()}

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.about,
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "step_ms": {name: round(value, 3) for name, value in self.steps.items()},
            "ratio": {name: round(value, 4) for name, value in self.ratios().items()},
            "rounds_ms": {name: [round(value, 3) for value in values] for name, values in self.rounds.items()},
        }


def bench_photos(
    recipe: Recipe,
    device: torch.device,
    *,
    images: int = 100_000,
    repeats: int = 60,
    rounds: int = 5,
    compile: bool | None = None,
    progress: Progress = no_progress,
) -> PhotoSteps:
    """images: JPEGs of many sizes.   repeats: steps per store and round."""
    if images < 20 or min(repeats, rounds) < 1:
        raise FinesslError("bench data --step: --images should be at least 20, --repeats and rounds at least 1.")
    seconds: dict[str, float] = {}
    begun = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal begun
        synchronize(device)
        seconds[name], begun = time.perf_counter() - begun, time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        progress("writing JPEGs", 0, images)
        write_set(root / "many", write_originals(root / "photos", SIZES, photo_sizes(SIZES)), images)
        write_set(root / "one", write_originals(root / "originals", 64), min(images, ONE_SIZE))
        lap("write")
        experiment = prepare(
            recipe, None, device, dataset=open_dataset(root / "many"), cache_dir=root / "pixels", progress=progress,
            resident=False,
        )  # fmt: skip
        lap("decode")
        host = experiment.store
        weak_view = create_view(WEAK, recipe.data.weak, experiment.image_size)
        shorter = max(round(experiment.image_size * RESIZE), weak_view.resized)
        one = PixelStore.build(open_dataset(root / "one").train, shorter=shorter, cache_dir=root / "pixels")
        stores = {"one size": one, "many sizes": host}
        if device.type == "cuda":
            stores = {"one size": one.to_device(device)}
            if host.nbytes < ROOM * torch.cuda.mem_get_info(device)[0]:
                copy = PixelStore(host.flat, host.offsets, host.sizes, host.failures, host.file)
                stores["many sizes"] = copy.to_device(device)
            stores["many sizes, in host memory"] = host
        lap("copy to the device")
        loaders = {name: loader_of(experiment, store) for name, store in stores.items()}
        training = compile_and_capture(training_step(experiment), compile=compile, steps=recipe.train.steps)
        prefetchers = {name: Prefetcher(loader, 10**6) for name, loader in loaders.items()}
        for number, prefetcher in enumerate(prefetchers.values()):
            progress("compiling", number, len(prefetchers))
            run_steps(training, prefetcher, range(WARMUP), device)
        lap("first steps")
        times: dict[str, list[float]] = {name: [] for name in stores}
        for turn in range(rounds):
            progress("measuring", turn, rounds)
            steps = range(WARMUP + turn * repeats, WARMUP + (turn + 1) * repeats)
            for name, prefetcher in prefetchers.items():
                times[name].append(1000 * run_steps(training, prefetcher, steps, device) / repeats)
        lap("measure")
    about = {
        "device": describe_device(device),
        "backbone": recipe.model.backbone,
        "tuning": recipe.tuning.name,
        "method": recipe.method.name,
        "image_size": experiment.image_size,
        "precision": resolve_precision(recipe.train.precision, device),
        "images": len(host),
        "sizes": len(np.unique(host.sizes, axis=0)),
        "decoded_gb": round(host.nbytes / 1e9, 2),
        "one_size": [int(side) for side in one.sizes[0]],
        "mean_bytes": {name: int(store.nbytes / len(store)) for name, store in stores.items()},
    }
    return PhotoSteps({name: median(values) for name, values in times.items()}, times, seconds, about)


def photo_sizes(count: int) -> list[tuple[int, int]]:
    """Width and height of photos: upright and across, in many formats."""
    rng = np.random.default_rng(0)
    shorter = rng.integers(*SHORTER, count, endpoint=True)
    longer = (shorter * rng.uniform(*ASPECT, count)).astype(int)
    sides = np.where(rng.random((count, 1)) < 0.5, np.stack([shorter, longer], 1), np.stack([longer, shorter], 1))
    return [(int(width), int(height)) for width, height in sides]


def training_step(experiment: Experiment) -> TrainingStep:
    """The recipe's step, as `finessl train` makes it."""
    recipe, device = experiment.recipe, experiment.device
    precision = resolve_precision(recipe.train.precision, device)
    network = experiment.network.train()
    store_frozen(network.encoder, precision)
    return TrainingStep(
        network, experiment.method, experiment.optimizer(), recipe.train, device, precision, Processes()
    )


def loader_of(experiment: Experiment, store: PixelStore) -> Loader:
    """The experiment's loader on another store, which may have fewer images: they are then drawn more often."""
    precision = resolve_precision(experiment.recipe.train.precision, experiment.device)
    loader = experiment.loader(Processes(), DTYPES[precision])
    loader.store = store
    loader.labeled, loader.unlabeled = loader.labeled % len(store), loader.unlabeled % len(store)
    return loader
