"""What there is to predict, cut into parts of fixed size, so that the same inputs always give the same parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from finessl.data.decoding import ImageError, decode, opened
from finessl.data.folder_index import natural
from finessl.data.images import FileImages
from finessl.data.path_table import PathTable
from finessl.data.shards import ShardImages, read_shard
from finessl.errors import FinesslError
from finessl.inference.predict import find_files
from finessl.inference.sorting import Packed

PART_FILES = 4096  # images of a part made of files
PART_BYTES = 256 << 20  # of a tar file; a larger one is cut into pieces


@dataclass(frozen=True)
class Part:
    """Images that one process predicts at once."""

    kind: str  # tar, parquet, files, unread
    source: str  # the file, or where the files were found
    piece: int = 0  # of `pieces` equal ones of a tar file; the row group of a Parquet file
    pieces: int = 1
    items: tuple[tuple[str, str], ...] = ()  # files: (path, ""); unread: (path, reason)


class BytesImages:
    """Encoded images in memory: those of a Parquet file's row group."""

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
    """The inputs as parts, in their order. `part_bytes`: of a tar file."""
    parts: list[Part] = []
    for path in inputs:
        if shards := shards_of(path):
            for shard in shards:
                pieces = max(math.ceil(shard.stat().st_size / part_bytes), 1)
                parts += [Part("tar", str(shard), piece, pieces) for piece in range(pieces)]
        elif groups := image_groups(path):
            parts += [Part("parquet", str(path), group, groups) for group in range(groups)]
        else:
            files, unread = find_files([path])
            for start in range(0, len(files), PART_FILES):
                chunk = tuple((str(file), "") for file in files[start : start + PART_FILES])
                parts.append(Part("files", str(path), items=chunk))
            if unread:
                parts.append(Part("unread", str(path), items=tuple(unread)))
    return parts


def shards_of(path: Path) -> list[Path]:
    """The tar file itself, or the tar files of a folder."""
    if path.is_dir():
        return sorted(path.glob("*.tar"), key=lambda file: natural(file.name))
    return [path] if path.suffix.lower() == ".tar" and path.is_file() else []


def image_groups(path: Path) -> int:
    """Row groups of a Parquet file that holds images in a column `image`; 0 for anything else."""
    if path.suffix.lower() not in (".parquet", ".pq") or not path.is_file():
        return 0
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            return file.num_row_groups if "image" in file.schema_arrow.names else 0
    except (OSError, ArrowException) as error:
        raise FinesslError(f"{path} cannot be read as a Parquet file: {error}") from error


def open_part(part: Part) -> tuple[PartImages, list[tuple[str, str]]]:
    """Its images, and (path, reason) of those in formats that are not read."""
    if part.kind == "files":
        paths = [Path(path).as_posix() for path, _ in part.items]
        return FileImages(Path(), PathTable.of(paths, [0] * len(paths))), []
    if part.kind == "unread":
        return FileImages(Path(), PathTable.of([], [])), list(part.items)
    if part.kind == "parquet":
        return row_group(Path(part.source), part.piece), []
    path = Path(part.source)
    shard = read_shard(path)
    bounds = [len(shard.names) * k // part.pieces for k in (part.piece, part.piece + 1)]
    chosen = slice(*bounds)
    names = [f"{part.source}/{name}" for name in shard.names[chosen]]
    unread = [(f"{part.source}/{name}", "not read in this format") for name in shard.unread] if part.piece == 0 else []
    table = PathTable.of(names, shard.sizes[chosen])
    which = np.zeros(len(names), np.int32)
    return ShardImages(path.parent, [path.name], which, np.array(shard.starts[chosen], np.int64), table), unread


def row_group(path: Path, group: int) -> BytesImages:
    """Images of a column `image`: bytes, or as Hugging Face stores them a struct with `bytes`."""
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            first = sum(file.metadata.row_group(k).num_rows for k in range(group))
            values = file.read_row_group(group, columns=["image"])["image"].to_pylist()
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
