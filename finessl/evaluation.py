"""A trained classifier on images: accuracy by class (`finessl evaluate`), classes of files (`finessl predict`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finessl.classifier import Classifier, load, squash
from finessl.data.images import EXTENSIONS, FileImages, ImageError, Images
from finessl.data.paths import PathTable
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.training.experiment import open_source
from finessl.training.rundir import RunDirectory

BATCH = 256


@dataclass(frozen=True)
class Evaluation:
    data: str
    images: int
    accuracy: float
    classes: list[tuple[str, int, float]]  # name, images, recall

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_run(
    run: str | Path,
    data: str | None = None,
    *,
    root: str | None = None,
    weights: str | None = None,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Accuracy on the run's own test images, or on the images of another source that have its classes."""
    classifier = load(run, weights=weights, device=device)
    if data is None:
        recipe = RunDirectory(run).recipe()
        data, dataset = recipe.data.source, open_source(recipe)
    else:
        dataset = open_dataset(data, root=root)
    if dataset.test is not None and dataset.test_labels is not None:
        images, labels = dataset.test, dataset.test_labels
    else:
        images, labels = dataset.train, dataset.train_labels
    number = {name: k for k, name in enumerate(classifier.classes)}
    known = np.array([number.get(name, -1) for name in dataset.classes])
    truth = np.where(labels >= 0, known[np.maximum(labels, 0)], -1)
    use = np.flatnonzero(truth >= 0)
    if not len(use):
        raise FinesslError(
            f"{data} has no labeled test image of the classifier's classes ({', '.join(classifier.classes[:5])}…)."
        )
    predicted = np.full(len(truth), -1)
    for index, probabilities, _ in predict_images(classifier, images.take(use), progress):
        predicted[use[index]] = probabilities.argmax(1)
    use = use[predicted[use] >= 0]
    right = predicted[use] == truth[use]
    counts = np.bincount(truth[use], minlength=len(classifier.classes))
    hits = np.bincount(truth[use][right], minlength=len(classifier.classes))
    rows = [(n, int(c), float(h / max(c, 1))) for n, c, h in zip(classifier.classes, counts, hits, strict=True)]
    return Evaluation(data, len(use), float(right.mean()), rows)


def reader(images: Images, size: int) -> Callable[[int], np.ndarray | ImageError]:
    """Position → the image as the model's input wants it (squashed, as in evaluation), or why there is none."""

    def read(i: int) -> np.ndarray | ImageError:
        try:
            return squash(images.read(i, square=size), size)
        except ImageError as error:
            return error

    return read


def predict_images(
    classifier: Classifier, images: Images, progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, list[tuple[int, str]]]]:
    """Batches of (positions, probabilities, broken): decoding of the next batch runs while the model works."""
    read = reader(images, classifier.image_size)
    classifier.expect(len(images))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        starts = list(range(0, len(images), BATCH))
        ahead = [pool.submit(read, i) for i in range(min(BATCH, len(images)))]
        for start in starts:
            loaded = [future.result() for future in ahead]
            following = range(start + BATCH, min(start + 2 * BATCH, len(images)))
            ahead = [pool.submit(read, i) for i in following]
            good = [(start + i, image) for i, image in enumerate(loaded) if isinstance(image, np.ndarray)]
            broken = [(start + i, str(error)) for i, error in enumerate(loaded) if isinstance(error, ImageError)]
            positions = np.array([i for i, _ in good], np.int64)
            yield positions, classifier.predict_proba([image for _, image in good]), broken
            if progress is not None:
                progress(start + len(loaded), len(images))


def image_files(folder: Path) -> list[Path]:
    """The image files in a folder and below it, in order."""
    found = [Path(top) / name for top, _, names in os.walk(folder) for name in names]
    return sorted(path for path in found if path.suffix.lower() in EXTENSIONS and not path.name.startswith("."))


def predict_files(
    run: str | Path,
    paths: list[Path],
    *,
    top: int = 1,
    weights: str | None = None,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Rows [path, label, confidence, …] of all image files named or found in folders; and (path, reason) of broken ones."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += image_files(path)
        elif path.exists():
            files.append(path)
        else:
            raise FinesslError(f"{path}: no such file or folder.")
    if not files:
        raise FinesslError(f"no image files in {', '.join(map(str, paths))}.")
    classifier = load(run, weights=weights, device=device)
    images = FileImages(Path(), PathTable.of([file.as_posix() for file in files], [0] * len(files)))
    rows: list[list[str]] = []
    broken: list[tuple[str, str]] = []
    for positions, probabilities, failures in predict_images(classifier, images, progress):
        order = np.argsort(-probabilities, axis=1)[:, :top]
        for position, row, best in zip(positions, probabilities, order, strict=True):
            answers = [text for k in best for text in (classifier.classes[k], f"{row[k]:.4f}")]
            rows.append([str(files[position]), *answers])
        broken += [(str(files[position]), reason) for position, reason in failures]
    return rows, broken
