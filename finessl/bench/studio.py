"""`finessl bench studio`: is the studio fast enough to label with? Measured over HTTP, on a studio in a process of its own.

The folder holds generated JPEGs (linked, 1,000 different ones at most). The refit is measured on made-up features.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from finessl.bench.scale import write_originals, write_set
from finessl.data.decoding import load
from finessl.data.sources.folder import open_pile
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Progress, no_progress
from finessl.studio.features import LINKED, Encoded
from finessl.studio.server import STATIC
from finessl.studio.solve import fit
from finessl.studio.thumbnails import THUMBNAIL, Thumbnails

DIFFERENT = 1000  # images of the folder
DIM, CLASSES, LABELS = 384, 10, 40  # of the refit


class Running:
    """`finessl studio` in a process of its own, and a connection with its cookie."""

    def __init__(self, data: Path, out: Path, *more: str, **environment: str) -> None:
        begun = time.perf_counter()
        command = [sys.executable, "-m", "finessl", "studio", str(data), "--out", str(out), "--backbone", "embedded"]
        self.process = subprocess.Popen(
            [*command, "--no-browser", *more], stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )
        assert self.process.stdout is not None
        address = next((line.split()[0] for line in self.process.stdout if "token=" in line), None)
        if address is None:
            raise FinesslError("finessl studio did not start.")
        self.seconds = time.perf_counter() - begun  # until it listens
        self.http = http.client.HTTPConnection("127.0.0.1", int(address.split(":")[2].split("/")[0]), timeout=60)
        self.cookie = ""
        self.fetch(address[address.index("/auth") :])

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        headers = {"Cookie": self.cookie, "X-Finessl": "1", "Content-Type": "application/json"}
        self.http.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        answer = self.http.getresponse()
        content = answer.read()
        if given := answer.headers.get("set-cookie"):
            self.cookie = given.split(";")[0]
        if answer.status >= 400:
            raise FinesslError(f"{path} answered {answer.status}: {content[:200].decode(errors='replace')}")
        return content

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(self.fetch(path, body))

    def memory(self) -> tuple[float, float] | None:
        """Megabytes of memory, now and at most; None where the system does not tell."""
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return None
        sizes = {
            name: int(rest.split()[0]) / 1024
            for name, _, rest in (line.partition(":") for line in lines)
            if "Vm" in name
        }
        return sizes["VmRSS"], sizes["VmHWM"]

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def bench_studio(
    images: int, labels: int, refit: Sequence[int], folder: Path | None = None, say: Progress = no_progress
) -> dict[str, Any]:
    """folder: for the generated images, on the disk to be measured; default: the system's temporary folder."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        root, cache = Path(scratch), {"FINESSL_CACHE": str(Path(scratch) / "cache")}
        say("writing images", 0, images)
        originals = write_originals(root / "originals", min(DIFFERENT, images))
        write_set(root / "photos", originals, images)
        found: dict[str, Any] = {"images": images, "thumbnails": thumbnail_rate(root / "originals", root / "small")}
        say("opening the studio for the first time", 0, 1)
        first = Running(root / "photos", root / "state", **cache)  # makes the index
        first.ask("/api/state")
        first.close()
        running = Running(root / "photos", root / "state", **cache)
        try:
            found |= measure(running, labels, say)
        finally:
            running.close()
    found["refit"] = []
    for number, count in enumerate(refit):
        say("fitting", number, len(refit))
        found["refit"].append(time_refit(count))
    return found


def measure(running: Running, labels: int, say: Progress) -> dict[str, Any]:
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
    wait_for_features(running, say)
    keys, shown = [], []
    queue = running.ask("/api/queue?n=4")["items"]
    begun = time.perf_counter()
    for number in range(labels):
        say("labeling", number, labels)
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
    found["grid"], found["thumbnail"] = scroll(running)
    if memory := running.memory():
        found["memory_mb"], found["peak_memory_mb"] = memory
    return found


def wait_for_features(running: Running, say: Progress, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        features = running.ask("/api/state")["features"]
        if features["error"]:
            raise FinesslError(features["error"])
        say("encoding images", features["done"], features["total"])
        if features["done"] == features["total"]:
            return
        time.sleep(0.5)


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
