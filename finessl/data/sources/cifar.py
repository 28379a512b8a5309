"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): the python and binary files as published, or class folders.

https://www.cs.toronto.edu/~kriz/cifar.html. The python files are pickles; they are read by an unpickler that knows
NumPy arrays and plain containers and nothing else.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.dataset import Dataset, Statistics
from finessl.data.download import Archive, obtain
from finessl.data.images import ArrayImages
from finessl.data.index import Progress
from finessl.data.sources.folder import open_folder
from finessl.errors import FinesslError


@dataclass(frozen=True)
class Form:
    name: str
    python: str  # folder of the python files
    binary: str  # folder of the binary files
    train: tuple[str, ...]
    test: str
    labels: str  # key in the python files
    names: str
    label_bytes: int  # before each image of the binary files; the last of them is the class
    meta: tuple[str, str]  # files with the class names, python and binary
    statistics: Statistics


BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10 = Form(
    "cifar10", "cifar-10-batches-py", "cifar-10-batches-bin", BATCHES, "test_batch", "labels", "label_names", 1,
    ("batches.meta", "batches.meta.txt"), ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
)  # fmt: skip
CIFAR100 = Form(
    "cifar100", "cifar-100-python", "cifar-100-binary", ("train",), "test", "fine_labels", "fine_label_names", 2,
    ("meta", "fine_label_names.txt"), ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
)  # fmt: skip


ARCHIVES = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", CIFAR10.python
    ),
    "cifar100": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", CIFAR100.python
    ),
}


def open_cifar10(root: Path | None, *, download: bool = False, progress: Progress | None = None) -> Dataset:
    return open_cifar(CIFAR10, root, download, progress)


def open_cifar100(root: Path | None, *, download: bool = False, progress: Progress | None = None) -> Dataset:
    return open_cifar(CIFAR100, root, download, progress)


def open_cifar(form: Form, root: Path | None, download: bool, progress: Progress | None) -> Dataset:
    """root: holds the published folder, or is it, or holds train/<class>/ and test/<class>/."""
    if root is None:
        raise FinesslError(f"{form.name} needs root: the folder that holds {form.python}/ (or class folders).")
    for kind, name, read in (("python", form.python, read_python), ("binary", form.binary, read_binary)):
        for folder in (root / name, root):
            if folder.is_dir() and (folder / form.meta[kind == "binary"]).is_file():
                return read(form, folder)
    for folder in (root, root / form.name):
        if (folder / "train").is_dir():
            dataset = open_folder(folder, progress=progress)
            dataset.name, dataset.statistics = form.name, form.statistics
            return dataset
    if download:
        return read_python(form, obtain(ARCHIVES[form.name], root, progress))
    raise FinesslError(
        f"{root} holds no {form.name}: put {form.python}/ (the python version), {form.binary}/ (the binary version) or "
        "train/<class>/ and test/<class>/ there, or ask for a download (--set source.download=true)."
    )


def read_python(form: Form, folder: Path) -> Dataset:
    names = field(unpickle(folder / form.meta[0]), form.names, folder / form.meta[0])
    classes = [name.decode() if isinstance(name, bytes) else str(name) for name in names]

    def read(files: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        pixels, labels = [], []
        for file in files:
            content = unpickle(folder / file)
            pixels.append(np.asarray(field(content, "data", folder / file), np.uint8))
            labels.append(np.asarray(field(content, form.labels, folder / file), np.int64))
        return np.concatenate(pixels), np.concatenate(labels)

    return assemble(form, folder, classes, read(form.train), read((form.test,)))


def read_binary(form: Form, folder: Path) -> Dataset:
    """Each image is its label (CIFAR-100: coarse, then fine) and 3,072 bytes, a colour plane after another."""
    classes = (folder / form.meta[1]).read_text(encoding="utf-8").split()

    def read(files: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        rows = []
        for file in files:
            path = folder / f"{file}.bin"
            if not path.is_file():
                raise FinesslError(f"{path} is missing; unpack the archive again.")
            raw = np.fromfile(path, np.uint8)
            if len(raw) == 0 or len(raw) % (form.label_bytes + 3072):
                raise FinesslError(f"{path} is cut short: {len(raw):,} bytes is no whole number of images.")
            rows.append(raw.reshape(-1, form.label_bytes + 3072))
        table = np.concatenate(rows)
        return table[:, form.label_bytes :], table[:, form.label_bytes - 1].astype(np.int64)

    return assemble(form, folder, classes, read(form.train), read((form.test,)))


def assemble(
    form: Form,
    folder: Path,
    classes: list[str],
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
) -> Dataset:
    images = []
    for part, (pixels, labels) in (("train", train), ("test", test)):
        if pixels.ndim != 2 or pixels.shape[1] != 3072 or len(pixels) != len(labels):
            raise FinesslError(f"{folder}: {part} should be images of 3,072 bytes with a label each.")
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
            raise FinesslError(f"{folder}: {part} has labels outside 0 … {len(classes) - 1}.")
        planes = pixels.reshape(-1, 3, 32, 32)
        images.append(ArrayImages(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), part))
    return Dataset(form.name, classes, images[0], train[1], images[1], test[1], statistics=form.statistics)


def field(content: Any, name: str, path: Path) -> Any:
    """An entry of an unpickled file, whose keys are bytes when Python 2 wrote it."""
    if isinstance(content, dict):
        for key in (name, name.encode()):
            if key in content:
                return content[key]
    raise FinesslError(f"{path} has no entry {name!r}; it is not the file of that name from the archive.")


class ArraysOnly(pickle.Unpickler):
    """A pickle can run any code; this one can only build NumPy arrays and plain containers."""

    ALLOWED = {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
        *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
        ("_codecs", "encode"),  # how Python 3 writes bytes in old protocols
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise FinesslError(f"asks for {module}.{name}, which no CIFAR file needs; it may do harm: refused.")
        return super().find_class(module, name)


def unpickle(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return ArraysOnly(file, encoding="bytes").load()
    except FinesslError as error:
        raise FinesslError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise FinesslError(f"{path} is missing; unpack the archive again.") from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise FinesslError(f"{path} is damaged ({type(error).__name__}: {error}); unpack the archive again.") from error
