"""Metrics against scikit-learn, against slow loops, and against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from finessl.inference import metrics


@pytest.fixture
def answers() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (400, 7))
    labels = np.where(rng.random(400) < 0.6, logits.argmax(1), rng.integers(0, 6, 400))  # class 6 is rare
    return logits, labels


def test_confusion_recall_precision_as_scikit_learn(answers: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = answers
    predicted = logits.argmax(1)
    table = metrics.confusion(labels, predicted, 7)
    np.testing.assert_array_equal(table, reference.confusion_matrix(labels, predicted, labels=range(7)))
    recall = reference.recall_score(labels, predicted, average=None, labels=range(7))
    precision = reference.precision_score(labels, predicted, average=None, labels=range(7))
    np.testing.assert_allclose(metrics.recalls(table), recall)
    np.testing.assert_allclose(metrics.precisions(table), precision)
    balanced = reference.balanced_accuracy_score(labels, predicted)
    assert metrics.balanced_accuracy(labels, predicted, 7) == pytest.approx(balanced)


def test_a_class_without_images_has_no_recall_and_does_not_count() -> None:
    labels, predicted = np.array([0, 0, 1, 1]), np.array([0, 2, 1, 1])
    recall = metrics.recalls(metrics.confusion(labels, predicted, 3))
    np.testing.assert_array_equal(recall[:2], [0.5, 1.0])
    assert math.isnan(recall[2])
    assert metrics.balanced_accuracy(labels, predicted, 3) == 0.75


def test_softmax_survives_large_logits() -> None:
    np.testing.assert_allclose(
        metrics.softmax(np.array([[1000.0, 1000.0], [0.0, math.log(3)]])), [[0.5, 0.5], [0.25, 0.75]]
    )


def test_calibration_error_by_hand() -> None:
    # (0.5, 0.6]: 2 images, confidence 0.6, accuracy 0.5;  (0.9, 1]: 2 images, 0.95, 1.0;  ECE = ½·0.1 + ½·0.05
    confidence, correct = np.array([0.6, 0.6, 0.95, 0.95]), np.array([True, False, True, True])
    assert metrics.calibration_error(confidence, correct, bins=10) == pytest.approx(0.075)


def test_calibration_error_as_a_slow_loop(answers: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = answers
    confidence, correct = metrics.softmax(logits).max(1), logits.argmax(1) == labels
    expected = 0.0
    for b in range(15):
        inside = [i for i in range(400) if b / 15 < confidence[i] <= (b + 1) / 15]
        if inside:
            gap = abs(sum(correct[i] for i in inside) - sum(confidence[i] for i in inside))
            expected += gap / 400
    assert metrics.calibration_error(confidence, correct) == pytest.approx(expected)
    assert metrics.reliability(confidence, correct).images.sum() == 400


def test_rectification_brings_mean_confidence_to_accuracy() -> None:
    confidence, correct = np.array([0.9, 0.8, 0.7, 0.8]), np.array([1, 1, 0, 0])
    kappa = metrics.rectification(confidence, correct)
    assert kappa == pytest.approx(0.5 / 0.8)
    assert (kappa * confidence).mean() == pytest.approx(0.5)


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
def test_temperature_is_where_the_log_loss_is_least(answers: tuple[np.ndarray, np.ndarray], scale: float) -> None:
    logits, labels = scale * answers[0], answers[1]
    t = metrics.fit_temperature(logits, labels)
    loss = lambda value: reference.log_loss(labels, metrics.softmax(logits / value), labels=range(7))  # noqa: E731
    assert loss(t) <= min(loss(0.98 * t), loss(1.02 * t))
    assert t == pytest.approx(scale * metrics.fit_temperature(answers[0], labels), rel=1e-6)


def test_entropy_and_distance_by_hand() -> None:
    assert metrics.entropy(np.array([5, 5, 5, 5])) == pytest.approx(math.log(4))
    assert metrics.entropy(np.array([7, 0, 0])) == 0.0
    assert metrics.entropy(np.array([3, 1])) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert metrics.distance(np.array([6, 2, 2]), np.array([2, 1, 2])) == pytest.approx(0.2)  # 0.6 0.2 0.2 / 0.4 0.2 0.4


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
)
@settings(max_examples=50, deadline=None)
def test_auroc_as_scikit_learn_with_ties(inside: list[int], outside: list[int]) -> None:
    truth = [1] * len(inside) + [0] * len(outside)
    expected = reference.roc_auc_score(truth, inside + outside)
    bins = [np.bincount(values, minlength=10) for values in (inside, outside)]
    assert metrics.binned_auroc(*bins) == pytest.approx(expected)


def test_wilson_by_hand() -> None:
    # the textbook case: 81 of 263; and all right of 10, where other intervals have no width
    low, high = metrics.wilson(81, 263)
    assert (low, high) == (pytest.approx(0.2553, abs=2e-4), pytest.approx(0.3662, abs=2e-4))
    low, high = metrics.wilson(10, 10)
    assert (low, high) == (pytest.approx(0.7225, abs=2e-4), pytest.approx(1.0))


def test_bootstrap_of_a_mean_has_the_normal_width_and_holds_the_estimate() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = metrics.bootstrap(lambda x: float(x.mean()), values)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.03)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert (low, high) == metrics.bootstrap(lambda x: float(x.mean()), values)


def test_bootstrap_of_the_calibration_error_holds_the_estimate(answers: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = answers
    arrays = metrics.softmax(logits).max(1), logits.argmax(1) == labels
    low, high = metrics.bootstrap(metrics.calibration_error, *arrays, resamples=200)
    assert low < metrics.calibration_error(*arrays) < high


def test_bootstrap_is_paired() -> None:
    """Two runs that err on the same images: their difference is certain, though each accuracy is not."""
    right = np.random.default_rng(0).random(300) < 0.5
    better = right.copy()
    better[np.flatnonzero(~right)[:30]] = True
    low, high = metrics.bootstrap(lambda a, b: float(a.mean() - b.mean()), better, right)
    assert 0.06 < low < 0.1 < high < 0.14


def test_paired_gain() -> None:
    """One run: the binomial interval of the images. Several: that of the runs, where they differ more than images do."""
    everything, three_quarters = np.ones((1, 400), bool), np.arange(400)[None] % 4 > 0
    gain, (low, high) = metrics.paired_gain(everything, three_quarters)
    assert gain == 0.25
    assert (low, high) == pytest.approx((0.25 - 1.96 * 0.0217, 0.25 + 1.96 * 0.0217), abs=0.006)
    assert metrics.paired_gain(three_quarters, three_quarters) == (0.0, (0.0, 0.0))
    none = np.zeros((1, 400), bool)
    ours, theirs = np.concatenate([everything, none]), np.concatenate([none, none])
    assert metrics.paired_gain(ours, theirs) == (0.5, (0.0, 1.0))  # one seed gains all, the other nothing
