"""`finessl bench labeling DATA`: how many labels, and minutes, until the studio's answer is good?

A script labels a pile of images through the studio's HTTP interface, as a person would: the image at the head of the queue, or
a random one, then its true class, then a pause. DATA has a label for every image, which the studio does not see.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finessl.bench.running import Running
from finessl.bench.studio import wait_for_features
from finessl.data.images import FileImages
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Progress, no_progress

AUDITED = 100  # images of the audit at the end
PAGE = 1000  # images per request to the grid


@dataclass(frozen=True)
class Labeling:
    """Labeling in one order, until the target was reached or the labels ran out."""

    order: str
    labels: int
    minutes: float
    accuracy: float  # of the suggestions for all unlabeled images
    audited: dict[str, Any]  # value, low, high, n: what the studio's own audit says
    curve: list[tuple[int, float]]  # labels, accuracy


def bench_labeling(
    data: str,
    *,
    target: float = 0.8,
    most: int = 300,
    pause: float = 1.0,
    seed: int = 0,
    backbone: str = "embedded",
    weights: Sequence[str] = (),
    orders: Sequence[str] = ("queue", "random"),
    progress: Progress = no_progress,
) -> list[Labeling]:
    """Label in the order of the queue, and in random order.

    target: accuracy to reach.   most: labels at most.   pause: seconds that a person takes per image.
    """
    dataset = open_dataset(data)
    if not isinstance(dataset.train, FileImages) or (dataset.train_labels < 0).any():
        raise FinesslError(f"{data}: every image needs a label, and a file of its own.")
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as scratch:
        pile = Path(scratch) / "pile"
        pile.mkdir()
        truth = {}
        for number, image in enumerate(rng.permutation(len(dataset.train))):
            source = Path(dataset.train.path(int(image)))
            name = f"{number:06d}{source.suffix}"
            (pile / name).symlink_to(source.resolve())
            truth[name] = int(dataset.train_labels[image])
        more = ["--backbone", backbone, *(part for file in weights for part in ("--weights", file))]
        found = []
        for order in orders:
            with Running(pile, "--out", str(Path(scratch) / order), *more) as running:
                script = Script(running, truth, dataset.classes, rng if order == "random" else None)
                found.append(script.run(order, target, most, pause, progress))
    return found


class Script:
    """The scripted labeler of one studio. rng: choose images at random instead of from the queue."""

    def __init__(
        self, running: Running, truth: dict[str, int], classes: Sequence[str], rng: np.random.Generator | None
    ) -> None:
        self.running, self.truth, self.classes, self.rng = running, truth, classes, rng
        for name in classes:
            state = running.ask("/api/classes", {"add": name})
        self.ids = {row["name"]: row["id"] for row in state["classes"]}
        self.labeled: set[int] = set()

    def run(self, order: str, target: float, most: int, pause: float, progress: Progress) -> Labeling:
        wait_for_features(self.running, progress)
        names = {item["id"]: item["name"] for item in self.grid("any")}
        begun, curve, accuracy = time.monotonic(), [], 0.0
        while len(self.labeled) < most and accuracy < target:
            progress(f"labeling, {order}", len(self.labeled), most)
            time.sleep(pause)
            image = self.next_image(names)
            self.labeled.add(image)
            body = {"image": image, "class": self.right(names[image]), "source": "queue"}
            answer = self.running.ask("/api/label", body)
            if len(self.labeled) % len(self.classes) == 0:
                self.running.wait_for_suggestions(answer["events"])
                accuracy = self.accuracy()
                curve.append((len(self.labeled), accuracy))
        minutes = (time.monotonic() - begun) / 60
        return Labeling(order, len(self.labeled), minutes, accuracy, self.audit(names), curve)

    def next_image(self, names: dict[int, str]) -> int:
        if self.rng is None:
            return int(self.running.ask("/api/queue?n=1")["items"][0]["id"])
        return int(self.rng.choice([image for image in names if image not in self.labeled]))

    def right(self, name: str) -> int:
        return int(self.ids[self.classes[self.truth[name]]])

    def accuracy(self) -> float:
        """Of the suggestions for the images without a label."""
        hits = [item["class"] == self.right(item["name"]) for item in self.grid("none")]
        return float(np.mean(hits))

    def grid(self, label: str) -> Iterator[dict[str, Any]]:
        offset, total = 0, 1
        while offset < total:
            page = self.running.ask(f"/api/grid?label={label}&sort=name&limit={PAGE}&offset={offset}")
            yield from page["items"]
            offset, total = offset + PAGE, page["total"]

    def audit(self, names: dict[int, str]) -> dict[str, Any]:
        """The accuracy that the studio states after an audit."""
        view = self.running.ask("/api/audit")
        for _ in range(AUDITED):
            image = view["image"]
            if image is None:
                break
            self.running.ask("/api/audit", {"image": image["id"], "class": self.right(names[image["id"]])})
            view = self.running.ask("/api/audit")
        return dict(view["accuracy"])
