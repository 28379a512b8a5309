"""Training from Python: `finessl.train(folder, out=…)`, and arrays in scikit-learn's manner."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from finessl.classifier import Classifier, load
from finessl.data.dataset import Dataset
from finessl.data.images import ArrayImages, to_bytes
from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.registry import nearest
from finessl.training.loop import Settings
from finessl.training.loop import train as run_recipe

# Short names for the fields that people set most; any other field goes by its dotted name in `settings=`.
SHORT = {
    "root": "data.root",
    "test": "data.test",
    "download": "source.download",
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


def make_recipe(recipe: str | Path | None, fields: dict[str, Any], more: dict[str, Any] | None = None) -> Recipe:
    """A recipe file, then short names, then dotted names; None leaves a field as it is."""
    overrides = {}
    for name, value in fields.items():
        if name not in SHORT:
            raise FinesslError(f"unknown argument {name!r}{nearest(name, SHORT) or '.'} Known: {', '.join(SHORT)}.")
        if value is not None:
            overrides[SHORT[name]] = str(value) if isinstance(value, Path) else value
    return Recipe.read(recipe, {**overrides, **(more or {})})


def train(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    recipe: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    device: str = "auto",
    quiet: bool = False,
    **fields: Any,
) -> Classifier:
    """Train on `data` (folder, table or data set name) in directory `out`, and return the classifier.

    `fields` are the short names of the command line (method=, tuning=, backbone=, weights=, steps=, lr=, seed=…);
    `settings` sets any recipe field by its dotted name, {"method.alpha": 4.0}. Calling it again with the same `out`
    resumes or, when the run is finished, just loads it.
    """
    source = {"data.source": data.name if isinstance(data, Dataset) else str(data)}
    run_recipe(
        make_recipe(recipe, fields, {**source, **(settings or {})}),
        out,
        Settings(device=device, quiet=quiet),
        data if isinstance(data, Dataset) else None,
    )
    return load(out, device=device)


class FineSSLClassifier:
    """fit(X, y) and predict(X) on arrays: X is uint8 [n, h, w, 3] (or floats in 0…1), y holds class labels and −1 for
    unlabeled images.

        model = FineSSLClassifier(backbone="embedded", steps=300).fit(X, y)
        model.predict(X_new)

    After fit: `classes_`, `classifier_` (a Classifier), `transduction_` (predicted labels of X).
    """

    def __init__(
        self, *, out: str | Path | None = None, device: str = "auto", quiet: bool = True, **fields: Any
    ) -> None:
        self.out, self.device, self.quiet, self.fields = out, device, quiet, fields

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {"out": self.out, "device": self.device, "quiet": self.quiet, **self.fields}

    def set_params(self, **parameters: Any) -> FineSSLClassifier:
        for name in ("out", "device", "quiet"):
            if name in parameters:
                setattr(self, name, parameters.pop(name))
        self.fields.update(parameters)
        return self

    def fit(self, X: np.ndarray, y: np.ndarray) -> FineSSLClassifier:
        X, y = as_images(X), np.asarray(y)
        if y.shape != (len(X),):
            raise FinesslError(f"X holds {len(X)} images, but y has shape {y.shape}; y needs one label an image.")
        known = y != -1
        if not known.any():
            raise FinesslError("y holds no label at all, only −1; at least two classes need a labeled image each.")
        self.classes_ = np.unique(y[known])
        labels = np.full(len(y), -1, np.int64)
        labels[known] = np.searchsorted(self.classes_, y[known])
        dataset = Dataset("arrays", [str(c) for c in self.classes_], ArrayImages(X, "X"), labels, None, None, known)
        with tempfile.TemporaryDirectory(prefix="finessl-") as scratch:
            self.classifier_ = train(
                dataset, out=self.out or Path(scratch) / "run", device=self.device, quiet=self.quiet, **self.fields
            )
        self.transduction_ = self.predict(X)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.classes_[self.predict_proba(X).argmax(1)]

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        return self.classifier_.predict_proba(as_images(X))

    def score(self, X: np.ndarray, y: np.ndarray) -> float:
        return float((self.predict(X) == np.asarray(y)).mean())


def as_images(X: np.ndarray) -> np.ndarray:
    X = np.asarray(X)
    if X.ndim == 3:
        X = np.repeat(X[..., None], 3, axis=3)
    if X.ndim != 4 or X.shape[3] != 3:
        raise FinesslError(f"X has shape {X.shape}; expected [n, h, w, 3], or [n, h, w] for grey images.")
    return np.ascontiguousarray(to_bytes(X, "X"))
