"""`finessl bench quick DATA`: accuracy of solvers on frozen features, and of labels that a strategy selects.

For data with all labels and a test set. Every number is an accuracy on the test images, which are used for nothing else: by
solver and labels per class, and with the labels that a strategy selects (without knowing any class).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from finessl.data.dataset import Dataset
from finessl.data.splits import make_split
from finessl.errors import FinesslError
from finessl.frozen.choose import FAST, Pile, choose_solver
from finessl.frozen.features import FrozenEncoder, encode_part
from finessl.frozen.select import Strategy, select_images
from finessl.frozen.solvers import feature_centre, prepare
from finessl.models.backbones import create_backbone
from finessl.runtime.callbacks import Progress

CHOSEN = "chosen"


@dataclass
class Row:
    """Accuracies over seeds."""

    what: str
    labels: float  # mean per class
    accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)  # classes with a selected label


def measure(
    dataset: Dataset,
    backbone: str,
    weights: str | None,
    *,
    labels: Sequence[int],
    seeds: int,
    strategies: Sequence[Strategy],
    device: torch.device,
    precision: str,
    progress: Progress,
) -> list[Row]:
    if dataset.test is None or dataset.test_labels is None or (dataset.train_labels < 0).any():
        raise FinesslError(f"{dataset.name}: this needs a label for every image, and test images.")
    encoder = FrozenEncoder(create_backbone(backbone, weights=weights), device, precision)
    trained, tests = (encode_part(dataset, part, encoder, progress) for part in ("train", "test"))
    rows, good = trained.rows, np.flatnonzero(trained.usable())
    centre = feature_centre(rows[good]).to(device)
    pile, truth = Pile(prepare(rows[good], centre)), torch.from_numpy(dataset.train_labels[good]).to(device)
    tested = tests.usable() & (dataset.test_labels >= 0)
    test, wanted = prepare(tests.rows[tested], centre), torch.from_numpy(dataset.test_labels[tested]).to(device)
    begun = time.perf_counter()
    pile.graph  # noqa: B018 - built once
    results = {("graph", 0): Row("graph", 0, seconds=[time.perf_counter() - begun])}

    def score(logits: Tensor) -> float:
        return float((logits.argmax(1) == wanted).float().mean())

    def row(what: str, count: int) -> Row:
        return results.setdefault((what, count), Row(what, count))

    classes, total = len(dataset.classes), len(labels) * seeds
    for number, (count, seed) in enumerate((c, s) for c in labels for s in range(seeds)):
        progress("solving", number, total)
        split = make_split(dataset, kind="per-class", seed=seed, labels_per_class=count)
        known = torch.from_numpy(np.isin(good, split.labeled)).to(device)
        choice = choose_solver(pile, torch.where(known, truth, -1), classes)
        for candidate in choice.candidates:
            line = row(candidate.solver, count)
            line.accuracy.append(score(candidate.solution.logits(test)))
            line.seconds.append(candidate.seconds)
            line.held_out += [] if candidate.held_out is None else [candidate.held_out]
        row(CHOSEN, count).accuracy.append(score(choice.chosen.solution.logits(test)))
    for strategy in strategies:
        for seed in range(seeds):
            progress(f"selecting: {strategy}", seed, seeds)
            begun = time.perf_counter()
            order = select_images(rows[good], max(labels) * classes, strategy=strategy, seed=seed, device=device).chosen
            seconds = time.perf_counter() - begun
            for count in labels:
                chosen = torch.from_numpy(order[: count * classes]).to(device)
                y = torch.full_like(truth, -1)
                y[chosen] = truth[chosen]
                line = row(f"select: {strategy}", count)
                line.accuracy.append(score(pile.solve(FAST, y, classes).logits(test)))
                line.classes.append(len(torch.unique(y[chosen])))
                line.seconds.append(seconds)
    return list(results.values())
