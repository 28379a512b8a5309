"""Previews of images as JPEG, kept in one file: 10⁵ small files would be slow to write, copy and delete.

FOLDER/thumbnails/data    JPEGs, one after another
FOLDER/thumbnails/index   one record per JPEG: image, digest of the image's name and size, place, length, checksum
FOLDER/thumbnails/images  fingerprint of the images that the numbers in the index mean

A record is written after its data, and a JPEG whose checksum does not hold is made again.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from finessl.data.decoding import ImageError, opened, to_rgb
from finessl.data.images import FileImages
from finessl.runtime.files import write_atomically, writing
from finessl.runtime.machine import usable_cores

THUMBNAIL, LARGE = 256, 1600  # pixels of the longest side
QUALITY = {THUMBNAIL: 80, LARGE: 88}
RECENT = 64  # large images that are kept in memory
LARGEST_ANSWER = 8 << 20  # bytes of thumbnails
RECORD = np.dtype([("image", "<i4"), ("key", "V16"), ("start", "<i8"), ("length", "<i4"), ("crc", "<u4")])


def preview(images: FileImages, i: int, longest: int) -> bytes:
    """JPEG of at most `longest` pixels, upright, without metadata; ImageError when the image cannot be read."""
    with opened(images.path(i)) as image:
        image.draft("RGB", (2 * longest, 2 * longest))
        image.load()
        small = to_rgb(image)
        small.thumbnail((longest, longest), Image.Resampling.BILINEAR, reducing_gap=2.0)
        small.info.clear()
        target = io.BytesIO()
        small.save(target, "JPEG", quality=QUALITY[longest])
    return target.getvalue()


class Thumbnails:
    def __init__(self, folder: Path, images: FileImages) -> None:
        self.images, self.folder = images, folder / "thumbnails"
        self.lock, self.decoders = threading.Lock(), threading.Semaphore(max(usable_cores(), 2))
        self.broken: dict[int, str] = {}
        self.recent: OrderedDict[int, bytes] = OrderedDict()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.data = open(self.folder / "data", "a+b", buffering=0)  # noqa: SIM115 - open until `close`
            self.index = open(self.folder / "index", "a+b", buffering=0)  # noqa: SIM115
            self.start, self.length, self.crc = self._read()

    def close(self) -> None:
        with self.lock:
            self.data.close()
            self.index.close()

    def digest(self, i: int) -> bytes:
        name = f"{self.images.paths.sizes[i]}\0{self.images.key(i)}".encode("utf-8", "surrogateescape")
        return hashlib.blake2b(name, digest_size=16).digest()

    def _read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """start (−1: none yet), length and checksum of each image's preview."""
        count = len(self.images)
        start, length, crc = np.full(count, -1, np.int64), np.zeros(count, np.int32), np.zeros(count, np.uint32)
        self.index.seek(0)
        content = self.index.read()
        if cut := len(content) % RECORD.itemsize:
            os.ftruncate(self.index.fileno(), len(content) - cut)
        records = np.frombuffer(content[: len(content) - cut], RECORD)
        self.end = os.fstat(self.data.fileno()).st_size
        whole = (records["start"] >= 0) & (records["length"] > 0) & (records["start"] + records["length"] <= self.end)
        records = self._renumbered(records[whole])
        records = records[(records["image"] >= 0) & (records["image"] < count)]
        at = records["image"]
        start[at], length[at], crc[at] = records["start"], records["length"], records["crc"]  # the newest of several
        return start, length, crc

    def _renumbered(self, records: np.ndarray) -> np.ndarray:
        """The records of the present images. Where files were added or removed, they are found by name and size."""
        mark, identity = self.folder / "images", self.images.fingerprint()
        if mark.is_file() and mark.read_bytes() == identity.encode():
            return records
        if len(records):
            number = {self.digest(i): i for i in range(len(self.images))}
            records = records.copy()
            records["image"] = [number.get(key.tobytes(), -1) for key in records["key"]]
            os.ftruncate(self.index.fileno(), 0)
            self.index.write(records[records["image"] >= 0].tobytes())
        write_atomically(mark, identity)
        return records

    def packed(self, i: int) -> bytes | None:
        """The thumbnail of an image, where there is one."""
        if self.start[i] < 0:
            return None
        content = os.pread(self.data.fileno(), int(self.length[i]), int(self.start[i]))
        return content if zlib.crc32(content) == self.crc[i] else None

    def many(self, images: Iterable[int]) -> Iterator[bytes]:
        """Thumbnails, empty where there is none yet, and beyond `LARGEST_ANSWER`."""
        size = 0
        for i in images:
            content = self.packed(i) or b""
            size += len(content)
            yield content if size <= LARGEST_ANSWER else b""

    def get(self, i: int) -> bytes:
        """The thumbnail of an image, made where there is none yet."""
        content = self.packed(i)
        if content is not None:
            return content
        if i in self.broken:
            raise ImageError(self.broken[i])
        try:
            with self.decoders:
                content = preview(self.images, i, THUMBNAIL)
        except ImageError as error:
            self.broken[i] = str(error)
            raise
        self.add(i, content)
        return content

    def add(self, i: int, content: bytes) -> None:
        record = np.array((i, self.digest(i), self.end, len(content), zlib.crc32(content)), RECORD)
        with self.lock:
            if self.data.closed:
                return
            record["start"] = self.end
            try:
                if self.data.write(content) != len(content) or self.index.write(record.tobytes()) != RECORD.itemsize:
                    raise OSError("cut short")
            except OSError:  # a full disk: previews are made on demand
                os.ftruncate(self.data.fileno(), self.end)
                return
            self.length[i], self.crc[i] = len(content), record["crc"]
            self.start[i] = self.end
            self.end += len(content)

    def large(self, i: int) -> bytes:
        with self.lock:
            if i in self.recent:
                self.recent.move_to_end(i)
                return self.recent[i]
        with self.decoders:
            content = preview(self.images, i, LARGE)
        with self.lock:
            self.recent[i] = content
            while len(self.recent) > RECENT:
                self.recent.popitem(last=False)
        return content

    def missing(self) -> np.ndarray:
        there = self.start >= 0
        there[list(self.broken)] = True
        return np.flatnonzero(~there)

    def build(self, stop: threading.Event) -> Iterator[int]:
        """Make all that are missing, on every core; yields how many are done."""

        def make(i: int) -> None:
            if not stop.is_set():
                with suppress(ImageError, ValueError):  # ValueError: closed meanwhile
                    self.get(i)

        waiting = iter(self.missing().tolist())
        done = 0
        with ThreadPoolExecutor(usable_cores(), "thumbnails") as pool:
            while not stop.is_set() and (part := list(islice(waiting, 256))):
                list(pool.map(make, part))
                done += len(part)
                yield done
