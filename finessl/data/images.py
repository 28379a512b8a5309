"""Sequences of images: files, arrays. Each image is decoded when it is read (decoding.py)."""

from __future__ import annotations

import functools
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from PIL import Image

from finessl.data.decoding import decode, fitted, open_regular, probe, reason_of, resize
from finessl.data.path_table import PathTable
from finessl.errors import FinesslError

PIECE = 1 << 14  # bytes of each of the three excerpts that identify a large file


def excerpt_of(file: BinaryIO, size: int, start: int = 0) -> bytes:
    """The `size` bytes from `start` on; of more than 3 · PIECE bytes, pieces of the beginning, middle and end."""
    if size <= 3 * PIECE:
        file.seek(start)
        return file.read(size)
    pieces = []
    for offset in (0, (size - PIECE) // 2, size - PIECE):
        file.seek(start + offset)
        pieces.append(file.read(PIECE))
    return b"".join(pieces)


class Images(Protocol):
    """The interface of image sequences: files, arrays, shards.   i: position of an image."""

    def __len__(self) -> int: ...

    def key(self, i: int) -> str:
        """A stable name: the path relative to the data, or "train/123"."""
        ...

    def read(self, i: int, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
        """uint8 [h, w, 3]; ImageError if it is unreadable.   shorter, square: pixels to reduce it to, as in `fitted`."""
        ...

    def size(self, i: int) -> tuple[int, int]:
        """(height, width) before EXIF rotation, without decoding if possible; ImageError as in `read`."""
        ...

    def content(self, i: int) -> bytes:
        """Bytes that identify the image: its file, or its pixels if it has none."""
        ...

    def excerpt(self, i: int) -> bytes:
        """`content`, or excerpts of it if it is long (`excerpt_of`); ImageError as in `read`."""
        ...

    def take(self, indices: np.ndarray) -> Images:
        """The images at the positions `indices`."""
        ...

    def fingerprint(self) -> str:
        """Equal for equal images in the same order, across processes."""
        ...


class ArrayImages:
    """Images of one size in one array, never copied.   array: uint8 [N, h, w, 3].   prefix, numbers: keys are PREFIX/NUMBER.
    Methods: see `Images`, also for shorter, square and indices."""

    def __init__(self, array: np.ndarray, prefix: str = "image", numbers: np.ndarray | None = None) -> None:
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
            raise FinesslError(f"images should be a uint8 array [N, h, w, 3], not {array.dtype} {list(array.shape)}.")
        self.array, self.prefix = array, prefix
        self.numbers = np.arange(len(array)) if numbers is None else numbers  # in keys; `take` keeps them

    def __len__(self) -> int:
        return len(self.array)

    def key(self, i: int) -> str:
        return f"{self.prefix}/{self.numbers[i]}"

    def read(self, i: int, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
        size = fitted(*self.size(i), shorter=shorter, square=square)
        return self.array[i] if size == self.size(i) else np.asarray(resize(Image.fromarray(self.array[i]), *size))

    def size(self, i: int) -> tuple[int, int]:
        return self.array.shape[1], self.array.shape[2]

    def content(self, i: int) -> bytes:
        return self.array[i].tobytes()

    def excerpt(self, i: int) -> bytes:
        return excerpt_of(io.BytesIO(self.content(i)), self.array[i].nbytes)

    def take(self, indices: np.ndarray) -> ArrayImages:
        return ArrayImages(self.array[indices], self.prefix, self.numbers[indices])

    def fingerprint(self) -> str:
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:  # a run asks for it several times, and CIFAR takes half a second
        digest = hashlib.blake2b(repr(self.array.shape).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.array).data)
        return digest.hexdigest()


class FileImages:
    """Image files under the folder `root`.   Methods: see `Images`, also for shorter, square and indices."""

    def __init__(self, root: Path, paths: PathTable) -> None:
        self.root, self.paths = Path(root), paths

    def __len__(self) -> int:
        return len(self.paths)

    def key(self, i: int) -> str:
        return self.paths[i]

    def path(self, i: int) -> Path:
        return self.root / self.paths[i]

    def files(self) -> Iterator[str]:
        return (os.path.join(self.root, self.paths[i]) for i in range(len(self)))

    def read(self, i: int, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
        return decode(self.path(i), shorter=shorter, square=square)

    def size(self, i: int) -> tuple[int, int]:
        return probe(self.path(i))

    def content(self, i: int) -> bytes:
        try:
            with open_regular(os.path.join(self.root, self.paths[i])) as file:
                return file.read()
        except OSError as error:
            raise reason_of(error) from error

    def excerpt(self, i: int) -> bytes:
        try:
            with open_regular(self.path(i)) as file:
                return excerpt_of(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise reason_of(error) from error

    def take(self, indices: np.ndarray) -> FileImages:
        return FileImages(self.root, self.paths.take(indices))

    def fingerprint(self) -> str:
        return self.paths.fingerprint()
