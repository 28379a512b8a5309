"""Suspicious labels and unusual images, according to the pretrained backbone before tuning.

The classifier was trained on all labels, so its predictions for the labeled images cannot check them. A ridge classifier on
features of the untuned backbone can (frozen/suspects.py). Distances to the class means find images that are unlike every
class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import normalize

from finessl.frozen.suspects import held_out_scores, suspicious_labels
from finessl.models.closed_form import class_directions, class_sums

if TYPE_CHECKING:
    from finessl.analysis.runs import Outcome

STRANGE = 0.05  # share of labeled images below the threshold of familiarity


@dataclass(frozen=True)
class SecondOpinion:
    """The pretrained backbone's view of a run."""

    scores: np.ndarray  # [N, C] of the labeled images, each from a fit without it
    familiarity: np.ndarray  # [m] of the unlabeled images: cosine similarity to the nearest class mean
    threshold: float | None  # familiarity that STRANGE of the labeled images do not reach
    strange: float | None  # share of unlabeled images below it


def second_opinion(outcome: Outcome) -> SecondOpinion | None:
    """None if the run has no features, or no class has two labels."""
    kept = outcome.features
    if kept is None or not outcome.classes:
        return None
    labels, classes = kept["labels"], len(outcome.classes)
    x, u = unit(kept["labeled_features"]), unit(kept["unlabeled_features"])
    several = np.bincount(labels, minlength=classes)[labels] > 1
    if not several.any():
        return None
    familiarity, threshold = familiar(x, labels, u, several, classes)
    strange = float((familiarity < threshold).mean()) if threshold is not None and len(familiarity) else None
    return SecondOpinion(held_out_scores(x, labels, classes), familiarity, threshold, strange)


def familiar(
    x: np.ndarray, labels: np.ndarray, u: np.ndarray, several: np.ndarray, classes: int
) -> tuple[np.ndarray, float | None]:
    """Familiarity of the unlabeled images, and its threshold from labeled images, each compared with the other ones.

    x, u: unit features of the labeled and unlabeled images.   several: [N] images whose class has other labels.
    """
    rows, own_class = torch.from_numpy(x), torch.from_numpy(labels).long()
    means, sums = (of(rows, own_class, classes) for of in (class_directions, class_sums))
    own = (rows * normalize(sums[own_class] - rows, dim=1)).sum(1)
    others = (rows @ means.T).scatter_(1, own_class[:, None], -1.0)
    held_out = torch.maximum(own, others.amax(1)).numpy()[several]
    threshold = float(np.quantile(held_out, STRANGE)) if len(held_out) >= 1 / STRANGE else None
    return (u @ means.numpy().T).max(1), threshold


def unit(x: np.ndarray) -> np.ndarray:
    return normalize(torch.tensor(x, dtype=torch.float64), dim=1).numpy()


def doubtful_labels(outcome: Outcome, opinion: SecondOpinion) -> list[tuple[int, int, int, float]]:
    """(position in train, label, class that it looks like, lead of that class's score), most suspicious first."""
    kept = outcome.features
    assert kept is not None
    found = suspicious_labels(opinion.scores, kept["labels"])
    return [(int(kept["labeled"][i]), int(kept["labels"][i]), other, lead) for i, other, lead in found]
