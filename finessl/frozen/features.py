"""Features of a frozen backbone, computed once per image and kept on disk.

An image is known by its content, a backbone by its weights and preprocessing. So a file that moved or was renamed, or
another split of the same images, costs nothing; a file that changed is encoded again.

CACHE/features/<encoder>/rows.f16       float16 rows, in the order in which they were computed
CACHE/features/<encoder>/chunks.jsonl   one line per chunk: its first row, its images' digests, the checksum of its rows
CACHE/features/<encoder>/broken.jsonl   images that cannot be read, and why
CACHE/features/<encoder>/encoder.json   backbone and preprocessing, for the reader

Rows reach the disk before the line that names them, and a chunk whose checksum does not hold is ignored: a killed
process costs the images of one chunk.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import PIL
import torch

from finessl.data.dataset import Dataset, broken_files
from finessl.data.decoding import ImageError
from finessl.data.folder_index import cache_folder
from finessl.data.identity import DIGEST_BYTES, image_digests
from finessl.data.images import Images
from finessl.data.pixel_file import locked
from finessl.data.reading import read_ahead
from finessl.errors import FinesslError
from finessl.models.backbones import Backbone
from finessl.models.build import store_frozen
from finessl.models.forward import forward_pixels
from finessl.runtime.callbacks import Count, Progress, no_count, no_progress

VERSION = 1
CHUNK = 256  # images per line of chunks.jsonl: what a kill costs at most
BATCH = {"cuda": 256}  # images per forward pass; 32 elsewhere
BLOCK = 1 << 15  # rows that are converted at a time


@dataclass(frozen=True)
class Features:
    """The features of a sequence of images."""

    rows: np.ndarray  # float16 [N, dim]; zero where an image is broken
    failures: list[tuple[int, str]]  # (position, reason)
    encoded: int  # images that were computed now; the others were in the cache

    def usable(self) -> np.ndarray:
        """bool [N]: the image could be read."""
        usable = np.ones(len(self.rows), bool)
        usable[[i for i, _ in self.failures]] = False
        return usable


def encode_images(images: Images, encoder: FrozenEncoder, *, progress: Count = no_count) -> Features:
    """Features of all images: from the cache where they are, computed and added to it where they are not."""
    if encoder.parts:
        return join([encode_images(images, part, progress=progress) for part in encoder.parts])
    keys, failures = digests(images)
    with locked(encoder.folder()):  # a second process waits, and then finds the rows of the first
        store = FeatureStore(encoder.folder(), encoder.backbone.dim, encoder.description())
        place = store.find(keys)
        readable, known = np.asarray(keys.any(1)), store.broken()
        if known:  # found broken before
            failures += [(i, known[key]) for i, key in enumerate(map(bytes, keys)) if key in known]
            readable[[i for i, _ in failures]] = False
        _, first = np.unique(as_text(keys), return_index=True)  # equal images are encoded once
        todo = np.sort(first[(place[first] < 0) & readable[first]])
        if len(todo):
            progress(0, len(todo))
        done = 0
        for positions, rows, broken in encoder.encode(images, todo):
            store.append(keys[positions], rows)
            store.add_broken({keys[i].tobytes(): reason for i, reason in broken})
            failures += broken
            done += len(positions) + len(broken)
            progress(done, len(todo))
        place = store.find(keys)
    unreadable = {i for i, _ in failures}
    reasons = {keys[i].tobytes(): reason for i, reason in failures}
    for i in np.flatnonzero((place < 0) & readable).tolist():
        if i not in unreadable:  # a copy of a broken image
            failures.append((i, reasons.get(keys[i].tobytes(), "broken")))
    return Features(store.gather(place), sorted(failures), len(todo))


def encode_part(dataset: Dataset, part: str, encoder: FrozenEncoder, progress: Progress = no_progress) -> Features:
    """Features of one part of a data set, which then excludes the images that cannot be read.   part: "train" or "test"."""
    images = dataset.train if part == "train" else dataset.test
    assert images is not None
    features = encode_images(
        images, encoder, progress=partial(progress, f"{encoder.backbone.name}: encoding {part} images")
    )
    dataset.exclude(part, features.failures)
    if not features.usable().any():
        broken = broken_files([(images.key(i), reason) for i, reason in features.failures])
        raise FinesslError(f"{dataset.name}: none of the {len(images):,} {part} images can be read. {broken}")
    return features


def join(found: Sequence[Features]) -> Features:
    """Features of joined backbones, from those of their parts: as models/joint.py computes them."""
    rows = np.empty((len(found[0].rows), sum(part.rows.shape[1] for part in found)), np.float16)
    for start in range(0, len(rows), BLOCK):
        parts = [part.rows[start : start + BLOCK].astype(np.float32) for part in found]
        unit = [part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12) for part in parts]
        rows[start : start + BLOCK] = np.concatenate(unit, axis=1)
    failures = dict(failure for part in found for failure in part.failures)
    return Features(rows, sorted(failures.items()), sum(part.encoded for part in found))


def count_missing(images: Images, encoder: FrozenEncoder) -> int:
    """How many images are not in the cache."""
    if encoder.parts:
        return max(count_missing(images, part) for part in encoder.parts)
    if not encoder.folder().is_dir():
        return len(images)
    keys, _ = digests(images)
    return int((FeatureStore(encoder.folder(), encoder.backbone.dim, encoder.description()).find(keys) < 0).sum())


def digests(images: Images) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """uint8 [N, DIGEST_BYTES] of what each image contains (zero where it cannot be read), and why some cannot."""
    keys, failures = np.zeros((len(images), DIGEST_BYTES), np.uint8), []
    for i, digest in image_digests(images, range(len(images))):
        if isinstance(digest, ImageError):
            failures.append((i, str(digest)))
        else:
            keys[i] = np.frombuffer(digest, np.uint8)
    return keys, failures


class FrozenEncoder:
    """A backbone that only computes: images → features, in batches, with the next batch decoded meanwhile. Joined backbones
    of one image size share the features that are kept of their parts.

    precision: fp32, bf16, fp16 or fp8. The backbone is converted: use it here alone.
    """

    def __init__(self, backbone: Backbone, device: torch.device, precision: str = "fp32") -> None:
        self.backbone, self.device, self.precision = backbone, device, precision
        self.weights = backbone.sha256()  # before it is converted
        self.batch = BATCH.get(device.type, 32)
        shared = all(part.image_size == backbone.image_size for part in backbone.parts)
        self.parts = [FrozenEncoder(part, device, precision) for part in backbone.parts] if shared else []
        backbone.encoder.to(device).eval().requires_grad_(False)
        store_frozen(backbone.encoder, precision)

    def description(self) -> dict[str, object]:
        backbone = self.backbone
        return {
            "version": VERSION,
            "backbone": backbone.name,
            "weights": self.weights,
            "image_size": backbone.image_size,
            "mean": list(backbone.mean),
            "std": list(backbone.std),
            "precision": self.precision,
        }

    def identity(self) -> str:
        known = {name: value for name, value in self.description().items() if name != "backbone"}
        return hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=12).hexdigest()

    def folder(self) -> Path:
        """Of its features in the cache."""
        return cache_folder() / "features" / self.identity()

    def encode(
        self, images: Images, positions: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, list[tuple[int, str]]]]:
        """Chunks of (positions, float16 features, broken images), in order."""
        kept: list[int] = []
        rows, broken, left = [], [], len(positions)
        for found, good, failed in read_ahead(images, positions.tolist(), self.backbone.image_size, self.batch):
            kept += found
            broken += failed
            left -= len(found) + len(failed)
            if good:
                rows.append(self.forward(np.stack(good)))
            if len(kept) + len(broken) >= CHUNK or not left:
                joined = np.concatenate(rows) if rows else np.empty((0, self.backbone.dim), np.float16)
                yield np.array(kept, np.int64), joined, broken
                kept, rows, broken = [], [], []

    @torch.inference_mode()
    def forward(self, pixels: np.ndarray) -> np.ndarray:
        """float16 [n, dim] of uint8 [n, S, S, 3]."""
        x, model = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2), self.backbone
        features = forward_pixels(model.encoder, x, model.mean, model.std, self.precision)
        if not bool(torch.isfinite(features).all()):
            raise FinesslError(
                f"the features of {self.backbone.name} are not finite numbers; its weights are damaged, "
                "or it needs --precision fp32."
            )
        return features.clamp(-6e4, 6e4).half().cpu().numpy()


class FeatureStore:
    """Rows of one encoder on disk, found by the images' digests. Hold the lock while appending."""

    def __init__(self, folder: Path, dim: int, description: dict[str, object] | None = None) -> None:
        self.folder, self.dim = folder, dim
        self.row_bytes = 2 * dim
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if description is not None and not (folder / "encoder.json").exists():
                (folder / "encoder.json").write_text(json.dumps(description, indent=2) + "\n", encoding="ascii")
        except OSError as error:
            raise cannot_write(folder, error) from error
        for path in (folder / "rows.f16", folder / "chunks.jsonl", folder / "broken.jsonl"):
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                raise FinesslError(f"{path} is not a regular file. Remove it, or run: finessl cache clear")
        self.keys, self.places = np.empty((0, DIGEST_BYTES), np.uint8), np.empty(0, np.int64)  # sorted by digest
        self.added, self.end = self._read()

    def _read(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
        """Digests and rows of every whole chunk, and the row where the next chunk goes."""
        chunks: list[tuple[np.ndarray, np.ndarray]] = []
        try:
            size = (self.folder / "rows.f16").stat().st_size
            lines = (self.folder / "chunks.jsonl").read_bytes().splitlines(keepends=True)
        except OSError:
            return chunks, 0
        rows = np.memmap(self.folder / "rows.f16", np.uint8, "r") if size else np.empty(0, np.uint8)
        for line in lines:
            try:
                chunk = json.loads(line) if line.endswith(b"\n") else {}
                found = np.frombuffer(base64.b64decode(chunk["keys"]), np.uint8).reshape(-1, DIGEST_BYTES)
                first, last = int(chunk["first"]), int(chunk["first"]) + len(found)
                content = rows[first * self.row_bytes : last * self.row_bytes]
                whole = len(content) == len(found) * self.row_bytes and zlib.crc32(content.data) == chunk["crc"]
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue
            if whole and first >= 0:
                chunks.append((found, np.arange(first, last)))
        return chunks, -(-size // self.row_bytes)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """int64: the row of each digest, −1 where there is none."""
        if self.added:
            joined = np.concatenate([self.keys, *(part for part, _ in self.added)])
            places = np.concatenate([self.places, *(part for _, part in self.added)])
            order = np.argsort(as_text(joined), kind="stable")
            self.keys, self.places, self.added = joined[order], places[order], []
        known, wanted = as_text(self.keys), as_text(keys)
        if not len(known):
            return np.full(len(wanted), -1, np.int64)
        at = np.searchsorted(known, wanted).clip(max=len(known) - 1)
        return np.where(known[at] == wanted, self.places[at], -1)

    def append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Write one chunk: its rows, then the line that names them."""
        if not len(keys):
            return
        content = np.ascontiguousarray(rows, np.float16).tobytes()
        chunk = {"first": self.end, "crc": zlib.crc32(content), "keys": base64.b64encode(keys.tobytes()).decode()}
        try:
            with open(self.folder / "rows.f16", "ab") as file:
                file.truncate(self.end * self.row_bytes)  # whole rows, also after a write that was cut short
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            cut = not ends_with_newline(self.folder / "chunks.jsonl")
            with open(self.folder / "chunks.jsonl", "ab") as file:
                file.write(b"\n" * cut + json.dumps(chunk).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        self.added.append((keys, np.arange(self.end, self.end + len(keys))))
        self.end += len(keys)

    def broken(self) -> dict[bytes, str]:
        """Digest → reason, of images that this version of Pillow could not read."""
        found: dict[bytes, str] = {}
        with contextlib.suppress(OSError):
            for line in (self.folder / "broken.jsonl").read_bytes().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    entry = json.loads(line)
                    if entry["pillow"] == PIL.__version__:
                        found[bytes.fromhex(entry["key"])] = str(entry["reason"])
        return found

    def add_broken(self, reasons: dict[bytes, str]) -> None:
        """Remember images that cannot be read. A line that is not written costs another try."""
        lines = [{"key": key.hex(), "pillow": PIL.__version__, "reason": reason} for key, reason in reasons.items()]
        with contextlib.suppress(OSError), open(self.folder / "broken.jsonl", "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def gather(self, places: np.ndarray) -> np.ndarray:
        """float16 [n, dim]: these rows, without a copy where they are neighbours on disk; zero for −1."""
        if not (places >= 0).any():
            return np.zeros((len(places), self.dim), np.float16)
        # as far as it is needed: the last row of the file may be cut
        rows = np.memmap(self.folder / "rows.f16", np.float16, "r", shape=(int(places.max()) + 1, self.dim))
        if places[0] >= 0 and np.array_equal(places, np.arange(places[0], places[0] + len(places))):
            return rows[places[0] : places[0] + len(places)]
        result = np.zeros((len(places), self.dim), np.float16)
        there = places >= 0
        result[there] = rows[places[there]]
        return result


def as_text(keys: np.ndarray) -> np.ndarray:
    """Digests as values that NumPy sorts and compares fast."""
    return np.ascontiguousarray(keys).view(f"S{DIGEST_BYTES}").reshape(-1)


def ends_with_newline(path: Path) -> bool:
    """Also true of a file that is empty or not there."""
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except OSError:
        return True


def cannot_write(folder: Path, error: OSError) -> FinesslError:
    return FinesslError(
        f"cannot write features to {folder}: {error.strerror or error}. Free some space, or choose another cache "
        "folder ($FINESSL_CACHE). What was computed so far is kept."
    )
