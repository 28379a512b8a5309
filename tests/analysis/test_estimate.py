"""Doubtful labels and strange images, against scikit-learn and against data whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from finessl.analysis.estimate import doubtful_labels, second_opinion, unit
from finessl.analysis.runs import read_runs
from finessl.frozen.suspects import fit, held_out_scores


def blobs(rng: np.random.Generator, labels: np.ndarray, classes: int, noise: float) -> np.ndarray:
    centres = np.random.default_rng(7).normal(0, 1, (classes, 16))
    return unit(centres[labels] + rng.normal(0, noise, (len(labels), 16)))


@pytest.mark.parametrize("images", [2, 6])  # of each class: fewer than there are features, and more
def test_ridge_as_scikit_learn(images: int) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(5), images)
    x, new = blobs(rng, labels, 5, 1.0), blobs(rng, rng.integers(0, 5, 40), 5, 1.0)
    penalty = float((np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2).mean())
    theirs = Ridge(alpha=penalty).fit(x, np.eye(5)[labels]).predict(new) - 1 / 5
    np.testing.assert_allclose(fit(x, labels, 5)(new), theirs, atol=1e-8)


def test_cross_validation_holds_out_each_image_once() -> None:
    rng = np.random.default_rng(0)
    labels = np.array([0, 1, 0, 1, 2, 0, 1, 0])  # class 2 has one image, the smallest other class three: 3 folds
    x = blobs(rng, labels, 3, 0.5)
    scores = held_out_scores(x, labels, 3)
    place = np.array([0, 0, 1, 1, -1, 2, 2, 3])
    for fold in range(3):
        held = (place % 3 == fold) & (place >= 0)
        np.testing.assert_allclose(scores[held], fit(x[~held], labels[~held], 3)(x[held]))
    np.testing.assert_allclose(scores[4], fit(x, labels, 3)(x[4]))


def test_cross_validated_accuracy_is_close_to_the_truth_on_new_images() -> None:
    rng = np.random.default_rng(3)
    labels, many = np.repeat(np.arange(8), 25), rng.integers(0, 8, 4000)
    x, new = blobs(rng, labels, 8, 1.6), blobs(rng, many, 8, 1.6)
    estimated = (held_out_scores(x, labels, 8).argmax(1) == labels).mean()
    true = (fit(x, labels, 8)(new).argmax(1) == many).mean()
    assert 0.4 < true < 0.95
    assert abs(estimated - true) < 0.08


def replace(folder: Path, name: str, **arrays: np.ndarray) -> None:
    with np.load(folder / name) as old:
        np.savez(folder / name, **{**{key: old[key] for key in old.files}, **arrays})


def test_second_opinion_at_many_classes(make_run: Callable[..., Path]) -> None:
    """1,000 classes with two labels each: the wrong ones are found among them."""
    folder, rng = make_run(tested=False), np.random.default_rng(0)
    content = json.loads((folder / "split.json").read_text())
    content["classes"] = [f"class {k}" for k in range(1000)]
    (folder / "split.json").write_text(json.dumps(content))
    labels = np.repeat(np.arange(1000), 2)
    x = unit(np.random.default_rng(7).normal(0, 1, (1000, 256))[labels] + rng.normal(0, 0.1, (2000, 256)))
    told = labels.copy()
    told[[10, 500]] = [700, 3]
    replace(folder, "features.npz", labels=told, labeled=np.arange(2000), labeled_features=x,
            unlabeled=np.arange(2000, 2010), unlabeled_features=x[:10])  # fmt: skip
    outcome = read_runs([folder])[0]
    opinion = second_opinion(outcome)
    assert opinion is not None and opinion.strange is not None
    assert {10, 500} <= {i for i, _, _, _ in doubtful_labels(outcome, opinion)[:6]}


def test_strange_images_and_wrong_labels_are_found(make_run: Callable[..., Path]) -> None:
    folder, rng = make_run(tested=False), np.random.default_rng(0)
    labels, truth = np.repeat(np.arange(3), 20), rng.integers(0, 3, 100)
    x, u = blobs(rng, labels, 3, 0.3), blobs(rng, truth, 3, 0.3)
    u[:30] = unit(rng.normal(0, 1, (30, 16)))  # nothing like any class
    told = labels.copy()
    told[[5, 25]] = [2, 0]
    replace(folder, "features.npz", labels=told, labeled=np.arange(60), labeled_features=x, unlabeled_features=u,
            unlabeled=np.arange(60, 160))  # fmt: skip
    replace(folder, "unlabeled.npz", index=np.arange(60, 160), label=truth, truth=truth, confidence=np.ones(100))
    outcome = read_runs([folder])[0]
    opinion = second_opinion(outcome)
    assert opinion is not None and opinion.strange is not None
    assert 0.25 < opinion.strange < 0.45
    assert set(np.argsort(opinion.familiarity)[:28]) <= set(range(30))
    assert {(i, label, looks) for i, label, looks, _ in doubtful_labels(outcome, opinion)[:2]} == {
        (5, 2, 0),
        (25, 0, 1),
    }


def test_one_label_a_class_allows_no_opinion(make_run: Callable[..., Path]) -> None:
    folder = make_run(tested=False)
    with np.load(folder / "features.npz") as kept:
        keep = [int(np.flatnonzero(kept["labels"] == k)[0]) for k in range(3)]
        arrays = {name: kept[name][keep] for name in ("labels", "labeled", "labeled_features")}
    replace(folder, "features.npz", **arrays)
    assert second_opinion(read_runs([folder])[0]) is None
