"""One part, from its images to its file: what a worker process does.

Every worker computes with one thread and in batches of fixed size, so that a part's content does not depend on the
number of workers.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finessl.errors import FinesslError
from finessl.inference.bulk.parts import Part, open_part
from finessl.inference.classifier import Classifier, load
from finessl.inference.evaluate import predict_images
from finessl.inference.output import encoded
from finessl.runtime.files import replacing


@dataclass(frozen=True)
class Settings:
    """What decides the content of a part, besides its images."""

    run: str
    weights: str | None
    device: str
    precision: str
    top: int
    min_confidence: float | None
    coverage: float | None
    embed: bool  # a column with the tuned backbone's features
    folder: str  # relative paths are meant from here
    threads: int  # for decoding

    @property
    def abstains(self) -> bool:
        return self.min_confidence is not None or self.coverage is not None


@dataclass
class Answers:
    """The classifier's answers for the n images of a part."""

    labels: np.ndarray  # int32 [n, top], −1: the image cannot be read
    confidences: np.ndarray  # float64 [n, top], rounded to six decimals
    errors: list[str | None]
    embeddings: np.ndarray | None  # float32 [n, dim]


_worker: tuple[Classifier, Settings] | None = None


def start_worker(settings: Settings, number: int = 0) -> None:
    """Load the classifier once."""
    global _worker
    os.chdir(settings.folder)
    device = settings.device
    if device == "cuda" and torch.cuda.device_count() > 1:
        device = f"cuda:{number % torch.cuda.device_count()}"
    if device == "cpu":
        torch.set_num_threads(1)
    _worker = load(settings.run, weights=settings.weights, device=device, precision=settings.precision), settings


def run_part(part: Part, target: str) -> str | None:
    """Write the part's file; why that failed, if it did."""
    assert _worker is not None
    classifier, settings = _worker
    try:
        images, unread = open_part(part)
        answers = predict_part(classifier, settings, images)
        keys = [images.key(i) for i in range(len(images))]
        write_table(part_table(classifier.classes, settings, keys, answers, unread), Path(target))
    except FinesslError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return None


def predict_part(classifier: Classifier, settings: Settings, images: Any) -> Answers:
    count = len(images)
    labels = np.full((count, settings.top), -1, np.int32)
    confidences = np.zeros((count, settings.top))
    errors: list[str | None] = [None] * count
    embeddings = np.zeros((count, classifier.network.dim), np.float32) if settings.embed else None
    compute = classifier.predict_and_embed if settings.embed else None
    for positions, answer, failures in predict_images(classifier, images, answer=compute, threads=settings.threads):
        probabilities = answer[0] if settings.embed else answer
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, : settings.top]
        labels[positions] = best
        confidences[positions] = np.take_along_axis(probabilities, best, 1).astype(np.float64).round(6)
        if embeddings is not None:
            embeddings[positions] = answer[1]
        for position, reason in failures:
            errors[position] = reason
    return Answers(labels, confidences, errors, embeddings)


def part_table(
    classes: list[str], settings: Settings, keys: list[str], answers: Answers, unread: list[tuple[str, str]]
) -> Any:
    """The part as a pyarrow table; a row for each image, then one for each that is in a format that is not read."""
    import pyarrow

    read = np.append(answers.labels[:, 0] >= 0, np.zeros(len(unread), bool))
    labels = np.append(answers.labels, np.full((len(unread), settings.top), -1), axis=0)
    confidences = np.append(answers.confidences, np.zeros((len(unread), settings.top)), axis=0)
    names = np.array([*(text(name) for name in classes), None], object)  # −1: none
    sure = confidences[:, 0] >= (settings.min_confidence or 0)
    columns: dict[str, Any] = {"path": strings([*keys, *(path for path, _ in unread)])}
    for rank in range(settings.top):
        suffix = "" if rank == 0 else str(rank + 1)
        shown = np.where(sure, labels[:, 0], -1) if rank == 0 else labels[:, rank]
        columns[f"label{suffix}"] = pyarrow.array(names[shown], pyarrow.string())
        columns[f"confidence{suffix}"] = pyarrow.array(confidences[:, rank], mask=~read)
    if settings.abstains:
        columns["guess"] = pyarrow.array(names[labels[:, 0]], pyarrow.string())
    columns["error"] = strings([*answers.errors, *(reason for _, reason in unread)])
    if answers.embeddings is not None:
        columns["embedding"] = embedding_column(answers.embeddings, read)
    about = {"images": int(read.sum()), "broken": int((~read).sum())}
    return pyarrow.table(columns).replace_schema_metadata({"finessl": json.dumps(about)})


def embedding_column(embeddings: np.ndarray, read: np.ndarray) -> Any:
    """Lists of floats; null for an image that cannot be read."""
    import pyarrow

    width = embeddings.shape[1]
    ends = np.append(0, np.cumsum(read) * width)
    offsets = pyarrow.array(ends.astype(np.int32), mask=np.append(~read, False))
    return pyarrow.ListArray.from_arrays(offsets, pyarrow.array(embeddings[read[: len(embeddings)]].ravel()))


def write_table(table: Any, target: Path) -> None:
    from pyarrow import parquet

    with replacing(target) as partial:
        parquet.write_table(table, partial, write_page_checksum=True)


def strings(values: list[str | None]) -> Any:
    import pyarrow

    return pyarrow.array([None if value is None else text(value) for value in values], pyarrow.string())


def text(value: str) -> str:
    return encoded(value).decode()
