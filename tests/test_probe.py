"""k-NN and the linear probe against scikit-learn's; few-label class means by hand."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch.nn import functional as F

from finessl.inference.probe import few_shot, knn_votes, linear_logits, score


def clouds(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(4, 12))
    labels = rng.integers(0, 4, n)
    return F.normalize(
        torch.from_numpy(centres[labels] + 1.2 * rng.normal(size=(n, 12))).float(), dim=1
    ), torch.from_numpy(labels)


def test_knn_is_sklearns() -> None:
    bank, labels = clouds(300, 0)
    queries, _ = clouds(80, 1)
    theirs = KNeighborsClassifier(20, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    theirs.fit(bank.numpy(), labels.numpy())
    votes = knn_votes(bank, labels, queries, 4, 20)
    np.testing.assert_allclose(
        (votes / votes.sum(1, keepdim=True)).numpy(), theirs.predict_proba(queries.numpy()), rtol=1e-3, atol=1e-5
    )


def test_linear_probe_is_sklearns() -> None:
    train, labels = clouds(300, 0)
    test, _ = clouds(200, 1)
    scale = StandardScaler().fit(train.numpy())
    # our objective is the mean loss + 1e-4 |w|²; sklearn's the sum of losses · C + |w|²/2
    theirs = LogisticRegression(C=1 / (2 * 1e-4 * 300), max_iter=2000, tol=1e-8)
    theirs.fit(scale.transform(train.numpy()), labels.numpy())
    ours = linear_logits(train, labels, test, 4).softmax(1).numpy()
    np.testing.assert_allclose(ours, theirs.predict_proba(scale.transform(test.numpy())), atol=0.02)


def test_class_means_by_hand() -> None:
    train = F.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]), dim=1)
    test = F.normalize(torch.tensor([[1.0, 0.2], [0.2, 1.0], [0.6, 0.5]]), dim=1)
    labels, truth = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1])
    assert few_shot(train, labels, test, truth, 2, 2, seed=0) == score(torch.tensor([[1, 0], [0, 1], [1, 0]]), truth)
