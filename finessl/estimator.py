"""finessl as a scikit-learn estimator: `FineSSLClassifier().fit(X, y)` on arrays or image files."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from finessl.api import SHORT, train
from finessl.data.dataset import Dataset, broken_files, some
from finessl.data.decoding import to_bytes
from finessl.data.images import ArrayImages, FileImages, Images
from finessl.data.path_table import PathTable
from finessl.errors import FinesslError
from finessl.inference.evaluate import predict_images
from finessl.registry import nearest

# Short names, without those that say where a data set is and how it is read: here X and y are the data.
FIELDS = [
    name for name, field in SHORT.items() if name not in ("root", "test", "strict") and not field.startswith("source.")
]


class InputError(FinesslError, ValueError):
    """X or y cannot be used. scikit-learn's tools expect a ValueError."""


class FineSSLClassifier(ClassifierMixin, BaseEstimator):
    """Classifies images from few labels and many unlabeled images, as a scikit-learn estimator.

    X: uint8 [n, h, w, 3] or [n, h, w] (or floats in 0…1), or n paths of image files.
    y: n labels of any one type. −1 marks an unlabeled image; among strings None, NaN and "" do, too.

        model = FineSSLClassifier(backbone="embedded", steps=300).fit(X, y)
        model.predict(X_new)

    The arguments are those of `finessl.train` (`finessl list fields`); None takes the recipe's value.
    recipe: file, or name of a shipped one.   settings: any recipe field by its dotted name, {"method.alpha": 4.0}.
    plugins: files or modules that register methods of your own.   out: keeps the run directory; leave it None in a search
    or cross-validation, where each fit is another run.   device: auto, cpu, cuda …   quiet: print no progress.

    After fit: `classes_`, `classifier_` (a finessl.Classifier), `transduction_` (predicted labels of X).
    """

    def __init__(
        self,
        *,
        recipe: str | Path | None = None,
        settings: dict[str, Any] | None = None,
        plugins: Sequence[str] | None = None,
        out: str | Path | None = None,
        device: str = "auto",
        quiet: bool = True,
        **fields: Any,
    ) -> None:
        if unknown := [name for name in fields if name not in FIELDS]:
            raise TypeError(
                f"unknown argument {unknown[0]!r}{nearest(unknown[0], FIELDS) or '.'} Known: {', '.join(FIELDS)}."
            )
        self.recipe = recipe
        self.settings = settings
        self.plugins = plugins
        self.out = out
        self.device = device
        self.quiet = quiet
        for name in FIELDS:
            setattr(self, name, fields.get(name))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = tags.input_tags.string = True  # paths
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True  # and four: images with channels
        tags.input_tags.positive_only = True
        return tags

    def fit(self, X: Any, y: Any) -> FineSSLClassifier:
        """Train on the labeled images and, where the method uses them, the unlabeled ones."""
        images = as_images(X)
        labels, known = as_labels(y, len(images))
        if not known.any():
            raise InputError("y holds no label, only marks of unlabeled images; at least two classes need a label.")
        if len({isinstance(label, str) for label in labels[known]}) > 1:
            raise InputError("y mixes strings and other labels; use one type.")
        check_classification_targets(labels[known])
        classes, numbers = np.unique(labels[known], return_inverse=True)
        if len(classes) < 2:
            raise InputError(
                f"y holds 1 class, {classes.tolist()[0]!r}; at least two are needed. In cross-validation each training "
                "part needs labels of two classes: use StratifiedKFold or fewer folds."
            )
        ids = np.full(len(labels), -1, np.int64)
        ids[known] = numbers
        dataset = Dataset("arrays", [str(name) for name in classes], images, ids, None, None, known, strict=True)
        options = {name: getattr(self, name) for name in FIELDS}
        with tempfile.TemporaryDirectory(prefix="finessl-") as scratch:
            self.classifier_ = train(
                dataset,
                out=self.out or Path(scratch) / "run",
                recipe=self.recipe,
                settings=self.settings,
                plugins=self.plugins or (),
                device=self.device,
                quiet=self.quiet,
                **options,
            )
        self.classes_ = classes
        self.transduction_ = self.predict(X)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each image."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities [n, classes], in the order of `classes_`."""
        check_is_fitted(self)
        images = as_images(X)
        result = np.empty((len(images), len(self.classes_)), np.float32)
        broken: list[tuple[int, str]] = []
        for positions, probabilities, failures in predict_images(self.classifier_, images):
            result[positions] = probabilities
            broken += failures
        if broken:
            raise InputError(f"X: {broken_files([(images.key(i), reason) for i, reason in broken])}")
        return result

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy on the images whose label y gives."""
        predicted = self.predict(X)
        labels, known = as_labels(y, len(predicted))
        if not known.any():
            raise InputError("y holds no label, only marks of unlabeled images: there is nothing to score.")
        weight = None if sample_weight is None else np.asarray(sample_weight)[known]
        return float(np.average(predicted[known] == labels[known], weights=weight))


def name_parameters(init: Any) -> None:
    """Give `init` one parameter per field in place of `**fields`: scikit-learn and `help` read the signature."""
    signature = inspect.signature(init)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    fields = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in FIELDS]
    init.__signature__ = signature.replace(parameters=[*kept, *fields])


name_parameters(FineSSLClassifier.__init__)


def as_images(X: Any) -> Images:
    """An array of images, or paths of image files (a list, an array or a series)."""
    if isinstance(X, (str, os.PathLike)):
        raise InputError(
            f"X is one path, {str(X)!r}; pass a list of image files, or finessl.train(folder) for a folder."
        )
    if isinstance(X, Sequence) and X and all(isinstance(item, (str, os.PathLike)) for item in X):
        return as_files(list(X))
    try:
        array = np.asarray(X)
    except ValueError as error:  # images of different shapes
        raise InputError(f"X is no array of images of one size: {error} Pass one array, or paths of files.") from error
    if array.ndim == 1 and len(array) and all(isinstance(item, (str, os.PathLike)) for item in array):
        return as_files(list(array))
    if array.ndim == 3:
        array = np.repeat(array[..., None], 3, axis=3)
    if array.ndim != 4 or array.shape[3] != 3:
        raise InputError(
            f"X has shape {array.shape}; expected [n, h, w, 3], [n, h, w] for grey images, or a list of image files."
        )
    if not len(array) or not all(array.shape):
        raise InputError(f"X has shape {array.shape}; it holds no image.")
    if array.dtype.kind not in "biuf":
        raise InputError(f"X holds values of type {array.dtype}; pass uint8, or floats between 0 and 1.")
    try:
        return ArrayImages(np.ascontiguousarray(to_bytes(array, "X")), "X")
    except FinesslError as error:
        raise InputError(str(error)) from error


def as_files(paths: Sequence[str | os.PathLike[str]]) -> FileImages:
    names = [Path(os.path.abspath(path)).as_posix() for path in paths]
    missing = [str(path) for path, name in zip(paths, names, strict=True) if not os.path.isfile(name)]
    if missing:
        raise InputError(f"X names {len(missing):,} of {len(names):,} files that are not there: {some(missing)}.")
    return FileImages(Path("/"), PathTable.of(names, [os.stat(name).st_size for name in names]))


def as_labels(y: Any, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of this many images, and which of them are given."""
    if y is None:
        raise InputError("fit requires y to be passed, but the target y is None.")  # scikit-learn's own words
    if isinstance(y, (list, tuple)) and any(isinstance(label, str) for label in y):
        labels = np.empty(len(y), object)  # NumPy would turn a −1 among strings into "-1"
        labels[:] = y
    else:
        labels = column_or_1d(y, warn=True)
    if len(labels) != images:
        raise InputError(f"X holds {images} images and y {len(labels)} labels; y needs one label per image.")
    if labels.dtype.kind not in "OU":
        return labels, labels != -1
    known = np.array([not unlabeled(label) for label in labels], bool)
    if any(isinstance(label, str) and label == "-1" for label in labels):
        raise InputError(
            "y holds the string '-1', which may be an unlabeled image or a class. Mark unlabeled images by an empty "
            "string (or by None or the number −1 in a list or an object array), or rename the class."
        )
    return labels, known


def unlabeled(label: Any) -> bool:
    """−1, None, NaN, pandas' NA or an empty string, in an array of objects."""
    if isinstance(label, str):
        return label == ""
    return label is None or type(label).__name__ == "NAType" or bool(label != label) or bool(label == -1)
