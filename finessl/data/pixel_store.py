"""Decoded pixels: every image is decoded once, reduced once, and stored as uint8.

In memory if they fit; otherwise in a memory-mapped file that is built once, resumes after an interruption and is found again
by fingerprint. Training calls `store.batch(indices, device)`. On a GPU the pixels lie in its memory if there is room
(`to_device`); otherwise the images of a batch are copied there, each once, from pinned memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from finessl.data import pixel_file
from finessl.data.cache import SHARED, make_room, pixel_folder, remove
from finessl.data.dataset import Statistics, readable
from finessl.data.decoding import MAX_ASPECT, ImageError, fitted
from finessl.data.identity import content_digest, written_digest
from finessl.data.images import ArrayImages, Images
from finessl.data.pixel_file import CannotWrite, PixelBuffer, PixelFile, locked
from finessl.data.pixel_ops import Packed, upload
from finessl.data.reading import thread_pool
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Count, no_count

TASK = 8  # images per task of a worker
ROUND = 1 << 30  # bytes decoded between two records of a build's progress
READERS, MIN_PARALLEL_BYTES = 8, 4 << 20  # threads that fetch a batch, from this size on
PIECE = 1 << 28  # bytes that are copied to a device at a time


class PixelStore:
    """uint8 pixels of N images in one flat buffer; `array` is its [N, h, w, 3] view if all images have one size.

    flat: all pixels.   offsets: int64 [N + 1].   sizes: int32 [N, 2], (0, 0) for unreadable images.   failures: (index,
    reason).   file: the buffer on disk; each image is compared with its checksum once.
    """

    def __init__(
        self,
        flat: np.ndarray,
        offsets: np.ndarray,
        sizes: np.ndarray,
        failures: list[tuple[int, str]] | None = None,
        file: PixelFile | None = None,
    ) -> None:
        self.flat, self.offsets, self.sizes = flat, offsets, sizes
        self.failures = failures or []
        self.file = file
        self._verified = np.zeros(len(sizes), bool)
        good = sizes[sizes[:, 0] > 0]
        self.array: np.ndarray | None = None
        if len(good) and (good == good[0]).all() and len(flat) == len(sizes) * int(good[0].prod()) * 3:
            self.array = flat.reshape(len(sizes), *good[0], 3)
        self._pool: ThreadPoolExecutor | None = None
        self._resident: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        return int(self.flat.nbytes)

    @property
    def resident(self) -> bool:
        """Are the pixels in the device's memory?"""
        return self._resident is not None

    def batch(self, indices: np.ndarray, device: torch.device) -> Tensor | Packed:
        """Images for `pixel_ops.resample` on the device: [n, H, W, 3] as from `fetch`, or packed where they lie."""
        if device.type != "cuda" or (self.resident and self.array is not None):
            return self.fetch(indices, device)
        if self._resident is None:
            return self.packed(indices, device)
        return Packed(self._resident, self.offsets[indices], self._sizes(indices))

    def packed(self, indices: np.ndarray, device: torch.device) -> Packed:
        """A copy of the images on the device, each once; a strong view mostly has the image of a weak one. From a GPU's
        pinned memory the copy is asynchronous."""
        sizes = self._sizes(indices)
        wanted, position = np.unique(indices, return_inverse=True)
        start = np.concatenate([[0], np.cumsum(self.offsets[wanted + 1] - self.offsets[wanted])])
        host = torch.empty(int(start[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
        pixels = host.numpy()

        def copy(rows: range) -> None:
            for row in rows:
                pixels[start[row] : start[row + 1]] = self.image(int(wanted[row])).reshape(-1)

        self._in_threads(copy, len(wanted), len(pixels))
        return Packed(host.to(device, non_blocking=True), start[position.reshape(-1)], sizes)

    def fetch(self, indices: np.ndarray, device: torch.device | str | None = None) -> Tensor:
        """uint8 [n, H, W, 3], each image in the upper left corner; `sizes[indices]` are their heights and widths."""
        if self._resident is not None and self.array is not None:
            return self._resident.index_select(0, upload(torch.as_tensor(indices), self._resident.device))
        indices = np.asarray(indices)
        return upload(torch.from_numpy(self._gather(indices, self._sizes(indices))), torch.device(device or "cpu"))

    def _sizes(self, indices: np.ndarray) -> np.ndarray:
        sizes = self.sizes[indices]
        if len(sizes) and sizes.min() == 0:
            raise FinesslError(f"image {indices[sizes.min(1) == 0][0]} of the store could not be decoded.")
        return sizes

    def _gather(self, indices: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """One indexing operation if possible, else image by image."""
        if self.array is not None and not isinstance(self.flat, np.memmap):
            return self.array[indices]
        pixels = np.zeros((len(indices), *sizes.max(0, initial=0), 3), np.uint8)

        def copy(rows: range) -> None:
            for row in rows:
                height, width = sizes[row]
                pixels[row, :height, :width] = self.image(int(indices[row]))

        self._in_threads(copy, len(indices), pixels.nbytes)
        return pixels

    def _in_threads(self, work: Callable[[range], None], count: int, size: int) -> None:
        """`work` on parts of range(count). NumPy copies without the interpreter lock, so that several threads wait for the
        disk at once.   size: bytes; few are not worth the threads."""
        if size < MIN_PARALLEL_BYTES:
            work(range(count))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS)
        list(self._pool.map(work, tasks(count, -(-count // READERS))))

    def image(self, i: int) -> np.ndarray:
        """uint8 [h, w, 3], without a copy."""
        self._verify(i)
        return self.flat[self.offsets[i] : self.offsets[i + 1]].reshape(*self.sizes[i], 3)

    def _verify(self, i: int) -> None:
        """Compare an image on disk with its checksum when it is first read."""
        if self.file is None or self.file.sums is None or self._verified[i] or not self.sizes[i, 0]:
            return
        if pixel_file.checksum(self.flat[self.offsets[i] : self.offsets[i + 1]]) != self.file.sums[i]:
            remove(self.file.folder)
            raise FinesslError(
                f"the decoded images in {self.file.folder} are damaged and have been removed. Run the same command again: "
                "it decodes the images once more."
            )
        self._verified[i] = True

    def statistics(self, sample: int = 5_000) -> Statistics:
        """Mean and standard deviation per channel, of values in 0…1, over `sample` evenly spaced images."""
        good = np.flatnonzero(self.sizes[:, 0])
        chosen = good[np.linspace(0, len(good) - 1, min(sample, len(good))).astype(int)]
        sums = np.zeros((2, 3))
        for i in chosen:
            values = self.image(int(i)).reshape(-1, 3) / 255
            sums += values.mean(0), (values**2).mean(0)  # every image has the same weight, independent of its size
        mean, square = sums / max(len(chosen), 1)
        return tuple(mean.tolist()), tuple(np.sqrt(square - mean**2).tolist())  # type: ignore[return-value]

    def to_device(self, device: torch.device | str) -> PixelStore:
        """Copy all pixels to the device; `batch` then reads them there without a synchronisation."""
        target = torch.device(device)

        def verify(part: range) -> None:
            for i in part:
                self._verify(i)

        self._in_threads(verify, len(self), self.nbytes)
        resident = torch.empty(self.nbytes, dtype=torch.uint8, device=target)
        for first in range(0, self.nbytes, PIECE):
            piece = self.flat[first : first + PIECE]
            host = torch.empty(len(piece), dtype=torch.uint8, pin_memory=target.type == "cuda")
            pixels = host.numpy()

            def copy(part: range, piece: np.ndarray = piece, pixels: np.ndarray = pixels) -> None:
                pixels[part.start : part.stop] = piece[part.start : part.stop]

            self._in_threads(copy, len(piece), len(piece))
            resident[first : first + len(piece)].copy_(host, non_blocking=True)
        self._resident = resident if self.array is None else resident.view(self.array.shape)
        return self

    @classmethod
    def from_array(cls, array: np.ndarray) -> PixelStore:
        """uint8 [N, h, w, 3], not copied."""
        count, height, width, _ = array.shape
        offsets = np.arange(count + 1, dtype=np.int64) * (height * width * 3)
        return cls(array.reshape(-1), offsets, np.tile(np.array([height, width], np.int32), (count, 1)))

    @classmethod
    def build(
        cls,
        images: Images,
        *,
        shorter: int | None = None,
        square: int | None = None,
        cache_dir: Path | None = None,
        memory_limit_bytes: int | None = None,
        workers: int | None = None,
        progress: Count = no_count,
    ) -> PixelStore:
        """Decode `images`. The attribute `failures` lists unreadable ones.

        shorter, square: size in pixels, as in `decoding.fitted`.   cache_dir: folder for files; None: the cache.
        memory_limit_bytes: size from which pixels go to a file; None: `memory_limit`.   workers: threads.
        """
        if isinstance(images, ArrayImages) and len(images):
            size = images.size(0)
            if fitted(*size, shorter=shorter, square=square) == size:
                return cls.from_array(images.array)
        fit = Fit(images, shorter, square)
        folder = pixel_folder(cache_dir) / fit.identity()
        buffer: PixelBuffer | None = PixelFile.open(folder)
        if buffer is None:
            limit = memory_limit() if memory_limit_bytes is None else memory_limit_bytes
            with thread_pool(workers) as pool:
                progress(0, len(images))
                begun = PixelFile.resume(folder)
                offsets = fit.plan(pool) if begun is None else begun.offsets
                fits = offsets[-1] <= limit
                shared = memory_limit_bytes is None and bool(os.environ.get(SHARED))
                with contextlib.suppress(CannotWrite) if fits else contextlib.nullcontext():
                    buffer = None if fits and not shared else fit.to_file(folder, offsets, pool, progress)
                if buffer is None:
                    buffer = PixelBuffer(offsets)
                    fit.decode(buffer, pool, progress)
        file = buffer if isinstance(buffer, PixelFile) else None
        return cls(buffer.pixels, buffer.offsets, buffer.sizes, sorted(buffer.failures), file)


class Fit:
    """Images and their target size. Threads decode: Pillow releases the interpreter lock."""

    def __init__(self, images: Images, shorter: int | None, square: int | None) -> None:
        self.images, self.shorter, self.square = images, shorter, square

    def identity(self) -> str:
        """Digest of the images' names, sizes, content and modification times: an image replaced in place is decoded again."""
        what = (self.images.fingerprint(), content_digest(self.images), written_digest(self.images))
        text = f"{pixel_file.VERSION} {' '.join(what)} {self.shorter} {self.square} {MAX_ASPECT}"
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def about(self) -> str:
        """Description for `finessl cache`."""
        form = f"{self.square}×{self.square}" if self.square else f"shorter side {self.shorter or 'as it is'}"
        return f"{len(self.images):,} images, {form}, from {readable(self.images.key(0))}"

    def plan(self, pool: ThreadPoolExecutor) -> np.ndarray:
        """Byte offset of each image, from its header. If all readable images have one size, unreadable ones get a slot of that
        size too, so that the store is one regular array."""

        def sizes_of(task: range) -> list[int]:
            found = []
            for i in task:
                try:
                    height, width = fitted(*self.images.size(i), shorter=self.shorter, square=self.square)
                    found.append(height * width * 3)
                except ImageError:
                    found.append(0)
            return found

        sizes = np.array([size for task in pool.map(sizes_of, tasks(len(self.images), 256)) for size in task], np.int64)
        if len(known := np.unique(sizes[sizes > 0])) == 1:
            sizes[:] = known[0]
        return np.concatenate([[0], np.cumsum(sizes)])

    def to_file(self, folder: Path, offsets: np.ndarray, pool: ThreadPoolExecutor, progress: Count) -> PixelFile:
        """The images decoded into files, by this process or by another one that has begun or finished meanwhile."""
        with locked(folder):
            buffer = PixelFile.open(folder) or PixelFile.resume(folder)
            if buffer is None:
                make_room(folder.parent, int(offsets[-1]), keep=folder)
                buffer = PixelFile.create(folder, offsets)
            self.decode(buffer, pool, progress)
            return buffer.finish(self.about())

    def decode(self, buffer: PixelBuffer, pool: ThreadPoolExecutor, progress: Count) -> None:
        """Every image that the buffer lacks, in rounds; the buffer takes note of each round."""
        todo = np.flatnonzero(buffer.state == pixel_file.TODO)
        for first, last in rounds(np.diff(buffer.offsets)[todo]):
            part, failures = todo[first:last], []
            results = pool.map(lambda task: self.decode_some(buffer, task), np.array_split(part, -(-len(part) // TASK)))
            done = len(self.images) - len(todo) + first
            for count, failed in results:
                failures += failed
                done += count
                progress(done, len(self.images))
            buffer.note(part, failures)

    def decode_some(self, buffer: PixelBuffer, indices: np.ndarray) -> tuple[int, list[tuple[int, str]]]:
        failures = []
        for i in indices.tolist():
            try:
                if not buffer.put(i, self.images.read(i, shorter=self.shorter, square=self.square)):
                    raise ImageError("broken: its header gives another size than its pixels have")
            except ImageError as error:
                failures.append((i, str(error)))
        return len(indices), failures


def rounds(sizes: np.ndarray) -> Iterator[tuple[int, int]]:
    """Cuts a sequence of images into runs of about ROUND bytes."""
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // ROUND)) + 1
    bounds = [0, *ends.tolist(), len(sizes)]
    return ((first, last) for first, last in zip(bounds, bounds[1:], strict=False) if last > first)


def tasks(count: int, size: int = TASK) -> list[range]:
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def memory_limit() -> int:
    """Bytes that one copy of the data may take: half of the free memory, divided by the processes of this machine."""
    return free_memory() // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def free_memory() -> int:
    """Bytes that a new process could use: what the system has to spare, within the container's limit."""
    amounts = []
    try:
        with open("/proc/meminfo") as file:
            amounts += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")]
        group = Path("/sys/fs/cgroup")  # version 2, as in today's containers
        if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()).isdigit():
            amounts.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(min(amounts, default=4 << 30), 0)
