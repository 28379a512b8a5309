"""The kinds of splits: which images are labeled, which are unlabeled, and which are in neither set.

Each function takes a data set, its seeded `Draw` and options by keyword; see `splits.make_split`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from finessl.data.dataset import Dataset, some
from finessl.data.splits import Draw, Parts
from finessl.errors import FinesslError
from finessl.registry.options import Count

Ratio = Annotated[float, Field(ge=1, le=10**6)]


def given(dataset: Dataset, draw: Draw) -> Parts:
    """The labels that the data gives; all images are unlabeled."""
    if dataset.given is None:
        raise FinesslError(every_image_has_a_label(dataset))
    return Parts(np.flatnonzero(dataset.given & (dataset.train_labels >= 0)), everything(dataset))


def per_class(dataset: Dataset, draw: Draw, *, labels_per_class: Count | None = None) -> Parts:
    """Random images of each class are labeled; all images are unlabeled.   labels_per_class: labels kept per class."""
    wanted = np.full(len(dataset.classes), at_least_one(dataset, labels_per_class))
    return Parts(first_of_each(draw.shuffled, draw.enough(wanted)), everything(dataset))


def first_n(dataset: Dataset, draw: Draw, *, labels_per_class: Count | None = None) -> Parts:
    """The first images of each class in the order of the data, as in the released code: equal for all seeds.
    labels_per_class: labels kept per class."""
    wanted = np.full(len(dataset.classes), at_least_one(dataset, labels_per_class))
    return Parts(first_of_each(draw.members, draw.enough(wanted)), everything(dataset))


def fraction(dataset: Dataset, draw: Draw, *, fraction: Annotated[float, Field(gt=0, le=1)] = 0.01) -> Parts:
    """A share of each class's images, rounded, at least one, is labeled; all images are unlabeled.   fraction: that share."""
    have = np.array([len(draw.members(label)) for label in range(len(dataset.classes))])
    wanted = np.maximum(np.floor(fraction * have + 0.5).astype(int), 1)
    return Parts(first_of_each(draw.shuffled, draw.enough(wanted)), everything(dataset))


def listed(dataset: Dataset, draw: Draw, *, file: str = "") -> Parts:
    """The images that a text file lists are labeled; all images are unlabeled.   file: its path; it holds one image per
    line, by path or the end of it."""
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise FinesslError(f"the list of labeled images {file!r} cannot be read: {error}.") from error
    found: dict[str, list[int]] = {line: [] for line in lines if line}
    for i in range(len(dataset.train)):
        name = dataset.train.key(i)
        while name not in found and "/" in name:
            name = name.partition("/")[2]
        if name in found:
            found[name].append(i)
    if missing := [name for name, matches in found.items() if not matches]:
        raise FinesslError(
            f"{file} names {len(missing):,} of {len(found):,} images that are not in {dataset.name}: {some(missing)}."
        )
    if several := [name for name, matches in found.items() if len(matches) > 1]:
        raise FinesslError(f"{file}: several images have the name {some(several)}; give more of the path.")
    labeled = np.array([matches[0] for matches in found.values()], np.int64)
    usable = (dataset.train_labels >= 0) & (True if dataset.given is None else dataset.given)
    if (unknown := labeled[~usable[labeled]]).size:
        raise FinesslError(
            f"{file} names images without a label: {some([dataset.train.key(i) for i in unknown.tolist()])}."
        )
    return Parts(labeled, everything(dataset))


def long_tailed(
    dataset: Dataset,
    draw: Draw,
    *,
    labeled_max: Count = 50,
    unlabeled_max: Count = 400,
    ratio: Ratio = 10.0,
    unlabeled_ratio: Ratio | None = None,
    unlabeled: Literal["same", "reversed", "uniform"] = "same",
    order: Literal["random", "first"] = "random",
) -> Parts:
    """N_k = N₁·ρ^(−(k−1)/(C−1)) labeled and M_k unlabeled images of class k = 1 … C, disjoint.

    labeled_max, unlabeled_max: N₁ and M₁, images of the largest class.   ratio, unlabeled_ratio: ρ of each (default: one
    for both).   unlabeled: M_k decreases as N_k does, in the reverse order, or is M₁ for all.   order: "first": as in the
    data, like the released code.
    """
    classes = len(dataset.classes)
    labels = tail(labeled_max, ratio, classes)
    if labels[-1] < 1:
        raise FinesslError(f"labeled_max = {labeled_max} with ratio = {ratio:g} leaves the last class without a label.")
    more = tail(unlabeled_max, 1.0 if unlabeled == "uniform" else unlabeled_ratio or ratio, classes)
    if unlabeled == "reversed":
        more = more[::-1]
    draw.enough(labels + more)
    pick = draw.shuffled if order == "random" else draw.members
    both = [pick(label)[: labels[label] + more[label]] for label in range(classes)]
    return Parts(
        np.concatenate([images[:count] for images, count in zip(both, labels, strict=True)]),
        np.concatenate([images[count:] for images, count in zip(both, labels, strict=True)]),
    )


def open_set(
    dataset: Dataset,
    draw: Draw,
    *,
    labels_per_class: Count | None = None,
    novel: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    seen: Literal["first", "random"] = "first",
) -> Parts:
    """Some of the classes are never labeled and never tested; their images are unlabeled.

    labels_per_class: labels kept per class.   novel: share of these classes.   seen: which classes are
    labeled; the first ones, as in ORCA (Cao et al. 2022), whose protocol the paper follows.
    """
    classes = len(dataset.classes)
    count = classes - round(novel * classes)
    if count < 2:
        raise FinesslError(f"novel = {novel} leaves {count} of {classes} classes to be told apart; two are needed.")
    chosen = np.arange(count) if seen == "first" else np.sort(draw.generator(classes).permutation(classes)[:count])
    wanted = np.zeros(classes, int)
    wanted[chosen] = at_least_one(dataset, labels_per_class)
    labeled = first_of_each(draw.shuffled, draw.enough(wanted))
    return Parts(labeled, everything(dataset), [dataset.classes[label] for label in chosen])


def tail(most: int, ratio: float, classes: int) -> np.ndarray:
    """int(most·ratio^(−k/(C−1))) for k = 0 … C − 1; the last is int(most / ratio), without the power's rounding error."""
    counts = (most * ratio ** (-np.arange(classes) / (classes - 1))).astype(int)
    counts[-1] = int(most / ratio)
    return counts


def first_of_each(members: Callable[[int], np.ndarray], wanted: np.ndarray) -> np.ndarray:
    """The first wanted[k] of `members(k)` for each class k."""
    return np.concatenate([members(label)[:count] for label, count in enumerate(wanted)])


def everything(dataset: Dataset) -> np.ndarray:
    return np.arange(len(dataset.train))


def every_image_has_a_label(dataset: Dataset) -> str:
    return (
        f"{dataset.name} has a label for every image. Say how many labels per class to keep: --labels-per-class N (in "
        "Python labels_per_class=N). The other images are used without their labels."
    )


def at_least_one(dataset: Dataset, labels_per_class: int | None) -> int:
    if labels_per_class is None:
        raise FinesslError(every_image_has_a_label(dataset))
    return labels_per_class
