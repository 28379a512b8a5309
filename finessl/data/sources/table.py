"""Tables of images: CSV, TSV or Parquet with the columns path, label and, if wanted, split (train or test).

A CSV file is separated by commas, semicolons or tabs. An empty label means unlabeled; paths are relative to the table's
folder. Options name the columns where they are called otherwise.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import posixpath
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finessl.data.dataset import Dataset, label_ids, some
from finessl.data.decoding import ImageError, open_regular
from finessl.data.folder_index import natural
from finessl.data.images import FileImages, Images
from finessl.data.path_table import PathTable
from finessl.errors import FinesslError

TRAIN, TEST = {"train", "labeled", "unlabeled", ""}, {"test", "val", "valid", "validation"}


@dataclass
class Rows:
    """The columns of a table, checked."""

    paths: list[str]
    labels: list[str]  # "": unlabeled
    splits: list[str]  # in lower case; "" where the table does not say
    notes: list[str]


def open_table(path: Path, *, path_column: str | None = None, label_column: str | None = None) -> Dataset:
    """path_column, label_column: the columns, where they are not called path and label."""
    rows = read_rows(path, path_column, label_column)
    if unknown := sorted(set(rows.splits) - TRAIN - TEST):
        raise FinesslError(f"{path}: the column split should say train or test, not {some(unknown)}.")
    train = [i for i, split in enumerate(rows.splits) if split in TRAIN]
    test = [i for i, split in enumerate(rows.splits) if split in TEST]
    images, labels = files(path.parent, rows.paths, path), rows.labels
    classes = sorted({labels[i] for i in train} - {""}, key=natural)
    ids = label_ids([labels[i] for i in train], classes, path)
    dataset = Dataset(
        name=path.stem,
        classes=classes,
        train=images.take(np.array(train, np.int64)),
        train_labels=ids,
        given=ids >= 0 if (ids < 0).any() else None,  # without unlabeled images, a split hides labels
        notes=rows.notes,
    )
    if test:
        dataset.test = images.take(np.array(test))
        dataset.test_labels = test_ids([labels[i] for i in test], classes, path)
    return dataset


def labeled_table(
    path: Path, path_column: str | None = None, label_column: str | None = None
) -> tuple[Images, np.ndarray, list[str]]:
    """Images, labels and classes of a table in which every row has a label."""
    rows = read_rows(path, path_column, label_column)
    classes = sorted(set(rows.labels) - {""}, key=natural)
    return files(path.parent, rows.paths, path), test_ids(rows.labels, classes, path), classes


def test_ids(names: list[str], classes: list[str], path: Path) -> np.ndarray:
    ids = label_ids(names, classes, path)
    if (ids < 0).any():
        raise FinesslError(f"{path}: {(ids < 0).sum():,} test images have no label; a test image needs one.")
    return ids


def read_rows(path: Path, path_column: str | None = None, label_column: str | None = None) -> Rows:
    """Case and blanks around a column's name do not matter."""
    names = {"path": path_column or "path", "label": label_column or "label", "split": "split"}
    wanted = {what: name.strip().lower() for what, name in names.items()}
    columns, notes = read_columns(path, list(wanted.values()))
    for what in ("path", "label"):
        if wanted[what] not in columns:
            raise FinesslError(
                f"{path} has no column {names[what]!r}; it has {some(list(columns), 12) or 'none'}. "
                f"Name the column with --{what}-column."
            )
    paths, labels, splits = (
        [value.strip() for value in columns.get(wanted[what], [""] * len(columns[wanted["path"]]))] for what in names
    )
    if not paths:
        raise FinesslError(f"{path} has a header and no rows.")
    if empty := [str(row) for row, value in enumerate(paths, 1) if not value]:
        raise FinesslError(f"{path}: the path is empty in rows {some(empty)}.")
    if odd := [str(row) for row, value in enumerate(paths, 1) if "\0" in value]:
        raise FinesslError(f"{path}: the path holds a NUL character in rows {some(odd)}.")
    counts = Counter(posixpath.normpath(Path(value).as_posix()) for value in paths)
    if twice := [value for value, count in counts.items() if count > 1]:
        raise FinesslError(f"{path} names {len(twice):,} paths more than once: {some(twice)}. Keep one row for each.")
    return Rows(paths, labels, [split.lower() for split in splits], notes)


