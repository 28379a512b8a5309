"""Images of the report: the most and least confident ones, suspicious labels, images unlike every class."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

from finessl.analysis.estimate import SecondOpinion, doubtful_labels
from finessl.analysis.findings import percent
from finessl.analysis.runs import Outcome
from finessl.data.dataset import Dataset
from finessl.data.decoding import ImageError
from finessl.data.images import Images
from finessl.data.splits import from_runs
from finessl.training.diagnostics import NOVEL, UNKNOWN

SIDE = 224  # pixels of an image's shorter side on the page; the longer side is at most twice that
IN_GALLERY, PER_CLASS, MAX_CLASSES = 12, 4, 12  # images per gallery, images per class, classes


@dataclass(frozen=True)
class Picture:
    uri: str
    name: str
    answer: str
    detail: str = ""
    right: bool | None = None  # None: not known

    @property
    def file(self) -> str:
        return PurePosixPath(self.name).name


@dataclass(frozen=True)
class Gallery:
    title: str
    about: str
    pictures: list[Picture]
    of_class: bool = False

    @property
    def id(self) -> str:
        """Anchor on the page; a title may hold any characters."""
        return "g" + hashlib.blake2b(self.title.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()


def thumbnail(images: Images, i: int) -> str | None:
    """A small copy as a data URI (the page shows its central square); None if the image can no longer be read."""
    try:
        pixels = Image.fromarray(images.read(i, shorter=SIDE))
    except (ImageError, OSError):
        return None
    wide, high = min(pixels.width, 2 * pixels.height), min(pixels.height, 2 * pixels.width)
    left, top = (pixels.width - wide) // 2, (pixels.height - high) // 2
    file = io.BytesIO()
    pixels.crop((left, top, left + wide, top + high)).save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def galleries(outcome: Outcome, opinion: SecondOpinion | None, dataset: Dataset) -> list[Gallery]:
    """All galleries with at least one image."""
    made = [*surest(outcome, dataset), least_sure(outcome, dataset), mistakes(outcome, dataset)]
    if opinion is not None:
        made += [doubtful(outcome, opinion, dataset), strangest(outcome, opinion, dataset)]
    return [gallery for gallery in made if gallery.pictures]


def pictures(images: Images, chosen: Iterable[tuple[int, str, str, bool | None]]) -> list[Picture]:
    """(position, answer, detail, right) → pictures of the readable ones."""
    shown = []
    for i, answer, detail, right in chosen:
        uri = thumbnail(images, i)
        if uri is not None:
            shown.append(Picture(uri, images.key(i), answer, detail, right))
    return shown


def described(outcome: Outcome, row: int) -> tuple[int, str, str, bool | None]:
    """(position, predicted class, confidence and true class, right) of an unlabeled image."""
    kept = outcome.unlabeled
    assert kept is not None
    truth, label = int(kept["truth"][row]), int(kept["label"][row])
    sure = percent(float(kept["confidence"][row]), 0)
    if truth >= 0 and truth != label:
        sure += f", is {outcome.classes[truth]}"
    elif truth == NOVEL:
        sure += ", of another class"
    right = None if truth == UNKNOWN else truth == label
    return int(kept["index"][row]), outcome.classes[label], sure, right


def surest(outcome: Outcome, dataset: Dataset) -> list[Gallery]:
    """The most confident unlabeled images per class; of many classes, the most and least frequent ones."""
    kept = outcome.unlabeled
    if kept is None:
        return []
    counts = np.bincount(kept["label"], minlength=len(outcome.classes))
    classes = np.arange(len(counts))
    if len(counts) > MAX_CLASSES:
        order = np.argsort(-counts, kind="stable")
        classes = np.concatenate([order[: MAX_CLASSES // 2], order[-MAX_CLASSES // 2 :]])
    made = []
    for k in classes:
        rows = np.flatnonzero(kept["label"] == k)
        best = rows[np.argsort(-kept["confidence"][rows], kind="stable")][:PER_CLASS]
        about = f"{counts[k]:,} of {len(kept['label']):,}"
        shown = pictures(dataset.train, (described(outcome, row) for row in best))
        made.append(Gallery(outcome.classes[k], about, shown, of_class=True))
    return made


def least_sure(outcome: Outcome, dataset: Dataset) -> Gallery:
    about = "Unlabeled images that the classifier hesitates on: label some of these next."
    rows = np.empty(0, int)
    if outcome.unlabeled is not None:
        searched, total = len(outcome.unlabeled["index"]), count_unlabeled(outcome, dataset)
        if searched < total:
            about += f" Searched: a sample of {searched:,} of {total:,} unlabeled images."
        rows = np.argsort(outcome.unlabeled["confidence"], kind="stable")[:IN_GALLERY]
    return Gallery("Least confident", about, pictures(dataset.train, (described(outcome, row) for row in rows)))


def count_unlabeled(outcome: Outcome, dataset: Dataset) -> int:
    """Number of training images whose labels were not used; 0 if the split is unknown."""
    split = outcome.split or {"labeled": [], "unlabeled": []}
    try:
        labeled, unlabeled = (from_runs(split[name], len(dataset.train)) for name in ("labeled", "unlabeled"))
    except ValueError:
        return 0
    return len(np.setdiff1d(unlabeled, labeled))


def mistakes(outcome: Outcome, dataset: Dataset) -> Gallery:
    test, classes, chosen = outcome.test, outcome.classes, []
    if test is not None:
        wrong = np.flatnonzero(~test.correct)
        for row in wrong[np.argsort(-test.confidence[wrong], kind="stable")][:IN_GALLERY]:
            detail = f"{percent(float(test.confidence[row]), 0)}, labeled {classes[test.labels[row]]}"
            chosen.append((int(test.index[row]), classes[test.predicted[row]], detail, False))
    return Gallery(
        "Confident but wrong",
        "Test images with a confident answer against their label: one of the two is wrong.",
        [] if dataset.test is None else pictures(dataset.test, chosen),
    )


def doubtful(outcome: Outcome, opinion: SecondOpinion, dataset: Dataset) -> Gallery:
    names = outcome.classes
    chosen = [
        (i, f"labeled {names[label]}", f"looks like {names[other]}", None)
        for i, label, other, _ in doubtful_labels(outcome, opinion)[:IN_GALLERY]
    ]
    return Gallery(
        "Most suspicious labels",
        "Labeled images that look more like another class to the untuned backbone, which did not see their label.",
        pictures(dataset.train, chosen),
    )


def strangest(outcome: Outcome, opinion: SecondOpinion, dataset: Dataset) -> Gallery:
    kept, chosen = outcome.features, []
    if kept is not None and outcome.unlabeled is not None:
        rows = {int(i): row for row, i in enumerate(outcome.unlabeled["index"])}
        order = np.argsort(opinion.familiarity, kind="stable")[:IN_GALLERY]
        chosen = [described(outcome, rows[int(kept["unlabeled"][k])]) for k in order]
    return Gallery(
        "Least like any class",
        "Unlabeled images furthest from every class's mean: the likeliest to be out of distribution.",
        pictures(dataset.train, chosen),
    )
