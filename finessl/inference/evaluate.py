"""Accuracy of a trained classifier on labeled images that it was not trained on: `finessl evaluate`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.dataset import Dataset, broken_files, count_of, renumbered, some, warnings_note
from finessl.data.decoding import pillow_warnings
from finessl.data.identity import image_digests
from finessl.data.images import Images
from finessl.data.reading import read_ahead
from finessl.data.sources import open_dataset
from finessl.data.splits import Split
from finessl.errors import FinesslError
from finessl.inference.classifier import Classifier, load
from finessl.inference.metrics import Interval, wilson
from finessl.runs.directory import RunDirectory
from finessl.runs.inputs import open_source
from finessl.runtime.callbacks import Count, no_count

BATCH = 256  # images decoded while the model works on the batch before
MAX_COMPARED = 200_000  # images whose files are compared with the training images; more would take many minutes
NEW, UNLABELED, LABELED = 0, 1, 2  # how training used an image: not at all, without its label, with its label


@dataclass(frozen=True)
class Evaluation:
    data: str
    images: int
    accuracy: float
    interval: Interval  # 95 %
    classes: list[tuple[str, int, float]]  # name, images, recall
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (image, reason): not measured
    left_out: int = 0  # images that training used: not measured
    notes: list[str] = field(default_factory=list)  # what the accuracy does not say by itself


def evaluate_run(
    run: str | Path,
    data: str | None = None,
    *,
    weights: str | None = None,
    device: str = "auto",
    include_unlabeled: bool = False,
    progress: Count = no_count,
    **options: Any,
) -> Evaluation:
    """Accuracy on the run's own test images, or on the labeled images of other data.

    Images of other data that training used are left out. Where no image is left to measure on, an error says why.
    run: its directory.   data, options: as in `open_dataset`; None: the run's test images.   weights: the backbone's file, if
    it moved.   include_unlabeled: keep images whose labels training did not see.
    """
    classifier = load(run, weights=weights, device=device)
    own = data is None
    if data is None:
        data, dataset = own_test_images(run)
    else:
        dataset = open_dataset(data, **options)
    images, use, truth = labeled_images(dataset, classifier, data)

    notes: list[str] = []
    keep = unseen(run, data, images.take(use), notes, own=own, include_unlabeled=include_unlabeled)
    left_out, use, truth = int((~keep).sum()), use[keep], truth[keep]

    predicted, unreadable = np.full(len(use), -1), []
    with pillow_warnings() as warned:
        for positions, probabilities, broken in predict_images(classifier, images.take(use), progress):
            predicted[positions] = probabilities.argmax(1)
            unreadable += [(images.key(int(use[i])), reason) for i, reason in broken]
    if warned:
        notes.append(f"{warnings_note(warned)}.")
    read = predicted >= 0
    if not read.any():
        raise FinesslError(f"no image of {data} could be measured: {broken_files(unreadable)}")
    truth, right = truth[read], predicted[read] == truth[read]
    counts = np.bincount(truth, minlength=len(classifier.classes))
    hits = np.bincount(truth[right], minlength=len(classifier.classes))
    rows = [(n, int(c), float(h / max(c, 1))) for n, c, h in zip(classifier.classes, counts, hits, strict=True)]
    interval = wilson(int(right.sum()), len(right))
    return Evaluation(data, len(right), float(right.mean()), interval, rows, unreadable, left_out, notes)


def own_test_images(run: str | Path) -> tuple[str, Dataset]:
    """The data of a run, whose test images are there."""
    recipe = RunDirectory(run_folder(run)).recipe()
    data, dataset = recipe.data.source, open_source(recipe)
    if dataset.test is None or dataset.test_labels is None:
        raise FinesslError(
            f"{data} has no test images. Accuracy on the training images would say nothing: the classifier was "
            "trained on them. Put labeled images that training has not seen into test/CLASS/, or name a folder of "
            f"them: finessl evaluate {shlex.quote(str(run))} DATA."
        )
    return data, dataset


def unseen(
    run: str | Path, data: str, images: Images, notes: list[str], *, own: bool, include_unlabeled: bool
) -> np.ndarray:
    """[n] Which images may be measured. `notes` gets a sentence about those that training used. Of a run's own test
    images all are measured."""
    try:
        seen = used_in_training(run, images)
    except FinesslError as error:
        notes.append(f"It was not checked whether training used some of these images. {error}")
        return np.ones(len(images), bool)
    if own:
        if count := int((seen != NEW).sum()):
            notes.append(
                f"{count:,} of these test images {'is' if count == 1 else 'are'} also in the training data, so the "
                f"accuracy is overstated. finessl inspect {shlex.quote(data)} names them."
            )
        return np.ones(len(images), bool)
    keep = seen < (LABELED if include_unlabeled else UNLABELED)
    if not keep.any():
        raise FinesslError(all_used(data, seen, include_unlabeled))
    if left_out := int((~keep).sum()):
        were = "was not measured: training used it" if left_out == 1 else "were not measured: training used them"
        notes.append(f"{count_of(left_out, 'labeled image')} {were}.")
    if count := int((seen[keep] != NEW).sum()):
        notes.append(
            f"Training used {count:,} of the {int(keep.sum()):,} images without their labels. Accuracy on new images may "
            "be lower."
        )
    return keep


def labeled_images(dataset: Dataset, classifier: Classifier, name: str) -> tuple[Images, np.ndarray, np.ndarray]:
    """The test images (or all, where there is no test set); positions and classes of those that the classifier knows."""
    if dataset.test is not None and dataset.test_labels is not None:
        images, labels = dataset.test, dataset.test_labels
    else:
        images, labels = dataset.train, dataset.train_labels
    truth = renumbered(labels, dataset.classes, classifier.classes)
    use = np.flatnonzero(truth >= 0)
    if not len(use):
        raise FinesslError(
            f"{name} has no labeled image of the classifier's classes ({some(classifier.classes)}). Its classes are "
            f"{some(dataset.classes)}."
        )
    return images, use, truth[use]


def all_used(data: str, seen: np.ndarray, include_unlabeled: bool) -> str:
    labeled = int((seen == LABELED).sum())
    text = (
        f"{data} holds no image to measure on: training used all {len(seen):,} labeled images of the classifier's "
        f"classes, {labeled:,} of them with their labels. Name images that training has not seen"
    )
    if labeled < len(seen) and not include_unlabeled:
        text += ", or add --include-unlabeled to measure on those whose labels it did not see"
    return f"{text}."


# ---- what training used ---------------------------------------------------------------------------------------------


def run_folder(run: str | Path) -> Path:
    """The run directory of a path that may also be its classifier/ folder."""
    path = Path(run)
    return path.parent if (path / "classifier.json").exists() and not (path / "recipe.toml").exists() else path


def used_in_training(run: str | Path, images: Images) -> np.ndarray:
    """[n] NEW, UNLABELED or LABELED for each image, by the content of its file. An error says why nobody can tell."""
    folder = RunDirectory(run_folder(run))
    dataset = open_source(folder.recipe())
    use = np.full(len(dataset.train), UNLABELED)
    try:
        split = Split.load(folder.split_file, dataset)
    except FinesslError:  # the data has changed since: every image of it may have been used
        pass
    else:
        use[:] = NEW
        use[split.unlabeled] = UNLABELED
        use[split.labeled] = LABELED
    candidates, wanted = np.flatnonzero(use), np.arange(len(images))
    theirs, ours = file_sizes(dataset.train), file_sizes(images)
    if theirs is not None and ours is not None:  # files of different sizes differ
        candidates = candidates[np.isin(theirs[candidates], ours)]
        wanted = wanted[np.isin(ours, theirs[candidates])]
    if len(candidates) + len(wanted) > MAX_COMPARED:
        raise FinesslError(
            f"There are {len(candidates):,} training images to compare them with, over {MAX_COMPARED:,}."
        )
    known: dict[object, int] = {}
    for i, digest in image_digests(dataset.train, candidates.tolist()):
        known[digest] = max(known.get(digest, NEW), int(use[i]))  # an error equals no digest
    seen = np.full(len(images), NEW)
    for i, digest in image_digests(images, wanted.tolist()):
        seen[i] = known.get(digest, NEW)
    return seen


def file_sizes(images: Images) -> np.ndarray | None:
    paths = getattr(images, "paths", None)
    return None if paths is None else np.asarray(paths.sizes)


# ---- images through the classifier ----------------------------------------------------------------------------------


def predict_images(
    classifier: Classifier,
    images: Images,
    progress: Count = no_count,
    *,
    answer: Callable[[list[np.ndarray]], Any] | None = None,
    threads: int | None = None,
) -> Iterator[tuple[np.ndarray, Any, list[tuple[int, str]]]]:
    """Batches of (positions, probabilities, broken): the next batch is decoded while the model works.

    answer: what to compute of a batch instead of probabilities.   threads: for decoding; None: one per core.
    """
    answer, done = answer or classifier.predict_proba, 0
    classifier.expect(len(images))
    for positions, good, broken in read_ahead(images, range(len(images)), classifier.image_size, BATCH, threads):
        yield np.array(positions, np.int64), answer(good), broken
        done += len(positions) + len(broken)
        progress(done, len(images))
