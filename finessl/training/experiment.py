"""From a recipe to everything that a run needs: data, split, network, method, on the device."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finessl.data.augment import STRONG, WEAK, create_view
from finessl.data.dataset import Dataset, broken_files, readable, short_digest, warnings_note
from finessl.data.identity import content_digest
from finessl.data.images import pillow_warnings
from finessl.data.loader import Loader
from finessl.data.sampler import INITIAL, generator
from finessl.data.sources import open_dataset
from finessl.data.splits import SPLITS, Split, make_split
from finessl.data.store import PixelStore, free_memory
from finessl.errors import FinesslError
from finessl.files import sha256, write_atomically, writing
from finessl.methods import create as create_method
from finessl.methods.base import Method, Task
from finessl.models.backbones import Backbone, create_backbone
from finessl.models.build import build_network
from finessl.models.head_init import start_heads
from finessl.models.network import Network
from finessl.models.tuning.base import Tuning
from finessl.recipe import Recipe
from finessl.training.cached import CachedLoader
from finessl.training.distributed import Processes
from finessl.training.evaluate import encode
from finessl.training.rundir import RunDirectory
from finessl.training.step import make_optimizer

Report = Callable[[str, int, int], None]  # what is being done, how many, of how many
Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean, standard deviation
RESIZE = 256 / 224  # training crops come from images whose shorter side is this much longer than the input


@dataclass
class Experiment:
    recipe: Recipe
    dataset: Dataset
    split: Split
    store: PixelStore  # training images
    labels: np.ndarray  # of all training images, numbered as in split.classes; training reads those of split.labeled
    test_store: PixelStore | None
    test_index: np.ndarray  # the test images to measure on, and their labels
    test_labels: np.ndarray
    backbone: Backbone
    tuning: Tuning
    network: Network
    method: Method
    mean: tuple[float, ...]
    std: tuple[float, ...]
    device: torch.device
    weights_sha256: str  # of the backbone as it was loaded

    @property
    def image_size(self) -> int:
        return self.backbone.image_size

    @property
    def truth(self) -> np.ndarray:
        """What is known of the unlabeled images' classes (−1: nothing). For diagnostics, never for training."""
        return self.labels[self.split.unlabeled]

    def identity(self) -> dict[str, str]:
        """What a run is about, by content: a checkpoint belongs to one of these."""
        split, options = self.split, self.recipe.head.options
        texts = [options[name] for name in ("text_features", "text_weights") if options.get(name)]
        return {
            "data": self.dataset.fingerprint(),
            "split": short_digest("\0".join(split.classes), split.labeled, split.unlabeled),
            "labeled": content_digest(self.dataset.train, sample=0, always=split.labeled),
            "test": short_digest(self.test_index, self.test_labels),
            "weights": self.weights_sha256 if self.backbone.pretrained else "",
            "texts": " ".join(sha256(Path(file)) for file in texts),
        }

    def changes(self, recorded: Mapping[str, str]) -> list[str]:
        """In words, what is not as it was when `identity` was recorded."""
        now = self.identity()
        changed = self.dataset.changes(recorded["data"])
        words = {
            "split": "split.json",
            "labeled": "the content of labeled images",
            "test": "which test images can be read",
            "weights": "the backbone's weights",
            "texts": "the class names' text features or the text tower's weights",
        }
        return changed + [text for name, text in words.items() if not changed and recorded[name] != now[name]]

    @property
    def images_per_step(self) -> int:
        """Passes through the encoder, over all processes."""
        train, method = self.recipe.train, self.method
        views = (method.weak is not None) + (self.recipe.data.strong_views if method.strong else 0)
        return train.batch_size * (1 + train.mu * views)

    def optimizer(self) -> torch.optim.Optimizer:
        """As the recipe says. Where it leaves the rate inside the backbone open and pretrained weights train, that rate
        is one that they stand: the heads' would destroy them within a few steps."""
        train = self.recipe.train
        if train.backbone_lr is None and self.tuning.gentle is not None and self.backbone.pretrained:
            train = train.model_copy(update={"backbone_lr": min(train.lr, self.tuning.gentle)})
        return make_optimizer(self.network, train, self.device)

    def labeled_features(self) -> tuple[Tensor, Tensor]:
        """Features of the labeled images, without augmentation, and their labels: what a head may start from."""
        self.network.eval()
        features = encode(
            self.network.features,
            self.store,
            size=self.image_size,
            mean=self.mean,
            std=self.std,
            device=self.device,
            indices=self.split.labeled,
        )
        self.network.train()
        return features, torch.from_numpy(self.labels[self.split.labeled])

    def loader(self, processes: Processes, dtype: torch.dtype = torch.float32) -> Loader:
        train, data, method = self.recipe.train, self.recipe.data, self.method
        kind = CachedLoader if train.cache_features else Loader
        return kind(
            self.store,
            self.labels,
            self.split.labeled,
            self.split.unlabeled,
            weak_view=create_view(WEAK, data.weak, self.image_size),
            strong_view=create_view(STRONG, data.strong, self.image_size),
            mean=self.mean,
            std=self.std,
            batch_size=train.batch_size,
            mu=train.mu,
            seed=self.recipe.seed,
            device=self.device,
            weak=method.weak,
            strong_views=data.strong_views if method.strong else 0,
            rows=processes.rows,
            dtype=dtype,
        )


