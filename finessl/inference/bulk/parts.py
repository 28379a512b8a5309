"""What there is to predict, cut into parts of fixed size, so that the same inputs always give the same parts."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from finessl.data.decoding import ImageError, decode, opened
from finessl.data.folder_index import natural
from finessl.data.images import FileImages
from finessl.data.path_table import PathTable
from finessl.data.shards import ShardImages, read_shard
from finessl.errors import FinesslError
from finessl.inference.predict import find_files, image_files
from finessl.inference.sorting import Packed

PART_FILES = 4096  # images of a part made of files
PART_BYTES = 256 << 20  # of a tar file or of a row group; a larger one is cut into pieces
READ_ROWS = 8  # rows of a Parquet file that are read at once


@dataclass(frozen=True)
class Part:
    """Images that one process predicts at once."""

    kind: str  # tar, parquet, files, unread
    source: str  # the file, or where the files were found
    piece: int = 0  # of `pieces` equal ones of a tar file
    pieces: int = 1
    rows: tuple[int, int] = (0, 0)  # of a Parquet file: the first, and the one after the last
    items: tuple[tuple[str, str], ...] = ()  # files: (path, ""); unread: (path, reason)


class BytesImages:
    """Encoded images in memory: those of some rows of a Parquet file."""

    def __init__(self, names: list[str], contents: list[bytes | None]) -> None:
        self.names, self.contents = names, contents

    def __len__(self) -> int:
        return len(self.names)

    def key(self, i: int) -> str:
        return self.names[i]

    def content(self, i: int) -> bytes:
        content = self.contents[i]
        if not content:
            raise ImageError("the row holds no image")
        return content

    def read(self, i: int, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
        return decode(self.content(i), shorter=shorter, square=square)


PartImages = FileImages | ShardImages | BytesImages


def cut(inputs: Sequence[Path], part_bytes: int = PART_BYTES) -> list[Part]:
    """The inputs as parts, in their order. `part_bytes`: of a tar file or of a row group."""
    parts: list[Part] = []
    for path in inputs:
        shards = shards_of(path)
        for shard in shards:
            pieces = max(math.ceil(shard.stat().st_size / part_bytes), 1)
            parts += [Part("tar", str(shard), piece, pieces) for piece in range(pieces)]
        if ranges := image_rows(path, part_bytes):
            parts += [Part("parquet", str(path), rows=rows) for rows in ranges]
        elif path.is_dir() or not shards:
            parts += file_parts(path, also=bool(shards))
    return parts


def file_parts(path: Path, also: bool) -> list[Part]:
    """Image files that are named, in a folder or in a list. also: there are shards too, so none is no error."""
    unread: list[tuple[str, str]] = []
    if also:
        files = image_files(path, unread)
    else:
        files, unread = find_files([path])
    chunks = [files[start : start + PART_FILES] for start in range(0, len(files), PART_FILES)]
    parts = [Part("files", str(path), items=tuple((str(file), "") for file in chunk)) for chunk in chunks]
    return [*parts, Part("unread", str(path), items=tuple(unread))] if unread else parts


def shards_of(path: Path) -> list[Path]:
    """The tar file itself, or the tar files in a folder and below it."""
    if not path.is_dir():
        return [path] if path.suffix.lower() == ".tar" and path.is_file() else []
    found = (Path(top) / name for top, _, names in os.walk(path) for name in names if not name.startswith("."))
    return sorted((file for file in found if file.suffix.lower() == ".tar"), key=lambda file: natural(str(file)))


def image_rows(path: Path, part_bytes: int) -> list[tuple[int, int]]:
    """Ranges of rows of a Parquet file that holds images in a column `image`: its row groups, and pieces of those that are
    larger than `part_bytes`. None for anything else."""
    if path.suffix.lower() not in (".parquet", ".pq") or not path.is_file():
        return []
    from pyarrow import ArrowException, parquet

    ranges: list[tuple[int, int]] = []
    try:
        with parquet.ParquetFile(path) as file:
            if "image" not in file.schema_arrow.names:
                return []
            first = 0
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                columns = [group.column(k) for k in range(group.num_columns)]
                size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] == "image")
                pieces = max(math.ceil(size / part_bytes), 1)
                bounds = [first + group.num_rows * k // pieces for k in range(pieces + 1)]
                ranges += pairwise(bounds)
                first += group.num_rows
    except (OSError, ArrowException) as error:
        raise FinesslError(f"{path} cannot be read as a Parquet file: {error}") from error
    return ranges


def open_part(part: Part) -> tuple[PartImages, list[tuple[str, str]]]:
    """Its images, and (path, reason) of those in formats that are not read."""
    if part.kind == "files":
        paths = [Path(path).as_posix() for path, _ in part.items]
        return FileImages(Path(), PathTable.of(paths, [0] * len(paths))), []
    if part.kind == "unread":
        return FileImages(Path(), PathTable.of([], [])), list(part.items)
    if part.kind == "parquet":
        return read_rows(Path(part.source), *part.rows), []
    path = Path(part.source)
    shard = read_shard(path)
    bounds = [len(shard.names) * k // part.pieces for k in (part.piece, part.piece + 1)]
    chosen = slice(*bounds)
    names = [f"{part.source}/{name}" for name in shard.names[chosen]]
    unread = [(f"{part.source}/{name}", "not read in this format") for name in shard.unread] if part.piece == 0 else []
    table = PathTable.of(names, shard.sizes[chosen])
    which = np.zeros(len(names), np.int32)
    return ShardImages(path.parent, [path.name], which, np.array(shard.starts[chosen], np.int64), table), unread


def read_rows(path: Path, first: int, end: int) -> BytesImages:
    """Images of rows of a column `image`: bytes, or as Hugging Face stores them a struct with `bytes`."""
    from pyarrow import ArrowException, parquet

    values: list[Any] = []
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:  # not a whole row group at once
            sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
            starts = list(accumulate(sizes, initial=0))
            groups = [k for k, size in enumerate(sizes) if starts[k] < end and starts[k] + size > first]
            row = starts[groups[0]] if groups else 0
            for batch in file.iter_batches(READ_ROWS, groups, ["image"]):
                values += batch["image"][max(first - row, 0) : max(end - row, 0)].to_pylist()
                row += len(batch)
                if row >= end:
                    break
    except (OSError, ArrowException) as error:
        raise FinesslError(f"{path} cannot be read as a Parquet file: {error}") from error
    contents = [value.get("bytes") if isinstance(value, dict) else value for value in values]
    if odd := {type(value).__name__ for value in contents if value is not None and not isinstance(value, bytes)}:
        raise FinesslError(f"{path}: the column image should hold the bytes of image files, not {min(odd)}.")
    return BytesImages([f"{path}/{first + i}" for i in range(len(contents))], contents)


def source_of(part: Part, images: PartImages, i: int) -> Path | Packed:
    """The image as a file, or under a file's name: SHARD_MEMBER, or TABLE_ROW with the suffix of its format."""
    if isinstance(images, FileImages):
        return images.path(i)
    content = images.content(i)
    name = f"{PurePosixPath(part.source).stem}_{PurePosixPath(images.key(i)).name}"
    if isinstance(images, BytesImages):
        with opened(content) as image:
            name += f".{(image.format or 'image').lower()}".replace(".jpeg", ".jpg")
    return Packed(name, content)
