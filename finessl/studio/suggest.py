"""The frozen-feature answer, fitted again after each label, and the order in which to label.

Three threads share the work, so that none waits for a slower one: `fit` answers after every label; `look ahead` chooses
the next images (herding; once there are labels, weighted by uncertainty); `judge` chooses the solver by cross-validation,
which is also the accuracy that is shown as long as no image was audited. All read and publish whole values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch

from finessl.frozen.choose import CROWD, DEFAULT, FALLBACK, TRANSDUCTIVE, Choice, Pile, calibrate, choose_solver
from finessl.frozen.select import Picker, herd, uncertainty, unit
from finessl.studio.events import UNLABELED, Labels
from finessl.studio.features import Encoded

SAMPLE = 10_000  # images that the slower threads look at
AHEAD = 64  # images in the queue
KEPT = 3  # images at its head that stay when the order changes
FAST = 20_000  # images up to which labels are propagated after each label; ridge regression above
CALIBRATION = 4096


@dataclass(frozen=True)
class Answer:
    """Probabilities of the images that have features, from the labels of one moment."""

    encoded: Encoded
    classes: np.ndarray  # class id of each column
    p: np.ndarray  # float32 [n, C]
    best: np.ndarray  # int32 [N]: class id, −1: unknown
    confidence: np.ndarray  # float32 [N]
    margin: np.ndarray  # float32 [N]: between the two most probable classes
    solver: str
    actions: int  # of the labels that it is fitted to
    seconds: float

    def top(self, image: int, count: int = 3) -> list[tuple[int, float]]:
        row = self.encoded.place[image]
        if row < 0:
            return []
        p = self.p[row]
        return [(int(self.classes[k]), float(p[k])) for k in np.argsort(-p, kind="stable")[:count]]


def targets(encoded: Encoded, label: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Labels of the rows as columns 0 … C − 1 (−1: none), and the class ids that have one."""
    y = label[encoded.ids]
    classes = np.unique(y[y >= 0])
    columns = np.where(y >= 0, np.searchsorted(classes, y), -1).astype(np.int64)
    return torch.from_numpy(columns), classes


