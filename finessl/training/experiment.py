"""From a recipe to everything that a run needs: data, split, network, method, on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finessl.data.dataset import Dataset, short_digest
from finessl.data.identity import content_digest
from finessl.data.loader import Loader
from finessl.data.pixel_store import PixelStore
from finessl.data.sampler import DROPOUT, INITIAL, generator
from finessl.data.splits import Split
from finessl.data.views import STRONG, WEAK, create_view
from finessl.errors import FinesslError
from finessl.inference.classifier import describe, write_classifier
from finessl.inference.encode import encode
from finessl.methods import create as create_method
from finessl.methods.base import Method, Task
from finessl.models.backbones import Backbone, digest_tensors
from finessl.models.build import build_network, set_patch_dropout
from finessl.models.head_init import start_heads
from finessl.models.network import Network
from finessl.models.tuning.base import Tuning
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runs.inputs import make_or_load_split, open_backbone, open_source, read_pixels, statistics, write_skipped
from finessl.runtime.background import in_background
from finessl.runtime.callbacks import Progress, no_progress
from finessl.runtime.distributed import Processes
from finessl.runtime.files import sha256
from finessl.training.feature_cache import CachedLoader
from finessl.training.optimizers import make_optimizer

RESIZE = 256 / 224  # training crops come from images whose shorter side is this much longer than the input


@dataclass
class Experiment:
    recipe: Recipe
    dataset: Dataset
    split: Split
    store: PixelStore  # training images
    labels: np.ndarray  # of the images split.labeled, numbered as in split.classes; training knows no others
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

    def check_resumable(self, run: RunDirectory, recorded: Mapping[str, str] | None) -> None:
        """Refuse to resume with other data or weights than those whose `identity` was recorded (None: by a version that
        did not record it)."""
        if recorded and (changes := self.changes(recorded)):
            raise FinesslError(
                f"{run.path} cannot resume, because these have changed since its checkpoint: {', '.join(changes)}. "
                "Restore them, or train again with another --out."
            )
        drawn = not self.backbone.pretrained and self.tuning.name != "full"
        if not recorded and drawn and self.recipe.seed:
            raise FinesslError(
                f"{run.path} was begun by an older finessl, whose backbones without pretrained weights did not follow "
                "the seed. Train again with another --out."
            )

    @property
    def images_per_step(self) -> int:
        """Passes through the encoder, over all processes."""
        train, method = self.recipe.train, self.method
        views = (method.weak is not None) + (self.recipe.data.strong_views if method.strong else 0)
        return train.batch_size * (1 + train.mu * views)

    def optimizer(self) -> torch.optim.Optimizer:
        """As the recipe says. Where it leaves the learning rate inside the backbone open and pretrained weights train,
        that rate is at most the strategy's `max_backbone_lr`: the heads' rate would destroy them within a few steps."""
        train = self.recipe.train
        if train.backbone_lr is None and self.tuning.max_backbone_lr is not None and self.backbone.pretrained:
            train = train.model_copy(update={"backbone_lr": min(train.lr, self.tuning.max_backbone_lr)})
        return make_optimizer(self.network, train, self.device)

    def seed_dropout(self, step: int, rank: int) -> None:
        """Seed the modules that draw random numbers: the same ones at a step, also after the run was resumed."""
        if self.network.random:
            torch.manual_seed(int(generator(self.recipe.seed, DROPOUT, step).integers(2**62)) + rank)

    def labeled_features(self) -> tuple[Tensor, Tensor]:
        """Features of the labeled images, without augmentation, and their labels: what a head may start from."""
        return self.encode(self.network.features, self.store, indices=self.split.labeled), torch.from_numpy(self.labels)

    def encode(self, function: Callable[[Tensor], Tensor], store: PixelStore, **options: Any) -> Tensor:
        """`function`, which calls the network, of the images of a store, without augmentation.   options: of `encode`."""
        self.network.eval()
        found = encode(
            function, store, size=self.image_size, mean=self.mean, std=self.std, device=self.device, **options
        )
        self.network.train()
        return found

    def write_classifier(self, folder: Path) -> None:
        """Write the trained network as a classifier."""
        head, tensors = self.network.exported(self.recipe.head)
        about = describe(
            self.recipe, self.split.classes, head, self.method.aux, weights_sha256=self.weights_sha256,
            image_size=self.image_size, mean=self.mean, std=self.std,
        )  # fmt: skip
        write_classifier(folder, about, tensors)

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
    progress: Progress = no_progress,
    writes: bool = True,
    resident: bool = True,
) -> Experiment:
    """Everything in its initial state. The split is the run's saved one where there is one; `writes`: save it.
    `resident`: decoded images go to a GPU's memory where they take less than a quarter of it."""
    data = recipe.data
    loading = in_background(open_backbone, recipe)  # reading weights leaves the interpreter to others
    dataset = dataset or open_source(recipe, progress)
    backbone = loading.result()
    size = backbone.image_size
    hashing = in_background(digest_tensors, backbone.encoder.state_dict())  # before a strategy inserts its own
    weak_view = create_view(WEAK, data.weak, size)
    shorter = max(round(size * RESIZE), weak_view.resized)
    store = read_pixels(dataset, "train", cache_dir, progress, shorter=shorter)
    split = make_or_load_split(recipe, dataset, run, writes)
    test_store = None if dataset.test is None else read_pixels(dataset, "test", cache_dir, progress, square=size)
    test_index, test_labels = split.test(dataset)
    if run is not None and writes:
        write_skipped(run, dataset)

    method = make_method(recipe, split)
    seed = int(generator(recipe.seed, INITIAL).integers(2**62))
    tuning, network = build_network(
        backbone, split.classes, recipe.tuning, recipe.head, method.aux, torch.Generator().manual_seed(seed)
    )
    if recipe.train.patch_dropout:
        set_patch_dropout(backbone.encoder, recipe.train.patch_dropout)
    mean, std = statistics(recipe, dataset, store, backbone)
    if device.type == "cuda" and resident:
        for pixels in (store, test_store):
            if pixels is not None and pixels.nbytes < torch.cuda.mem_get_info(device)[0] // 4:
                pixels.to_device(device)
    experiment = Experiment(
        recipe, dataset, split, store, split.labels(dataset)[split.labeled], test_store if len(test_index) else None,
        test_index, test_labels, backbone, tuning, network.to(device), method.to(device), mean, std, device,
        hashing.result(),
    )  # fmt: skip
    start = recipe.head.options
    if start.get("init", "random") != "random":
        start_heads(
            experiment.network, start["init"], backbone=backbone, classes=split.classes,
            labeled=experiment.labeled_features, generator=torch.Generator().manual_seed(seed),
            **{name: start[name] for name in ("template", "text_features") if name in start},
        )  # fmt: skip
    return experiment


def make_method(recipe: Recipe, split: Split) -> Method:
    task = Task(
        classes=len(split.classes),
        unlabeled=len(split.unlabeled),
        steps=recipe.train.steps,
        epoch_steps=recipe.train.epoch_steps,
        labeled=len(split.labeled),
    )
    return create_method(recipe.method.name, task, recipe.method.options)
