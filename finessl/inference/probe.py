"""How good are a backbone's features, frozen? k-nearest neighbours and a linear probe: `finessl probe DATA`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from finessl.data.sampler import SPLIT, generator
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.frozen.features import FrozenEncoder, encode_part
from finessl.models.backbones import create_backbone
from finessl.models.closed_form import class_directions
from finessl.runtime.callbacks import Progress, no_progress

NEIGHBOURS = 20  # k of k-NN


@dataclass(frozen=True)
class Probe:
    """Top-1 accuracies on the test images."""

    train_images: int
    test_images: int
    knn: float
    linear: float
    prototypes: tuple[float, float]  # mean and deviation over seeds, from a few labels per class
    labels_per_class: int


def probe(
    data: str,
    *,
    backbone: str = "embedded",
    weights: str | None = None,
    image_size: int | None = None,
    labels_per_class: int = 4,
    device: torch.device,
    precision: str = "fp32",
    progress: Progress = no_progress,
    **options: Any,
) -> Probe:
    """The bank of the neighbours and the probe's training set are all training images whose labels are known.

    data, options: as in `open_dataset`.   backbone, weights, image_size: as in `create_backbone`.   labels_per_class: of the
    class means.   precision: of the encoder.
    """
    dataset = open_dataset(data, **options)
    if dataset.test is None or dataset.test_labels is None:
        raise FinesslError(f"{data} has no test images; a probe needs train and test.")
    encoder = FrozenEncoder(create_backbone(backbone, weights=weights, image_size=image_size), device, precision)
    train, test = (
        F.normalize(torch.tensor(encode_part(dataset, part, encoder, progress).rows, device=device).float(), dim=1)
        for part in ("train", "test")
    )
    labels = torch.from_numpy(dataset.train_labels).to(device)
    truth = torch.from_numpy(dataset.test_labels).to(device)
    usable = labels >= 0
    usable[dataset.broken] = False
    scored = truth >= 0
    scored[dataset.broken_test] = False
    train, labels, test, truth = train[usable], labels[usable], test[scored], truth[scored]
    classes = len(dataset.classes)
    few = [few_shot(train, labels, test, truth, classes, labels_per_class, seed) for seed in range(10)]
    return Probe(
        len(train),
        len(test),
        score(knn_votes(train, labels, test, classes, NEIGHBOURS), truth),
        score(linear_logits(train, labels, test, classes), truth),
        (float(np.mean(few)), float(np.std(few, ddof=1))),
        labels_per_class,
    )


def score(logits: Tensor, truth: Tensor) -> float:
    return float((logits.argmax(1) == truth).float().mean())


def knn_votes(bank: Tensor, labels: Tensor, queries: Tensor, classes: int, neighbours: int, t: float = 0.07) -> Tensor:
    """Σ over the nearest of exp(cosine / t), by class (unit vectors in, [n, classes] out)."""
    votes = queries.new_zeros(len(queries), classes)
    for start in range(0, len(queries), 1024):
        similarity, nearest = (queries[start : start + 1024] @ bank.T).topk(min(neighbours, len(bank)), dim=1)
        votes[start : start + 1024].scatter_add_(1, labels[nearest], (similarity / t).exp())
    return votes


def linear_logits(train: Tensor, labels: Tensor, test: Tensor, classes: int, decay: float = 1e-4) -> Tensor:
    """Multinomial logistic regression on standardised features, by L-BFGS."""
    mean, std = train.mean(0), train.std(0).clamp_min(1e-6)
    train, test = (train - mean) / std, (test - mean) / std
    weight = train.new_zeros(classes, train.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], lr=1, max_iter=100, history_size=10, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        logits = F.linear(train, weight[:, :-1], weight[:, -1])
        loss = F.cross_entropy(logits, labels) + decay * weight[:, :-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return F.linear(test, weight[:, :-1], weight[:, -1]).detach()


def few_shot(train: Tensor, labels: Tensor, test: Tensor, truth: Tensor, classes: int, shots: int, seed: int) -> float:
    """Nearest class mean from `shots` labels per class."""
    rng = generator(seed, SPLIT)
    of_class = [torch.nonzero(labels == k).flatten().cpu().numpy() for k in range(classes)]
    chosen = torch.from_numpy(np.concatenate([rng.permutation(rows)[:shots] for rows in of_class])).to(train.device)
    return score(test @ class_directions(train[chosen], labels[chosen], classes).T, truth)
