"""Training from Python: `finessl.train(folder, out=…)`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finessl.data.dataset import Dataset
from finessl.errors import FinesslError
from finessl.inference.classifier import Classifier, load
from finessl.recipe import Recipe
from finessl.registry import nearest
from finessl.training.loop import Settings
from finessl.training.loop import train as run_recipe

# Short names for the fields that people set most; any other field goes by its dotted name in `settings=`.
SHORT = {
    "root": "data.root",
    "test": "data.test",
    "labels": "source.labels",
    "download": "source.download",
    "path_column": "source.path_column",
    "label_column": "source.label_column",
    "image_size": "data.image_size",
    "strong_views": "data.strong_views",
    "strict": "data.strict",
    "split": "split.name",
    "labels_per_class": "split.labels_per_class",
    "backbone": "model.backbone",
    "weights": "model.weights",
    "tuning": "tuning.name",
    "head": "head.name",
    "head_init": "head.init",
    "text_features": "head.text_features",
    "method": "method.name",
    "steps": "train.steps",
    "batch_size": "train.batch_size",
    "mu": "train.mu",
    "lr": "train.lr",
    "backbone_lr": "train.backbone_lr",
    "precision": "train.precision",
    "cache_features": "train.cache_features",
    "seed": "seed",
}


def make_recipe(
    recipe: str | Path | None,
    fields: dict[str, Any],
    more: dict[str, Any] | None = None,
    *,
    plugins: Sequence[str] = (),
    check: bool = True,
    source: bool = False,
) -> Recipe:
    """A recipe file, then short names (None leaves a field as it is), then dotted names.

    plugins: files or modules to import first.   check: all names and options.   source: also that the data is there.
    """
    overrides = {}
    for name, value in fields.items():
        if name not in SHORT:
            raise FinesslError(f"unknown argument {name!r}{nearest(name, SHORT) or '.'} Known: {', '.join(SHORT)}.")
        if value is not None:
            overrides[SHORT[name]] = str(value) if isinstance(value, Path) else value
    if plugins:
        overrides["plugins"] = list(map(str, plugins))
    return Recipe.read(recipe, {**overrides, **(more or {})}, check=check, source=source)


def train(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    recipe: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    plugins: Sequence[str] = (),
    device: str = "auto",
    quiet: bool = False,
    **fields: Any,
) -> Classifier:
    """Train on `data` (folder, table or data set name) in directory `out`, and return the classifier.

    `fields` are the short names of the command line (method=, tuning=, backbone=, weights=, steps=, lr=, seed=…);
    `settings` sets any recipe field by its dotted name, {"method.alpha": 4.0}; `plugins` names files or modules that
    register methods of your own. Calling it again with the same `out` resumes or, when the run is finished, just loads
    it.
    """
    source = {"data.source": data.name if isinstance(data, Dataset) else str(data)}
    run_recipe(
        make_recipe(
            recipe, fields, {**source, **(settings or {})}, plugins=plugins, source=not isinstance(data, Dataset)
        ),
        out,
        Settings(device=device, quiet=quiet),
        data if isinstance(data, Dataset) else None,
    )
    return load(out, device=device)
