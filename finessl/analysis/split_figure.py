"""A chart of a split: labeled and unlabeled images per class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finessl.analysis.style import canvas, styled
from finessl.data.dataset import Dataset
from finessl.data.splits import Split
from finessl.errors import FinesslError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELED, UNLABELED = "#d1495b", "#8fb8de"
NAMED = 40  # classes whose names are legible


@styled()
def draw_split(split: Split, dataset: Dataset, path: Path | None = None) -> Figure:
    """Bars per class, labeled in front of unlabeled, on a scale that shows 4 next to 500. Saved to `path`."""
    labeled, unlabeled, other = split.counts(dataset)
    classes = np.arange(len(split.classes))
    figure = canvas(9, 3.6)
    axes = figure.subplots()
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
    axes.set_title(f"{dataset.name}: {split.kind}, seed {split.seed}")
    axes.legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    if path is not None:
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:  # the suffix is not of an image format
            raise FinesslError(f"cannot draw {path}: {error}") from error
    return figure
