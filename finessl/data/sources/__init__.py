"""Sources of images: `open_dataset` opens a folder, a table, shards or a known data set.

A source is one file here with one function `open_…(path, *, options) -> Dataset`, and one line in NAMED or FORMS.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from finessl.data.dataset import Dataset, label_ids
from finessl.errors import FinesslError
from finessl.registry import Registry, nearest
from finessl.registry.options import check_options
from finessl.runtime.callbacks import Count, no_count

# Known data sets, opened by name with the folder that holds them (root) …
NAMED = {
    "cifar10": ("finessl.data.sources.cifar:open_cifar10", "50,000 + 10,000 images of 32×32 in 10 classes"),
    "cifar100": ("finessl.data.sources.cifar:open_cifar100", "50,000 + 10,000 images of 32×32 in 100 classes"),
    "food101": ("finessl.data.sources.food101:open_food101", "75,750 + 25,250 photos of 101 dishes"),
    "semi-aves": ("finessl.data.sources.semi_aves:open_semi_aves", "200 bird species, few labels, also other species"),
    "imagenet": ("finessl.data.sources.imagenet:open_imagenet", "1.28 million + 50,000 photos in 1,000 classes"),
    "sample": ("finessl.data.sources.sample:open_sample", "a small set that comes with the package"),
}
# … and forms that any data may have, told apart by what the path holds.
FORMS = {
    "folder": ("finessl.data.sources.folder:open_folder", "labeled/<class>/… + unlabeled/…, or <class>/…, or train/…"),
    "table": ("finessl.data.sources.table:open_table", "CSV or Parquet with columns path, label (empty: unlabeled)"),
    "webdataset": ("finessl.data.sources.webdataset:open_webdataset", "tar shards with key.jpg and key.cls"),
    "huggingface": (
        "finessl.data.sources.huggingface:open_huggingface",
        "hf:NAME, or a folder that datasets has saved",
    ),
}
SOURCES = Registry("dataset", NAMED | FORMS)


def open_dataset(
    data: str | Path,
    *,
    root: str | Path | None = None,
    strict: bool = False,
    test: str | Path | None = None,
    progress: Count = no_count,
    **options: Any,
) -> Dataset:
    """Open a data set.

    data: a folder, a table, shards, "hf:NAME" or a known name.   root: folder of a known data set.   test: another folder or
    table with labeled test images.   strict: unreadable images are an error instead of being left out.   options: of the
    source (`finessl list datasets --options`).
    """
    name, path = recognise(data, root)
    source = SOURCES[name]
    checked = check_options("dataset", name, source, options)
    if "progress" in inspect.signature(source).parameters:
        checked["progress"] = progress
    try:
        dataset: Dataset = source(path, **checked)
        if test is not None:
            columns = {name: options.get(name) for name in ("path_column", "label_column")}
            dataset = with_test(dataset, Path(test), progress, **columns)
    except OSError as error:
        raise FinesslError(f"{error.filename or data} cannot be read: {error.strerror or error}.") from error
    dataset.strict = strict
    return dataset


def recognise(data: str | Path, root: str | Path | None) -> tuple[str, Path | str | None]:
    """(source, path) that `data` and `root` mean."""
    if not str(data):  # probably an unset shell variable; Path("") would be the current folder
        raise FinesslError("the name of the data is empty; give a folder, a table or a data set's name.")
    if str(data).startswith("hf:"):
        return "huggingface", str(data)[3:]
    path, known = Path(data).expanduser(), named_sources()
    if str(data) in known and (root is not None or not path.exists()):
        return str(data), None if root is None else Path(root).expanduser()
    if root is not None:
        path = Path(root).expanduser() / path
    if path.is_dir():
        if any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
            return "huggingface", path
        return "webdataset" if any(path.glob("*.tar")) else "folder", path
    if path.is_file():
        return "webdataset" if path.suffix == ".tar" else "table", path
    raise FinesslError(
        f"{data}: there is no such folder or file, and no data set of that name{nearest(data, known) or '.'} "
        f"Known names: {', '.join(known)}."
    )


def is_own(data: str | Path, root: str | Path | None = None) -> bool:
    """Is it a folder, a table or shards of the user's, and no known data set?"""
    return recognise(data, root)[0] in FORMS


def named_sources() -> list[str]:
    """Names of known data sets, including those of plug-ins."""
    return [name for name in SOURCES.names() if name not in FORMS]


def with_test(dataset: Dataset, path: Path, progress: Count, **columns: str | None) -> Dataset:
    """`dataset` with the labeled images of another folder or table as test images. Classes are matched by name."""
    from finessl.data.sources.folder import labeled_folder
    from finessl.data.sources.table import labeled_table

    if path.is_dir():
        images, ids, classes = labeled_folder(path, progress)
    elif path.is_file():
        images, ids, classes = labeled_table(path, **columns)
    else:
        raise FinesslError(f"{path}: there is no such folder or table to test on.")
    return replace(dataset, test=images, test_labels=label_ids(classes, dataset.classes, path)[ids])
