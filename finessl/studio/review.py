"""What deserves a second look: doubtful labels, confident disagreements, images of no class, pairs that are confused."""

from __future__ import annotations

from typing import Any

import numpy as np

from finessl.data.dataset import readable
from finessl.errors import FinesslError
from finessl.studio.events import UNLABELED, Labels
from finessl.studio.suggest import Answer, Suggestions

KINDS = ("doubtful", "disagree", "none", "confused")
MOST = 100  # items per kind
SURE = 0.6  # confidence of both opinions in a disagreement
Item = dict[str, Any]


class Review:
    def __init__(self, labels: Labels, suggestions: Suggestions) -> None:
        self.labels, self.suggestions = labels, suggestions
        self.found: dict[str, tuple[tuple[int, int], list[Item]]] = {}

    def items(self, kind: str) -> list[Item]:
        if kind not in KINDS:
            raise FinesslError(f"kind should be {', '.join(KINDS)}.")
        answer = self.suggestions.answer
        if answer is None:
            return []
        key = (id(answer), self.labels.action)
        if kind not in self.found or self.found[kind][0] != key:
            with self.labels.lock:
                label = self.labels.label.copy()
            work = {
                "doubtful": self.doubtful,
                "disagree": self.disagree,
                "none": self.strange,
                "confused": self.confused,
            }
            self.found[kind] = (key, work[kind](answer, label))
        return [item for item in self.found[kind][1] if item["id"] not in self.labels.settled][:MOST]

    def labeled(self, answer: Answer, label: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, unit features and columns of the labeled images."""
        y = label[answer.encoded.ids]
        rows = np.flatnonzero(np.isin(y, answer.classes))
        return rows, answer.encoded.x[rows].astype(np.float64), np.searchsorted(answer.classes, y[rows])

    def doubtful(self, answer: Answer, label: np.ndarray) -> list[Item]:
        """Labels that the other labels, without this one, would call something else."""
        from finessl.frozen.solvers import SCALE
        from finessl.frozen.suspects import held_out_scores, suspicious_labels
        from finessl.inference.metrics import softmax

        rows, x, y = self.labeled(answer, label)
        if np.bincount(y).max(initial=0) < 2:
            return []
        scores = held_out_scores(x, y, int(y.max()) + 1)
        p = softmax(SCALE * scores)
        found = []
        for i, other, _ in suspicious_labels(scores, y)[: 2 * MOST]:
            wanted = int(answer.classes[other])
            why = f"The other labels say {self.labels.name(wanted)}."
            found.append(self.item(int(answer.encoded.ids[rows[i]]), wanted, p[i, other], why))
        return found

    def disagree(self, answer: Answer, label: np.ndarray) -> list[Item]:
        """Unlabeled images on which two classifiers are sure of different classes: the trained one and the answer from
        frozen features, or two solvers of the latter."""
        from finessl.frozen.choose import SOLVERS
        from finessl.studio.solve import targets

        frozen, trained = self.suggestions.frozen, self.suggestions.trained
        if frozen is None:
            return []
        encoded = frozen.encoded
        best, sure = frozen.best[encoded.ids], frozen.confidence[encoded.ids]
        if trained is not None:
            other, (theirs, confidence) = "the trained classifier", trained.answers(self.labels)
            theirs, confidence = theirs[encoded.ids], confidence[encoded.ids]
        else:
            y, classes = targets(encoded, label)
            solver = "ridge" if frozen.solver != "ridge" else "means"
            p = encoded.pile.solve(solver, y, len(classes)).logits(encoded.pile.x).softmax(1).numpy()
            other, theirs, confidence = SOLVERS[solver], classes[p.argmax(1)], p.max(1)
        both = np.minimum(sure, confidence)
        free = (label[encoded.ids] == UNLABELED) & (self.labels.judged[encoded.ids] == UNLABELED)
        rows = np.flatnonzero((best != theirs) & (theirs >= 0) & free & (both >= SURE))
        found = []
        for i in rows[np.argsort(-both[rows], kind="stable")][: 2 * MOST]:
            why = (
                f"{SOLVERS[frozen.solver].capitalize()} says {self.labels.name(int(best[i]))}, "
                f"{other} says {self.labels.name(int(theirs[i]))}."
            )
            found.append(self.item(int(encoded.ids[i]), int(theirs[i]), confidence[i], why))
        return found

    def strange(self, answer: Answer, label: np.ndarray) -> list[Item]:
        """Unlabeled images that are unlike every class, the strangest first."""
        from finessl.analysis.estimate import familiar

        rows, x, y = self.labeled(answer, label)
        if not len(rows):
            return []
        encoded = answer.encoded
        free = np.flatnonzero((label[encoded.ids] == UNLABELED) & (self.labels.judged[encoded.ids] == UNLABELED))
        several = np.bincount(y)[y] > 1
        u = encoded.x[free]
        familiarity, threshold = familiar(x, y, u, several, int(y.max()) + 1)
        order = np.argsort(familiarity, kind="stable")
        if threshold is not None:
            order = order[familiarity[order] < threshold]
        found = []
        for k in order[:MOST]:
            i = int(encoded.ids[free[k]])
            why = f"Unlike every class (similarity {familiarity[k]:.2f} to the nearest one)."
            found.append(self.item(i, int(answer.best[i]), answer.confidence[i], why))
        return found

    def confused(self, answer: Answer, label: np.ndarray) -> list[Item]:
        """Pairs of labeled images that look more alike than their labels allow, the most alike first."""
        rows, x, y = self.labeled(answer, label)
        if len(rows) < 2:
            return []
        similarity = x @ x.T
        np.fill_diagonal(similarity, -2)
        same = np.where(y[:, None] == y[None], similarity, -2).max(1)
        apart = np.where(y[:, None] != y[None], similarity, -2)
        partner, alike = apart.argmax(1), apart.max(1)
        found, seen = [], set[frozenset[int]]()
        for i in np.argsort(same - alike, kind="stable").tolist():
            pair = frozenset((i, int(partner[i])))
            if alike[i] <= same[i] or pair in seen:
                continue
            seen.add(pair)
            image, other = (int(answer.encoded.ids[rows[k]]) for k in (i, int(partner[i])))
            theirs = int(answer.classes[y[partner[i]]])
            why = f"More like this image of {self.labels.name(theirs)} than like any of its own class."
            found.append({**self.item(image, theirs, float(alike[i]), why), "pair": other})
        return found

    def item(self, image: int, predicted: int, p: float, why: str) -> Item:
        labels = self.labels
        label = int(labels.label[image])
        near = self.suggestions.nearest(image)
        return {
            "id": image,
            "name": readable(labels.images.key(image)),
            "label": None if label == UNLABELED else "none" if label < 0 else label,
            "predicted": None if predicted < 0 else labels.resolve(predicted),
            "p": round(float(p), 4),
            "why": why,
            "nearest": [{"id": i, "class": int(labels.label[i])} for i in near],
        }
