"""The cache on disk: decoded images, features, and indexes of large folders and shards. All of it can be rebuilt.

The folder is `cache_folder()`: $FINESSL_CACHE, or the user's cache folder. Decoded images are written only if they do not fit
into memory, or if several runs of a grid read them at the same time ($FINESSL_SHARED_PIXELS). Beyond a limit
($FINESSL_CACHE_GB, default 100 GB) the least recently used ones are removed.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from finessl.data.dataset import count_of
from finessl.data.folder_index import cache_folder
from finessl.errors import FinesslError
from finessl.runtime.files import read_json

LIMIT_GB = 100.0
SHARED = "FINESSL_SHARED_PIXELS"  # set to anything: decoded images go to files, which several processes read
NAME = re.compile(r"[0-9a-f]{24}(\.part|\.npz)?")  # of entries that finessl wrote


@dataclass(frozen=True)
class Entry:
    path: Path
    what: str
    size: int  # bytes
    used: float  # seconds since 1970


def pixel_folder(cache_dir: Path | None = None) -> Path:
    """Folder of decoded images."""
    return Path(cache_dir) if cache_dir is not None else cache_folder() / "pixels"


def limit_bytes() -> int:
    """Largest size of all decoded images."""
    text = os.environ.get("FINESSL_CACHE_GB", "") or str(LIMIT_GB)
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise FinesslError(f"FINESSL_CACHE_GB should be a number of gigabytes, not {text!r}.")
    return int(limit * 1e9)


def entries(cache_dir: Path | None = None) -> list[Entry]:
    """All entries, the most recently used first.   cache_dir: folder of decoded images."""
    found = list(stores(pixel_folder(cache_dir)))
    for kind, what in (("index", "list of the images in a folder"), ("shards", "list of the images in shards")):
        for path in children(cache_folder() / kind):
            found.append(Entry(path, what, size_of(path), modified(path)))
    for path in children(cache_folder() / "features"):
        backbone = read_entry(path / "encoder.json", "backbone") or "of an unknown backbone"
        found.append(Entry(path, f"features: {backbone}", size_of(path), modified(path / "chunks.jsonl")))
    return sorted(found, key=lambda entry: -entry.used)


def read_entry(path: Path, name: str) -> str | None:
    """The value `name` of a JSON file of the cache; None if it is missing or damaged."""
    try:
        return str(read_json(path, dict[str, Any])[name])
    except (FinesslError, KeyError):
        return None


def stores(folder: Path) -> Iterator[Entry]:
    """Decoded images, finished or not."""
    for path in children(folder):
        if not (path / "offsets.npy").is_file():
            continue
        manifest = path / "store.json"
        what = read_entry(manifest, "about") or ("not finished" if path.suffix else "of another version of finessl")
        yield Entry(path, f"decoded images: {what}", size_of(path), modified(manifest if manifest.is_file() else path))


def children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))
    except OSError:
        return []


def size_of(path: Path) -> int:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def make_room(folder: Path, needed: int, keep: Path) -> None:
    """Remove the least recently used decoded images until `needed` more bytes fit within the limit.

    Entries that another process builds are kept; a process that reads a removed entry can read on.
    """
    others = sorted((entry for entry in stores(folder) if entry.path.stem != keep.name), key=lambda entry: entry.used)
    excess = sum(entry.size for entry in others) + needed - limit_bytes()
    for entry in others:
        if excess > 0 and remove(entry.path):
            excess -= entry.size


def remove(path: Path) -> bool:
    """Remove an entry and its lock; False if another process is building it."""
    lock = FileLock(path.with_suffix(".lock"))
    try:
        with lock.acquire(timeout=0):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            Path(lock.lock_file).unlink(missing_ok=True)
    except (Timeout, OSError):
        return False
    return not path.exists()


def clear(cache_dir: Path | None = None) -> tuple[list[Entry], list[Entry]]:
    """Remove everything; (removed, still in use)."""
    found = entries(cache_dir)
    removed = [entry for entry in found if remove(entry.path)]
    for folder in {pixel_folder(cache_dir), *(entry.path.parent for entry in found)}:
        for lock in folder.glob("*.lock"):  # locks without an entry
            if NAME.fullmatch(lock.stem) and not any(lock.with_suffix(s).exists() for s in ("", ".part")):
                remove(lock.with_suffix(""))
    return removed, [entry for entry in found if entry not in removed]


def age(used: float) -> str:
    """ "3 days"."""
    seconds = max(time.time() - used, 0)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return count_of(int(seconds // length), unit)
    return "less than a minute"
