"""`finessl bench studio`: is the studio fast enough to label with? Measured over HTTP, on a studio in a process of its own.

The folder holds generated JPEGs (linked, 1,000 different ones at most), and its thumbnails are made. The time of a refit is
also measured on made-up features, at several sizes.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from finessl.bench.browser import watch_page
from finessl.bench.running import MemoryWatch, Running
from finessl.bench.scale import write_originals, write_set
from finessl.data.decoding import load
from finessl.data.sources.folder import open_pile
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Progress, no_progress
from finessl.runtime.files import writing
from finessl.studio.features import LINKED, Encoded
from finessl.studio.server import STATIC
from finessl.studio.solve import fit
from finessl.studio.thumbnails import THUMBNAIL, Thumbnails

DIFFERENT = 1000  # images of the folder
DIM, CLASSES, LABELS = 384, 10, 40  # of the refit
REFITS, THINKING = 10, 1.0  # labels after which the suggestions are waited for; seconds between them


def bench_studio(
    images: int,
    labels: int,
    refit: Sequence[int],
    folder: Path | None = None,
    browser: bool = False,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """folder: for the generated images, on the disk to be measured; default: the system's temporary folder.
    browser: measure in Chromium too."""
    if folder is not None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        root, cache = Path(scratch), {"FINESSL_CACHE": str(Path(scratch) / "cache")}
        progress("writing images", 0, images)
        originals = write_originals(root / "originals", min(DIFFERENT, images))
        write_set(root / "photos", originals, images)
        found: dict[str, Any] = {"images": images, "thumbnails": thumbnail_rate(root / "originals", root / "small")}
        progress("opening the studio for the first time", 0, 1)
        with Running(root / "photos", "--out", str(root / "state"), **cache) as first:  # makes the index
            first.ask("/api/state")
        progress("writing thumbnails", 0, images)
        copy_thumbnails(root / "small", root / "originals", root / "state", root / "photos")
        with (
            Running(root / "photos", "--out", str(root / "state"), **cache) as running,
            MemoryWatch(running.process.pid) as memory,
        ):
            found |= measure(running, labels, progress)
            if browser:
                progress("looking at it in a browser", 0, 1)
                seen = watch_page(running.address, running.origin)
                found["browser"] = seen | {"keys": spread(seen["keys"])}
        found |= memory.figures()
    found["refit"] = []
    for number, count in enumerate(refit):
        progress("fitting", number, len(refit))
        found["refit"].append(time_refit(count))
    return found


def measure(running: Running, labels: int, progress: Progress) -> dict[str, Any]:
    begun = time.perf_counter()
    running.fetch("/")
    for file in sorted(STATIC.iterdir()):
        running.fetch(f"/static/{file.name}")
    running.ask("/api/state")
    item = running.ask("/api/queue?n=4")["items"][0]
    running.fetch(f"/image/{item['id']}")
    found: dict[str, Any] = {"start_s": running.seconds, "first_paint_s": time.perf_counter() - begun}
    for number in range(CLASSES):
        running.ask("/api/classes", {"add": f"class {number}"})
    found["encoded_s"] = wait_for_features(running, progress)
    keys, shown = [], []
    queue = running.ask("/api/queue?n=4")["items"]
    begun = time.perf_counter()
    for number in range(labels):
        progress("labeling", number, labels)
        pressed = time.perf_counter()
        answer = running.ask("/api/label", {"image": queue[0]["id"], "class": number % CLASSES, "source": "queue"})
        keys.append(time.perf_counter() - pressed)
        queue = answer["next"]
        if not queue:
            break
        running.fetch(f"/image/{queue[0]['id']}")
        shown.append(time.perf_counter() - pressed)
    found["labels_per_minute"] = 60 * len(keys) / (time.perf_counter() - begun)
    found["key"], found["key_and_image"] = spread(keys), spread(shown)
    found["suggestions"] = spread([time_suggestions(running, number) for number in range(REFITS)])
    found["grid"], found["thumbnail"] = scroll(running)
    return found


def time_suggestions(running: Running, number: int) -> float:
    """Seconds from a label until the suggestions are fitted to it, while the labeler thinks."""
    time.sleep(THINKING)
    image = running.ask("/api/queue?n=1")["items"][0]["id"]
    begun = time.perf_counter()
    events = running.ask("/api/label", {"image": image, "class": number % CLASSES, "source": "queue"})["events"]
    running.wait_for_suggestions(events)
    return time.perf_counter() - begun


def wait_for_features(running: Running, progress: Progress, seconds: float = 3600) -> float:
    """How long it took, in seconds."""
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < seconds:
        features = running.ask("/api/state")["features"]
        if features["error"]:
            raise FinesslError(features["error"])
        progress("encoding images", features["done"], features["total"])
        if features["done"] == features["total"]:
            return waited
        time.sleep(0.5)
    raise FinesslError(f"the studio has not encoded its images after {seconds:.0f} seconds.")


def scroll(running: Running, screens: int = 20) -> tuple[dict[str, float], dict[str, float]]:
    """A page of 200 images anywhere in the grid, and thumbnails that are in the pack."""
    total = running.ask("/api/grid?limit=1")["total"]
    pages, pictures = [], []
    for number in range(screens):
        begun = time.perf_counter()
        items = running.ask(f"/api/grid?limit=200&offset={number * total // screens}")["items"]
        pages.append(time.perf_counter() - begun)
        for item in items[:5]:
            running.fetch(f"/thumb/{item['id']}")
            begun = time.perf_counter()
            running.fetch(f"/thumb/{item['id']}")
            pictures.append(time.perf_counter() - begun)
    return spread(pages), spread(pictures)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


def thumbnail_rate(originals: Path, state: Path) -> dict[str, float]:
    """Thumbnails per second on all cores, and images that are only decoded to that size, one after another."""
    state.mkdir()
    images, _, _ = open_pile(originals)
    thumbnails = Thumbnails(state, images)
    begun = time.perf_counter()
    for _ in thumbnails.build(threading.Event()):
        pass
    rate = len(images) / (time.perf_counter() - begun)
    thumbnails.close()
    begun, some = time.perf_counter(), range(0, len(images), 5)
    for i in some:
        load(images.path(i), shorter=THUMBNAIL * 3 // 4)
    return {"per_second": rate, "decoded_per_second_and_core": len(some) / (time.perf_counter() - begun)}


def copy_thumbnails(made: Path, originals: Path, state: Path, photos: Path) -> None:
    """Into the pack of `photos`, which are links to the originals in turn."""
    source, target = Thumbnails(made, open_pile(originals)[0]), Thumbnails(state, open_pile(photos)[0])
    jpegs = {int(Path(key).stem): source.get(i) for i, key in enumerate(source.images.paths)}
    for i in target.missing().tolist():
        number = int(Path(target.images.key(i)).stem.rpartition("_")[2])
        target.add(i, jpegs[number % len(jpegs)])
    source.close()
    target.close()


def time_refit(count: int, repeats: int = 5) -> dict[str, Any]:
    """The answer after one more label, on features with as many clusters as classes."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, CLASSES, count)
    centres = rng.normal(size=(CLASSES, DIM)).astype(np.float32)
    rows = np.empty((count, DIM), np.float16)
    for start in range(0, count, 10_000):
        part = truth[start : start + 10_000]
        rows[start : start + len(part)] = centres[part] + 2 * rng.standard_normal((len(part), DIM), np.float32)
    encoded = Encoded.of(np.arange(count), rows, count)
    encoded = encoded.with_graph() if count <= LINKED else encoded
    label = np.full(count, -1, np.int32)
    chosen = rng.choice(count, LABELS + repeats + 1, replace=False)
    seconds, solver = [], ""
    for number in range(repeats + 1):  # the first one warms up
        known = chosen[: LABELS + number]
        label[known] = truth[known]
        begun = time.perf_counter()
        answer = fit(encoded, label, accuracy=0.8)
        seconds.append(time.perf_counter() - begun)
        solver = answer.solver if answer else ""
    return {"images": count, "seconds": median(seconds[1:]), "solver": solver}
