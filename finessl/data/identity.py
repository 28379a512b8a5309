"""Digests of image content. Names and file sizes do not notice an image that was replaced."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from finessl.data.decoding import ImageError
from finessl.data.images import Images

SAMPLE = 1_000  # images
KEY = 16  # bytes of an image's digest
READERS = 8  # threads that read files: most of the time they wait for the disk


def content_digest(images: Images, sample: int = SAMPLE, always: np.ndarray | None = None) -> str:
    """Digest of the content of up to `sample` images, evenly spaced, and of those at the positions `always`.

    It does not depend on the location of the images or on their times. Of each image an excerpt is read (`Images.excerpt`).
    A change to an image outside the sample is not noticed.
    """
    chosen = np.linspace(0, len(images) - 1, min(sample, len(images))).astype(np.int64)
    if always is not None:
        chosen = np.union1d(chosen, always)
    digest = hashlib.blake2b(f"{len(images)}".encode(), digest_size=16)
    for i in chosen.tolist():
        try:
            part = images.excerpt(i)
        except ImageError:
            part = b"unreadable"
        digest.update(f"\0{i} {len(part)}\0".encode())
        digest.update(part)
    return digest.hexdigest()


def image_digests(images: Images, positions: Iterable[int]) -> Iterator[tuple[int, bytes | ImageError]]:
    """(position, digest of an excerpt of the image, or why it cannot be read)."""

    def digest(i: int) -> tuple[int, bytes | ImageError]:
        try:
            return i, hashlib.blake2b(images.excerpt(i), digest_size=KEY).digest()
        except ImageError as error:
            return i, error

    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(digest, positions)


def written_digest(images: Images) -> str:
    """Digest of the modification times of all files; "" without files. For caches on this machine: unlike `content_digest` it
    notices a change to any image; it also changes when files are copied."""
    files = getattr(images, "files", None)
    if files is None:
        return ""
    times = array("q")
    for path in files():
        try:
            times.append(os.stat(path).st_mtime_ns)
        except OSError:
            times.append(-1)
    return hashlib.blake2b(times.tobytes(), digest_size=16).hexdigest()
