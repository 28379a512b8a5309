"""Tables of images: CSV, TSV or Parquet with the columns path, label and, if wanted, split (train or test).

An empty label means unlabeled; paths are relative to the table's folder.
"""

from __future__ import annotations

import csv
import os
import posixpath
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from finessl.data.dataset import Dataset, label_ids, some
from finessl.data.images import FileImages, Images
from finessl.data.index import natural
from finessl.data.paths import PathTable
from finessl.errors import FinesslError

COLUMNS = ("path", "label", "split")
TRAIN, TEST = {"train", "labeled", "unlabeled", ""}, {"test", "val", "valid", "validation"}


def open_table(path: Path) -> Dataset:
    rows = read_rows(path)
    splits = [split.strip().lower() for split in rows.get("split", [""] * len(rows["path"]))]
    if unknown := sorted(set(splits) - TRAIN - TEST):
        raise FinesslError(f"{path}: the column split should say train or test, not {some(unknown)}.")
    train = [i for i, split in enumerate(splits) if split in TRAIN]
    test = [i for i, split in enumerate(splits) if split in TEST]
    images, labels = files(path.parent, rows["path"], path), rows["label"]
    classes = sorted({labels[i] for i in train} - {""}, key=natural)
    ids = label_ids([labels[i] for i in train], classes, path)
    dataset = Dataset(
        name=path.stem,
        classes=classes,
        train=images.take(np.array(train, np.int64)),
        train_labels=ids,
        given=ids >= 0 if (ids < 0).any() else None,  # without unlabeled images, a split hides labels
    )
    if test:
        dataset.test = images.take(np.array(test))
        dataset.test_labels = test_ids([labels[i] for i in test], classes, path)
    return dataset


def labeled_table(path: Path) -> tuple[Images, np.ndarray, list[str]]:
    """Images, labels and classes of a table in which every row has a label."""
    rows = read_rows(path)
    classes = sorted(set(rows["label"]) - {""}, key=natural)
    return files(path.parent, rows["path"], path), test_ids(rows["label"], classes, path), classes


def test_ids(names: list[str], classes: list[str], path: Path) -> np.ndarray:
    ids = label_ids(names, classes, path)
    if (ids < 0).any():
        raise FinesslError(f"{path}: {(ids < 0).sum():,} test images have no label; a test image needs one.")
    return ids


def read_rows(path: Path) -> dict[str, list[str]]:
    """Columns path and label (and split, if there), checked."""
    columns = read_parquet(path) if path.suffix.lower() in (".parquet", ".pq") else read_csv(path)
    for name in ("path", "label"):
        if name not in columns:
            raise FinesslError(f"{path} has no column {name!r}; it has {some(list(columns), 12) or 'none'}.")
    wanted = [name for name in COLUMNS if name in columns]
    columns = {name: [value.strip() for value in columns[name]] for name in wanted}
    if not columns["path"]:
        raise FinesslError(f"{path} has a header and no rows.")
    if empty := [str(row) for row, value in enumerate(columns["path"], 1) if not value]:
        raise FinesslError(f"{path}: the path is empty in rows {some(empty)}.")
    counts = Counter(posixpath.normpath(Path(value).as_posix()) for value in columns["path"])
    if twice := [value for value, count in counts.items() if count > 1]:
        raise FinesslError(f"{path} names {len(twice):,} paths more than once: {some(twice)}. Keep one row for each.")
    return columns


def read_csv(path: Path) -> dict[str, list[str]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            start = file.readline()
            file.seek(0)
            rows = csv.reader(file, delimiter=max(",;\t", key=start.count), skipinitialspace=True)
            names = [name.strip().lower() for name in next(rows, [])]
            kept = [row + [""] * (len(names) - len(row)) for row in rows if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FinesslError(f"{path} cannot be read as a CSV table: {error}") from error
    return {name: [row[column] for row in kept] for column, name in enumerate(names)}


def read_parquet(path: Path) -> dict[str, list[str]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise FinesslError(f"{path}: Parquet tables need pyarrow: pip install 'finessl[tables]'.") from error
    try:
        with parquet.ParquetFile(path) as file:
            wanted = [name for name in file.schema_arrow.names if name.lower() in COLUMNS]
            if not wanted:
                return {name: [] for name in file.schema_arrow.names}
            table = file.read(columns=wanted)
    except (OSError, ArrowException) as error:
        raise FinesslError(f"{path} cannot be read as a Parquet table: {error}") from error
    return {name.lower(): ["" if v is None else str(v) for v in table[name].to_pylist()] for name in wanted}


def files(root: Path, names: Sequence[str], where: Path) -> FileImages:
    """The files of these names under `root`; an error counts those that are not there."""
    root, sizes, missing = Path(root).resolve(), [], []
    for name in names:
        try:
            sizes.append(os.stat(os.path.join(root, name)).st_size)
        except OSError:
            missing.append(name)
    if missing:
        raise FinesslError(
            f"{where} names {len(missing):,} of {len(names):,} files that are not there: {some(missing)}. "
            f"Paths are relative to {root}."
        )
    return FileImages(root, PathTable.of([Path(name).as_posix() for name in names], sizes))
