"""Labeled images that are drawn without their label keep it: `--set train.known_labels=true`.

An unlabeled set usually contains the labeled images, too (`data.labeled_in_unlabeled`). Their weak views then have a
pseudo-label like any other, which may be wrong. Here the logits of such a view become those of its label, PEAK for the
class and 0 for the others, so that every method takes the label for the pseudo-label, with full confidence.
The accuracy of pseudo-labels in the log counts them, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from finessl.methods.base import HeadOutputs

if TYPE_CHECKING:
    from finessl.training.experiment import Experiment

PEAK = 30.0  # the other classes have a probability of e⁻³⁰ each


class KnownLabels:
    """labels: of the unlabeled images, −1 where none is known."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def apply(self, weak: HeadOutputs, index: Tensor) -> HeadOutputs:
        """index: [m] positions in the unlabeled set."""
        labels = self.labels[index]
        known = (labels >= 0)[:, None]
        peaks = PEAK * (labels[:, None] == torch.arange(weak.logits.shape[1], device=labels.device))

        def put(logits: Tensor) -> Tensor:
            return torch.where(known, peaks.to(logits.dtype), logits)

        return weak._replace(logits=put(weak.logits), aux=None if weak.aux is None else put(weak.aux))


def known_labels(experiment: Experiment) -> KnownLabels | None:
    """As the recipe asks; None also where no labeled image is among the unlabeled ones."""
    split = experiment.split
    if not experiment.recipe.train.known_labels or experiment.method.weak is None:
        return None
    table = np.full(1 + max(split.labeled.max(initial=0), split.unlabeled.max(initial=0)), -1)
    table[split.labeled] = experiment.labels
    labels = torch.from_numpy(table[split.unlabeled])
    return KnownLabels(labels.to(experiment.device)) if bool((labels >= 0).any()) else None
