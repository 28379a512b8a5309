"""The folder of parts: what it holds, who writes to it, which parts are whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from finessl.errors import FinesslError
from finessl.inference.bulk.parts import Part
from finessl.inference.bulk.worker import Settings
from finessl.runtime.files import read_json, sha256, write_json

MANIFEST = "predictions.json"


@dataclass(frozen=True)
class Checked:
    """A part that is whole."""

    images: int  # that were predicted
    labeled: int  # of these, with a label
    broken: list[tuple[str, str]]  # (path, reason) of those that were not


def open_folder(out: Path, settings: Settings, parts: list[Part], classes: list[str]) -> None:
    """Make the folder for these predictions, or check that it holds the same ones."""
    digest = hashlib.sha256(json.dumps([asdict(part) for part in parts]).encode()).hexdigest()
    folder = Path(settings.run)
    folder = folder if (folder / "classifier.json").exists() else folder / "classifier"
    about = {
        "classifier": sha256(folder / "classifier.json"),
        "inputs": digest,
        "device": settings.device,
        "precision": settings.precision,
        "top": settings.top,
        "min_confidence": settings.min_confidence,
        "coverage": settings.coverage,
        "embeddings": settings.embed or None,
    }
    manifest = out / MANIFEST
    if manifest.exists():
        there = read_json(manifest, dict[str, Any])
        if changed := [name for name, value in about.items() if there.get(name) != value]:
            raise FinesslError(
                f"{out} holds predictions with other settings ({', '.join(changed)}); choose another --out, or remove it."
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FinesslError(f"{out} exists already and holds no predictions; choose another --out.")
    out.mkdir(parents=True, exist_ok=True)
    write_json(manifest, {**about, "classes": classes, "parts": len(parts)})


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Only one command at a time writes to a folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    place = out.absolute()
    if not place.name:
        raise FinesslError(f"cannot write to {out}: name a new folder for --out.")
    lock = FileLock(place.with_name(f".{place.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise FinesslError(
            f"another command is writing to {out}; wait for its end, or choose another --out."
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()


def part_file(out: Path, number: int) -> Path:
    return out / f"part-{number:05d}.parquet"


def read_part(path: Path, columns: list[str] | None = None) -> Any:
    """The part as a pyarrow table, its checksums verified. None if it is missing or damaged."""
    from pyarrow import ArrowException, parquet

    if not path.is_file():  # nor a pipe, which would never end
        return None
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read(columns)
    except (OSError, ArrowException, ValueError):
        return None


def check_part(path: Path) -> Checked | None:
    """None if the part is missing or damaged, in any column."""
    from pyarrow import compute

    if (table := read_part(path)) is None:
        return None
    try:
        broken = table.filter(compute.is_null(table["confidence"]))
        images = len(table) - len(broken)
        if json.loads(table.schema.metadata[b"finessl"]) != {"images": images, "broken": len(broken)}:
            return None
        labeled = len(table) - table["label"].null_count
        reasons = zip(broken["path"].to_pylist(), broken["error"].to_pylist(), strict=True)
        return Checked(images, labeled, list(reasons))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
