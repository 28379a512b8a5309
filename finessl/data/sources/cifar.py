"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): the python and binary files as published, or class folders.

https://www.cs.toronto.edu/~kriz/cifar.html. The python files are pickles; of these, arrays of bytes and plain
containers are read and nothing is run.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finessl.data.dataset import Dataset, Statistics
from finessl.data.download import Archive, obtain
from finessl.data.images import ArrayImages
from finessl.data.sources.folder import open_folder
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Count, no_count
from finessl.runtime.pickles import load_pickle


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


def open_cifar10(root: Path | None, *, download: bool = False, progress: Count = no_count) -> Dataset:
    """download: fetch the archive if it is missing."""
    return open_cifar(CIFAR10, root, download, progress)


def open_cifar100(root: Path | None, *, download: bool = False, progress: Count = no_count) -> Dataset:
    """download: fetch the archive if it is missing."""
    return open_cifar(CIFAR100, root, download, progress)


def open_cifar(form: Form, root: Path | None, download: bool, progress: Count) -> Dataset:
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
    path = folder / form.meta[0]
    names = field(unpickle(path), form.names, path)
    if not isinstance(names, list) or not all(isinstance(name, (str, bytes)) for name in names):
        raise FinesslError(f"{path}: {form.names} should be a list of class names.")
    classes = [name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names]

    def read(files: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        pixels, labels = [], []
        for file in files:
            content = unpickle(folder / file)
            data, classes = (field(content, name, folder / file) for name in ("data", form.labels))
            array = getattr(data, "value", None) if isinstance(data, ByteArray) else None
            if array is None or array.ndim != 2 or array.shape[1] != 3072:
                raise FinesslError(f"{folder / file}: data should be an array of bytes, 3,072 for each image.")
            if not isinstance(classes, list) or not all(type(k) is int and abs(k) < 1 << 31 for k in classes):
                raise FinesslError(f"{folder / file}: {form.labels} should be a list of integers.")
            pixels.append(array)
            labels.append(np.array(classes, np.int64))
        return pixels[0] if len(pixels) == 1 else np.concatenate(pixels), np.concatenate(labels)

    return assemble(form, folder, classes, read(form.train), read((form.test,)))


def read_binary(form: Form, folder: Path) -> Dataset:
    """Each image is its label (CIFAR-100: coarse, then fine) and 3,072 bytes, a colour plane after another."""
    classes = (folder / form.meta[1]).read_text(encoding="utf-8", errors="replace").split()

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
        with warnings.catch_warnings():  # of an array that cannot be written to; it is only read
            warnings.simplefilter("ignore", UserWarning)
            planes = torch.from_numpy(pixels.reshape(-1, 3, 32, 32))
        images.append(ArrayImages(planes.permute(0, 2, 3, 1).contiguous().numpy(), part))  # on all cores
    return Dataset(form.name, classes, images[0], train[1], images[1], test[1], statistics=form.statistics)


def field(content: Any, name: str, path: Path) -> Any:
    """An entry of an unpickled file, whose keys are bytes when Python 2 wrote it."""
    if isinstance(content, dict):
        for key in (name, name.encode()):
            if key in content:
                return content[key]
    raise FinesslError(f"{path} has no entry {name!r}; it is not the file of that name from the archive.")


class Dtype:
    """numpy.dtype, of which CIFAR needs one: uint8."""

    __slots__ = ()

    def __call__(self, code: object, *_: object) -> Dtype:
        if code not in ("u1", b"u1", "|u1", b"|u1"):
            raise FinesslError(f"holds an array of {code!r}, not of bytes: refused.")
        return self

    def __setstate__(self, state: object) -> None:
        """Byte order and fields mean nothing for uint8."""


class ByteArray:
    """numpy.ndarray of uint8: keeps the bytes and the shape."""

    __slots__ = ("value",)

    def __setstate__(self, state: tuple[int, tuple[int, ...], Dtype, bool, bytes]) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, Dtype) or not isinstance(data, bytes):
            raise FinesslError("holds an array of something else than bytes: refused.")
        self.value = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class Reconstruct:
    """numpy.core.multiarray._reconstruct: an empty array, filled by what follows."""

    __slots__ = ()

    def __call__(self, *_: object) -> ByteArray:
        return ByteArray()


class FromBuffer:
    """numpy.core.numeric._frombuffer."""

    __slots__ = ()

    def __call__(self, data: bytes, dtype: Dtype, shape: tuple[int, ...], order: str) -> ByteArray:
        array = ByteArray()
        array.__setstate__((1, shape, dtype, order in ("F", b"F"), bytes(data)))
        return array


class Encode:
    """_codecs.encode, by which Python 3 writes bytes in old protocols."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        return text.encode("latin-1")


NAMES = {
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): Dtype(),
    ("_codecs", "encode"): Encode(),
    **{(f"numpy.{core}.multiarray", "_reconstruct"): Reconstruct() for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): FromBuffer() for core in ("core", "_core")},
}


def unpickle(path: Path) -> Any:
    try:
        return load_pickle(path.read_bytes(), NAMES)
    except FinesslError as error:
        raise FinesslError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise FinesslError(f"{path} is missing; unpack the archive again.") from error
    except OSError as error:
        raise FinesslError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise FinesslError(f"{path} is damaged ({type(error).__name__}: {error}); unpack the archive again.") from error
