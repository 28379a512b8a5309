"""`finessl bench scale`: cost per image in sets of 10⁴ to 10⁶ images.

One set per size is written (hard links to a few JPEGs, 1,000 per class folder) and measured in rounds. Every round measures
all sizes, so that a slow phase of the machine affects all. A measurement is a separate process: it opens the set with an
empty cache, repeatedly for a few seconds, and decodes a random sample into a memory-mapped store. The first round warms up
and is not counted. A round gives means, the result is the median of the rounds: the minimum would favour small sets, whose
short passes are disturbed less often. Processor time is measured besides wall time, because other programs hardly change it;
the files are in the system's cache, so there is nothing else to wait for.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image, ImageFilter

from finessl.bench.timing import process_peak
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Progress, no_progress

CLASS, LABELED, SIDE = 1000, 10, (500, 375)  # images per class folder, labels per class, pixels
MIN_ORIGINALS, MAX_LINKS = 64, 50_000  # different JPEGs; links to one (file systems allow about 65,000)
FETCH, FETCHES = 128, 20  # images per batch, batches
LOADED = ["finessl.data.sources.folder", "finessl.data.splits", "finessl.data.pixel_store"]


@dataclass(frozen=True)
class SizeCost:
    """Cost of a set of `images` images."""

    images: int
    index: float  # seconds to open it with an empty cache
    reopen: float  # seconds to open it again
    image: float  # microseconds of indexing, per image
    image_cpu: float  # in processor time
    memory: float  # MB beyond the imports, with a split and the order of an epoch
    decode: float  # milliseconds of decoding into the store, per image, all threads together
    decode_cpu: float  # in processor time of all threads
    fetch: float  # milliseconds for a batch of 128 from the memory map


def bench_scale(
    sizes: Sequence[int],
    *,
    sample: int = 1000,
    repeats: int = 5,
    seconds: float = 2.0,
    folder: Path | None = None,
    progress: Progress = no_progress,
) -> list[SizeCost]:
    """One row per size.   sizes: images.   sample: images decoded per round.   repeats: rounds.   seconds: least time of
    indexing per measurement.   folder: where the sets are written; None: the temporary folder."""
    if not sizes or min(sizes) < 2 * LABELED or min(sample, repeats) < 1:
        raise FinesslError(
            f"scale: sizes {', '.join(map(str, sizes))} should be at least {2 * LABELED} images, sample = {sample} and "
            f"repeats = {repeats} at least 1."
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    rounds: list[list[SizeCost]] = [[] for _ in sizes]
    with tempfile.TemporaryDirectory(dir=folder) as root:
        originals = write_originals(Path(root) / "originals", max(MIN_ORIGINALS, sum(sizes) // MAX_LINKS))
        sets = [Path(root) / f"{number}-{size}" for number, size in enumerate(sizes)]
        for number, (path, size) in enumerate(zip(sets, sizes, strict=True)):
            progress("writing the sets", number, len(sizes))
            write_set(path, originals, size)
        for turn in range(repeats + 1):
            for number, path in enumerate(sets):
                progress("measuring", turn * len(sets) + number, (repeats + 1) * len(sets))
                with ProcessPoolExecutor(1, mp_context=context) as fresh:
                    rounds[number].append(fresh.submit(measure, path, sample, seconds if turn else 0.0, turn).result())
        progress("removing the sets", 0, 1)
    return [middle(measured[1:]) for measured in rounds]


def middle(measured: Sequence[SizeCost]) -> SizeCost:
    measures = (median(getattr(row, column.name) for row in measured) for column in fields(SizeCost)[1:])
    return SizeCost(measured[0].images, *measures)


def ratios(rows: Sequence[SizeCost]) -> dict[str, float]:
    """Largest over smallest value of costs that should not depend on the size; 1 is ideal."""
    return {
        name: max(getattr(row, name) for row in rows) / min(getattr(row, name) for row in rows)
        for name in ("image", "image_cpu", "decode", "decode_cpu")
    }


def write_originals(folder: Path, count: int, sides: Sequence[tuple[int, int]] = (SIDE,)) -> list[Path]:
    """JPEGs with about as much detail as photos.   sides: width and height, in turn."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    paths = [folder / f"{number}.jpg" for number in range(count)]
    for path, side in zip(paths, itertools.cycle(sides), strict=False):
        rough = Image.fromarray(rng.integers(0, 256, (47, 63, 3), dtype=np.uint8))
        rough.resize(side, Image.Resampling.BICUBIC).filter(ImageFilter.DETAIL).save(path, quality=92)
    return paths


def write_set(root: Path, originals: Sequence[Path], count: int) -> None:
    """`count` images in at least two class folders; the remainder goes to the last."""
    share = min(CLASS, count // 2)
    folders = [root / f"n{number:08d}" for number in range(count // share)]
    for folder in folders:
        folder.mkdir(parents=True)
    for number in range(count):
        folder = folders[min(number // share, len(folders) - 1)]
        os.link(originals[number % len(originals)], folder / f"{folder.name}_{number}.JPEG")


def measure(root: Path, sample: int, seconds: float, seed: int) -> SizeCost:
    """One measurement. Runs in a separate process, so that memory and caches start empty."""
    from finessl.data.pixel_store import PixelStore
    from finessl.data.sources import open_dataset
    from finessl.data.splits import make_split

    with tempfile.TemporaryDirectory(dir=root.parent) as scratch:

        def empty_cache() -> None:
            os.environ["FINESSL_CACHE"] = tempfile.mkdtemp(dir=scratch)

        imported = process_peak()
        empty_cache()
        times = [timed(lambda: open_dataset(root))]
        reopened, _ = timed(lambda: open_dataset(root))
        data = open_dataset(root)
        split = make_split(data, labels_per_class=LABELED)
        order = np.random.default_rng(seed).permutation(len(split.unlabeled))
        memory = (process_peak() - imported) / 2**20
        while sum(wall for wall, _ in times) < seconds:
            empty_cache()
            times.append(timed(lambda: open_dataset(root)))
        indexed, cpu = np.mean(times, axis=0).tolist()

        chosen, pixels = data.train.take(np.sort(order[:sample])), Path(scratch) / "pixels"
        decoding = timed(lambda: PixelStore.build(chosen, shorter=256, cache_dir=pixels, memory_limit_bytes=0))
        store = PixelStore.build(chosen, shorter=256, cache_dir=pixels)
        rng, fetches = np.random.default_rng(seed), []
        for _ in range(FETCHES):
            batch = rng.integers(0, len(store), FETCH)
            fetches.append(timed(lambda batch=batch: store.fetch(batch))[0])  # type: ignore[misc]
    count = len(data.train)
    decode, decode_cpu = (1e3 * value / len(chosen) for value in decoding)
    return SizeCost(
        count, indexed, reopened, 1e6 * indexed / count, 1e6 * cpu / count, memory, decode, decode_cpu,
        1e3 * median(fetches),
    )  # fmt: skip


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Wall time and processor time of a call, seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu
