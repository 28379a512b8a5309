"""`finessl bench scale`, second part: quick and select on frozen features of 10⁴ to 10⁶ images.

Features are synthetic: groups within classes, variances that decay as those of real features do, float16 in a memory-mapped
file as `finessl quick` reads them. Each measurement is a separate process, so that its peak memory is its own.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from finessl.bench.scale import timed
from finessl.bench.timing import process_peak
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Progress, no_progress

DIM, CLASSES, GROUPS, LABELS = 384, 100, 10, 4  # numbers per image, classes, groups per class, labels per class
CHOSEN = 1000  # images that select chooses
BLOCK = 1 << 14
LOADED = ["finessl.frozen.select"]


@dataclass(frozen=True)
class FeatureCost:
    """Cost of one command on the features of `images` images."""

    what: str
    images: int
    seconds: float  # wall time
    cpu: float  # processor time, seconds
    memory: float  # peak of the process, MB
    accuracy: float | None = None  # of quick, on other images

    @property
    def image(self) -> float:
        """Milliseconds of processor time per image."""
        return 1e3 * self.cpu / self.images


def bench_features(
    sizes: Sequence[int], *, folder: Path | None = None, threads: int = 0, progress: Progress = no_progress
) -> list[FeatureCost]:
    """quick and select for each size.   folder: of the features (None: temporary).   threads: of torch; 0: as it chooses."""
    if not sizes or min(sizes) < 2 * CLASSES * LABELS:
        raise FinesslError(f"scale: sizes of features should be at least {2 * CLASSES * LABELS} images.")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    measures: list[Callable[[Path, int], FeatureCost]] = [measure_quick, measure_select]
    found = []
    with tempfile.TemporaryDirectory(dir=folder) as root:
        for number, size in enumerate(sizes):
            progress("writing features", number, len(sizes))
            path = Path(root) / str(size)
            with ProcessPoolExecutor(1, mp_context=context) as fresh:
                fresh.submit(write_features, path, size).result()
            for step, measure in enumerate(measures):
                progress("measuring features", len(measures) * number + step, len(measures) * len(sizes))
                with ProcessPoolExecutor(1, mp_context=context) as fresh:
                    found.append(fresh.submit(measure, path, threads).result())
            for file in path.iterdir():
                file.unlink()
    return sorted(found, key=lambda row: row.what)


def write_features(path: Path, count: int) -> None:
    """rows.npy [count, DIM], labels.npy; the same for 2,000 test images."""
    path.mkdir()
    generator = torch.Generator().manual_seed(0)
    spread = torch.arange(1, DIM + 1).float() ** -0.5
    classes = torch.randn(CLASSES, DIM, generator=generator)
    centres = classes.repeat_interleave(GROUPS, 0) + torch.randn(CLASSES * GROUPS, DIM, generator=generator)
    for part, n in (("train", count), ("test", 2000)):
        rows = np.lib.format.open_memmap(path / f"{part}.npy", "w+", np.float16, (n, DIM))
        group = torch.randint(len(centres), (n,), generator=generator)
        for start in range(0, n, BLOCK):
            mine = centres[group[start : start + BLOCK]]
            rows[start : start + BLOCK] = ((mine + 2 * torch.randn(mine.shape, generator=generator)) * spread).numpy()
        np.save(path / f"{part}-labels.npy", (group // GROUPS).numpy())


def few_labels(truth: np.ndarray) -> np.ndarray:
    """The labels of the first LABELS images of each class, −1 for the others."""
    y = np.full(len(truth), -1)
    for k in range(CLASSES):
        y[np.flatnonzero(truth == k)[:LABELS]] = k
    return y


def measure_quick(path: Path, threads: int) -> FeatureCost:
    """What `finessl quick` does after encoding: neighbours, all solvers with four folds each, the choice."""
    from finessl.frozen.choose import Pile, choose_solver, representatives
    from finessl.frozen.solvers import feature_centre, prepare

    set_threads(threads)
    rows = np.load(path / "train.npy", mmap_mode="r")
    labels = few_labels(np.load(path / "train-labels.npy"))
    answer = []

    def solve() -> None:
        kept = representatives(labels >= 0)
        part, y = rows[kept], torch.from_numpy(labels[kept])
        centre = feature_centre(part)
        choice = choose_solver(Pile(prepare(part, centre)), y, CLASSES)
        answer.append((centre, choice.chosen.solution))

    seconds, cpu = timed(solve)
    memory, (centre, solution) = process_peak() / 2**20, answer[0]
    found = solution.logits(prepare(np.load(path / "test.npy"), centre)).argmax(1).numpy()
    accuracy = float((found == np.load(path / "test-labels.npy")).mean())
    return FeatureCost("quick", len(rows), seconds, cpu, memory, accuracy)


def measure_select(path: Path, threads: int) -> FeatureCost:
    """What `finessl select -k 1000` does after encoding, with labels: suggestions, then uncertainty herding."""
    from finessl.frozen.select import select_images

    set_threads(threads)
    rows = np.load(path / "train.npy", mmap_mode="r")
    labels = few_labels(np.load(path / "train-labels.npy"))
    count = min(CHOSEN, len(rows) // 10)
    seconds, cpu = timed(lambda: select_images(rows, count, labels=labels, classes=CLASSES))
    return FeatureCost("select", len(rows), seconds, cpu, process_peak() / 2**20)


def set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
