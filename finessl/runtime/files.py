"""Files on disk: atomic writes, typed reads. Every failure is a FinesslError that names the file."""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.lib import format as npy
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from finessl.errors import FinesslError

T = TypeVar("T")

MAX_JSON_BYTES = 256 << 20  # a split of 10 million single images has about 90 MB
MAX_ARRAY_BYTES = 8 << 30  # of one array, unpacked


class DamagedFile(FinesslError):
    """A file's content is not valid."""


# ---- writing --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writing(path: Path, then: str = "") -> Iterator[None]:
    """Turn a failed write to `path` (of the operating system, safetensors or torch.save) into a FinesslError.

    then: what happens when the same command runs again.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and "inline_container" not in text and "PytorchStreamWriter" not in text:
            raise
        number = error.errno if isinstance(error, OSError) else None
        reason = error.strerror if isinstance(error, OSError) and error.strerror else text.splitlines()[0]
        if "os error 28" in text or (isinstance(error, RuntimeError) and full(path)):
            number, reason = errno.ENOSPC, os.strerror(errno.ENOSPC)
        if number in (errno.ENOSPC, errno.EDQUOT):
            advice = f"Free some space and run the same command again{f': {then}' if then else '.'}"
        elif number in (errno.ENOTDIR, errno.EEXIST):
            advice = "A file is in its place; choose another --out."
        elif number == errno.EISDIR:
            advice = "It is a folder; name a file."
        else:
            advice = "Choose another --out."
        raise FinesslError(f"cannot write to {path}: {reason}. {advice}") from error


def full(path: Path) -> bool:
    """Whether the disk of `path` is full; torch.save does not say why it failed."""
    there = next((p for p in (path, *path.parents) if p.exists()), Path())
    return shutil.disk_usage(there).free < 1 << 20


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write-then-rename: yields a temporary path to write to, which replaces `path` when the block ends.

    The file is synchronised to disk before the rename, so that after a power failure `path` holds the old content or the
    new one, never half of it. If the block raises, the temporary file is removed.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # a rename would destroy the device
        raise FinesslError(f"cannot write to {path}: it is a device or a pipe; name a file.")
    if not path.name:  # "." or "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a whole file by write-then-rename. Text from file names that are not UTF-8 keeps its bytes."""
    with replacing(path) as partial:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))


def write_output(path: Path, content: str | bytes | Iterable[Sequence[object]]) -> None:
    """Write a file that the user names, whole or not at all, in a folder that is made if it is missing.

    content: text, bytes, or the rows of a CSV file, its header first.
    """
    if not isinstance(content, (str, bytes)):
        text = io.StringIO(newline="")
        csv.writer(text).writerows(content)
        content = text.getvalue()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def write_json(path: Path, content: Any) -> None:
    """Write an indented JSON file by write-then-rename."""
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a compressed .npz by write-then-rename."""
    with replacing(path) as partial, open(partial, "wb") as file:
        np.savez_compressed(file, **dict(arrays))  # type: ignore[arg-type]


def sync_folder(path: Path) -> None:
    """Make renames in this folder durable (Windows has no such call and needs none)."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- reading --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a failed read of `path` into a FinesslError."""
    try:
        yield
    except OSError as error:
        raise FinesslError(f"cannot read {path}: {error.strerror or error}.") from error


def regular(path: Path) -> os.stat_result:
    """The status of a file; an error for a pipe or a device, whose reading may never end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedFile(f"{path} is not a regular file.")
    return status


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with reading(path):
        status = regular(path)
        if status.st_size > limit:
            raise DamagedFile(f"{path} has {status.st_size:,} bytes, more than such a file can have.")
        return path.read_bytes()


def read_json(path: Path, schema: type[T]) -> T:
    """The content of a JSON file, checked against `schema`; an error says which entry is wrong."""
    content = read_bytes(path, MAX_JSON_BYTES)
    try:
        return TypeAdapter(schema).validate_python(json.loads(content.decode("utf-8", "surrogateescape")), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedFile(f"{path} is damaged: {f'{where}: ' if where else ''}{first['msg']}.") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: it is not valid JSON ({error}).") from error


def read_arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz; an error if one of `names` is missing. Sizes are checked before memory is allocated, and
    Python objects are refused: nothing in the file is executed."""
    with reading(path):
        if not path.is_file():
            raise FinesslError(f"there is no file {path}.")
        try:
            with zipfile.ZipFile(path) as archive:
                arrays = {info.filename.removesuffix(".npy"): read_array(archive, info) for info in archive.infolist()}
        except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError) as error:
            raise DamagedFile(f"{path} is damaged: {error}.") from error
    if missing := [name for name in names if name not in arrays]:
        raise DamagedFile(f"{path} is damaged: it holds no {missing[0]}.")
    return arrays


def read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as file:
        version = npy.read_magic(file)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = header(file)
        if dtype.hasobject:
            raise ValueError(f"{info.filename} holds Python objects")
        size = dtype.itemsize
        for length in shape:  # Python integers: no overflow
            size *= length
        if size > MAX_ARRAY_BYTES or size != info.file_size - file.tell():
            raise ValueError(f"{info.filename} has another size than its header says")
    with archive.open(info) as file:
        return npy.read_array(file, allow_pickle=False)


def sha256(path: Path) -> str:
    with reading(path):
        regular(path)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
