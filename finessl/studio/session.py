"""One open studio: project, labels, features, training. Its methods give the values that the page shows, as plain data."""

from __future__ import annotations

import hashlib
import subprocess
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finessl.data.dataset import readable
from finessl.errors import FinesslError
from finessl.studio import project as projects
from finessl.studio.audit import Auditor
from finessl.studio.events import NONE, UNLABELED, Labels
from finessl.studio.exports import Exports
from finessl.studio.features import Encoding
from finessl.studio.grid import Grid
from finessl.studio.project import Project
from finessl.studio.review import Review
from finessl.studio.suggest import Suggestions
from finessl.studio.thumbnails import Thumbnails
from finessl.studio.trained import read_trained, start_predicting
from finessl.studio.training import Trainer

WRITES = 0.5  # seconds between two writings of labels.csv
FOLLOWS = 1.0  # seconds between two looks at the training
PAINT = 1.0  # seconds for the page to appear before torch is imported, which stops all other threads for a while


class Studio:
    def __init__(
        self, project: Project, backbone: str = "auto", files: dict[str, str] | None = None, device: str = "auto"
    ) -> None:
        self.project, self.images = project, project.images
        self.labels = Labels(project.folder, project.images)
        if not self.labels.names:
            for name in project.classes:
                self.labels.find_or_add(name)
        self.labels.import_labels(project.given)
        self.version, self.lock = 0, threading.Lock()
        self.thumbnails = Thumbnails(project.folder, project.images)
        self.suggestions = Suggestions(self.labels, self.touch)
        self.encoding = Encoding(project, backbone, files, device)
        self.trainer = Trainer(project, self.labels, self.encoding)
        self.grid = Grid(self.labels, self.suggestions)
        self.review = Review(self.labels, self.suggestions)
        self.audit = Auditor(self.labels, self.suggestions)
        self.exports = Exports(project, self.labels, self.trainer, self.audit)
        self.identity = hashlib.blake2b(project.images.fingerprint().encode(), digest_size=8).hexdigest()
        self.stop, self.written = threading.Event(), -1
        self.predicting: subprocess.Popen[bytes] | None = None
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        self.suggestions.start()
        work = {
            "encode": self._encode,
            "write labels": self._write_labels,
            "thumbnails": self._build_thumbnails,
            "follow training": self._follow_training,
        }
        for name, target in work.items():
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self.threads.append(thread)

    def close(self) -> None:
        """What was labeled is on the disk already; the rest is derived."""
        self.stop.set()
        self.encoding.stop()
        if self.predicting is not None and self.predicting.poll() is None:
            self.predicting.kill()
        self.suggestions.close()
        for thread in self.threads:
            thread.join(1)
        self.save_labels()
        self.thumbnails.close()
        self.labels.close()

    def notes(self) -> list[str]:
        absent = len(self.labels.absent)
        lost = f"{absent:,} labels name images that are not in the data now; labels.jsonl keeps them."
        return [lost] if absent else []

    def touch(self) -> None:
        with self.lock:
            self.version += 1

    def changed(self) -> None:
        self.touch()
        self.suggestions.notice()

    def _write_labels(self) -> None:
        while not self.stop.wait(WRITES):
            self.save_labels()

    def save_labels(self) -> None:
        action = self.labels.action
        if action != self.written:
            projects.write_labels(self.labels, self.project.labels_file)
            self.written = action

    def _encode(self) -> None:
        if not self.stop.wait(PAINT):
            self.encoding.run(self.suggestions.publish)

    def _follow_training(self) -> None:
        """When a run has finished, what it says of every image joins the suggestions."""
        tried: set[Path] = set()
        while not self.stop.wait(FOLLOWS):
            run, trained = self.trainer.run(), self.suggestions.trained
            if run is None or (trained is not None and trained.run == run):
                continue
            found = read_trained(self.project, run)
            if found is not None:
                self.suggestions.trained = found
                self.changed()
            elif run not in tried:
                tried.add(run)
                self.predicting = start_predicting(self.project, run, self.encoding.device)
                self.predicting.wait()

    def _build_thumbnails(self) -> None:
        self.stop.wait(PAINT)
        for _ in self.thumbnails.build(self.stop):
            pass

    # ---- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        labels, encoding = self.labels, self.encoding
        with labels.lock:
            counts, answer = labels.counts(), self.suggestions.answer
            uncertain = self.grid.uncertain(answer)
            classes = [
                {
                    "id": k,
                    "name": labels.names[k],
                    "labels": int(counts[k]),
                    "uncertain": round(uncertain.get(k, 0.0), 4),
                }
                for k in labels.classes()
            ]
            none = int((labels.label == NONE).sum())
            total = int((labels.label >= 0).sum())
        left = encoding.seconds_left()
        return {
            "project": {
                "name": self.project.name,
                "data": readable(str(self.project.data)),
                "images": len(self.images),
                "folder": readable(str(self.project.folder)),
                "v": self.identity,
                "notes": self.project.notes,
            },
            "classes": classes,
            "features": {
                "done": encoding.done,
                "total": encoding.total,
                "seconds_left": None if left is None else round(left, 1),
                "backbone": encoding.backbone or "",
                "error": encoding.error or self.suggestions.error,
            },
            "accuracy": self.accuracy(),
            "labels": total,
            "none": none,
            "events": labels.action,
            "fitted": self.suggestions.fitted,
            "training": self.trainer.state(),
            "version": self.version,
        }

    def accuracy(self) -> dict[str, Any]:
        """The one figure that is shown: audited where there is an audit, else cross-validated."""
        found = self.audit.accuracy()
        if found["kind"] is not None:
            return found
        choice = self.suggestions.choice
        chosen = choice.chosen if choice else None
        if chosen is None or chosen.right is None or chosen.interval is None or chosen.held_out is None:
            how = "Label two images of each of two classes, and accuracy can be estimated."
            return {"kind": None, "value": None, "low": None, "high": None, "n": 0, "how": how}
        low, high = chosen.interval
        return {
            "kind": "cross-validated",
            "value": round(chosen.held_out, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "n": len(chosen.right),
            "how": f"{len(chosen.right):,} labels, each hidden in turn and predicted from the others "
            f"({chosen.solver} on {self.encoding.backbone}). Chosen images are not a random sample: audit to be sure.",
        }

    # ---- labeling ---------------------------------------------------------------------------------------------------

    def image_id(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.images):
            raise FinesslError(f"there is no image {str(value)[:50]!r}.")
        return value

    def class_or_none(self, value: Any) -> int:
        return NONE if value is None else self.labels.class_id(value)

    def item(self, image: int) -> dict[str, Any]:
        """An image of the queue, with what is known of it."""
        suggestions, labels = self.suggestions, self.labels
        answer = suggestions.answer
        top = answer.top(image) if answer is not None else []
        return {
            "id": image,
            "name": readable(self.images.key(image)),
            "why": self.why(image),
            "suggestions": [{"class": labels.resolve(k), "p": round(p, 4)} for k, p in top],
            "nearest": [{"id": i, "class": int(labels.label[i])} for i in suggestions.nearest(image)],
        }

    def why(self, image: int) -> str:
        answer, suggestions = self.suggestions.answer, self.suggestions
        if image not in suggestions.order:
            return "a random image"
        if answer is None or answer.best[image] < 0:
            return "unlike the images before it, like many others"
        sure = answer.margin[image] > 0.5
        return "like many that have no label yet" if sure else "the classes are hard to tell apart here"

    def queue(self, count: int, without: Collection[int] = ()) -> dict[str, Any]:
        found = self.suggestions.queue(count, without)
        return {"items": [self.item(i) for i in found], "left": self.suggestions.left()}

    def totals(self) -> dict[str, Any]:
        return {"events": self.labels.action, "labels": int((self.labels.label >= 0).sum())}

    def assign(self, images: Sequence[Any], target: Any, source: str) -> dict[str, Any]:
        """Label images; those that were answered in the audit are test images and stay so."""
        if source not in ("queue", "sort", "review"):
            raise FinesslError("source should be queue, sort or review.")
        chosen = [self.image_id(i) for i in images]
        if not chosen:
            raise FinesslError("no image is named.")
        number = self.class_or_none(target)
        free = [i for i in chosen if self.labels.judged[i] == UNLABELED]
        if not free:
            raise FinesslError("that image was judged in the audit: it measures accuracy and cannot be a label too.")
        self.labels.assign(free, number, source)
        self.changed()
        return self.totals() | {"skipped": len(chosen) - len(free)}

    def undo(self) -> dict[str, Any]:
        last = self.labels.undo()
        undone = None
        if last is not None:
            self.changed()
            before = int(last.before[0]) if len(last.before) else UNLABELED
            undone = {"images": last.images.tolist(), "class": self.shown(before), "source": last.source}
        return {"undone": undone, **self.totals()}

    def shown(self, number: int) -> int | str | None:
        """A label as the page has it: class id, "none", or null."""
        return None if number == UNLABELED else "none" if number == NONE else self.labels.resolve(number)

    def edit_classes(self, change: dict[str, Any]) -> None:
        labels = self.labels
        if "add" in change:
            labels.add_class(change["add"])
        elif "rename" in change:
            labels.rename_class(labels.class_id(change["rename"]), change.get("name"))  # type: ignore[arg-type]
        elif "merge" in change:
            labels.merge_classes(labels.class_id(change["merge"]), labels.class_id(change.get("into")))
        else:
            raise FinesslError("add, rename or merge a class.")
        self.changed()


@contextmanager
def opened(
    project: Project, backbone: str = "auto", files: dict[str, str] | None = None, device: str = "auto"
) -> Iterator[Studio]:
    """A running studio; a second one on the same folder is refused."""
    with projects.held(project):
        studio = Studio(project, backbone, files, device)
        studio.start()
        try:
            yield studio
        finally:
            studio.close()
