"""Hugging Face data sets, saved to disk by the library itself."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from finessl.data.pixel_store import PixelStore
from finessl.data.sources import open_dataset
from finessl.data.splits import make_split
from finessl.errors import FinesslError


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FinesslError, match=r"pip install 'finessl\[huggingface\]'"):
        open_dataset("hf:ylecun/mnist")


@pytest.fixture
def hf():
    return pytest.importorskip("datasets", reason="the library datasets is not installed")


def rows(make, labels: list, first: int = 0) -> dict:
    return {"image": [Image.fromarray(make.picture(first + i)) for i in range(len(labels))], "label": labels}


def test_saved_folder(hf, tmp_path: Path, make) -> None:
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["zebra", "ant"])})
    parts = {
        "train": hf.Dataset.from_dict(rows(make, [0, 1, 1]), features),
        "unlabeled": hf.Dataset.from_dict(rows(make, [-1, -1], 10), features),
        "test": hf.Dataset.from_dict(rows(make, [1], 20), features),
    }
    hf.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    data = open_dataset(tmp_path / "saved")
    assert data.classes == ["zebra", "ant"] and data.train_labels.tolist() == [0, 1, 1, -1, -1]
    assert data.test_labels.tolist() == [1] and make_split(data).labeled.tolist() == [0, 1, 2]
    assert [data.train.key(i) for i in range(5)] == ["train/0", "train/1", "train/2", "unlabeled/0", "unlabeled/1"]
    for i, seed in enumerate([0, 1, 2, 10, 11]):
        assert (data.train.read(i) == make.picture(seed)).all() and data.train.size(i) == (8, 8)
    assert (data.train.take(np.array([4])).read(0) == make.picture(11)).all()
    assert open_dataset(tmp_path / "saved").fingerprint() == data.fingerprint()
    assert PixelStore.build(data.train, shorter=8).array is not None


def test_one_part_and_plain_labels(hf, tmp_path: Path, make) -> None:
    hf.Dataset.from_dict(
        rows(make, ["b", None, "a"]), hf.Features({"image": hf.Image(), "label": hf.Value("string")})
    ).save_to_disk(tmp_path / "saved")
    data = open_dataset(tmp_path / "saved")
    assert data.classes == ["a", "b"] and data.train_labels.tolist() == [1, -1, 0] and data.test is None


def test_columns(hf, tmp_path: Path, make) -> None:
    content = rows(make, [0, 1])
    content = {"picture": content["image"], "species": ["x", "y"], "number": [1, 2]}
    features = hf.Features({"picture": hf.Image(), "species": hf.Value("string"), "number": hf.Value("int64")})
    hf.Dataset.from_dict(content, features).save_to_disk(tmp_path / "saved")
    with pytest.raises(FinesslError, match=r"which column holds the label.*species \(Value\)"):
        open_dataset(tmp_path / "saved")
    with pytest.raises(FinesslError, match="no column 'specis'"):
        open_dataset(tmp_path / "saved", label_column="specis")
    assert open_dataset(tmp_path / "saved", label_column="species").classes == ["x", "y"]


def test_cannot_be_opened(hf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(FinesslError, match="cannot be opened"):
        open_dataset(tmp_path)
