"""Image folders, in the usual layouts:

labeled/<class>/…  unlabeled/…  [test/<class>/…]     a few labels and a pile of images
train/<class>/…  [test/<class>/… or val/<class>/…]   all labels known: a split hides most of them
<class>/…  [unlabeled/…]  [test/<class>/…]           the same, or a few labels where there is an unlabeled/
any folder with labels.csv (path,label)              the images that it does not name are unlabeled
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from finessl.data.dataset import Dataset, label_ids, left_out, some
from finessl.data.folder_index import FolderIndex, natural
from finessl.data.images import FileImages, Images
from finessl.data.sources.table import read_rows, rows_by_path
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Count, no_count

LABELED, UNLABELED = ("labeled", "labelled"), ("unlabeled", "unlabelled")
TESTS = ("test", "val", "valid", "validation")
LABELS = "labels.csv"
SAME_NAME = 0.85  # similarity (difflib) of names of which one may be misspelt
PUBLISHED = {  # folders of data sets whose images are inside other files
    "cifar-10-batches-py": "cifar10",
    "cifar-10-batches-bin": "cifar10",
    "cifar-100-python": "cifar100",
    "cifar-100-binary": "cifar100",
}


def open_folder(
    path: Path,
    *,
    labels: str | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    progress: Count = no_count,
) -> Dataset:
    """labels: a table with the class of some images, in addition to labeled/ or labels.csv; all others are unlabeled.
    path_column, label_column: columns of the table, if they are not called path and label."""
    index = read_index(path, progress)
    images, tops = FileImages(index.root, index.paths), {folder.split("/")[0] for folder in index.folders}
    test = next((top for top in TESTS if top in tops and has_classes(index, top)), None)
    table = Path(labels) if labels else index.root / LABELS
    top = next((top for top in (*LABELED, "train") if top in tops and has_classes(index, top)), "")

    by_name, notes = bool(labels) or (table.is_file() and top == ""), list[str]()
    if by_name:
        rows = read_rows(table, path_column, label_column)
        notes, known = rows.notes, dict[str, str]()
        if labels and top in LABELED:
            known = by_folder(index, top)
        elif labels and (index.root / LABELS).is_file():
            known = rows_by_path(read_rows(index.root / LABELS))
        named = known | rows_by_path(rows)
        if not named:
            raise FinesslError(
                f"{table}: no row has a label. Fill in the column label of some rows, and save the file."
            )
        positions, ids, classes = by_table(index, table, named, without=test)
        notes = notes + misspelt(Counter(named.values()))
    else:
        if top not in LABELED and tops.intersection(LABELED):
            raise FinesslError(f"{path}/labeled should hold a folder with images for each class, labeled/<class>/….")
        classes = class_names(index, top, () if top else {*UNLABELED, *(TESTS if test else ())})
        if not classes:
            raise FinesslError(
                f"{path}: {len(index.paths):,} images but no classes. Put labeled ones in labeled/<class>/ and the "
                f"others in unlabeled/, or name the class of a few in {LABELS} (columns path,label). "
                f"finessl select {path} -k 50 --out to-label.csv chooses images to label."
            )
        positions, ids = by_class(index, top, classes)
        unlabeled = np.flatnonzero(inside(index, *UNLABELED)[index.paths.folder_of])
        positions = np.concatenate([positions, unlabeled])
        ids = np.concatenate([ids, np.full(len(unlabeled), -1)])
    dataset = Dataset(
        name=index.root.name,
        classes=classes,
        train=images.take(positions),
        train_labels=ids,
        given=ids >= 0 if (ids < 0).any() or top in LABELED else None,
        excluded=index.left_out() + ([] if by_name else loose(index, top)),
        notes=notes,
    )
    if test:
        names = class_names(index, test)
        label_ids(names, classes, index.root / test)  # refuses classes that the training data does not have
        positions, ids = by_class(index, test, classes)
        dataset.test, dataset.test_labels = images.take(positions), ids
    return dataset


def open_pile(path: Path, labels: str | None = None) -> tuple[FileImages, dict[str, str], list[tuple[str, str]]]:
    """All images except those of a test folder, path → class of the labeled ones, and (path, reason) of those left out.

    Labels are those of labeled/, labels.csv and the table `labels`. Other folders are no classes: without labels, what a
    folder is called says nothing.
    """
    index = read_index(path)
    tops = {folder.split("/")[0] for folder in index.folders}
    test = next((top for top in TESTS if top in tops and has_classes(index, top)), None)
    top = next((top for top in LABELED if top in tops and has_classes(index, top)), None)
    named = by_folder(index, top) if top else {}
    for table in (index.root / LABELS, Path(labels) if labels else None):
        if table is not None and (table.is_file() or table != index.root / LABELS):
            named |= rows_by_path(read_rows(table))
    positions, _, _ = by_table(index, Path(labels or index.root / LABELS), named, without=test)
    return FileImages(index.root, index.paths).take(positions), named, index.left_out()


def labeled_folder(path: Path, progress: Count = no_count) -> tuple[Images, np.ndarray, list[str]]:
    """Images, labels and classes of a plain <class>/… folder."""
    index = read_index(path, progress)
    classes = class_names(index, "")
    if not classes:
        raise FinesslError(f"{path} should hold a folder for each class, <class>/….")
    positions, ids = by_class(index, "", classes)
    return FileImages(index.root, index.paths).take(positions), ids, classes


def read_index(path: Path, progress: Count = no_count) -> FolderIndex:
    index = FolderIndex.open(path, progress=progress)
    if len(index.paths) == 0:
        seen = ", ".join(f"{count:,} {extension or 'without extension'}" for extension, count in index.ignored.items())
        known = next(
            (f"; for {name}, give that name, with root" for f, name in PUBLISHED.items() if (path / f).exists()), ""
        )
        unread = "".join(f" {line}." for line in left_out(index.left_out()))
        raise FinesslError(
            f"{path}: no images in this folder or below it{f' (other files: {seen})' if seen else ''}{known}.{unread}"
        )
    return index


def class_names(index: FolderIndex, top: str, without: Iterable[str] = ()) -> list[str]:
    """Names of the folders directly in `top` ("": the root), including empty ones: an empty class is an error."""
    parts = [folder.split("/") for folder in index.folders]
    found = {p[1] for p in parts if p[0] == top and len(p) > 1} if top else {p[0] for p in parts}
    return sorted(found - {"", *without}, key=natural)


def has_classes(index: FolderIndex, top: str) -> bool:
    counts = index.counts()
    return any(counts[i] for i, folder in enumerate(index.folders) if folder.startswith(f"{top}/"))


def by_class(index: FolderIndex, top: str, classes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the images below `top`/<class>/, at any depth, and their labels."""
    depth, ids = (1 if top else 0), {name: i for i, name in enumerate(classes)}
    of_folder = np.full(len(index.folders), -1, np.int64)
    for number, folder in enumerate(index.folders):
        parts = folder.split("/")
        if folder and len(parts) > depth and (not top or parts[0] == top):
            of_folder[number] = ids.get(parts[depth], -1)
    labels = of_folder[index.paths.folder_of]
    positions = np.flatnonzero(labels >= 0)
    return positions, labels[positions]


