"""Hugging Face data sets: by name ("hf:ylecun/mnist", "hf:stanfordnlp/x:config") or a folder saved by save_to_disk.

Needs the library `datasets` (pip install 'finessl[huggingface]'). Images stay in their Arrow files until they are read.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.dataset import Dataset, label_ids, some
from finessl.data.decoding import ImageError, decode, open_regular, probe
from finessl.data.folder_index import natural
from finessl.data.images import excerpt_of
from finessl.data.sources.folder import TESTS
from finessl.errors import FinesslError

UNLABELED = ("unlabeled", "unsupervised")
LABELS = ("label", "labels", "fine_label", "class", "target")  # names of a label column that is not marked as one


def open_huggingface(
    path: Path | str, *, image_column: str | None = None, label_column: str | None = None, revision: str | None = None
) -> Dataset:
    """image_column, label_column: the columns; found by themselves where there is one of each.   revision: on the hub."""
    parts = read_parts(path, revision)
    train_name = next(name for name in ("train", *parts) if name in parts)
    test_name = next((name for name in TESTS if name in parts and name != train_name), None)
    features = parts[train_name].features
    image, label = find_columns(path, features, image_column, label_column)
    train, names = [parts[train_name]], label_names(parts[train_name], label)
    for name in UNLABELED:
        if name in parts:
            train.append(parts[name])
            names += [""] * len(parts[name])
    declared = getattr(features[label], "names", None)
    classes = list(declared) if declared else sorted(set(names) - {""}, key=natural)
    labels = label_ids(names, classes, str(path))
    dataset = Dataset(
        name=str(path).rpartition("/")[2],
        classes=classes,
        train=ArrowImages([(train_name, train[0]), *(("unlabeled", part) for part in train[1:])], image),
        train_labels=labels,
        given=labels >= 0 if (labels < 0).any() else None,
    )
    if test_name:
        tested = label_ids(label_names(parts[test_name], label), classes, f"{path}, {test_name}")
        if (tested >= 0).all():  # some publish a test set without its labels
            dataset.test, dataset.test_labels = ArrowImages([(test_name, parts[test_name])], image), tested
    return dataset


def read_parts(path: Path | str, revision: str | None) -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise FinesslError(f"{path}: needs the library datasets: pip install 'finessl[huggingface]'.") from error
    try:
        if isinstance(path, Path):
            found = datasets.load_from_disk(str(path))
        else:
            name, _, config = path.partition(":")
            found = datasets.load_dataset(name, config or None, revision=revision)
    except Exception as error:  # the library raises its own, the hub's and the network's errors
        raise FinesslError(f"the Hugging Face data set {path} cannot be opened: {error}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def find_columns(path: Path | str, features: Any, image: str | None, label: str | None) -> tuple[str, str]:
    for name in (image, label):
        if name is not None and name not in features:
            raise FinesslError(f"{path} has no column {name!r}; it has {some(list(features), 12)}.")
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    images = [image] if image else [name for name, kind in kinds.items() if kind == "Image"]
    labels = [label] if label else [name for name, kind in kinds.items() if kind == "ClassLabel"]
    labels = labels if len(labels) == 1 else [name for name in LABELS if name in (labels or features)][:1] or labels
    for what, found in (("image", images), ("label", labels)):
        if len(found) != 1:
            columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
            raise FinesslError(f"{path}: say which column holds the {what} ({what}_column); it has {columns}.")
    return images[0], labels[0]


def label_names(part: Any, column: str) -> list[str]:
    """Class names, "" for unlabeled (None or −1)."""
    names = getattr(part.features[column], "names", None)
    values = part.with_format(None)[column]
    return ["" if v is None or v == -1 else names[v] if names else str(v) for v in values]


class ArrowImages:
    """Encoded images in Arrow tables, one after another."""

    def __init__(self, parts: list[tuple[str, Any]], column: str, index: np.ndarray | None = None) -> None:
        from datasets import Image

        self.parts, self.column = parts, column
        self.bounds = np.cumsum([0, *(len(part) for _, part in parts)])
        self.index = np.arange(self.bounds[-1]) if index is None else index
        self.encoded = [part.select_columns([column]).cast_column(column, Image(decode=False)) for _, part in parts]

    def _place(self, i: int) -> tuple[int, int]:
        number = int(self.index[i])
        part = int(np.searchsorted(self.bounds, number, "right")) - 1
        return part, number - int(self.bounds[part])

    def __len__(self) -> int:
        return len(self.index)

    def key(self, i: int) -> str:
        part, row = self._place(i)
        return f"{self.parts[part][0]}/{row}"

    def content(self, i: int) -> bytes:
        part, row = self._place(i)
        value = self.encoded[part][row][self.column]
        if value is None:
            raise ImageError("the row has no image")
        if value.get("bytes") is not None:
            return bytes(value["bytes"])
        try:
            with open_regular(value["path"]) as file:
                return file.read()
        except OSError as error:
            raise ImageError(f"cannot be read: {error.strerror or error}") from error

    def excerpt(self, i: int) -> bytes:
        content = self.content(i)
        return excerpt_of(io.BytesIO(content), len(content))

    def read(self, i: int, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
        return decode(self.content(i), shorter=shorter, square=square)

    def size(self, i: int) -> tuple[int, int]:
        return probe(self.content(i))

    def take(self, indices: np.ndarray) -> ArrowImages:
        return ArrowImages(self.parts, self.column, self.index[indices])

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self.column.encode(), digest_size=16)
        for name, part in self.parts:  # the library's own fingerprint: of the data and what was done to it
            digest.update(f"{name} {len(part)} {getattr(part, '_fingerprint', '')}".encode())
        digest.update(np.ascontiguousarray(self.index, np.int64).data)
        return digest.hexdigest()
