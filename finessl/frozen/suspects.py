"""Suspicious labels: labeled images that the other labeled images would call something else.

A ridge classifier on frozen features is cross-validated on the labeled images, so it never saw the label of the image that
it scores. A label is suspicious if another class has a higher score. `finessl inspect` and `finessl report` both list these.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from finessl.data.dataset import Dataset
from finessl.data.inspection import Suspect
from finessl.frozen.choose import assign_folds
from finessl.models.closed_form import ridge

FOLDS = 5
OUTLIER = 3.0  # robust standard deviations


def fit(x: np.ndarray, labels: np.ndarray, classes: int) -> Callable[[np.ndarray], np.ndarray]:
    """One-against-all ridge regression on centred features, without bias: a class has no advantage for having more labels.
    The penalty is the mean squared singular value, which suits few labels. Returns the scores [n, C] of new features."""
    mean = x.mean(0)
    target = np.eye(classes)[labels] - 1 / classes
    weight = ridge(torch.from_numpy(x - mean), torch.from_numpy(target), 1.0, relative=True).numpy()
    return lambda z: (z - mean) @ weight


def held_out_scores(x: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """[N, C]: scores of every image by a fit without its fold.

    Each fold holds every k-th image of each class, up to FOLDS folds. The only image of a class is in no fold: its score is of
    a fit that includes it.   x: float64 unit features [N, d].   labels: [N].
    """
    scores, folds = fit(x, labels, classes)(x), assign_folds(labels, classes, FOLDS)
    for fold in () if folds is None else range(folds.max() + 1):
        held = folds == fold
        scores[held] = fit(x[~held], labels[~held], classes)(x[held])
    return scores


def suspicious_labels(scores: np.ndarray, labels: np.ndarray) -> list[tuple[int, int, float]]:
    """(row, class with the highest score, its lead over the label's score), most suspicious first. The only image of a class
    has no held-out score and is left out.   scores: from `held_out_scores`."""
    rows, best = np.arange(len(labels)), scores.argmax(1)
    lead = scores[rows, best] - scores[rows, labels]
    comparable = np.bincount(labels)[labels] > 1
    return [
        (int(i), int(best[i]), float(lead[i]))
        for i in np.argsort(-lead, kind="stable")
        if lead[i] > 0 and comparable[i]
    ]


def find_suspects(dataset: Dataset, features: np.ndarray) -> list[Suspect]:
    """Suspicious labels of a data set whose lead is an outlier among all labeled images, so that not every error on a hard data
    set is listed.   features: [N, d] of the training images, from any backbone."""
    labels = dataset.train_labels
    usable = np.flatnonzero((labels >= 0) & (True if dataset.given is None else dataset.given))
    y, classes = labels[usable], dataset.classes
    if len(usable) < 2 or np.bincount(y).max() < 2:
        return []
    x = features[usable].astype(np.float64)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    scores = held_out_scores(x, y, len(classes))
    others = scores.copy()
    others[np.arange(len(y)), y] = -np.inf
    lead = others.max(1) - scores[np.arange(len(y)), y]  # negative where the label's own score is the highest
    middle = np.median(lead)
    limit = middle + OUTLIER * 1.4826 * np.median(np.abs(lead - middle))
    found = [(i, other, lead) for i, other, lead in suspicious_labels(scores, y) if lead > limit]
    return [Suspect(dataset.train.key(int(usable[i])), classes[y[i]], classes[k], lead) for i, k, lead in found]
