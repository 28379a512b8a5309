"""WebDataset: folders of tar shards, for data sets with too many files. Labels are next to the images (.cls or .json).

Shards whose name begins with test or val are test data, those beginning with unlabeled have no labels; all others are
training data. Where labels are numbers, classes.txt (a name on each line) gives them names.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finessl.data.dataset import Dataset, label_ids, some
from finessl.data.decoding import EXTENSIONS, unread_reason
from finessl.data.folder_index import cache_folder, load_table, natural, store_table
from finessl.data.path_table import PathTable
from finessl.data.shards import ShardImages, read_shard
from finessl.data.sources.folder import TESTS
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Count, no_count

VERSION = 3
COLUMNS = ("shard_of", "starts", "label_of")  # of the index in the cache


@dataclass
class ShardIndex:
    """Every image of a folder's shards; kept in the cache, for reading the headers takes a pass over all of them."""

    images: ShardImages
    labels: list[str]  # the different ones
    label_of: np.ndarray  # int32 [N], −1: none
    unread: list[str]  # images in a format that is not read


def open_webdataset(path: Path, *, progress: Count = no_count) -> Dataset:
    root = path if path.is_dir() else path.parent
    shards = [path.name] if path.is_file() else sorted((f.name for f in path.glob("*.tar")), key=natural)
    if not shards:
        raise FinesslError(f"{path} holds no shards (*.tar).")
    index = open_index(root.resolve(), shards, progress)
    if len(index.images) == 0:
        raise FinesslError(f"{path}: the {len(shards)} shards hold no images.")
    names, numbers = name_labels(root, index.labels), index.label_of
    kinds = np.array([2 if s.startswith(TESTS) else 1 if s.startswith("unlabeled") else 0 for s in shards])
    kind = kinds[index.images.shard_of]
    train, test = np.flatnonzero(kind < 2), np.flatnonzero(kind == 2)
    known = np.where(kind == 0, numbers, -1)
    used = np.unique(known[known >= 0])
    listed = class_list(root)
    classes = listed if listed else sorted({names[i] for i in used}, key=natural)
    ids = np.append(label_ids([names[i] if i in used else "" for i in range(len(names))], classes, path), -1)
    labels = ids[known[train]]
    dataset = Dataset(
        name=root.resolve().name if path.is_dir() else path.stem,
        classes=classes,
        train=index.images.take(train),
        train_labels=labels,
        given=labels >= 0 if (labels < 0).any() else None,
        excluded=[(name, unread_reason(name)) for name in index.unread],
    )
    if len(test):
        if (numbers[test] < 0).any():
            raise FinesslError(
                f"{path}: {(numbers[test] < 0).sum():,} test images have no label; a test image needs one."
            )
        tested = label_ids([names[i] for i in numbers[test]], classes, path)
        dataset.test, dataset.test_labels = index.images.take(test), tested
    return dataset


def class_list(root: Path) -> list[str]:
    file = root / "classes.txt"
    return (
        [line.strip() for line in file.read_text("utf-8", "replace").splitlines() if line.strip()]
        if file.is_file()
        else []
    )


def name_labels(root: Path, labels: list[str]) -> list[str]:
    """Class names for the labels: those of classes.txt where the labels are numbers."""
    classes = class_list(root)
    if not classes or not all(label.isdecimal() for label in labels):
        return labels
    if beyond := [label for label in labels if int(label) >= len(classes)]:
        raise FinesslError(f"{root / 'classes.txt'} has {len(classes)} classes; the shards have labels {some(beyond)}.")
    return [classes[int(label)] for label in labels]


def open_index(root: Path, shards: list[str], progress: Count) -> ShardIndex:
    """From the cache while no shard has changed, else in one pass."""
    state = [(s, (st := (root / s).stat()).st_size, st.st_mtime_ns) for s in shards]
    name = hashlib.blake2b(
        json.dumps([VERSION, str(root), sorted(EXTENSIONS), state]).encode(), digest_size=12
    ).hexdigest()
    stored = cache_folder() / "shards" / name
    try:
        table, facts, (shard_of, starts, label_of) = load_table(stored, *COLUMNS)
        images = ShardImages(root, shards, shard_of, starts, table)
        return ShardIndex(images, facts["labels"], label_of, facts["unread"])
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        index = scan(root, shards, progress)
        arrays = zip(COLUMNS, (index.images.shard_of, index.images.starts, index.label_of), strict=True)
        store_table(stored, index.images.paths, {"labels": index.labels, "unread": index.unread}, **dict(arrays))
        return index


def scan(root: Path, shards: list[str], progress: Count) -> ShardIndex:
    numbers: dict[str, int] = {"": -1}
    shard_of, starts, labels, sizes, paths, unread = [], [], [], [], list[str](), list[str]()
    for number, shard in enumerate(shards):
        content = read_shard(root / shard)
        paths += [f"{shard}/{name}" for name in content.names]
        unread += [f"{shard}/{name}" for name in content.unread]
        shard_of.append(np.full(len(content.names), number, np.int32))
        starts.append(np.array(content.starts, np.int64))
        sizes.append(np.array(content.sizes, np.int64))
        labels.append(np.array([numbers.setdefault(label, len(numbers) - 1) for label in content.labels], np.int32))
        progress(len(paths), len(paths) if number == len(shards) - 1 else 0)
    table = PathTable.of(paths, np.concatenate(sizes))
    images = ShardImages(root, shards, np.concatenate(shard_of), np.concatenate(starts), table)
    return ShardIndex(images, list(numbers)[1:], np.concatenate(labels), unread)
