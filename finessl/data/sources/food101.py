"""Food-101 (Bossard et al. 2014): 750 training and 250 test photos of each of 101 dishes, in the published layout.

https://data.vision.ee.ethz.ch/datasets_extra/food-101/
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from finessl.data.dataset import IMAGENET, Dataset, label_ids
from finessl.data.download import Archive, obtain
from finessl.data.images import FileImages
from finessl.data.sources.table import files
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Count, no_count

ARCHIVE = Archive("http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz", "85eeb15f3717b99a5da872d97d918f87", "food-101")


def open_food101(root: Path | None, *, download: bool = False, progress: Count = no_count) -> Dataset:
    """root: holds food-101/ (or is it) with images/<class>/<number>.jpg and meta/{train,test,classes}.txt.
    download: fetch the archive if it is missing."""
    if root is None:
        raise FinesslError("food101 needs root: the folder that holds food-101/.")
    folder = next((f for f in (root / ARCHIVE.creates, root) if (f / "meta" / "train.txt").is_file()), None)
    if folder is None and download:
        folder = obtain(ARCHIVE, root, progress)
    if folder is None:
        raise FinesslError(
            f"{root} holds no food101: put food-101/ with images/ and meta/ there, or ask for a download "
            "(--set source.download=true)."
        )
    classes = (folder / "meta" / "classes.txt").read_text(encoding="utf-8").split()

    def read(part: str) -> tuple[FileImages, np.ndarray]:
        path = folder / "meta" / f"{part}.txt"
        names = path.read_text(encoding="utf-8").split()  # apple_pie/1005649
        labels = label_ids([name.partition("/")[0] for name in names], classes, path)
        return files(folder / "images", [f"{name}.jpg" for name in names], path), labels

    return Dataset("food101", classes, *read("train"), *read("test"), statistics=IMAGENET)
