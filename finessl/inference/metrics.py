"""Figures of merit from predictions, in NumPy: accuracy, calibration, detection of odd images, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from finessl.frozen.choose import Interval, wilson

BINS = 15  # of the expected calibration error, as in Guo et al. 2017
MIN_JUDGED = 30  # images, for PPI++ and for a temperature


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.asarray(logits, np.float64)
    exponents = np.exp(shifted - shifted.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


# ---- right and wrong ------------------------------------------------------------------------------------------------


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """int64 [C, C]: images of class (row) that were given class (column)."""
    return np.bincount(labels * classes + predicted, minlength=classes * classes).reshape(classes, classes)


def recalls(table: np.ndarray) -> np.ndarray:
    """[C] share of each class's images that are recognised; NaN for a class without images."""
    return ratio(np.diag(table), table.sum(1))


def precisions(table: np.ndarray) -> np.ndarray:
    """[C] share of right answers among those that name the class; NaN for a class that is never named."""
    return ratio(np.diag(table), table.sum(0))


def balanced_accuracy(labels: np.ndarray, predicted: np.ndarray, classes: int) -> float:
    """Mean recall of the classes that have images."""
    return float(np.nanmean(recalls(confusion(labels, predicted, classes))))


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


# ---- confidence -----------------------------------------------------------------------------------------------------


class Reliability(NamedTuple):
    """What was predicted and what came true, in equal bins of confidence."""

    images: np.ndarray  # how many
    confidence: np.ndarray  # mean in the bin, NaN where it is empty
    accuracy: np.ndarray

    @property
    def error(self) -> float:
        """Expected calibration error: Σ share of the bin · |accuracy − confidence|."""
        gap = np.nan_to_num(np.abs(self.accuracy - self.confidence))
        return float((self.images * gap).sum() / self.images.sum())


def reliability(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> Reliability:
    """Bins are (0, 1/b], (1/b, 2/b] … as in Guo et al."""
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    sums = [np.bincount(place, values, minlength=bins) for values in (confidence, correct)]
    return Reliability(count, ratio(sums[0], count), ratio(sums[1], count))


def calibration_error(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> float:
    return reliability(confidence, correct, bins).error


def rectification(confidence: np.ndarray, correct: np.ndarray) -> float:
    """κ = accuracy / mean confidence (the paper's appendix C): κ · max q is confidence brought down to the accuracy."""
    return float(np.mean(correct) / np.mean(confidence))


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """T that minimises the mean cross-entropy of softmax(logits / T); within 0.01 … 100.

    The loss is convex in β = 1/T, so the sign of its slope, E[Σ_k p_k z_k − z_y], tells on which side T is.
    """
    z = np.asarray(logits, np.float64)
    target = z[np.arange(len(z)), labels]
    low, high = np.log(0.01), np.log(100.0)  # of β
    for _ in range(60):
        middle = (low + high) / 2
        slope = ((softmax(np.exp(middle) * z) * z).sum(1) - target).mean()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return float(np.exp(-(low + high) / 2))


# ---- distributions --------------------------------------------------------------------------------------------------


def entropy(counts: np.ndarray) -> float:
    """Of the distribution over classes, in nats; ln C when all classes are equally frequent."""
    share = np.asarray(counts, float) / np.sum(counts)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


def distance(counts: np.ndarray, others: np.ndarray) -> float:
    """Total variation: the share of the first that would have to change class to be distributed like the second."""
    return float(np.abs(counts / np.sum(counts) - others / np.sum(others)).sum() / 2)


def binned_auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """AUROC from two histograms over the same bins: the probability that an image inside has a higher score than one outside.
    Images in one bin are ties and count half."""
    below = np.cumsum(outside) - outside
    return float((inside * (below + outside / 2)).sum() / (inside.sum() * outside.sum()))


# ---- how sure -------------------------------------------------------------------------------------------------------


def bootstrap(
    statistic: Callable[..., float], *arrays: np.ndarray, resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Interval of a statistic of images: rows are resampled with replacement, equally in all arrays.

    The percentiles are moved so that their mean is the estimate itself: resampling makes some statistics larger (the
    calibration error of a resample is), and a plain percentile interval may then not even hold the estimate.
    """
    rng, count = np.random.default_rng(seed), len(arrays[0])
    values = []
    for _ in range(resamples):
        rows = rng.integers(0, count, count)
        values.append(statistic(*(array[rows] for array in arrays)))
    tail, shift = (1 - level) / 2, statistic(*arrays) - np.nanmean(values)
    low, high = np.nanquantile(values, [tail, 1 - tail]) + shift
    return Interval(float(low), float(high))


def paired_gain(
    ours: np.ndarray, theirs: np.ndarray, resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> tuple[float, Interval]:
    """How much more often one method is right than another, and the interval of that.

    ours, theirs: bool [runs, images]; row k of both has the same seed and labels, column i is the same image. Runs and images
    are resampled with replacement, equally for both: the interval covers other images and other seeds.
    """
    rng, difference = np.random.default_rng(seed), ours.astype(np.float64) - theirs
    runs, images = difference.shape
    values = []
    for _ in range(resamples):
        often = np.bincount(rng.integers(0, images, images), minlength=images)
        values.append((difference @ often)[rng.integers(0, runs, runs)].mean() / images)
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(difference.mean()), Interval(float(low), float(high))


def estimate(right: np.ndarray, confidence: np.ndarray, others: np.ndarray) -> tuple[float, Interval, str]:
    """Accuracy and its 95 % interval from n judged images and the confidence of N others (PPI++, Angelopoulos 2023).

    a = λ·mean(c_N) + mean(r − λ·c),  λ = cov(r, c) / ((1 + n/N)·var(c)),  within 0 … 1
    Wilson's interval where images are few, or all (or none) are right.
    """
    n, hits = len(right), int(right.sum())
    if n < MIN_JUDGED or hits in (0, n) or len(others) < MIN_JUDGED:
        return hits / n, wilson(hits, n), "wilson"
    r, c = right.astype(float), confidence.astype(float)
    variance = float(c.var(ddof=1))
    share = float(np.cov(r, c)[0, 1]) / ((1 + n / len(others)) * variance) if variance > 0 else 0.0
    share = min(max(share, 0.0), 1.0)
    accuracy = share * float(others.mean()) + float((r - share * c).mean())
    error = math.sqrt((r - share * c).var(ddof=1) / n + share**2 * others.var(ddof=1) / len(others))
    low, high = accuracy - 1.959964 * error, accuracy + 1.959964 * error
    return min(max(accuracy, 0.0), 1.0), Interval(max(low, 0.0), min(high, 1.0)), "ppi++"
