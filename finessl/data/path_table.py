"""File names in little memory: one array of bytes with offsets. 1.3 million paths take about 60 MB, not 600 MB."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PathTable:
    """Relative paths ("folder/name", with "/" on every system) and file sizes; the arrays may be memory maps."""

    folders: list[str]  # "" is the root
    folder_of: np.ndarray  # int32 [N]
    names: np.ndarray  # uint8, all names one after another
    offsets: np.ndarray  # int64 [N + 1]
    sizes: np.ndarray  # int64 [N], bytes of each file

    @classmethod
    def of(cls, paths: Iterable[str], sizes: Iterable[int]) -> PathTable:
        folders: dict[str, int] = {}
        folder_of, names, lengths = [], bytearray(), []
        for path in paths:
            folder, _, name = path.rpartition("/")
            folder_of.append(folders.setdefault(folder, len(folders)))
            encoded = os.fsencode(name)
            names += encoded
            lengths.append(len(encoded))
        offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int64)
        blob = np.frombuffer(bytes(names), np.uint8)
        return cls(list(folders), np.array(folder_of, np.int32), blob, offsets, np.array(list(sizes), np.int64))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> str:
        name = os.fsdecode(self.names[self.offsets[i] : self.offsets[i + 1]].tobytes())
        folder = self.folders[self.folder_of[i]]
        return f"{folder}/{name}" if folder else name

    def __iter__(self) -> Iterator[str]:
        """All paths; several times faster than indexing."""
        names, prefixes = self.names.tobytes(), [f"{folder}/" if folder else "" for folder in self.folders]
        offsets = self.offsets.tolist()
        for i, folder in enumerate(self.folder_of.tolist()):
            yield prefixes[folder] + os.fsdecode(names[offsets[i] : offsets[i + 1]])

    def take(self, indices: np.ndarray) -> PathTable:
        """The paths at these positions. Consecutive positions share the memory of this table."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and np.array_equal(indices, np.arange(indices[0], indices[0] + len(indices))):
            first, last = int(indices[0]), int(indices[-1]) + 1
            start = int(self.offsets[first])
            return PathTable(
                self.folders,
                self.folder_of[first:last],
                self.names[start : int(self.offsets[last])],
                self.offsets[first : last + 1] - start,
                self.sizes[first:last],
            )
        lengths = np.diff(self.offsets)[indices]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        names = np.empty(offsets[-1], np.uint8)
        for first in range(0, len(indices), 1 << 16):  # in blocks: the gather needs 8 bytes per character
            part = slice(first, first + (1 << 16))
            spans = lengths[part]
            where = np.arange(offsets[first], offsets[first + len(spans)])
            shift = np.repeat(self.offsets[indices[part]] - offsets[first : first + len(spans)], spans)
            names[where] = self.names[where + shift]
        return PathTable(self.folders, self.folder_of[indices], names, offsets, self.sizes[indices])

    def fingerprint(self) -> str:
        """Digest of names, order and file sizes, independent of the root and of how the table was made."""
        digest = hashlib.blake2b(digest_size=16)
        bounds = [0, *(np.flatnonzero(np.diff(self.folder_of)) + 1).tolist(), len(self)]
        for start, stop in zip(bounds, bounds[1:], strict=False):
            folder = self.folders[self.folder_of[start]] if len(self) else ""
            digest.update(os.fsencode(f"{folder}\0{stop - start}\0"))
        for array in (np.diff(self.offsets), self.sizes, self.names):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()