def rows_by_path(rows: Rows) -> dict[str, str]:
    """Path → class of the rows that have a label."""
    return {Path(path).as_posix(): label for path, label in zip(rows.paths, rows.labels, strict=True) if label}


def read_columns(path: Path, wanted: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Columns by name in lower case (the wanted ones, or more), and what the user should know of how they were read."""
    return read_parquet(path, wanted) if path.suffix.lower() in (".parquet", ".pq") else read_csv(path)


def refuse_twice(path: Path, names: list[str]) -> None:
    if twice := sorted(name for name, count in Counter(names).items() if count > 1 and name):
        raise FinesslError(f"{path} has more than one column {some(twice)}; keep one of each.")


def read_csv(path: Path) -> tuple[dict[str, list[str]], list[str]]:
    try:
        with open_regular(path) as file:
            text, notes = decode_text(path, file.read())
        start = text.partition("\n")[0]
        if "\0" in start:
            raise FinesslError(f"{path} is no text, or UTF-16 without its byte-order mark; save the table as UTF-8.")
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=start.count), skipinitialspace=True)
        names = [name.strip().lower() for name in next(rows, [])]
        kept = [row + [""] * (len(names) - len(row)) for row in rows if any(row)]
    except FileNotFoundError as error:
        raise FinesslError(f"there is no file {path}.") from error
    except (OSError, ImageError, csv.Error) as error:
        raise FinesslError(f"{path} cannot be read as a CSV table: {error}.") from error
    if not names:
        raise FinesslError(f"{path} is empty: it should hold a header and rows.")
    refuse_twice(path, names)
    return {name: [row[column] for row in kept] for column, name in enumerate(names)}, notes


def decode_text(path: Path, data: bytes) -> tuple[str, list[str]]:
    """UTF-8, or UTF-16 with its mark, or cp1252, in which Excel saves CSV in western Europe."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    else:
        try:
            return data.decode("utf-8-sig"), []
        except UnicodeDecodeError:
            encoding = "cp1252"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise FinesslError(f"{path} is neither UTF-8 nor {encoding} text; save it as UTF-8.") from error
    return text, [f"{path.name} is not UTF-8 and was read as {encoding}; if names look wrong, save it as UTF-8"]


def read_parquet(path: Path, wanted: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise FinesslError(f"{path}: Parquet tables need pyarrow: pip install 'finessl[tables]'.") from error
    try:
        with open_regular(path) as opened, parquet.ParquetFile(opened) as file:
            names = file.schema_arrow.names
            refuse_twice(path, [name.strip().lower() for name in names if name.strip().lower() in wanted])
            found = [name for name in names if name.strip().lower() in wanted]
            table = file.read(columns=found) if found else None
        columns = {
            name.strip().lower(): ["" if v is None else str(v) for v in table[name].to_pylist()] if table else []
            for name in found or names
        }
    except (OSError, ImageError, ArrowException, ValueError, OverflowError, LookupError) as error:
        raise FinesslError(f"{path} cannot be read as a Parquet table: {error}.") from error
    return columns, []


def files(root: Path, names: Sequence[str], where: Path) -> FileImages:
    """The files of these names under `root`; an error counts those that are not there or are named twice.   where: what names
    them, for the message."""
    root, sizes, missing = Path(root).resolve(), [], []
    seen: dict[tuple[int, int], list[str]] = {}
    for name in names:
        try:
            status = os.stat(os.path.join(root, name))
        except (OSError, ValueError):
            missing.append(name)
        else:
            sizes.append(status.st_size)
            seen.setdefault((status.st_dev, status.st_ino), []).append(name)
    if missing:
        raise FinesslError(
            f"{where} names {len(missing):,} of {len(names):,} files that are not there: {some(missing)}. "
            f"Paths are relative to {root}."
        )
    for alike in (group for group in seen.values() if len(group) > 1):  # hard links are files of their own
        real = Counter(os.path.realpath(os.path.join(root, name)) for name in alike)
        if twice := [path for path, count in real.items() if count > 1]:
            same = [name for name in alike if os.path.realpath(os.path.join(root, name)) == twice[0]]
            raise FinesslError(
                f"{where} names one file in several ways: {' = '.join(same)}. Keep one row for each file."
            )
    return FileImages(root, PathTable.of([Path(name).as_posix() for name in names], sizes))
