"""The buffers that a pixel store is built in: in memory, or in files that survive an interruption.

On disk a store is a folder: pixels.bin and .npy files for offsets, sizes and the state of each image. It is built in a
folder of its own ("….part") and renamed when complete, so a store is either whole or not there. While building, pixels
reach the disk before the note that they did; an interrupted build goes on from its notes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from finessl.errors import FinesslError

try:
    import fcntl
except ImportError:  # Windows: without the lock two builds of one store at once would only waste work
    fcntl = None  # type: ignore[assignment]

TODO, DONE, FAILED = 0, 1, 2
VERSION = 1


class PixelBuffer:
    """Room for N images at known offsets, in memory."""

    def __init__(self, offsets: np.ndarray) -> None:
        count = len(offsets) - 1
        self.offsets = offsets  # int64 [N + 1]
        self.pixels = np.zeros(int(offsets[-1]), np.uint8)
        self.sizes = np.zeros((count, 2), np.int32)  # written when an image is decoded: rotation may swap the sides
        self.state = np.zeros(count, np.uint8)
        self.failures: list[tuple[int, str]] = []

    def note(self, indices: np.ndarray, failures: list[tuple[int, str]]) -> None:
        """These images are decoded, but for the failures."""
        self.failures += failures
        self.state[indices] = DONE
        self.state[[i for i, _ in failures]] = FAILED


class PixelFile(PixelBuffer):
    """The same in files under `folder`, memory-mapped."""

    def __init__(self, folder: Path, mode: Literal["r", "r+"]) -> None:
        """ValueError, EOFError or OSError when the files are damaged."""
        self.folder = folder
        self.offsets, self.sizes, self.state = (
            np.load(folder / f"{name}.npy", mmap_mode=mode) for name in ("offsets", "sizes", "state")
        )
        if (folder / "pixels.bin").stat().st_size != self.offsets[-1]:
            raise ValueError("cut short")
        empty = not self.offsets[-1]  # nothing can be mapped
        self.pixels = np.zeros(0, np.uint8) if empty else np.memmap(folder / "pixels.bin", np.uint8, mode)
        with open(folder / "failures.jsonl", encoding="ascii") as file:
            noted = [json.loads(line) for line in file if line.endswith("\n")]
        self.failures = sorted({(int(i), str(reason)) for i, reason in noted})

    @classmethod
    def open(cls, folder: Path) -> PixelFile | None:
        """A complete store, if there is one."""
        return cls._open(folder, "r")

    @classmethod
    def resume(cls, folder: Path) -> PixelFile | None:
        """What an interrupted build has left, if anything."""
        return cls._open(part_of(folder), "r+") if (part_of(folder) / "ready").is_file() else None

    @classmethod
    def _open(cls, folder: Path, mode: Literal["r", "r+"]) -> PixelFile | None:
        if folder.is_dir():
            try:
                return cls(folder, mode)
            except (OSError, ValueError, EOFError):  # damaged from outside: to be built again
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
            np.save(part / "offsets.npy", offsets)
            np.save(part / "sizes.npy", np.zeros((count, 2), np.int32))
            np.save(part / "state.npy", np.zeros(count, np.uint8))
            (part / "failures.jsonl").touch()
            with open(part / "pixels.bin", "wb") as file:
                file.truncate(needed)
                if needed and hasattr(os, "posix_fallocate"):  # a full disk is an error now, not a crash in the map
                    os.posix_fallocate(file.fileno(), 0, needed)
            (part / "ready").touch()
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise cannot_write(part.parent, error) from error
        return cls(part, "r+")

    def note(self, indices: np.ndarray, failures: list[tuple[int, str]]) -> None:
        for array in (self.pixels, self.sizes):
            if isinstance(array, np.memmap):
                array.flush()
        with open(self.folder / "failures.jsonl", "a", encoding="ascii") as file:
            file.writelines(json.dumps(failure) + "\n" for failure in failures)
            file.flush()
            os.fsync(file.fileno())
        super().note(indices, failures)
        if isinstance(self.state, np.memmap):
            self.state.flush()

    def finish(self) -> PixelFile:
        """Complete: take the final name and open read-only."""
        final = self.folder.with_suffix("")
        if self.folder != final:
            os.replace(self.folder, final)
            (final / "ready").unlink()
        return PixelFile(final, "r")


def cannot_write(folder: Path, error: OSError) -> FinesslError:
    return FinesslError(
        f"cannot write decoded images to {folder}: {error.strerror or error}. "
        "Free some space, choose another cache folder or a smaller image size."
    )


def part_of(folder: Path) -> Path:
    return folder.with_suffix(".part")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Held while building; a second process that builds the same store waits here for the first."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = open(folder.with_suffix(".lock"), "w")  # noqa: SIM115
    except OSError as error:
        raise cannot_write(folder.parent, error) from error
    with file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
