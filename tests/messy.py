"""A folder of photos as people have them, made of the sample images that come with finessl.

python tests/messy.py "Müll Fotos 2026"

labeled/CLASS, unlabeled (nested) and test/CLASS with EXIF rotation, WebP, TIFF, 16-bit PNG, exact and near copies, test
images that leak into the unlabeled ones, a contradicting label, odd names, broken files, iPhone's HEIC files and other
files that are no images.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = {"automobile": "glass", "cat": "Müll & Rest", "ship": "[paper]", "frog": "metal $x$"}
LABELS, UNLABELED, TEST = 5, 15, 6  # images of each class
FORMATS = (".jpg", ".jpeg", ".JPG", ".png", ".webp", ".tiff", ".bmp")


def make_messy_folder(root: Path) -> Path:
    from finessl.data.sources import open_dataset

    sample = open_dataset("sample")
    assert sample.test is not None and sample.test_labels is not None
    pile = root / "unlabeled" / "2026-07 phone" / "DCIM"
    pile.mkdir(parents=True)
    for name, folder in CLASSES.items():
        k = sample.classes.index(name)
        photos = (large(sample.train.read(int(i))) for i in np.flatnonzero(sample.train_labels == k))
        for part, count in (("labeled", LABELS), ("test", TEST)):
            (root / part / folder).mkdir(parents=True)
            for i in range(count):
                save(next(photos), root / part / folder / f"{name} {i}", i)
        for i in range(UNLABELED):
            save(next(photos), (pile if i % 3 else pile.parents[1]) / f"{name}_{i:03d}", i)
    add_special_images(root, pile, photos)
    add_copies_and_leaks(root, pile)
    add_files_that_are_no_images(root, pile)
    return root


def large(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels).resize((96, 72), Image.Resampling.BICUBIC)


def save(photo: Image.Image, stem: Path, number: int) -> None:
    suffix = FORMATS[number % len(FORMATS)]
    photo.save(stem.with_name(stem.name + suffix), **({"quality": 92} if suffix.lower().startswith(".jp") else {}))


def add_special_images(root: Path, pile: Path, photos: Iterator[Image.Image]) -> None:
    """EXIF orientations, 16 bits, grey, transparent, odd names."""
    for orientation in (3, 6, 8):
        exif = Image.Exif()
        exif[0x0112] = orientation
        next(photos).save(pile / f"turned {orientation}.jpg", exif=exif)
    grey = np.asarray(next(photos).convert("L")).astype(np.uint16) * 257
    Image.fromarray(grey).save(pile / "sixteen bits.png")
    next(photos).convert("L").save(pile / "grey.png")
    next(photos).convert("RGBA").save(pile / "alpha.png")
    for name in ("=1+1.jpg", "-rf.jpg", "[bold]x.jpg", "[].png", "Ümläut 日本 🙂.jpg", "a,b;c.jpg"):
        next(photos).save(pile / name)


def add_copies_and_leaks(root: Path, pile: Path) -> None:
    shutil.copy(pile / "frog_001.jpeg", pile / "Copy of frog_001.jpeg")
    with Image.open(pile / "frog_002.JPG") as photo:
        photo.save(pile / "frog_002 edited.jpg", quality=70)
    shutil.copy(root / "test" / "glass" / "automobile 0.jpg", pile / "from the test set.jpg")
    shutil.copy(root / "test" / "[paper]" / "ship 1.jpeg", pile / "again.jpeg")
    shutil.copy(root / "labeled" / "glass" / "automobile 1.jpeg", root / "labeled" / "[paper]" / "contradiction.jpeg")


def add_files_that_are_no_images(root: Path, pile: Path) -> None:
    whole = (pile / "frog_001.jpeg").read_bytes()
    (pile / "cut off.jpg").write_bytes(whole[:300])
    (pile / "empty.png").write_bytes(b"")
    (root / "test" / "glass" / "text.png").write_text("no image")
    for i in range(3):
        (pile / f"IMG_{i:04d}.HEIC").write_bytes(b"\x00\x00\x00\x18ftypheic" + bytes(100))
    for name in (".DS_Store", "._frog_001.jpeg", "Thumbs.db", "film.mp4", "notes.txt"):
        (pile / name).write_bytes(b"\x00\x05\x16\x07")


if __name__ == "__main__":
    print(make_messy_folder(Path(sys.argv[1])))
