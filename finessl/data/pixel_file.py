"""Buffers of a pixel store: in memory, or in files that survive an interruption.

On disk a store is a folder: pixels.bin, .npy files with offset, size, state and checksum of each image, and store.json with a
digest of these. It is built under the name "….part" and renamed when complete: a store is whole or absent. During the build
pixels are synchronised to disk before their state is, so that an interrupted build resumes. A damaged store is removed and
built again (`cache.py` limits and lists the stores).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from filelock import FileLock

from finessl.errors import FinesslError

TODO, DONE, FAILED = 0, 1, 2
VERSION = 2
ARRAYS = {"offsets": np.int64, "sizes": np.int32, "state": np.uint8, "sums": np.uint32}
MANIFEST, READY = "store.json", "ready"


class PixelBuffer:
    """N images at known offsets, in memory."""

    def __init__(self, offsets: np.ndarray) -> None:
        count = len(offsets) - 1
        self.offsets = offsets  # int64 [N + 1]
        self.pixels = np.zeros(int(offsets[-1]), np.uint8)
        self.sizes = np.zeros((count, 2), np.int32)  # set when an image is decoded: EXIF rotation may swap the sides
        self.state = np.zeros(count, np.uint8)
        self.sums: np.ndarray | None = None  # uint32 [N], CRC-32 of each image's pixels; in files only
        self.failures: list[tuple[int, str]] = []

    def put(self, i: int, pixels: np.ndarray) -> bool:
        """Store an image; False if its size is not the planned one."""
        slot = self.pixels[self.offsets[i] : self.offsets[i + 1]]
        if pixels.size != slot.size:
            return False
        slot[:] = pixels.reshape(-1)
        self.sizes[i] = pixels.shape[:2]
        if self.sums is not None:
            self.sums[i] = checksum(slot)
        return True

    def note(self, indices: np.ndarray, failures: list[tuple[int, str]]) -> None:
        """Record that these images are decoded, except for the failures."""
        self.failures += failures
        self.state[indices] = DONE
        self.state[[i for i, _ in failures]] = FAILED


class PixelFile(PixelBuffer):
    """N images in memory-mapped files under `folder`."""

    def __init__(self, folder: Path, mode: Literal["r", "r+"]) -> None:
        """Raises ValueError, EOFError, KeyError or OSError if the files are damaged."""
        self.folder = folder
        self.offsets, self.sizes, self.state, self.sums = (
            np.load(folder / f"{name}.npy", mmap_mode=mode) for name in ARRAYS
        )
        self.check()
        empty = not self.offsets[-1]  # an empty file cannot be mapped
        self.pixels = np.zeros(0, np.uint8) if empty else np.memmap(folder / "pixels.bin", np.uint8, mode)
        with open(folder / "failures.jsonl", encoding="ascii") as file:
            lines = [json.loads(line) for line in file if line.endswith("\n")]
        self.failures = sorted({(int(i), str(reason)) for i, reason in lines})
        if mode == "r":
            facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if facts["version"] != VERSION or facts["digest"] != self.digest():
                raise ValueError("damaged")
            os.utime(folder / MANIFEST)  # time of the last use

    def check(self) -> None:
        """ValueError if the arrays are inconsistent: reading by them could leave the file."""
        count = len(self.offsets) - 1
        for (name, kind), shape in zip(ARRAYS.items(), [(count + 1,), (count, 2), (count,), (count,)], strict=True):
            array = getattr(self, name)
            if array.dtype != kind or array.shape != shape:
                raise ValueError(f"{name} has another form")
        spans, sides = np.diff(self.offsets), np.asarray(self.sizes, np.int64)
        done = np.asarray(self.state) == DONE
        if self.offsets[0] != 0 or (spans < 0).any() or (sides < 0).any():
            raise ValueError("offsets or sizes are out of order")
        if (sides[done].prod(1) * 3 != spans[done]).any():
            raise ValueError("sizes and offsets differ")
        if (self.folder / "pixels.bin").stat().st_size != self.offsets[-1]:
            raise ValueError("cut short")

    def digest(self) -> str:
        """Digest of everything but the pixels, which have checksums of their own."""
        state = hashlib.blake2b(digest_size=16)
        for name in ARRAYS:
            state.update(np.ascontiguousarray(getattr(self, name)).data)
        state.update(json.dumps(self.failures).encode())
        return state.hexdigest()

    @classmethod
    def open(cls, folder: Path) -> PixelFile | None:
        """The complete store, or None."""
        return cls._open(folder, "r")

    @classmethod
    def resume(cls, folder: Path) -> PixelFile | None:
        """The store of an interrupted build, or None."""
        return cls._open(part_of(folder), "r+") if (part_of(folder) / READY).is_file() else None

    @classmethod
    def _open(cls, folder: Path, mode: Literal["r", "r+"]) -> PixelFile | None:
        if folder.is_dir():
            try:
                return cls(folder, mode)
            except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError):  # damaged: build it again
                shutil.rmtree(folder, ignore_errors=True)
        return None

    @classmethod
    def create(cls, folder: Path, offsets: np.ndarray) -> PixelFile:
        part, count, needed = part_of(folder), len(offsets) - 1, int(offsets[-1])
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            if (free := shutil.disk_usage(part).free) < needed:
                raise OSError(errno.ENOSPC, f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free")
            np.save(part / "offsets.npy", offsets.astype(np.int64))
            np.save(part / "sizes.npy", np.zeros((count, 2), np.int32))
            np.save(part / "state.npy", np.zeros(count, np.uint8))
            np.save(part / "sums.npy", np.zeros(count, np.uint32))
            (part / "failures.jsonl").touch()
            with open(part / "pixels.bin", "wb") as file:
                file.truncate(needed)
                if needed and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, needed)  # a full disk is an error here, not in the mapping
            (part / READY).touch()
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise cannot_write(part.parent, error) from error
        return cls(part, "r+")

    def note(self, indices: np.ndarray, failures: list[tuple[int, str]]) -> None:
        for array in (self.pixels, self.sizes, self.sums):
            if isinstance(array, np.memmap):
                array.flush()
        with open(self.folder / "failures.jsonl", "a", encoding="ascii") as file:
            file.writelines(json.dumps(failure) + "\n" for failure in failures)
            file.flush()
            os.fsync(file.fileno())
        super().note(indices, failures)
        if isinstance(self.state, np.memmap):
            self.state.flush()

    def finish(self, about: str) -> PixelFile:
        """Rename the complete store to its final name and open it read-only.   about: description for `finessl cache`."""
        final = self.folder.with_suffix("")
        if self.folder != final:
            self.failures = sorted(set(self.failures))
            facts = {"version": VERSION, "about": about, "digest": self.digest()}
            try:
                (self.folder / MANIFEST).write_text(json.dumps(facts) + "\n", encoding="utf-8")
                os.replace(self.folder, final)
                (final / READY).unlink()
            except OSError as error:
                raise cannot_write(final, error) from error
        return PixelFile(final, "r")


def checksum(pixels: np.ndarray) -> int:
    return zlib.crc32(pixels.data)


class CannotWrite(FinesslError):
    """The disk is full, or the folder may not be written."""


def cannot_write(folder: Path, error: OSError) -> CannotWrite:
    return CannotWrite(
        f"cannot write decoded images to {folder}: {error.strerror or error}. "
        "Free some space, choose another cache folder or a smaller image size."
    )


def part_of(folder: Path) -> Path:
    return folder.with_suffix(".part")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock of a build: a second process that builds the same store waits for the first."""
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise cannot_write(folder.parent, error) from error
    try:
        yield
        Path(lock.lock_file).unlink(missing_ok=True)  # a waiting process finds the complete store
    finally:
        lock.release()
