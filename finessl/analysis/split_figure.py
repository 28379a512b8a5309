"""A chart of a split: labeled and unlabeled images per class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finessl.data.dataset import Dataset
from finessl.data.splits import Split
from finessl.errors import FinesslError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELED, UNLABELED = "#d1495b", "#8fb8de"
NAMED = 40  # classes whose names are legible


def draw_split(split: Split, dataset: Dataset, path: Path | None = None) -> Figure:
    """Bars per class, labeled in front of unlabeled, on a scale that shows 4 next to 500. Saved to `path`."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # a class may be called $x$
        return _draw(split, dataset, path)


def _draw(split: Split, dataset: Dataset, path: Path | None) -> Figure:
    from matplotlib.figure import Figure

    labeled, unlabeled, other = split.counts(dataset)
    classes = np.arange(len(split.classes))
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    axes.bar(classes, unlabeled, width=0.9, color=UNLABELED, label=f"unlabeled ({unlabeled.sum():,})")
    axes.bar(classes, labeled, width=0.55, color=LABELED, label=f"labeled ({labeled.sum():,})")
    if other:
        axes.bar([len(classes) + 0.5], [other], width=0.9, color="#b9b9b9", label=f"of no known class ({other:,})")
    most = max(int(unlabeled.max(initial=1)), int(labeled.max(initial=1)), other)
    if most > 20 * max(int(labeled.min(initial=1)), 1):
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(0, most * 2)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    if len(classes) <= NAMED:
        axes.set_xticks(classes, split.classes, rotation=60, ha="right", fontsize=7)
    else:
        axes.set_xlabel("class")
    axes.set_ylabel("images")
    axes.set_title(f"{dataset.name}: {split.kind}, seed {split.seed}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    if path is not None:
        try:
            figure.savefig(path)
        except ValueError as error:  # the suffix is not of an image format
            raise FinesslError(f"cannot draw {path}: {error}") from error
    return figure
