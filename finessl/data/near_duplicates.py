"""Images that are the same, or nearly: content hashes, and difference hashes with thumbnails to confirm.

A difference hash (dHash) shrinks an image to 9×8 grey pixels and keeps, for each of the 64 neighbours in a row, which is
brighter. Resizing, recompression and small edits change few of the bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

MAX_BITS = 3  # in which near hashes differ; then at least one of the four 16-bit quarters is equal
MAX_LEVELS = 6.0  # mean difference of their thumbnails, grey levels (hashes of flat images are meaningless)
THUMBNAIL = 8  # pixels per side
BLOCK = 1 << 18  # pairs compared at a time
WINDOW = 256  # images: if more share a quarter (blank pages), each is compared with its nearest in sorted order


@dataclass
class Signatures:
    """216 bytes per image."""

    content: np.ndarray  # uint64 [N], hash of the file
    difference: np.ndarray  # uint64 [N], dHash
    thumbnail: np.ndarray  # uint8 [N, 8·8·3]

    @classmethod
    def empty(cls, count: int) -> Signatures:
        return cls(
            np.zeros(count, np.uint64), np.zeros(count, np.uint64), np.zeros((count, THUMBNAIL**2 * 3), np.uint8)
        )

    def take(self, indices: np.ndarray) -> Signatures:
        return Signatures(self.content[indices], self.difference[indices], self.thumbnail[indices])

    def copy(self, i: int, source: int) -> None:
        """Set the signature of image i to that of `source`, an image with equal content."""
        for array in (self.content, self.difference, self.thumbnail):
            array[i] = array[source]

    def put(self, i: int, content: int, image: Image.Image) -> None:
        self.content[i] = content
        self.difference[i] = difference_hash(image)
        small = image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR)
        self.thumbnail[i] = np.frombuffer(small.tobytes(), np.uint8)


def content_hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def difference_hash(image: Image.Image) -> np.uint64:
    small = image.convert("L").resize((9, 8), Image.Resampling.BILINEAR)
    grey = np.frombuffer(small.tobytes(), np.uint8).reshape(8, 9)
    return np.packbits(grey[:, 1:] > grey[:, :-1]).view(np.uint64)[0]


def equal_groups(values: np.ndarray) -> list[np.ndarray]:
    """Positions of values that occur more than once, grouped; in order of the first position."""
    order = np.argsort(values, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(values[order])) + 1)
    return sorted((group for group in groups if len(group) > 1), key=lambda group: int(group[0]))


def near_pairs(signatures: Signatures) -> np.ndarray:
    """int64 [P, 2] pairs (i < j) with close hashes and thumbnails and different content.

    Images with equal content are compared once; each copy is then paired with the first image of the other content.
    """
    _, firsts, content = np.unique(signatures.content, return_index=True, return_inverse=True)
    pairs = firsts[near_unique(signatures.take(firsts))]
    if len(firsts) == len(content):
        return np.unique(np.sort(pairs, axis=1), axis=0)
    copies = np.split(np.argsort(content, kind="stable"), np.cumsum(np.bincount(content))[:-1])
    found = [np.empty((0, 2), np.int64)]
    for i, j in pairs.tolist():
        left, right = copies[content[i]], copies[content[j]]
        found.append(np.stack([left, np.full_like(left, right[0])], 1))
        found.append(np.stack([np.full_like(right, left[0]), right], 1))
    return np.unique(np.sort(np.concatenate(found), axis=1), axis=0)


def near_unique(signatures: Signatures) -> np.ndarray:
    """`near_pairs` for images with different content."""
    quarters = signatures.difference[:, None].view(np.uint16)
    found = [np.empty((0, 2), np.int64)]
    for quarter in range(4):
        order = np.lexsort((signatures.difference, quarters[:, quarter]))
        sorted_keys = quarters[order, quarter]
        for shift in range(1, min(len(order), WINDOW)):  # 1, 2, 3 … positions apart, while a pair shares its quarter
            together = np.flatnonzero(sorted_keys[shift:] == sorted_keys[:-shift])
            if not len(together):
                break
            for first in range(0, len(together), BLOCK):
                part = together[first : first + BLOCK]
                found.append(confirm(signatures, order[part], order[part + shift]))
    return np.unique(np.concatenate(found), axis=0)


def confirm(signatures: Signatures, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    different = (signatures.difference[left] ^ signatures.difference[right]).view(np.uint8).reshape(-1, 8)
    bits = np.unpackbits(different, axis=1).sum(1)
    left, right = left[bits <= MAX_BITS], right[bits <= MAX_BITS]
    distance = np.abs(signatures.thumbnail[left].astype(np.int16) - signatures.thumbnail[right]).mean(1)
    pairs = np.stack([left, right], 1)[distance <= MAX_LEVELS]
    return np.sort(pairs, axis=1)


def join_pairs(pairs: np.ndarray) -> list[np.ndarray]:
    """Groups of positions that pairs connect, each in order; in order of their first position."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    members, ends = np.unique(pairs, return_inverse=True)
    left, right = ends.reshape(-1, 2).T
    links = coo_array((np.ones(len(left), bool), (left, right)), shape=(len(members), len(members)))
    _, group_of = connected_components(links, directed=False)
    return [members[group] for group in equal_groups(group_of)]
