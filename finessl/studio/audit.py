"""Accuracy from random images that a person judges without seeing the prediction.

Answers are no labels: they are never trained on, so the figure holds for every later classifier too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from finessl.data.dataset import readable
from finessl.errors import FinesslError
from finessl.studio.events import NONE, UNLABELED, Labels
from finessl.studio.suggest import Suggestions

MIN_ANSWERS = 10  # below it the cross-validated accuracy is shown instead


class Auditor:
    def __init__(self, labels: Labels, suggestions: Suggestions, seed: int = 0) -> None:
        self.labels, self.suggestions = labels, suggestions
        self.order = np.random.default_rng([seed, 7]).permutation(len(labels.label))

    def answered(self) -> int:
        return int((self.labels.judged != UNLABELED).sum())

    def next(self) -> int | None:
        """The first image of a fixed random order that nobody has judged or labeled."""
        labels = self.labels
        free = (labels.judged == UNLABELED) & (labels.label == UNLABELED) & ~self.suggestions.broken
        place = np.flatnonzero(free[self.order])
        return int(self.order[place[0]]) if len(place) else None

    def predictions(self) -> tuple[np.ndarray, np.ndarray, str] | None:
        """Class id (−1: unknown) and confidence of every image, and whose they are: what is audited."""
        labels, trained, frozen = self.labels, self.suggestions.trained, self.suggestions.frozen
        if trained is not None:
            return *trained.answers(labels), f"the trained classifier ({readable(trained.run.name)})"
        if frozen is None:
            return None
        best = np.array([*map(labels.resolve, range(len(labels.names))), -1])[frozen.best]
        return best, frozen.confidence, "the answer from frozen features"

    def accuracy(self) -> dict[str, Any]:
        """Of the present classifier on all judged images."""
        found, labels = self.predictions(), self.labels
        none = {"kind": None, "value": None, "low": None, "high": None, "n": 0, "how": "No image is audited."}
        if found is None:
            return none
        best, confidence, title = found
        with labels.lock:
            judged, label = labels.judged.copy(), labels.label.copy()
        images = np.flatnonzero((judged != UNLABELED) & (best >= 0))
        others = np.flatnonzero((judged == UNLABELED) & (label == UNLABELED) & (best >= 0))
        if not len(images):
            return none
        from finessl.inference.metrics import estimate  # imports torch, which the suggestions have done by now

        right = best[images] == judged[images]
        value, interval, method = estimate(right, confidence[images], confidence[others])
        return {
            "kind": "audited" if len(images) >= MIN_ANSWERS else None,
            "value": round(value, 4),
            "low": round(interval.low, 4),
            "high": round(interval.high, 4),
            "n": len(images),
            "how": f"{int(right.sum()):,} of {len(images):,} random images right, judged without seeing the prediction of "
            f"{title}; 95 % interval ({method}).",
        }

    def view(self) -> dict[str, Any]:
        image = self.next()
        named = None if image is None else {"id": image, "name": readable(self.labels.images.key(image))}
        return {"image": named, "answered": self.answered(), "accuracy": self.accuracy()}

    def answer(self, image: int, target: int) -> dict[str, Any]:
        if self.labels.label[image] != UNLABELED:
            raise FinesslError("that image has a label: it was trained on and says nothing about accuracy.")
        known = self.predictions()
        predicted = -1 if known is None else int(known[0][image])
        name = self.labels.name(predicted) if predicted >= 0 else None
        self.labels.assign([image], target, "audit", predicted=name)
        view = self.view()
        return {
            "predicted": None if predicted < 0 else predicted,
            "right": None if predicted < 0 else predicted == target,
            "answered": view["answered"],
            "accuracy": view["accuracy"],
            "next": view["image"],
        }

    def rows(self) -> list[tuple[int, str, str]]:
        """number, path, label: the answers as `finessl audit --answers` reads them."""
        labels = self.labels
        chosen = [i for i in self.order.tolist() if labels.judged[i] != UNLABELED]
        named = (
            "none of these classes" if labels.judged[i] == NONE else labels.names[labels.judged[i]] for i in chosen
        )
        return [(n, labels.images.key(i), name) for n, (i, name) in enumerate(zip(chosen, named, strict=True), 1)]
