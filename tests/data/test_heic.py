"""Photos of iPhones: read with pillow-heif, counted and named without it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from finessl.data import decoding
from finessl.data import folder_index as index
from finessl.data import inspection as inspect
from finessl.data.dataset import left_out
from finessl.data.decoding import ImageError, decode
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError


@pytest.fixture
def photos(tmp_path: Path, make) -> Path:
    """Two classes with two labels each, and three photos in unlabeled/ that are not images for Pillow alone."""
    make.class_folder(tmp_path / "labeled", {"a": 2, "b": 2})
    (tmp_path / "unlabeled").mkdir()
    for i in range(3):
        (tmp_path / "unlabeled" / f"IMG_{i}.HEIC").write_bytes(b"....ftypheic")
    return tmp_path


@pytest.fixture
def without_heif(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (decoding, index):
        monkeypatch.setattr(module, "EXTENSIONS", decoding.EXTENSIONS - decoding.HEIC)
        monkeypatch.setattr(module, "UNREAD", decoding.UNREAD | decoding.HEIC)
    decoding.formats.cache_clear()
    yield
    decoding.formats.cache_clear()


def test_without_the_package_files_are_counted_and_named(photos: Path, without_heif: None) -> None:
    data = open_dataset(photos)
    assert len(data.train) == 4
    expected = (
        "3 files are left out: HEIC needs pillow-heif: pip install 'finessl[heic]' "
        "(unlabeled/IMG_0.HEIC, unlabeled/IMG_1.HEIC, unlabeled/IMG_2.HEIC)"
    )
    assert left_out(data.excluded) == [expected]
    assert any("pip install 'finessl[heic]'" in line for line in inspect.report(data).advice)
    with pytest.raises(ImageError, match="pip install 'finessl\\[heic\\]'"):
        decode(photos / "unlabeled" / "IMG_0.HEIC")
    shutil.rmtree(photos / "labeled")
    with pytest.raises(FinesslError, match="no images in this folder.*3 files are left out: HEIC needs pillow-heif"):
        open_dataset(photos)


def test_with_the_package_they_are_images(photos: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:, :24], pixels[:16] = [200, 40, 40], [40, 40, 200]
    Image.fromarray(pixels).save(photos / "unlabeled" / "IMG_0.HEIC", quality=95)
    data = open_dataset(photos)
    assert len(data.train) == 7 and not data.excluded and data.train.size(4) == (32, 48)
    assert np.abs(data.train.read(4).astype(int) - pixels).mean() < 6
    with pytest.raises(ImageError):
        data.train.read(6)


def test_a_broken_pillow_heif_leaves_the_other_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "EXTENSIONS", decoding.EXTENSIONS | decoding.HEIC)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # its import raises ImportError
    decoding.formats.cache_clear()
    try:
        assert "JPEG" in decoding.formats()
    finally:
        decoding.formats.cache_clear()
