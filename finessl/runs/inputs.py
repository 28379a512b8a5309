"""The inputs of a run: data, split, and the statistics that normalise its images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.dataset import Dataset, broken_files, hold_out, readable, warnings_note
from finessl.data.decoding import pillow_warnings
from finessl.data.pixel_store import PixelStore
from finessl.data.sources import open_dataset
from finessl.data.splits import SPLITS, Split, make_split
from finessl.errors import FinesslError
from finessl.models.backbones import Backbone, create_backbone
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runtime.callbacks import Progress, no_progress
from finessl.runtime.files import write_output, writing


def read_pixels(dataset: Dataset, part: str, cache_dir: Path | None, progress: Progress, **sizes: int) -> PixelStore:
    """Decode one part of the data. Unreadable images are left out, or refused if the recipe is strict.

    part: "train" or "test".   cache_dir: folder of decoded images; None: the cache.   sizes: `shorter` or
    `square`, in pixels (PixelStore.build).
    """
    images = dataset.train if part == "train" else dataset.test
    assert images is not None
    count = partial(progress, f"reading {part} images")
    with pillow_warnings() as warned:
        store = PixelStore.build(images, cache_dir=cache_dir, progress=count, **sizes)
    if warned:
        dataset.notes.append(warnings_note(warned))
    dataset.exclude(part, store.failures)
    return store


def open_source(recipe: Recipe, progress: Progress = no_progress) -> Dataset:
    """The data set that a recipe names."""
    data = recipe.data
    dataset = open_dataset(
        data.source,
        root=data.root,
        strict=data.strict,
        test=data.test,
        progress=lambda done, total: progress("looking for images", done, total or done),
        **recipe.source.options,
    )
    return hold_out(dataset, data.development) if data.development else dataset


def open_backbone(recipe: Recipe) -> Backbone:
    """The backbone that a recipe names, before tuning."""
    model = recipe.model
    return create_backbone(
        model.backbone, weights=model.weights, image_size=recipe.data.image_size, pretrained=model.pretrained,
        seed=recipe.seed,
    )  # fmt: skip


def statistics(
    recipe: Recipe, dataset: Dataset, store: PixelStore, backbone: Backbone
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that normalise the images: the backbone's, or the data's (published or measured)."""
    if recipe.data.statistics == "model":
        return backbone.mean, backbone.std
    return dataset.statistics or store.statistics()


def write_skipped(run: RunDirectory, dataset: Dataset) -> None:
    """Write skipped.csv: unreadable images and the reason."""
    if dataset.excluded:
        rows = ((readable(key), reason) for key, reason in dataset.excluded)
        write_output(run.skipped_file, [("image", "reason"), *rows])


def make_or_load_split(recipe: Recipe, dataset: Dataset, run: RunDirectory | None, writes: bool) -> Split:
    """The split of a run: split.json if the run has one, otherwise as the recipe says.   writes: write split.json."""
    if run is not None and run.split_file.exists():
        split = Split.read(run.split_file, dataset)  # without the images that were unreadable when it was made
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
    """Refuse data or weights at a new location for a finished run, unless their content is the same.

    places: recipe fields whose location differs (RunDirectory.check).
    """
    meta, changed = run.meta(), []
    if dataset is not None or any(name.startswith(("data.", "source.")) for name in places):
        changed += (dataset or open_source(recipe)).changes(meta.get("data_fingerprint", ""))
    if "model.weights" in places and meta.get("weights_sha256"):
        changed += ["the backbone's weights"] if open_backbone(recipe).sha256() != meta["weights_sha256"] else []
    if changed:
        raise FinesslError(
            f"{run.path} holds a finished run of other data or weights; these differ: {', '.join(changed)}. "
            "Name another --out."
        )