def prepare(
    recipe: Recipe,
    run: RunDirectory | None,
    device: torch.device,
    *,
    dataset: Dataset | None = None,
    cache_dir: Path | None = None,
    progress: Report | None = None,
    writes: bool = True,
) -> Experiment:
    """Everything in its initial state. The split is the run's saved one where there is one; `writes`: save it."""
    data, model = recipe.data, recipe.model
    dataset = dataset or open_source(recipe, progress)
    backbone = create_backbone(
        model.backbone,
        weights=model.weights,
        image_size=data.image_size,
        pretrained=model.pretrained,
        seed=recipe.seed,
    )
    weights_sha256, size = backbone.sha256(), backbone.image_size
    weak_view = create_view(WEAK, data.weak, size)
    shorter = max(round(size * RESIZE), getattr(weak_view, "resized", 0))
    store = read_pixels(dataset, "train", cache_dir, progress, shorter=shorter)
    split = make_or_load_split(recipe, dataset, run, writes)
    test_store = None if dataset.test is None else read_pixels(dataset, "test", cache_dir, progress, square=size)
    test_index, test_labels = split.test(dataset)
    if run is not None and writes:
        write_skipped(run, dataset)

    task = Task(
        classes=len(split.classes),
        unlabeled=len(split.unlabeled),
        steps=recipe.train.steps,
        epoch_steps=recipe.train.epoch_steps,
        labeled=len(split.labeled),
    )
    method = create_method(recipe.method.name, task, recipe.method.options)
    seed = int(generator(recipe.seed, INITIAL).integers(2**62))
    tuning, network = build_network(
        backbone, split.classes, recipe.tuning, recipe.head, method.aux, torch.Generator().manual_seed(seed)
    )
    mean, std = statistics(recipe, dataset, store, backbone)
    experiment = Experiment(
        recipe,
        dataset,
        split,
        store,
        split.labels(dataset),
        test_store if len(test_index) else None,
        test_index,
        test_labels,
        backbone,
        tuning,
        network.to(device),
        method.to(device),
        mean,
        std,
        device,
        weights_sha256,
    )
    if device.type == "cuda":
        for pixels in (store, test_store):
            if pixels is not None and pixels.nbytes < torch.cuda.mem_get_info(device)[0] // 4:
                pixels.to_device(device)
    init = recipe.head.options.get("init", "random")
    if init != "random":
        start_heads(
            experiment.network,
            init,
            backbone=backbone,
            classes=split.classes,
            labeled=experiment.labeled_features,
            generator=torch.Generator().manual_seed(seed),
            **{
                name: recipe.head.options[name] for name in ("template", "text_features") if name in recipe.head.options
            },
        )
    return experiment


