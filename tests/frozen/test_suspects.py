"""Suspicious labels: found where they are wrong, and only there."""

from __future__ import annotations

import numpy as np

from finessl.data.dataset import Dataset
from finessl.data.images import ArrayImages
from finessl.frozen.suspects import find_suspects


def test_suspicious_labels() -> None:
    """Three clusters; two labels exchanged between the first two; one image far from everything."""
    rng = np.random.default_rng(0)
    centres = np.eye(3) * 5
    labels = np.repeat(np.arange(3), 20)
    features = centres[labels] + rng.normal(0, 0.3, (60, 3))
    wrong = labels.copy()
    wrong[[4, 25]] = [1, 0]
    data = Dataset("d", ["a", "b", "c"], ArrayImages(np.zeros((60, 1, 1, 3), np.uint8), "train"), wrong)
    suspects = find_suspects(data, features)
    assert {(s.key, s.label, s.looks_like) for s in suspects} == {("train/4", "b", "a"), ("train/25", "a", "b")}
    assert suspects[0].margin >= suspects[1].margin > 0
    data.train_labels = labels
    assert find_suspects(data, features) == []


def test_suspicion_needs_company() -> None:
    data = Dataset("d", ["a", "b"], ArrayImages(np.zeros((2, 1, 1, 3), np.uint8)), np.array([0, 1]))
    assert find_suspects(data, np.eye(2)) == []  # one image in each class: nothing to compare with
