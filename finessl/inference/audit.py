"""Accuracy without a test set: a random sample of the unlabeled images, judged by a person. `finessl audit RUN`

    finessl audit RUN -k 100 --out audit.csv      the images, in random order, without the classifier's answers
    finessl audit RUN --answers audit.csv         accuracy with its 95 % interval, from the filled-in label column

RUN/audit.json holds the result: figures, and for every judged image its class, the classifier's answer and confidence.
The answers are not used as training labels. The result holds only for the classifier that was audited.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from finessl.data.dataset import Dataset, broken_files, some
from finessl.data.sampler import AUDIT, generator
from finessl.data.sources.table import read_rows, rows_by_path
from finessl.data.splits import Split
from finessl.errors import FinesslError
from finessl.inference.classifier import Description, load
from finessl.inference.evaluate import predict_images
from finessl.inference.metrics import MIN_JUDGED, Interval, estimate, fit_temperature, softmax, wilson
from finessl.runs.directory import RunDirectory
from finessl.runs.inputs import open_source
from finessl.runtime.callbacks import Count, no_count
from finessl.runtime.files import read_arrays, read_json, write_json, writing

FILE = "audit.json"
Share = Annotated[float, Field(ge=0, le=1)]


class Judged(TypedDict):
    path: str
    label: str  # by the person
    predicted: str
    confidence: Share  # at the fitted temperature


class Audit(TypedDict):
    """audit.json."""

    date: str
    judged: Annotated[int, Field(ge=1)]
    right: Annotated[int, Field(ge=0)]
    accuracy: Share
    low: Share
    high: Share
    method: str  # wilson, or ppi++
    unlabeled: int  # images whose confidence PPI++ used
    temperature: NotRequired[float]
    images: list[Judged]


def sample_images(run: str | Path, count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Paths of `count` unlabeled images of a run, in random order, and the classifier's classes.   seed: of the order."""
    dataset, split = opened(run)
    pool = np.setdiff1d(split.unlabeled, split.labeled)
    if not len(pool):
        raise FinesslError(f"{run} has no unlabeled image to judge: every image was trained on with its label.")
    chosen = generator(seed, AUDIT).permutation(pool)[:count]
    return [dataset.train.key(int(i)) for i in chosen], split.classes


def audit_run(
    run: str | Path, answers: Path, *, weights: str | None = None, device: str = "auto", progress: Count = no_count
) -> Audit:
    """Compare the classifier with the answers; write RUN/audit.json and, with enough of them, the temperature.

    run: its directory.   answers: table with the columns path and label.   weights: the backbone's file, if it moved.
    """
    folder = RunDirectory(run)
    dataset, split = opened(run)
    positions, labels = judged_images(answers, dataset, split)
    classifier = load(run, weights=weights, device=device)
    logits, read = [], np.zeros(len(positions), bool)
    broken: list[tuple[str, str]] = []
    for done, found, failures in predict_images(
        classifier, dataset.train.take(positions), progress, answer=classifier.logits
    ):
        logits.append(found)
        read[done] = True
        broken += [(dataset.train.key(int(positions[i])), reason) for i, reason in failures]
    if not read.any():
        raise FinesslError(f"no judged image can be read: {broken_files(broken)}")
    z, labels = np.concatenate(logits), [label for label, there in zip(labels, read, strict=True) if there]
    keys = [dataset.train.key(int(i)) for i in positions[read]]
    number = {name: k for k, name in enumerate(classifier.classes)}
    truth = np.array([number.get(label, -1) for label in labels])  # −1: of none of the classes
    predicted = z.argmax(1)
    right = predicted == truth
    # the same confidence for judged and other images; `unlabeled.npz` holds it at temperature 1
    others = unlabeled_confidence(folder)
    accuracy, interval, method = estimate(right, softmax(z).max(1), others)
    temperature = fit_temperature(z[truth >= 0], truth[truth >= 0]) if (truth >= 0).sum() >= MIN_JUDGED else None
    confidence = softmax(z / (temperature or classifier.temperature)).max(1)
    result: Audit = {
        "date": datetime.date.today().isoformat(),
        "judged": len(right),
        "right": int(right.sum()),
        "accuracy": accuracy,
        "low": interval.low,
        "high": interval.high,
        "method": method,
        "unlabeled": len(others) if method == "ppi++" else 0,
        "images": [
            {"path": key, "label": label, "predicted": classifier.classes[k], "confidence": float(c)}
            for key, label, k, c in zip(keys, labels, predicted, confidence, strict=True)
        ],
    }
    with writing(folder.path):
        if temperature is not None:
            result["temperature"] = temperature
            description = read_json(folder.classifier / "classifier.json", Description)
            write_json(folder.classifier / "classifier.json", {**description, "temperature": temperature})
        write_json(folder.path / FILE, result)
    return result


def error_rate(audit: Audit, min_confidence: float) -> tuple[int, int, Interval] | None:
    """Wrong answers among judged images with a confidence of at least `min_confidence`, their number, and the interval of the
    error rate."""
    sure = [image for image in audit["images"] if image["confidence"] >= min_confidence]
    if not sure:
        return None
    wrong = sum(image["label"] != image["predicted"] for image in sure)
    return wrong, len(sure), wilson(wrong, len(sure))


def read_audit(run: str | Path) -> Audit | None:
    """audit.json of the directory `run`, if there is one."""
    file = Path(run) / FILE
    return read_json(file, Audit) if file.is_file() else None


def opened(run: str | Path) -> tuple[Dataset, Split]:
    folder = RunDirectory(run)
    dataset = open_source(folder.recipe())
    return dataset, Split.load(folder.split_file, dataset)


def judged_images(answers: Path, dataset: Dataset, split: Split) -> tuple[np.ndarray, list[str]]:
    """Positions and labels of the rows that have a label. Images that were trained on with a label are refused."""
    named = rows_by_path(read_rows(answers))
    if not named:
        raise FinesslError(f"{answers} holds no answer: fill in the column label.")
    pool = np.setdiff1d(split.unlabeled, split.labeled)
    where = {dataset.train.key(int(i)): int(i) for i in pool}
    if odd := [path for path in named if path not in where]:
        raise FinesslError(
            f"{answers} names {len(odd):,} images that are not among the run's unlabeled images: {some(odd)}. "
            "Answers for images that were trained on with a label say nothing."
        )
    return np.array([where[path] for path in named], np.int64), list(named.values())


def unlabeled_confidence(run: RunDirectory) -> np.ndarray:
    """Confidence of a sample of the unlabeled images, as the run recorded it; empty where it did not."""
    file = run.path / "unlabeled.npz"
    return read_arrays(file, "confidence")["confidence"].astype(float) if file.is_file() else np.empty(0)
