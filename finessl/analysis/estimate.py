"""Which labels and which images look odd, to the pretrained backbone before tuning.

The classifier was trained on every label there is, so its answers for the labeled images say nothing about them. A
ridge classifier on the features of the untuned backbone, cross-validated on the labeled images, never saw the label of
the image that it scores: where it disagrees, the label is doubtful. Distances to the class means tell images that are
unlike every class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from finessl.analysis.runs import Outcome

STRANGE = 0.05  # share of labeled images that are called strange, by definition of the threshold
FOLDS = 5


@dataclass(frozen=True)
class SecondOpinion:
    """The pretrained backbone's view of a run."""

    scores: np.ndarray  # [N, C] of each labeled image, from the other folds
    familiarity: np.ndarray  # [m] of the unlabeled images: cosine similarity to the nearest class mean
    threshold: float | None  # familiarity that STRANGE of the labeled images do not reach
    strange: float | None  # share of unlabeled images below it


def second_opinion(outcome: Outcome) -> SecondOpinion | None:
    """None where the run kept no features, or no class has two labels."""
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
    return SecondOpinion(cross_validated(x, labels, classes), familiarity, threshold, strange)


def ridge(x: np.ndarray, labels: np.ndarray, classes: int) -> Callable[[np.ndarray], np.ndarray]:
    """One-against-all least squares on centred features; the penalty is the features' mean square, which suits few
    labels. No class is favoured for having more of them."""
    mean = x.mean(0)
    centred, target = x - mean, np.eye(classes)[labels] - 1 / classes
    penalty = (centred**2).sum() / min(x.shape) + 1e-12  # the mean of the squared singular values
    if len(x) < x.shape[1]:  # the same weights from the smaller of the two systems
        weight = centred.T @ np.linalg.solve(centred @ centred.T + penalty * np.eye(len(x)), target)
    else:
        weight = np.linalg.solve(centred.T @ centred + penalty * np.eye(x.shape[1]), centred.T @ target)
    return lambda z: (z - mean) @ weight


def cross_validated(x: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """[N, C] scores of every image by a fit without its fold. Each fold holds every k-th image of each class, up to
    five folds; the only image of a class is in no fold, and its score is of a fit with it."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels, minlength=classes)
    place = np.empty(len(labels), int)  # within its class
    place[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    folds = int(min(FOLDS, counts[counts > 1].min()))
    scores = ridge(x, labels, classes)(x)
    for fold in range(folds):
        held = (place % folds == fold) & (counts[labels] > 1)
        scores[held] = ridge(x[~held], labels[~held], classes)(x[held])
    return scores


def familiar(
    x: np.ndarray, labels: np.ndarray, u: np.ndarray, several: np.ndarray, classes: int
) -> tuple[np.ndarray, float | None]:
    """Familiarity of the unlabeled images, and the threshold from labeled ones, each compared with the others only."""
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
    """(position in train, label, what it looks like, by how much higher that scores), most doubtful first: labeled
    images that the other labeled images, without theirs, would call something else."""
    kept = outcome.features
    assert kept is not None
    labels, scores = kept["labels"], opinion.scores
    best, rows = scores.argmax(1), np.arange(len(labels))
    margin = scores[rows, best] - scores[rows, labels]
    several = np.bincount(labels)[labels] > 1
    order = [i for i in np.argsort(-margin, kind="stable") if margin[i] > 0 and several[i]]
    return [(int(kept["labeled"][i]), int(labels[i]), int(best[i]), float(margin[i])) for i in order]
