"""The wall of images: filtered and sorted on the server from arrays, sent in pages."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from finessl.data.dataset import readable
from finessl.errors import FinesslError
from finessl.studio.events import NONE, SOURCES, UNLABELED, Labels
from finessl.studio.suggest import Answer, Suggestions

SORTS = ("typical", "doubt", "name")
KEPT = 8  # orders in memory: a page of each view that is open


@dataclass(frozen=True)
class View:
    """What is shown, in which order.   group: class id of the label or else of the suggestion; None: all."""

    group: int | None = None
    label: str = "any"  # any, none (without a label), yes
    low: float = 0.0
    high: float = 1.0
    source: str = ""
    text: str = ""
    sort: str = "typical"

    def __post_init__(self) -> None:
        if self.label not in ("any", "none", "yes"):
            raise FinesslError("label should be any, none or yes.")
        if self.sort not in SORTS:
            raise FinesslError(f"sort should be {', '.join(SORTS)}.")
        if self.source not in ("", *SOURCES):
            raise FinesslError(f"source should be one of {', '.join(SOURCES)}.")
        if len(self.text) > 200:
            raise FinesslError("a search may have 200 characters.")


class Grid:
    def __init__(self, labels: Labels, suggestions: Suggestions) -> None:
        self.labels, self.suggestions = labels, suggestions
        self.orders: OrderedDict[tuple[Any, ...], np.ndarray] = OrderedDict()
        self.names: list[str] | None = None

    def page(self, view: View, offset: int, limit: int) -> dict[str, Any]:
        answer = self.suggestions.answer
        order = self.order(view, answer)
        return {"total": len(order), "items": [self.item(i, answer) for i in order[offset : offset + limit].tolist()]}

    def item(self, image: int, answer: Answer | None) -> dict[str, Any]:
        labels = self.labels
        judged, label = int(labels.judged[image]), int(labels.label[image])
        suggested = -1 if answer is None else int(answer.best[image])
        return {
            "id": image,
            "name": readable(labels.images.key(image)),
            "class": None if suggested < 0 else labels.resolve(suggested),
            "p": None if suggested < 0 or answer is None else round(float(answer.confidence[image]), 4),
            "label": None if label == UNLABELED else "none" if label == NONE else label,
            "audit": judged != UNLABELED,
        }

    def order(self, view: View, answer: Answer | None) -> np.ndarray:
        key = (view, id(answer), self.labels.action)
        if key not in self.orders:
            self.orders[key] = self.arrange(view, answer)
            while len(self.orders) > KEPT:
                self.orders.popitem(last=False)
        return self.orders[key]

    def arrange(self, view: View, answer: Answer | None) -> np.ndarray:
        labels = self.labels
        with labels.lock:
            label, source = labels.label.copy(), labels.source.copy()
            judged = labels.judged != UNLABELED
        best, confidence, margin = self.answers(answer)
        shown = (confidence >= view.low) & (confidence <= view.high)
        if view.label != "any":
            shown &= ((label == UNLABELED) & ~judged) == (view.label == "none")
        if view.group is not None:
            shown &= np.where(label == UNLABELED, best, label) == view.group
        if view.source:
            shown &= (source == SOURCES.index(view.source)) & (label != UNLABELED)
        found = np.flatnonzero(shown)
        if view.text:
            names, wanted = self.lower_names(), view.text.lower()
            found = np.array([i for i in found.tolist() if wanted in names[i]], np.int64)
        if view.sort == "name" or answer is None:
            return found
        keys = -confidence[found] if view.sort == "typical" else margin[found]
        return found[np.argsort(keys, kind="stable")]

    def answers(self, answer: Answer | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count = len(self.labels.label)
        if answer is None:
            return np.full(count, -1), np.zeros(count, np.float32), np.zeros(count, np.float32)
        best = answer.best
        if self.labels.merged:
            table = np.array([self.labels.resolve(k) for k in range(len(self.labels.names))] + [-1])
            best = table[best]
        return best, answer.confidence, answer.margin

    def uncertain(self, answer: Answer | None) -> dict[int, float]:
        """Class id → mean doubt (1 − confidence) over the unlabeled images that look like it."""
        if answer is None:
            return {}
        best, confidence, _ = self.answers(answer)
        free = (self.labels.label == UNLABELED) & (best >= 0)
        size = len(self.labels.names)
        counts = np.bincount(best[free], minlength=size)
        doubt = np.bincount(best[free], 1 - confidence[free], minlength=size)
        return {k: float(doubt[k] / counts[k]) for k in range(size) if counts[k]}

    def lower_names(self) -> list[str]:
        if self.names is None:
            self.names = [readable(path).lower() for path in self.labels.images.paths]
        return self.names
