"""Classes of image files, as rows for people and programs: `finessl predict`."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.dataset import broken_files, some, warnings_note
from finessl.data.decoding import EXTENSIONS, UNREAD, ImageError, open_regular, pillow_warnings, unread_reason
from finessl.data.images import FileImages
from finessl.data.path_table import PathTable
from finessl.errors import FinesslError
from finessl.inference.classifier import load
from finessl.inference.evaluate import predict_images
from finessl.runtime.callbacks import Count, no_count
from finessl.runtime.files import reading

TABLES = (".csv", ".tsv", ".parquet", ".pq")


@dataclass
class Predictions:
    columns: list[str]  # path, label, confidence, label2, confidence2 …
    rows: list[list[Any]] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)  # (path, reason): files and folders that cannot be read
    notes: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    embeddings: np.ndarray | None = None  # [rows, dim], where asked for


def predict_files(
    run: str | Path,
    paths: list[Path],
    *,
    top: int = 1,
    embed: bool = False,
    weights: str | None = None,
    device: str = "auto",
    progress: Count = no_count,
) -> Predictions:
    """The most probable classes of image files. Files that cannot be read are listed in `broken`. Where that is all of them, an
    error says so.

    run: its directory.   paths: files, folders of them, tables and lists that name them.   top: classes per image.
    embed: add the tuned backbone's features.   weights: the backbone's file, if it moved.
    """
    files, broken = find_files(paths)
    classifier = load(run, weights=weights, device=device)
    top = min(top, len(classifier.classes))
    ranks = ["", *map(str, range(2, top + 1))]
    found = Predictions(["path", *(f"{name}{rank}" for rank in ranks for name in ("label", "confidence"))], [], broken)
    images = FileImages(Path(), PathTable.of([file.as_posix() for file in files], [0] * len(files)))
    found.classes = classifier.classes
    features: list[np.ndarray] = []
    compute = classifier.predict_and_embed if embed else classifier.predict_proba
    with pillow_warnings() as warned:
        for positions, answer, failures in predict_images(classifier, images, progress, answer=compute):
            probabilities = answer[0] if embed else answer
            if embed:
                features.append(answer[1])
            order = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
            for position, row, best in zip(positions, probabilities, order, strict=True):
                answers = [value for k in best for value in (classifier.classes[k], round(float(row[k]), 6))]
                found.rows.append([str(files[position]), *answers])
            found.broken += [(str(files[position]), reason) for position, reason in failures]
    if warned:
        found.notes.append(warnings_note(warned))
    if not found.rows:
        raise FinesslError(f"nothing was predicted: {broken_files(found.broken)}")
    if embed:
        found.embeddings = np.concatenate(features)
    return found


def abstain(found: Predictions, min_confidence: float | None = None, coverage: float | None = None) -> int:
    """Take back the label of images that are not sure enough; the number that keep theirs.

    min_confidence: the lowest confidence of an answer.   coverage: the share of images to answer, the most confident
    first. A column `guess` keeps the most probable class of every image.
    """
    confidence = np.array([row[2] for row in found.rows])
    sure = np.ones(len(confidence), bool) if min_confidence is None else confidence >= min_confidence
    if coverage is not None:
        first = np.argsort(-confidence, kind="stable")[: math.ceil(coverage * len(confidence))]
        sure &= np.isin(np.arange(len(confidence)), first)
    found.columns.append("guess")
    for row, keep in zip(found.rows, sure, strict=True):
        row.append(row[1])
        row[1] = row[1] if keep else None
    return int(sure.sum())


def find_files(paths: list[Path]) -> tuple[list[Path], list[tuple[str, str]]]:
    """Image files named, below folders or in tables; and (folder, reason) of folders that cannot be read."""
    files: list[Path] = []
    broken: list[tuple[str, str]] = []
    for path in paths:
        if path.is_dir():
            files += image_files(path, broken)
        elif not path.exists():
            raise FinesslError(f"{path}: there is no such file or folder.")
        elif path.suffix.lower() in TABLES:
            files += table_files(path)
        elif path.suffix.lower() == ".txt":
            files += listed_files(path)
        else:
            files.append(path)
    if not files:
        unread = f" {broken_files(broken)}" if broken else ""
        raise FinesslError(f"there are no image files in {some([str(path) for path in paths])}.{unread}")
    return files, broken


def image_files(folder: Path, broken: list[tuple[str, str]]) -> list[Path]:
    """The image files in a folder and below it, in order. Folders and formats that are not read are added to `broken`."""

    def note(error: OSError) -> None:
        broken.append((str(error.filename), f"the folder cannot be read: {error.strerror}"))

    found = sorted(Path(top) / name for top, _, names in os.walk(folder, onerror=note) for name in names)
    found = [path for path in found if not path.name.startswith(".")]
    broken += [(str(path), unread_reason(path)) for path in found if path.suffix.lower() in UNREAD]
    return [path for path in found if path.suffix.lower() in EXTENSIONS]


def table_files(table: Path) -> list[Path]:
    """The files in a table's column `path`, relative to the table's folder."""
    from finessl.data.sources.table import read_columns

    columns, _ = read_columns(table, ["path"])
    if "path" not in columns:
        raise FinesslError(
            f"{table} has no column 'path' with the image files; it has {some(list(columns), 12) or 'no columns'}."
        )
    return [table.parent / name.strip() for name in columns["path"] if name.strip()]


def listed_files(path: Path) -> list[Path]:
    """The files of a list, one on each line, relative to the list's folder."""
    try:
        with reading(path), open_regular(path) as file:
            lines = file.read().decode("utf-8-sig", "surrogateescape").splitlines()
    except ImageError as error:
        raise FinesslError(f"{path} cannot be read as a list of images: {error}.") from error
    return [path.parent / line.strip() for line in lines if line.strip()]