def loose(index: FolderIndex, top: str) -> list[tuple[str, str]]:
    """Images next to the class folders, which belong to no class."""
    own = np.flatnonzero(np.isin(index.paths.folder_of, [index.folders.index(""), index.folders.index(top)]))
    return [(index.paths[i], "in no class folder; unlabeled images belong in unlabeled/") for i in own.tolist()]


def inside(index: FolderIndex, *tops: str) -> np.ndarray:
    return np.array([folder.split("/")[0] in tops for folder in index.folders])


def misspelt(counts: Counter[str]) -> list[str]:
    """Classes with one label whose name is nearly that of a class with more."""
    found = []
    for name in sorted(name for name, count in counts.items() if count == 1):
        close = difflib.get_close_matches(name, [n for n, count in counts.items() if count > 1], n=1, cutoff=SAME_NAME)
        found += [f"{name!r} has one label; did you mean {close[0]!r}?"] if close else []
    return found


def by_folder(index: FolderIndex, top: str) -> dict[str, str]:
    """Path → class of the images in `top`/<class>/…."""
    classes = class_names(index, top)
    positions, ids = by_class(index, top, classes)
    return {index.paths[i]: classes[k] for i, k in zip(positions.tolist(), ids.tolist(), strict=True)}


def by_table(
    index: FolderIndex, table: Path, named: Mapping[str, str], without: str | None
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """All images (but those of the test folder), with the labels that some paths have."""
    kept = ~inside(index, without) if without else np.ones(len(index.folders), bool)
    positions = np.flatnonzero(kept[index.paths.folder_of])
    if not named:
        return positions, np.full(len(positions), -1, np.int64), []
    where = {index.paths[i]: n for n, i in enumerate(positions.tolist())}
    missing = [path for path in named if path not in where]
    if missing:
        counted = "1 image that is" if len(missing) == 1 else f"{len(missing):,} images that are"
        raise FinesslError(
            f"{table} names {counted} not in {index.root}: {some(missing)}. Paths are relative to that folder."
        )
    classes = sorted(set(named.values()), key=natural)
    labels = np.full(len(positions), -1, np.int64)
    labels[[where[path] for path in named]] = label_ids(list(named.values()), classes, table)
    return positions, labels, classes
