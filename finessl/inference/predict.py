"""Classes of image files, as rows for people and programs: `finessl predict`.

The suffix of the output file chooses its form: .csv, .json (a list), .jsonl (one object a line) or .parquet.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.dataset import broken_files, some, warnings_note
from finessl.data.images import (
    EXTENSIONS,
    UNREAD,
    FileImages,
    ImageError,
    open_regular,
    pillow_warnings,
    unread_reason,
)
from finessl.data.path_table import PathTable
from finessl.errors import FinesslError
from finessl.inference.classifier import load
from finessl.inference.evaluate import predict_images
from finessl.runtime.files import reading, replacing, write_arrays, write_atomically, writing

TABLES = (".csv", ".tsv", ".parquet", ".pq")
FORMATS = (".csv", ".json", ".jsonl", ".parquet")
EMBEDDINGS = (".npz", ".parquet")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet takes text that begins with these for a formula


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
    progress: Callable[[int, int], None] | None = None,
) -> Predictions:
    """The `top` most probable classes of all image files that are named, found in folders or listed in tables.

    `embed` adds the tuned backbone's features. Files that cannot be read are listed in `broken`. Where that is all of
    them, an error says so.
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


# ---- output ---------------------------------------------------------------------------------------------------------


def check_output(out: Path, formats: Sequence[str] = FORMATS, option: str = "--out") -> None:
    """Refuse what cannot be written, before any work."""
    if out.suffix.lower() not in formats:
        raise FinesslError(f"{option} {out}: the suffix chooses the form of the output; use {', '.join(formats)}.")
    if out.is_dir():
        raise FinesslError(f"{option} {out} is a folder; name a file.")
    if out.suffix.lower() == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise FinesslError(f"{option} {out}: Parquet needs pyarrow: pip install 'finessl[tables]'.") from error


def write_predictions(found: Predictions, out: Path, *, excel: bool = False) -> None:
    """Write the whole file or nothing. `excel`: CSV as Excel reads it (see `as_csv`)."""
    write = {".csv": as_csv, ".json": as_json, ".jsonl": as_jsonl, ".parquet": as_parquet}[out.suffix.lower()]
    content = as_csv(found, excel) if write is as_csv else write(found)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, content)


def as_csv(found: Predictions, excel: bool = False) -> bytes:
    """`excel`: with a byte order mark, so that Excel reads UTF-8, and with an apostrophe before text that a spreadsheet
    would run as a formula."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(found.columns)
    for row in found.rows:
        cells = [f"{value:.4f}" if isinstance(value, float) else value or "" for value in row]
        writer.writerow([f"'{c}" if excel and c.startswith(FORMULA) else c for c in cells])
    return encoded(text.getvalue(), "utf-8-sig" if excel else "utf-8")


def as_json(found: Predictions) -> bytes:
    return encoded(json.dumps(records(found), ensure_ascii=False, indent=1) + "\n")


def as_jsonl(found: Predictions) -> bytes:
    return encoded("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records(found)))


def as_parquet(found: Predictions) -> bytes:
    import pyarrow
    from pyarrow import parquet

    clean = [[encoded(v).decode() if isinstance(v, str) else v for v in row] for row in found.rows]
    table = pyarrow.table({name: [row[k] for row in clean] for k, name in enumerate(found.columns)})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def write_embeddings(found: Predictions, out: Path) -> None:
    """.npz with the arrays path and embedding, or .parquet with the columns path and embedding; the rows of `found`."""
    assert found.embeddings is not None
    paths = [encoded(row[0]).decode() for row in found.rows]
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix.lower() == ".npz":
            write_arrays(out, {"path": np.array(paths), "embedding": found.embeddings})
            return
        import pyarrow
        from pyarrow import parquet

        values = pyarrow.array(found.embeddings.ravel(), pyarrow.float32())
        lists = pyarrow.FixedSizeListArray.from_arrays(values, found.embeddings.shape[1])
        with replacing(out) as partial:
            parquet.write_table(pyarrow.table({"path": paths, "embedding": lists}), partial)


def records(found: Predictions) -> list[dict[str, Any]]:
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def encoded(text: str, encoding: str = "utf-8") -> bytes:
    """Bytes of a file name that are not UTF-8 are written as \\udcXX: the file itself stays valid UTF-8."""
    return text.encode(encoding, "backslashreplace")