def fit(encoded: Encoded, label: np.ndarray, solver: str, accuracy: float | None, actions: int = 0) -> Answer | None:
    """None with labels of fewer than two classes."""
    begun = time.perf_counter()
    y, classes = targets(encoded, label)
    count = len(classes)
    if count < 2:
        return None
    if solver in TRANSDUCTIVE and (not encoded.linked or len(y) < CROWD * count or len(y) > FAST):
        solver = FALLBACK
    solution = encoded.pile.solve(solver, y, count)
    if accuracy is not None:
        sample = encoded.pile.x[:: max(len(y) // CALIBRATION, 1)]
        solution = calibrate(solution, sample, accuracy)
    p = solution.logits(encoded.pile.x).softmax(1)
    top = p.topk(2, dim=1)
    best, confidence, margin = (np.full(len(encoded.place), v, t) for v, t in ((-1, "i4"), (0, "f4"), (0, "f4")))
    best[encoded.ids] = classes[top.indices[:, 0].numpy()]
    confidence[encoded.ids] = top.values[:, 0].numpy()
    margin[encoded.ids] = (top.values[:, 0] - top.values[:, 1]).numpy()
    seconds = time.perf_counter() - begun
    return Answer(encoded, classes, p.numpy(), best, confidence, margin, solver, actions, seconds)


def sample_rows(encoded: Encoded, label: np.ndarray, most: int = SAMPLE, seed: int = 0) -> np.ndarray:
    """Rows of a random sample and of all labeled images."""
    if len(encoded.ids) <= most:
        return np.arange(len(encoded.ids))
    drawn = np.random.default_rng(seed).choice(len(encoded.ids), most, replace=False)
    return np.union1d(drawn, np.flatnonzero(label[encoded.ids] >= 0))


def look_ahead(encoded: Encoded, label: np.ndarray, taken: np.ndarray, answer: Answer | None, count: int) -> np.ndarray:
    """The next images to label, best first.   taken: bool [N], images that are labeled, judged or dismissed."""
    rows = sample_rows(encoded, label)
    x = unit(encoded.rows[rows])
    known = torch.from_numpy(np.flatnonzero(taken[encoded.ids[rows]]))
    weights = None
    if answer is not None and answer.encoded is encoded:
        weights = uncertainty(torch.from_numpy(answer.p[rows]))
    picker = Picker(x, known)
    herd(picker, count, weights, seed=0)
    return encoded.ids[rows[np.array(picker.chosen, np.int64)]]


def judge(encoded: Encoded, label: np.ndarray) -> Choice | None:
    y, classes = targets(encoded, label)
    if len(classes) < 2 or not encoded.linked:
        return None
    rows = sample_rows(encoded, label)
    pile = encoded.pile if len(rows) == len(y) else Pile(encoded.pile.x[rows])
    return choose_solver(pile, y[rows], len(classes))


class Suggestions:
    """What the three threads have found, and the queue."""

    def __init__(self, labels: Labels, changed: Callable[[], None]) -> None:
        self.labels, self.changed = labels, changed
        self.encoded: Encoded | None = None
        self.answer: Answer | None = None
        self.choice: Choice | None = None
        self.broken: np.ndarray = np.zeros(len(labels.label), bool)
        self.plain = np.random.default_rng(1).permutation(len(labels.label))  # before there are features
        self.order = self.plain[:0]
        self.queue_lock, self.stop = threading.Lock(), threading.Event()
        self.wake = {name: threading.Event() for name in ("fit", "look ahead", "judge")}
        self.head: list[int] = []
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        work = {"fit": self._fit, "look ahead": self._look_ahead, "judge": self._judge}
        for name, step in work.items():
            thread = threading.Thread(target=self._loop, args=(name, step), name=name, daemon=True)
            thread.start()
            self.threads.append(thread)

    def close(self) -> None:
        self.stop.set()
        for event in self.wake.values():
            event.set()
        for thread in self.threads:
            thread.join(10)

    def publish(self, encoded: Encoded) -> None:
        """More features."""
        self.encoded = encoded
        self.notice()

    def notice(self) -> None:
        """Labels or features have changed."""
        for event in self.wake.values():
            event.set()

    def _loop(self, name: str, step: Callable[[Encoded, np.ndarray], None]) -> None:
        while True:
            self.wake[name].wait()
            self.wake[name].clear()
            if self.stop.is_set():
                return
            encoded = self.encoded
            if encoded is not None:
                with self.labels.lock:
                    label = self.labels.label.copy()
                step(encoded, label)
                self.changed()

    def _fit(self, encoded: Encoded, label: np.ndarray) -> None:
        chosen = self.choice.chosen if self.choice else None
        actions = self.labels.action
        self.answer = fit(
            encoded, label, chosen.solver if chosen else DEFAULT, chosen.held_out if chosen else None, actions
        )

    def _look_ahead(self, encoded: Encoded, label: np.ndarray) -> None:
        order = look_ahead(encoded, label, self.taken(), self.answer, AHEAD)
        with self.queue_lock:
            self.order = order
        self.stop.wait(0.5)  # one order serves several labels

    def _judge(self, encoded: Encoded, label: np.ndarray) -> None:
        begun = time.monotonic()
        self.choice = judge(encoded, label)
        self.wake["fit"].set()
        self.stop.wait(1 + 2 * (time.monotonic() - begun))  # at most a third of the time

    # ---- the queue --------------------------------------------------------------------------------------------------

    def taken(self) -> np.ndarray:
        """bool [N]: images that need no label from the queue."""
        labels = self.labels
        taken = (labels.label != UNLABELED) | (labels.judged != UNLABELED) | self.broken
        taken[list(labels.settled)] = True
        return taken

    def queue(self, count: int, without: Collection[int] = ()) -> list[int]:
        """The next images. The first KEPT stay when the order behind them changes."""
        taken = self.taken()
        with self.queue_lock:
            found = [i for i in self.head if not taken[i]]
            known = set(found)
            for source in (self.order, self.plain):
                for i in source.tolist() if len(source) <= AHEAD else iterate(source, taken):
                    if len(found) - sum(i in without for i in found) >= max(count, KEPT):
                        break
                    if not taken[i] and i not in known:
                        found.append(i)
                        known.add(i)
            self.head = found[:KEPT]
            return [i for i in found if i not in without][:count]

    def left(self) -> int:
        return int((~self.taken()).sum())

    def nearest(self, image: int, count: int = 4) -> list[int]:
        """The labeled images that look most alike."""
        encoded = self.encoded
        if encoded is None or encoded.place[image] < 0:
            return []
        x = encoded.pile.x
        known = np.flatnonzero((self.labels.label[encoded.ids] >= 0) & (encoded.ids != image))
        if not len(known):
            return []
        similarity = (x[torch.from_numpy(known)] @ x[int(encoded.place[image])]).numpy()
        return encoded.ids[known[np.argsort(-similarity, kind="stable")[:count]]].tolist()


def iterate(order: np.ndarray, taken: np.ndarray):  # type: ignore[no-untyped-def]
    """Free images of a long order, found in blocks."""
    for start in range(0, len(order), 4096):
        part = order[start : start + 4096]
        yield from part[~taken[part]].tolist()
