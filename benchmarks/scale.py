"""How cost grows with the number of images: python benchmarks/scale.py [--sizes 10000 100000 1000000] [--folder DIR]

For each size a synthetic set is written (hard links to a few JPEGs, 1,000 to a class folder) and a fresh process opens
it, opens it again, draws a split and an epoch's order, and decodes a random sample of it into a memory-mapped store.
Columns: seconds to index and to reopen, microseconds of indexing per image, peak memory beyond the imports, decoded
images per second, and milliseconds to fetch a batch of 128 from the map.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

CLASS, ORIGINALS, SIDE = 1000, 64, (375, 500)
COLUMNS = ("images", "index s", "reopen s", "index µs/image", "memory MB", "decode images/s", "fetch ms/128")


def write_set(root: Path, count: int) -> None:
    """count images in count / 1,000 classes; a file system allows some 65,000 links to one file."""
    rng = np.random.default_rng(0)
    originals = []
    for number in range(ORIGINALS):
        rough = Image.fromarray(rng.integers(0, 256, (47, 63, 3), dtype=np.uint8))
        path = root / "originals" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        rough.resize(SIDE[::-1], Image.Resampling.BICUBIC).filter(ImageFilter.DETAIL).save(path, quality=92)
        originals.append(path)
    for first in range(0, count, CLASS):
        folder = root / "images" / f"n{first // CLASS:08d}"
        folder.mkdir(parents=True)
        for number in range(first, min(first + CLASS, count)):
            os.link(originals[number % ORIGINALS], folder / f"{folder.name}_{number}.JPEG")


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(root: Path, sample: int) -> dict[str, float]:
    """In a process of its own, so that its memory is its own."""
    from finessl.data.sources import open_dataset
    from finessl.data.splits import make_split
    from finessl.data.store import PixelStore

    imported = peak()
    start = time.perf_counter()
    data = open_dataset(root / "images")
    indexed = time.perf_counter() - start
    start = time.perf_counter()
    data = open_dataset(root / "images")
    reopened = time.perf_counter() - start
    split = make_split(data, labels_per_class=10)
    order = np.random.default_rng(0).permutation(len(split.unlabeled))
    memory = peak() - imported

    chosen = data.train.take(np.sort(order[:sample]))
    start = time.perf_counter()
    store = PixelStore.build(chosen, shorter=256, cache_dir=root / "pixels", memory_limit_bytes=0)
    decoded = len(chosen) / (time.perf_counter() - start)
    rng = np.random.default_rng(1)
    times = []
    for _ in range(20):
        batch = rng.integers(0, len(store), 128)
        start = time.perf_counter()
        store.fetch(batch)
        times.append(time.perf_counter() - start)
    count = len(data.train)
    fetched = float(np.median(times)) * 1e3
    return dict(zip(COLUMNS, (count, indexed, reopened, 1e6 * indexed / count, memory, decoded, fetched), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--sample", type=int, default=4_000, help="images to decode")
    parser.add_argument("--folder", type=Path, default=None, help="where to write the sets (they are removed again)")
    parser.add_argument("--measure", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.sample)))
        return
    print("  ".join(f"{name:>15}" for name in COLUMNS))
    rows = []
    for size in args.sizes:
        root = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            write_set(root, size)
            command = [sys.executable, __file__, "--measure", str(root), "--sample", str(args.sample)]
            environment = {**os.environ, "FINESSL_CACHE": str(root / "cache")}
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
            rows.append(row)
            print("  ".join(f"{row[name]:>15,.{0 if row[name] >= 1000 else 2}f}" for name in COLUMNS), flush=True)
        finally:
            shutil.rmtree(root)
    for name in ("index µs/image", "decode images/s"):
        values = [row[name] for row in rows]
        print(f"{name}: largest / smallest = {max(values) / min(values):.2f}")


if __name__ == "__main__":
    main()