def read_pixels(
    dataset: Dataset,
    part: str,
    cache_dir: Path | None,
    progress: Report | None,
    **sizes: int,
) -> PixelStore:
    """Decode one part of the data; what cannot be read is left out of it (or refused, if the recipe is strict)."""
    images = dataset.train if part == "train" else dataset.test
    assert images is not None
    report = (lambda done, total: progress(f"reading {part} images", done, total)) if progress else None
    limit = free_memory() // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each process has its own copy
    with pillow_warnings() as warned:
        store = PixelStore.build(images, cache_dir=cache_dir, progress=report, memory_limit_bytes=limit, **sizes)
    if warned:
        dataset.notes.append(warnings_note(warned))
    dataset.exclude(part, store.failures)
    return store


def open_source(recipe: Recipe, progress: Report | None = None) -> Dataset:
    """The data set that a recipe names."""
    data = recipe.data
    return open_dataset(
        data.source,
        root=data.root,
        strict=data.strict,
        test=data.test,
        progress=None if progress is None else lambda done, total: progress("looking for images", done, total or done),
        **recipe.source.options,
    )


def statistics(recipe: Recipe, dataset: Dataset, store: PixelStore, backbone: Backbone) -> Statistics:
    """Mean and standard deviation that normalise the images: the backbone's, or the data's (published or measured)."""
    if recipe.data.statistics == "model":
        return backbone.mean, backbone.std
    return dataset.statistics or store.statistics()


def write_skipped(run: RunDirectory, dataset: Dataset) -> None:
    if dataset.excluded:
        text = io.StringIO(newline="")
        rows = ((readable(key), reason) for key, reason in dataset.excluded)
        csv.writer(text).writerows([("image", "reason"), *rows])
        with writing(run.skipped_file):
            write_atomically(run.skipped_file, text.getvalue())


def make_or_load_split(recipe: Recipe, dataset: Dataset, run: RunDirectory | None, writes: bool) -> Split:
    if run is not None and run.split_file.exists():
        split = Split.read(run.split_file, dataset)  # which left out what could not be decoded then
        if recipe.split.name in SPLITS and split.kind != recipe.split.name:
            raise FinesslError(
                f"{run.path} was begun with the split {split.kind}, and {recipe.split.name} is asked for; name another --out."
            )
        lost = np.intersect1d(np.union1d(split.labeled, split.unlabeled), dataset.broken)
        if len(lost):
            reasons = dict(dataset.excluded)
            named = [(key, reasons[key]) for key in map(dataset.train.key, lost.tolist())]
            raise FinesslError(
                f"{run.path} was begun with images that can no longer be read: {broken_files(named)} "
                "Restore them, or train again with another --out."
            )
        return split
    if recipe.split.name.endswith(".json"):
        split = Split.load(Path(recipe.split.name), dataset)
    else:
        options: dict[str, Any] = dict(recipe.split.options)
        split = make_split(
            dataset,
            kind=recipe.split.name,
            seed=options.pop("seed", recipe.seed),
            labeled_in_unlabeled=recipe.labeled_in_unlabeled(),
            **options,
        )
    if run is not None and writes:
        with writing(run.split_file):
            split.save(run.split_file)
    return split


def check_places(run: RunDirectory, recipe: Recipe, places: Sequence[str], dataset: Dataset | None = None) -> None:
    """Refuse data or weights at other places than a finished run recorded, unless their content is the same."""
    meta, changed = run.meta(), []
    if dataset is not None or any(name.startswith(("data.", "source.")) for name in places):
        changed += (dataset or open_source(recipe)).changes(meta.get("data_fingerprint", ""))
    if "model.weights" in places and meta.get("weights_sha256"):
        model = recipe.model
        backbone = create_backbone(model.backbone, weights=model.weights, image_size=recipe.data.image_size)
        changed += ["the backbone's weights"] if backbone.sha256() != meta["weights_sha256"] else []
    if changed:
        raise FinesslError(
            f"{run.path} holds a finished run of other data or weights; these differ: {', '.join(changed)}. "
            "Name another --out."
        )
