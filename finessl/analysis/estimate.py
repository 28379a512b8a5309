"""Suspicious labels and unusual images, according to the pretrained backbone before tuning.

The classifier was trained on all labels, so its predictions for the labeled images cannot check them. A ridge classifier on
features of the untuned backbone can (frozen/suspects.py). Distances to the class means find images that are unlike every
class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from finessl.frozen.suspects import held_out_scores, suspicious_labels

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
    """Familiarity of the unlabeled images, and its threshold from labeled images, each compared with the other ones."""
    sums = np.zeros((classes, x.shape[1]))
    np.add.at(sums, labels, x)
    means = unit(sums)
    means[np.bincount(labels, minlength=classes) == 0] = 0.0
    own = (x * unit(sums[labels] - x)).sum(1)
    others = x @ means.T
    others[np.arange(len(x)), labels] = -1.0
    held_out = np.maximum(own, others.max(1))[several]
    threshold = float(np.quantile(held_out, STRANGE)) if len(held_out) >= 1 / STRANGE else None
    return (u @ means.T).max(1), threshold


def unit(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def doubtful_labels(outcome: Outcome, opinion: SecondOpinion) -> list[tuple[int, int, int, float]]:
    """(position in train, label, class that it looks like, lead of that class's score), most suspicious first."""
    kept = outcome.features
    assert kept is not None
    found = suspicious_labels(opinion.scores, kept["labels"])
    return [(int(kept["labeled"][i]), int(kept["labels"][i]), other, lead) for i, other, lead in found]
