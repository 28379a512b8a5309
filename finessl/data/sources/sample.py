"""The sample that comes with the package: small images of a few classes, so that everything can be tried at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from finessl.data.dataset import Dataset
from finessl.data.decoding import ImageError, decode
from finessl.data.folder_index import natural
from finessl.data.images import ArrayImages
from finessl.errors import FinesslError

FOLDER = Path(__file__).resolve().parents[2] / "assets" / "sample"
SIDE = 32


def open_sample(root: Path | None = None) -> Dataset:
    """<root>/{train,test}/<class>.webp: that class's images, 32×32 pixels, from top to bottom."""
    folder = FOLDER if root is None else root
    classes = sorted((file.stem for file in (folder / "train").glob("*.webp")), key=natural)
    if not classes:
        raise FinesslError(f"{folder} holds no sample (train/<class>.webp); install the package again.")
    train, train_labels = read_stacks(folder / "train", classes)
    test, test_labels = read_stacks(folder / "test", classes)
    return Dataset("sample", classes, ArrayImages(train, "train"), train_labels, ArrayImages(test, "test"), test_labels)


def read_stacks(folder: Path, classes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    try:
        stacks = [decode(folder / f"{name}.webp").reshape(-1, SIDE, SIDE, 3) for name in classes]
    except (ImageError, ValueError) as error:
        raise FinesslError(f"the sample in {folder} is damaged ({error}); install the package again.") from error
    return np.concatenate(stacks), np.repeat(np.arange(len(classes)), [len(stack) for stack in stacks])
