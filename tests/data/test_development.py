"""Images held out of training, to choose settings on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import finessl
from finessl.data.dataset import Dataset, hold_out
from finessl.data.images import ArrayImages
from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runs.inputs import open_source


def dataset(labels: np.ndarray) -> Dataset:
    pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    return Dataset("numbers", ["a", "b", "c"], ArrayImages(pixels, "train"), labels)


def pixels(images) -> list[int]:  # type: ignore[no-untyped-def]
    return [int(images.read(i)[0, 0, 0]) for i in range(len(images))]


def test_images_are_held_out_evenly_and_only_once() -> None:
    labels = np.array([0] * 30 + [1] * 20 + [2] * 2 + [-1] * 8)
    parts = hold_out(dataset(labels), 14)
    assert parts.test is not None and parts.test_labels is not None
    assert np.bincount(parts.test_labels).tolist() == [6, 6, 2]
    held, kept = pixels(parts.test), pixels(parts.train)
    assert sorted(held + kept) == list(range(60)) and len(held) == 14
    assert (labels[held] == parts.test_labels).all() and (labels[kept] == parts.train_labels).all()
    assert pixels(hold_out(dataset(labels), 14).test) == held  # the same ones each time
    with pytest.raises(FinesslError, match=r"more than half of the 52 training images"):
        hold_out(dataset(labels), 27)


def test_a_run_is_measured_on_them(shapes: Path, tmp_path: Path) -> None:
    fields = {"data.source": str(shapes), "data.development": 12}
    opened = open_source(Recipe.read(None, fields))
    assert len(opened.train) == 60 and opened.test is not None and len(opened.test) == 12
    assert not {opened.train.key(i) for i in range(60)} & {opened.test.key(i) for i in range(12)}
    finessl.train(
        shapes, out=tmp_path / "run", labels_per_class=2, backbone="embedded", tuning="linear", steps=2, batch_size=2,
        device="cpu", quiet=True, settings={"data.development": 12},
    )  # fmt: skip
    assert RunDirectory(tmp_path / "run").meta()["test"] == 12
