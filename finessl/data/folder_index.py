"""The images of a folder, found in one pass: paths, sizes, folders. The index of a large folder is cached."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.decoding import EXTENSIONS, UNREAD, unread_reason
from finessl.data.path_table import PathTable
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Count, no_count

MIN_CACHED = 20_000  # images; smaller folders are read every time, which is fast and sees files that changed in place
VERSION = 2
RUN_MARK = "recipe.toml"  # the file that makes a folder a run directory
JUNK = {"__MACOSX", "@eaDir", "lost+found", "__pycache__", "$RECYCLE.BIN", "System Volume Information"}


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: "img2" before "img10"."""
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def cache_folder() -> Path:
    """The cache: $FINESSL_CACHE, or finessl in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FINESSL_CACHE") or Path(base) / "finessl")


@dataclass
class FolderIndex:
    """The image files under `root`: folders in natural order, a folder's own files before its subfolders'."""

    root: Path
    paths: PathTable
    times: np.ndarray  # int64, last change of each folder (ns)
    ignored: dict[str, int] = field(default_factory=dict)  # other files: extension → count
    unread: list[str] = field(default_factory=list)  # images among them, in formats that are not read

    @property
    def folders(self) -> list[str]:
        return self.paths.folders

    def left_out(self) -> list[tuple[str, str]]:
        """(path, reason) of the images that are not read."""
        return [(path, unread_reason(path)) for path in self.unread]

    def counts(self) -> np.ndarray:
        """Images directly in each folder."""
        return np.bincount(self.paths.folder_of, minlength=len(self.folders))

    @classmethod
    def open(cls, root: Path, *, progress: Count = no_count) -> FolderIndex:
        """The index from the cache if no folder has changed, else by one pass over the disk.

        A file of a large folder that is rewritten under its old name is not noticed: clear the cache after that.
        """
        root = Path(root).resolve()
        stored = cache_folder() / "index" / name_of(root)
        index = cls.load(root, stored)
        if index is None:
            index = cls.scan(root, progress)
            if len(index.paths) >= MIN_CACHED:
                index.store(stored)
        return index

    @classmethod
    def scan(cls, root: Path, progress: Count = no_count) -> FolderIndex:
        folders: list[str] = []
        folder_of, lengths, sizes, times = array("i"), array("q"), array("q"), array("q")
        names, ignored, unread = bytearray(), Counter[str](), list[str]()
        for folder, time, files in walk(root, "", ()):
            for entry in files:
                extension = os.path.splitext(entry.name)[1].lower()
                if extension not in EXTENSIONS:
                    ignored[extension] += 1
                    if extension in UNREAD:
                        unread.append(f"{folder}/{entry.name}" if folder else entry.name)
                    continue
                encoded = os.fsencode(entry.name)
                names += encoded
                lengths.append(len(encoded))
                sizes.append(size_of(entry))
                folder_of.append(len(folders))
                if len(sizes) % 4096 == 0:
                    progress(len(sizes), 0)
            folders.append(folder)
            times.append(time)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(np.array(lengths, np.int64), out=offsets[1:])
        progress(len(sizes), len(sizes))
        blob = np.frombuffer(names, np.uint8) if names else np.empty(0, np.uint8)
        table = PathTable(folders, np.array(folder_of, np.int32), blob, offsets, np.array(sizes, np.int64))
        return cls(root, table, np.array(times, np.int64), dict(ignored), unread)

    def store(self, target: Path) -> None:
        facts = {"version": VERSION, "extensions": sorted(EXTENSIONS), "ignored": self.ignored, "unread": self.unread}
        store_table(target, self.paths, facts, times=self.times)

    @classmethod
    def load(cls, root: Path, stored: Path) -> FolderIndex | None:
        """The cached index; None if a folder has changed since (a file was added, removed or renamed)."""
        try:
            table, facts, (times,) = load_table(stored, "times")
            if facts["version"] != VERSION or facts["extensions"] != sorted(EXTENSIONS):
                return None
            if any(os.stat(root / f).st_mtime_ns != t for f, t in zip(table.folders, times, strict=True)):
                return None
            return cls(root, table, times, facts["ignored"], facts["unread"])
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return None


TABLE = ("folder_of", "names", "offsets", "sizes")  # arrays of a PathTable


def store_table(target: Path, table: PathTable, facts: dict[str, Any], **arrays: np.ndarray) -> None:
    """Write an index to the cache, atomically. Failure (disk full, no permission) is ignored: the next run is slower.

    facts: what JSON can hold.   arrays: more arrays, one per path or folder.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=target.parent))
    except OSError:
        return
    try:
        for name, array in ({name: getattr(table, name) for name in TABLE} | arrays).items():
            np.save(draft / f"{name}.npy", array)
        (draft / "index.json").write_text(json.dumps({**facts, "folders": table.folders}), encoding="ascii")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(draft, target)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)


def load_table(stored: Path, *names: str) -> tuple[PathTable, dict[str, Any], list[np.ndarray]]:
    """What `store_table` wrote: table, facts, and the arrays called `names`. OSError, ValueError, KeyError or EOFError if it is
    missing or damaged."""
    facts = json.loads((stored / "index.json").read_text(encoding="ascii"))
    arrays = [np.load(stored / f"{name}.npy", mmap_mode="r") for name in (*TABLE, *names)]
    return PathTable(facts["folders"], *arrays[: len(TABLE)]), facts, arrays[len(TABLE) :]


def name_of(root: Path) -> str:
    """Name of a folder's index in the cache."""
    return hashlib.blake2b(os.fsencode(root), digest_size=12).hexdigest()


def size_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:  # a broken link: listed here, reported when it is decoded
        return -1


def walk(
    root: Path, folder: str, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, int, list[os.DirEntry[str]]]]:
    """(folder, time of its last change, files) of a folder and its subfolders. Links are followed, but not into a loop. Run
    directories are skipped: `cd photos && finessl train .` puts them next to the classes."""
    path = root / folder
    try:
        status = os.stat(path)
        with os.scandir(path) as found:
            entries = [entry for entry in found if not entry.name.startswith(".") and entry.name not in JUNK]
    except OSError as error:
        raise FinesslError(f"cannot read the folder {path}: {error.strerror}.") from error
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        return
    below = sorted((e for e in entries if is_folder(e) and not holds_runs(Path(e.path))), key=lambda e: natural(e.name))
    files = sorted((e for e in entries if not is_folder(e)), key=lambda e: natural(e.name))
    yield folder, status.st_mtime_ns, files
    for entry in below:
        yield from walk(root, f"{folder}/{entry.name}" if folder else entry.name, (*above, identity))


def holds_runs(path: Path) -> bool:
    """Whether a folder is a run directory, or holds only run directories."""
    if (path / RUN_MARK).is_file():
        return True
    try:
        with os.scandir(path) as found:
            inner = []
            for entry in found:
                if is_folder(entry):
                    inner.append(Path(entry.path))
                elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                    return False
    except OSError:  # `walk` reports it
        return False
    return bool(inner) and all(map(holds_runs, inner))


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link
        return False
