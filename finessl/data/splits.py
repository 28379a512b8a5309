"""Seeded splits of the training images into labeled and unlabeled ones.

A kind of split is one function `kind(dataset, draw, *, options) -> Parts` (split_kinds.py) and one line in SPLITS. Each class
has a random stream of its own: the images of one class do not depend on the other classes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from finessl.data.dataset import Dataset, renumbered, some
from finessl.data.sampler import SPLIT, generator
from finessl.errors import FinesslError
from finessl.registry import Registry
from finessl.registry.options import check_options
from finessl.runtime.files import DamagedFile, read_json, write_atomically

SPLITS = Registry(
    "split",
    {
        "given": ("finessl.data.split_kinds:given", "the labels that the data gives (labeled/ folder, table)"),
        "per-class": ("finessl.data.split_kinds:per_class", "N random images of each class"),
        "first-n": ("finessl.data.split_kinds:first_n", "the first N images of each class, as in the released code"),
        "fraction": ("finessl.data.split_kinds:fraction", "a share of each class, for example 1 % of ImageNet"),
        "list": ("finessl.data.split_kinds:listed", "the images that a text file names, such as SimCLR's lists"),
        "long-tailed": (
            "finessl.data.split_kinds:long_tailed",
            "from N₁ labels for the first class to N₁/ρ for the last",
        ),
        "open-set": ("finessl.data.split_kinds:open_set", "some classes are novel: unlabeled only, never tested"),
    },
)
FORMAT = 1


class SplitFile(TypedDict):
    """split.json."""

    format: int
    kind: str
    seed: int
    settings: dict[str, Any]
    fingerprint: str
    classes: Annotated[list[str], Field(min_length=2)]
    labeled: list[int | Annotated[list[int], Field(min_length=2, max_length=2)]]
    unlabeled: list[int | Annotated[list[int], Field(min_length=2, max_length=2)]]


class Parts(NamedTuple):
    """Result of a kind of split: positions in train. `make_split` adds labeled images to the unlabeled ones if asked to."""

    labeled: np.ndarray
    unlabeled: np.ndarray
    classes: list[str] | None = None  # None: all classes of the data set


@dataclass
class Split:
    """Positions of labeled and unlabeled images, the classes to learn, and how the split was made."""

    labeled: np.ndarray  # int64 [n], sorted positions in train
    unlabeled: np.ndarray  # int64 [M], sorted
    classes: list[str]  # of the classifier; in an open-set split the seen classes only
    kind: str
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""  # of the data set

    def labels(self, dataset: Dataset) -> np.ndarray:
        """int64 [N]: class of every training image, an index of `classes`; −1: unknown or another class."""
        return renumbered(dataset.train_labels, dataset.classes, self.classes)

    def test(self, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
        """Positions and labels of the test images that are readable and of one of `classes`."""
        if dataset.test_labels is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        labels = renumbered(dataset.test_labels, dataset.classes, self.classes)
        labels[dataset.broken_test] = -1
        positions = np.flatnonzero(labels >= 0)
        return positions, labels[positions]

    def counts(self, dataset: Dataset) -> tuple[np.ndarray, np.ndarray, int]:
        """[C] labeled images per class, [C] unlabeled ones, and the number of unlabeled images of other or unknown classes."""
        labels, classes = self.labels(dataset), len(self.classes)
        unlabeled = labels[self.unlabeled]
        return (
            np.bincount(labels[self.labeled], minlength=classes),
            np.bincount(unlabeled[unlabeled >= 0], minlength=classes),
            int((unlabeled < 0).sum()),
        )

    # ---- in and out -------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the JSON file `path`, atomically. Ranges are written as [first, last], so that a split of millions stays
        small."""
        content = {
            "format": FORMAT,
            "kind": self.kind,
            "seed": self.seed,
            "settings": self.settings,
            "fingerprint": self.fingerprint,
            "classes": self.classes,
            "labeled": to_runs(self.labeled),
            "unlabeled": to_runs(self.unlabeled),
        }
        write_atomically(Path(path), json.dumps(content))

    @classmethod
    def read(cls, path: Path, dataset: Dataset) -> Split:
        """The split in the file `path`. An error names the differences if it was made for other data."""
        if not Path(path).exists():
            raise FinesslError(f"there is no split file {path}.")
        try:
            content = read_json(Path(path), SplitFile)
            if content["format"] > FORMAT:
                raise FinesslError(f"{path} was written by a newer finessl; update finessl to read it.")
            images = len(dataset.train)
            split = cls(
                from_runs(content["labeled"], images),
                from_runs(content["unlabeled"], images),
                content["classes"],
                content["kind"],
                content["seed"],
                content["settings"],
                content["fingerprint"],
            )
        except DamagedFile as error:
            raise FinesslError(f"{path} is not a split file: {str(error).partition(': ')[2] or error}") from error
        except ValueError as error:
            raise FinesslError(f"{path} does not belong to {dataset.name}: {error}.") from error
        if differences := split.differences(dataset):
            raise FinesslError(f"{path} does not belong to {dataset.name}: {'; '.join(differences)}.")
        return split

    @classmethod
    def load(cls, path: Path, dataset: Dataset) -> Split:
        """The split in the file `path`, without unreadable images."""
        return without_broken(cls.read(path, dataset), dataset)

    def differences(self, dataset: Dataset) -> list[str]:
        found = []
        if missing := [name for name in self.classes if name not in dataset.classes]:
            found.append(f"the data has no class {some(missing)}")
        if not found and (nameless := int((self.labels(dataset)[self.labeled] < 0).sum())):
            found.append(f"the data gives no label to {nameless:,} of the labeled images")
        if not found and self.fingerprint and (changes := dataset.changes(self.fingerprint, test=False)):
            found.append(f"since the split was made, these have changed: {', '.join(changes)}")
        return found


