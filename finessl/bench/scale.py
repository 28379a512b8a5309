"""`finessl bench scale`: does an image cost the same in a set of 10⁴ and of 10⁶?

One set for each size is written (hard links to a few JPEGs, 1,000 to a class folder) and measured in rounds, all sizes
in each round, so that a machine that slows down does so for all. A measurement is a process of its own: it opens the
set with an empty cache, as often as fits in a few seconds, and decodes a random sample into a memory-mapped store. The
first round warms up and is not counted. A round's figure is a mean, the result the median of the rounds: the minimum
would favour small sets, whose short passes find the machine undisturbed more often. Beside the clock's figures stand
those of the processor's time, which other programs on the machine hardly change; with the files in the system's cache,
as here, there is nothing else to wait for.
"""

from __future__ import annotations

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
from finessl.runtime.callbacks import Progress

CLASS, LABELED, SIDE = 1000, 10, (500, 375)
ORIGINALS, LINKS = 64, 50_000  # different JPEGs at least; a file system allows some 65,000 links to one file
FETCH, FETCHES = 128, 20  # images of a batch, batches
LOADED = ["finessl.data.sources.folder", "finessl.data.splits", "finessl.data.pixel_store"]


@dataclass(frozen=True)
class SizeCost:
    """What a set of so many images costs."""

    images: int
    index: float  # seconds to open it with an empty cache
    reopen: float  # seconds to open it again
    image: float  # microseconds of indexing an image
    image_cpu: float  # the same in processor time
    memory: float  # MB beyond the imports, with a split and an epoch's order
    decode: float  # milliseconds of decoding an image into the store, by all threads together
    decode_cpu: float  # the same in processor time of all threads
    fetch: float  # milliseconds for a batch of 128 from the map


def bench_scale(
    sizes: Sequence[int],
    *,
    sample: int = 1000,
    repeats: int = 5,
    seconds: float = 2.0,
    folder: Path | None = None,
    progress: Progress = lambda label, done, total: None,
) -> list[SizeCost]:
    """One row a size. `sample`: images decoded in each of `repeats` rounds; `seconds`: of indexing at least."""
    if not sizes or min(sizes) < 2 * LABELED or min(sample, repeats) < 1:
        raise FinesslError(
            f"scale: sizes {', '.join(map(str, sizes))} should be at least {2 * LABELED} images, sample = {sample} and "
            f"repeats = {repeats} at least 1."
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    rounds: list[list[SizeCost]] = [[] for _ in sizes]
    with tempfile.TemporaryDirectory(dir=folder) as root:
        originals = write_originals(Path(root) / "originals", max(ORIGINALS, sum(sizes) // LINKS))
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
    """Largest over smallest of what should not depend on the size: 1 is flat."""
    return {
        name: max(getattr(row, name) for row in rows) / min(getattr(row, name) for row in rows)
        for name in ("image", "image_cpu", "decode", "decode_cpu")
    }


def write_originals(folder: Path, count: int) -> list[Path]:
    """JPEGs with as much detail as photos have."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    paths = [folder / f"{number}.jpg" for number in range(count)]
    for path in paths:
        rough = Image.fromarray(rng.integers(0, 256, (47, 63, 3), dtype=np.uint8))
        rough.resize(SIDE, Image.Resampling.BICUBIC).filter(ImageFilter.DETAIL).save(path, quality=92)
    return paths


def write_set(root: Path, originals: Sequence[Path], count: int) -> None:
    """`count` images in two class folders at least; those left over join the last."""
    share = min(CLASS, count // 2)
    folders = [root / f"n{number:08d}" for number in range(count // share)]
    for folder in folders:
        folder.mkdir(parents=True)
    for number in range(count):
        folder = folders[min(number // share, len(folders) - 1)]
        os.link(originals[number % len(originals)], folder / f"{folder.name}_{number}.JPEG")


def measure(root: Path, sample: int, seconds: float, seed: int) -> SizeCost:
    """In a process of its own, so that its memory and its caches are its own."""
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
    """Seconds by the clock, and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu
