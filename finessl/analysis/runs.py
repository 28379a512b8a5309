"""A run directory, read for figures and reports. A missing part is None, and `missing` says so in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.splits import SplitFile
from finessl.errors import FinesslError
from finessl.inference import metrics
from finessl.inference.audit import Audit, read_audit
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runtime.files import read_arrays, read_json

MAX_NUMBERED = 100_000  # classes of a run that names none


@dataclass
class Predictions:
    """The classifier's predictions for the test images."""

    logits: np.ndarray  # [n, C]
    labels: np.ndarray
    index: np.ndarray  # positions in the data set's test images

    @cached_property
    def probabilities(self) -> np.ndarray:
        return metrics.softmax(self.logits)

    @cached_property
    def predicted(self) -> np.ndarray:
        return self.logits.argmax(1)

    @cached_property
    def confidence(self) -> np.ndarray:
        return self.probabilities.max(1)

    @cached_property
    def correct(self) -> np.ndarray:
        return self.predicted == self.labels

    @cached_property
    def confusion(self) -> np.ndarray:
        return metrics.confusion(self.labels, self.predicted, self.logits.shape[1])


@dataclass
class Outcome:
    """One run, finished or not."""

    run: RunDirectory
    recipe: Recipe
    label: str = ""
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.label = self.label or self.recipe.method.name
        self.path, self.meta = self.run.path, self.run.meta()
        self.finished = bool(self.meta.get("finished"))
        self.rows = self.run.metrics()
        self.split = self._split()
        self.test = self._predictions()
        self.unlabeled = self._arrays(
            "unlabeled.npz", "labels and confidence of the unlabeled images", "index", "label", "confidence", "truth"
        )
        self.features = self._arrays(
            "features.npz", "features of the pretrained backbone", "labeled", "labels", "unlabeled",
            "labeled_features", "unlabeled_features",
        )  # fmt: skip
        if not self.finished:
            where = f"step {self.step:,} of {self.recipe.train.steps:,}"
            self.missing.insert(
                0, f"The run has stopped, or still runs, at {where}. Its command, run again, resumes it."
            )

    @cached_property
    def audit(self) -> Audit | None:
        try:
            return read_audit(self.path)
        except FinesslError as error:
            self.missing.append(f"The audit is not shown: {error}")
            return None

    # ---- what it is -------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last step: by its metrics, whose lines are some steps apart, or by its newest checkpoint."""
        saved = [int(path.name[5:]) for path in self.run.checkpoints.glob("step-*") if path.name[5:].isdigit()]
        return max([0, *saved, *(row["step"] for row in self.rows if "step" in row)])

    @property
    def fingerprint(self) -> str | None:
        """Of the data."""
        return self.meta.get("data_fingerprint") or (self.split or {}).get("fingerprint")

    @cached_property
    def classes(self) -> list[str]:
        """Class names; numbers if split.json is missing."""
        if self.split:
            return self.split["classes"]
        counted = [len(row["pseudo"]) for row in self.rows if "pseudo" in row]
        count = counted[-1] if counted else self.meta.get("classes", 0)
        return [f"class {k}" for k in range(min(count, MAX_NUMBERED))]

    @cached_property
    def labels_per_class(self) -> float | None:
        """Mean number of labels per class."""
        count = self.meta.get("labeled")
        if count is None or not self.classes:
            return self.recipe.split.options.get("labels_per_class")
        return count / len(self.classes)

    # ---- what it recorded -------------------------------------------------------------------------------------------

    @cached_property
    def diagnostics(self) -> list[dict[str, Any]]:
        found = [row for row in self.rows if row.get("kind") == "diagnostics"]
        return [row for row in found if len(row.get("pseudo", [])) == len(self.classes)]

    def series(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of one metric in metrics.jsonl."""
        rows = [row for row in self.rows if row.get("kind") == kind and row.get(name) is not None]
        return np.array([row["step"] for row in rows], int), np.array([row[name] for row in rows], float)

    def pseudo_accuracy(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps, share of correct pseudo-labels among images of known class), per epoch."""
        rows = [row for row in self.diagnostics if "truth" in row]
        return np.array([row["step"] for row in rows], int), np.array([sum(r["right"]) / sum(r["truth"]) for r in rows])

    def pseudo_entropy(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps, entropy of the pseudo-labels' distribution over classes)."""
        rows = self.diagnostics
        return np.array([row["step"] for row in rows], int), np.array([metrics.entropy(r["pseudo"]) for r in rows])

    def histogram(self, name: str, *groups: str) -> np.ndarray | None:
        """Bins of confidence, confidence_aux or weight in the last epoch, summed over groups of images."""
        found = self.diagnostics[-1].get(name, {}) if self.diagnostics else {}
        chosen = [found[group] for group in groups or found if group in found]
        return np.sum(chosen, axis=0) if chosen else None

    @property
    def accuracy(self) -> float | None:
        if self.test is not None:
            return float(self.test.correct.mean())
        values = self.series("test", "accuracy")[1]
        return float(values[-1]) if len(values) else None

    # ---- files ------------------------------------------------------------------------------------------------------

    def _split(self) -> dict[str, Any] | None:
        try:
            return dict(read_json(self.run.split_file, SplitFile))
        except FinesslError as error:
            self.missing.append(str(error))
            return None

    def _arrays(self, name: str, what: str, *keys: str) -> dict[str, np.ndarray] | None:
        """None if the file is damaged or belongs to other classes."""
        try:
            arrays = read_arrays(self.path / name, *keys)
            if not fits(arrays, len(self.classes)):
                raise FinesslError(f"{self.path / name} does not fit the run's classes.")
            return arrays
        except FinesslError as error:
            if self.finished:
                self.missing.append(f"No {what}: {error}")
            return None

    def _predictions(self) -> Predictions | None:
        if self.finished and not self.meta.get("test"):
            return None  # there was nothing to predict
        arrays = self._arrays("predictions.npz", "answers for the test images", "logits", "labels", "index")
        return None if arrays is None else Predictions(arrays["logits"], arrays["labels"], arrays["index"])


def fits(arrays: dict[str, np.ndarray], classes: int) -> bool:
    """Whether the arrays of a run are consistent: equal numbers of rows, labels among the classes, finite numbers."""
    groups = (("index", "label", "confidence", "truth"), ("index", "labels", "logits"),
              ("labeled", "labels", "labeled_features"), ("unlabeled", "unlabeled_features"))  # fmt: skip
    for group in groups:
        if set(group) <= set(arrays) and len({arrays[name].shape[:1] for name in group}) != 1:
            return False
    for name, low in (("label", 0), ("labels", 0), ("truth", -2)):
        if name in arrays and arrays[name].size and not low <= arrays[name].min() <= arrays[name].max() < classes:
            return False
    if "logits" in arrays and (arrays["logits"].shape[1:] != (classes,) or not arrays["logits"].size):
        return False
    return all(np.isfinite(array).all() for array in arrays.values() if array.dtype.kind == "f")


def read_runs(paths: Sequence[str | Path]) -> list[Outcome]:
    """The runs at these paths; a folder of runs means all of them. Labels name the differences between the runs."""
    folders: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.glob("*/recipe.toml"))
        if (path / "recipe.toml").exists():
            folders.append(path)
        elif inside:
            folders += inside
        else:
            raise FinesslError(f"{path} is not a run directory, nor a folder of them: there is no recipe.toml.")
    runs = [RunDirectory(folder) for folder in dict.fromkeys(folders)]
    recipes = [run.recipe() for run in runs]
    return [Outcome(run, recipe, label) for run, recipe, label in zip(runs, recipes, run_labels(recipes), strict=True)]


def run_labels(recipes: Sequence[Recipe]) -> list[str]:
    """Method, then every other field in which the recipes differ: 'finessl', or 'finessl, alpha 4, seed 1'."""
    flats = [recipe.flat() for recipe in recipes]
    apart = []
    for name in dict.fromkeys(name for flat in flats for name in flat):
        choice = f"{name.partition('.')[0]}.name"
        values: dict[Any, set[str]] = {}  # an option counts where it differs between runs of one method (strategy …)
        for flat in flats:
            values.setdefault(None if name == choice else flat.get(choice), set()).add(repr(flat.get(name)))
        if name != "method.name" and any(len(group) > 1 for group in values.values()):
            apart.append(name)
    labels = []
    for recipe, flat in zip(recipes, flats, strict=True):
        parts = [f"{short(name)} {plain(flat[name])}".strip() for name in apart if flat.get(name) is not None]
        labels.append(", ".join([recipe.method.name, *parts]))
    return [text if labels.count(text) == 1 else f"{text} ({i})" for i, text in enumerate(labels, 1)]


def short(name: str) -> str:
    """'tuning.name' → 'tuning', 'method.alpha' → 'alpha', 'split.labels_per_class' → 'labels'."""
    names = {"split.labels_per_class": "labels", "model.backbone": "", "tuning.name": "", "data.source": ""}
    return names.get(name, name.removesuffix(".name").rpartition(".")[2]).replace("_", " ")


def plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