def make_split(
    dataset: Dataset, *, kind: str = "auto", seed: int = 0, labeled_in_unlabeled: bool = True, **options: Any
) -> Split:
    """Make a split.

    kind: an entry of SPLITS; "auto": "given" if the data gives labels for a part of its images, else "per-class".
    seed: of random choices.   labeled_in_unlabeled: labeled images are also unlabeled ones.   options: of the kind.
    """
    if kind == "auto":
        kind = "per-class" if dataset.given is None else "given"
        if kind == "given":
            options = {name: value for name, value in options.items() if name != "labels_per_class"}
    settings = check_options("split", kind, SPLITS[kind], options)
    parts: Parts = SPLITS[kind](dataset, Draw(dataset, seed), **settings)
    unlabeled = (
        np.union1d(parts.unlabeled, parts.labeled)
        if labeled_in_unlabeled
        else np.setdiff1d(parts.unlabeled, parts.labeled)
    )
    split = Split(
        np.sort(parts.labeled),
        unlabeled,
        parts.classes or list(dataset.classes),
        kind,
        seed,
        settings | {"labeled_in_unlabeled": labeled_in_unlabeled},
        dataset.fingerprint(),
    )
    return without_broken(split, dataset)


def without_broken(split: Split, dataset: Dataset) -> Split:
    """Remove unreadable images. An error if a class is left without a labeled image."""
    split.labeled = np.setdiff1d(split.labeled, dataset.broken)
    split.unlabeled = np.setdiff1d(split.unlabeled, dataset.broken)
    labeled, _, _ = split.counts(dataset)
    if empty := [name for name, count in zip(split.classes, labeled, strict=True) if count == 0]:
        raise FinesslError(
            f"{dataset.name}: {len(empty)} of {len(split.classes)} classes have no labeled image: {some(empty)}. "
            "Label an image of each, or remove the class."
        )
    return split


class Draw:
    """Images with usable labels, per class, in a random order that follows from `seed` and does not depend on other classes.
    label: number of a class."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        usable = dataset.train_labels >= 0
        if dataset.given is not None:
            usable &= dataset.given
        order = np.argsort(np.where(usable, dataset.train_labels, len(dataset.classes)), kind="stable")
        counts = np.bincount(dataset.train_labels[usable], minlength=len(dataset.classes))
        self._members = np.split(order[: counts.sum()], np.cumsum(counts)[:-1])

    def members(self, label: int) -> np.ndarray:
        """Readable images of a class, in the order of the data."""
        members = self._members[label]
        return members[~np.isin(members, self.dataset.broken)]

    def shuffled(self, label: int) -> np.ndarray:
        """`members` in random order. Unreadable images are removed after shuffling, so that the order of the others is kept."""
        members = self.generator(label).permutation(self._members[label])
        return members[~np.isin(members, self.dataset.broken)]

    def generator(self, stream: int) -> np.random.Generator:
        """Random numbers of a stream: a class, or the number of classes for choices among them."""
        return generator(self.seed, SPLIT, stream)

    def enough(self, wanted: np.ndarray) -> np.ndarray:
        """`wanted` [C] itself, or an error that names the classes with fewer labels."""
        have = np.array([len(self.members(label)) for label in range(len(wanted))])
        if (short := np.flatnonzero(have < wanted)).size:
            shown = some([f"{self.dataset.classes[i]} has {have[i]} of {wanted[i]}" for i in short])
            raise FinesslError(
                f"{self.dataset.name}: too few labels in {len(short)} of {len(have)} classes: {shown}. "
                "Ask for fewer, or label more images."
            )
        return wanted


def to_runs(indices: np.ndarray) -> list[int | list[int]]:
    """Sorted numbers, with ranges of three or more as [first, last]."""
    runs: list[int | list[int]] = []
    for run in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1):
        if len(run) > 2:
            runs.append([int(run[0]), int(run[-1])])
        else:
            runs.extend(int(i) for i in run)
    return runs


def from_runs(runs: Sequence[int | list[int]], images: int) -> np.ndarray:
    """Inverse of `to_runs`; ValueError for numbers that are not sorted positions below `images`. Ranges are checked before
    they are expanded: a split file is untrusted."""
    bounds = [(run, run) if isinstance(run, int) else (run[0], run[-1]) for run in runs]
    after = -1
    for first, last in bounds:
        if last >= images:
            raise ValueError(f"the split names image {last:,} and the data has {images:,}")
        if not after < first <= last:
            raise ValueError(f"the split's images are not in order at {first:,}")
        after = last
    pieces = [np.arange(first, last + 1, dtype=np.int64) for first, last in bounds]
    return np.concatenate([np.empty(0, np.int64), *pieces])
