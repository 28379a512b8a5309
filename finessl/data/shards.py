"""Images in tar files (WebDataset shards), read in place: nothing is unpacked.

One pass over a shard's headers finds the offset of each image. An image is then one read at an offset, from any thread.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from finessl.data.decoding import EXTENSIONS, UNREAD, ImageError, decode, open_regular, probe
from finessl.data.images import excerpt_of
from finessl.data.path_table import PathTable
from finessl.errors import FinesslError

MAX_LABEL_BYTES = 1 << 20  # of a label file
HEADER_BYTES = 1 << 16  # that nearly always hold an image's header


@dataclass
class Shard:
    """The images of a tar file and their labels: key.jpg with key.cls, or key.json with a "label"."""

    names: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # "": unlabeled
    unread: list[str] = field(default_factory=list)  # images in formats that are not read


def read_shard(path: Path) -> Shard:
    """The index of a tar file. Members of one sample share their name up to the first dot after the last slash."""
    shard, labels = Shard(), dict[str, str]()
    try:
        with open_regular(path) as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                extension = os.path.splitext(name)[1].lower()
                if member.isfile() and extension in EXTENSIONS:
                    shard.names.append(name)
                    shard.starts.append(member.offset_data)
                    shard.sizes.append(member.size)
                elif member.isfile() and extension in UNREAD:
                    shard.unread.append(name)
                elif member.isfile() and extension in (".cls", ".json") and (data := tar.extractfile(member)):
                    if member.size > MAX_LABEL_BYTES:
                        raise FinesslError(f"{path}: {name} has {member.size:,} bytes, which is no label.")
                    labels[sample(name)] = read_label(data.read(), path, name)
            end = tar.offset
        with open(path, "rb") as file:  # tarfile takes a truncated header for the end; a whole archive ends with zeros
            file.seek(end)
            if file.read(512) != bytes(512):
                raise tarfile.ReadError("it has no end")
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise FinesslError(
            f"{path} is cut short, compressed or no tar file ({error}); its first {len(shard.names):,} images are whole. "
            "Get it again."
        ) from error
    except (OSError, ImageError) as error:
        raise FinesslError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    shard.labels = [labels.get(sample(name), "") for name in shard.names]
    return shard


def sample(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def read_label(data: bytes, shard: Path, name: str) -> str:
    """A label; "" for none. −1 means unlabeled."""
    try:
        value: object = data.decode("utf-8")
        if name.lower().endswith(".json"):
            content = json.loads(data)
            value = content.get("label", content.get("cls", "")) if isinstance(content, dict) else ""
    except (ValueError, RecursionError) as error:
        raise FinesslError(f"{shard}: the label {name} cannot be read ({error}); mend or remove it.") from error
    text = str("" if value is None else value).strip()
    return "" if text == "-1" else text


class ShardImages:
    """Images at known offsets of the shards of one folder."""

    def __init__(
        self, root: Path, shards: list[str], shard_of: np.ndarray, starts: np.ndarray, paths: PathTable
    ) -> None:
        self.root, self.shards = Path(root), shards
        self.shard_of, self.starts, self.paths = shard_of, starts, paths  # paths: "<shard>/<member>" and their sizes

    def __len__(self) -> int:
        return len(self.paths)

    def key(self, i: int) -> str:
        return self.paths[i]

    def content(self, i: int, most: int | None = None) -> bytes:
        """The image file, or its first `most` bytes."""
        size = int(self.paths.sizes[i])
        wanted = size if most is None else min(size, most)
        with self._opened(i) as file:
            file.seek(int(self.starts[i]))
            data = file.read(wanted)
        if len(data) < wanted:
            raise ImageError("the shard has been cut short since it was indexed")
        return data

    def excerpt(self, i: int) -> bytes:
        with self._opened(i) as file:
            return excerpt_of(file, int(self.paths.sizes[i]), int(self.starts[i]))

    @contextmanager
    def _opened(self, i: int) -> Iterator[BinaryIO]:
        try:
            with open_regular(self.root / self.shards[self.shard_of[i]]) as file:
                yield file
        except OSError as error:
            raise ImageError(f"the shard cannot be read: {error.strerror or error}") from error

    def files(self) -> Iterator[str]:
        return (os.path.join(self.root, shard) for shard in self.shards)

    def read(self, i: int, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
        return decode(self.content(i), shorter=shorter, square=square)

    def size(self, i: int) -> tuple[int, int]:
        try:
            return probe(self.content(i, HEADER_BYTES))
        except ImageError:  # a header after much metadata
            return probe(self.content(i))

    def take(self, indices: np.ndarray) -> ShardImages:
        return ShardImages(
            self.root, self.shards, self.shard_of[indices], self.starts[indices], self.paths.take(indices)
        )

    def fingerprint(self) -> str:
        return self.paths.fingerprint()
