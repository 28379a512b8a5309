"""The frozen-feature answer, fitted again after each label, and the order in which to label.

Three threads share the work, so that none waits for a slower one: `fit` answers after every label; `look ahead` chooses
the next images (herding; once there are labels, weighted by uncertainty); `judge` chooses the solver by cross-validation,
which is also the accuracy that is shown as long as no image was audited. All read and publish whole values.

torch is imported by these threads (solve.py), not by the server: the page is there before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from finessl.runtime.machine import yield_to_others
from finessl.studio.events import UNLABELED, Labels
from finessl.studio.features import Encoded
from finessl.studio.trained import Trained

if TYPE_CHECKING:
    from finessl.frozen.choose import Choice

STEPS = ("judge", "fit", "look ahead")
AHEAD = 64  # images in the queue
KEPT = 3  # images at its head that stay when the order changes
GRACE = 0.04  # seconds for the browser to show the next image before the cores are busy


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


class Suggestions:
    """What the three threads have found, and the queue."""

    def __init__(self, labels: Labels, changed: Callable[[], None]) -> None:
        self.labels, self.changed = labels, changed
        self.encoded: Encoded | None = None
        self.frozen: Answer | None = None  # from frozen features alone
        self.trained: Trained | None = None  # from the last finished run
        self.answer: Answer | None = None  # what is shown: both
        self.choice: Choice | None = None
        self.broken: np.ndarray = np.zeros(len(labels.label), bool)
        self.plain = np.random.default_rng(1).permutation(len(labels.label))  # before there are features
        self.order = self.plain[:0]
        self.queue_lock, self.stop = threading.Lock(), threading.Event()
        self.slow = threading.Lock()  # `judge` or `look ahead`: each takes much memory
        self.wake = {name: threading.Event() for name in STEPS}
        self.head: list[int] = []
        self.fitted = 0  # events that the answer knows
        self.error: str | None = None
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        for name in STEPS:
            thread = threading.Thread(target=self._loop, args=(name,), name=name, daemon=True)
            thread.start()
            self.threads.append(thread)

    def close(self) -> None:
        self.stop.set()
        for event in self.wake.values():
            event.set()
        for thread in self.threads:
            thread.join(1)

    def publish(self, encoded: Encoded) -> None:
        """More features."""
        self.broken[encoded.broken] = True
        self.encoded = encoded
        self.notice()

    def notice(self) -> None:
        """Labels or features have changed."""
        for event in self.wake.values():
            event.set()

    def _loop(self, name: str) -> None:
        if name != "fit":
            yield_to_others(threading.get_native_id())
        while True:
            self.wake[name].wait()
            self.wake[name].clear()
            if self.stop.is_set():
                return
            if name == "fit":
                self.stop.wait(GRACE)
            begun = time.monotonic()
            try:
                with nullcontext() if name == "fit" else self.slow:
                    self.update(name)
                self.error = None
            except Exception as error:  # the page says so, and labeling goes on
                self.error = f"{name}: {type(error).__name__}: {error}"
            self.changed()
            if name == "judge":
                self.wake["fit"].set()
            if name != "fit":  # one order serves several labels; both leave most of the time to `fit`
                self.stop.wait(0.5 + 2 * (time.monotonic() - begun))

    def update(self, *names: str) -> None:
        """Do these steps now, all by default."""
        encoded = self.encoded
        if encoded is None:
            return
        from finessl.studio.solve import blend, fit, judge, look_ahead

        with self.labels.lock:
            label, action = self.labels.label.copy(), self.labels.action
        if "judge" in (names or STEPS):
            self.choice = judge(encoded, label)
        if "fit" in (names or STEPS):
            chosen = self.choice.chosen if self.choice else None
            solver, accuracy = (chosen.solver, chosen.held_out) if chosen else (None, None)
            self.frozen = fit(encoded, label, solver, accuracy, action)
            trained, frozen = self.trained, self.frozen
            if frozen is None or trained is None:
                self.answer = frozen
            else:
                self.answer = blend(frozen, trained.classes(self.labels), trained.p)
            self.fitted = action
        if "look ahead" in (names or STEPS):
            order = look_ahead(encoded, label, self.taken(), self.answer, AHEAD)
            with self.queue_lock:
                self.order = order

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
        known = np.flatnonzero((self.labels.label[encoded.ids] >= 0) & (encoded.ids != image))
        if not len(known):
            return []
        similarity = encoded.x[known] @ encoded.x[encoded.place[image]]
        return encoded.ids[known[np.argsort(-similarity, kind="stable")[:count]]].tolist()


def iterate(order: np.ndarray, taken: np.ndarray) -> Iterator[int]:
    """Free images of a long order, found in blocks."""
    for start in range(0, len(order), 4096):
        part = order[start : start + 4096]
        yield from part[~taken[part]].tolist()
