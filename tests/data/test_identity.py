"""Images are told apart by what they contain, not by name and size alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from finessl.data.decoding import ImageError, open_regular
from finessl.data.identity import content_digest
from finessl.data.images import ArrayImages, FileImages
from finessl.data.path_table import PathTable


def images_in(root: Path) -> FileImages:
    names = sorted(path.name for path in root.iterdir())
    return FileImages(root, PathTable.of(names, [(root / name).stat().st_size for name in names]))


@pytest.fixture
def pictures(tmp_path: Path, make) -> Path:  # type: ignore[no-untyped-def]
    for i in range(6):
        make.write(tmp_path / "photos" / f"{i}.bmp", i, 32, 32)
    return tmp_path / "photos"


def test_replaced_image_of_the_same_size_changes_the_digest(pictures: Path, make) -> None:  # type: ignore[no-untyped-def]
    before, names_and_sizes = content_digest(images_in(pictures)), images_in(pictures).fingerprint()
    make.write(pictures / "3.bmp", 99, 32, 32)
    assert images_in(pictures).fingerprint() == names_and_sizes
    assert content_digest(images_in(pictures)) != before


def test_copied_folder_has_the_same_digest(pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / "0.bmp", (1, 1))
    assert content_digest(images_in(pictures)) == content_digest(images_in(tmp_path / "copy"))


def test_positions_that_always_count(pictures: Path, make) -> None:  # type: ignore[no-untyped-def]
    digests = lambda: [content_digest(images_in(pictures), 2, always) for always in (None, np.array([3]))]  # noqa: E731
    before = digests()
    make.write(pictures / "3.bmp", 99, 32, 32)  # the sample is the first and the last
    after = digests()
    assert after[0] == before[0] and after[1] != before[1]


@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_large_file_counts_by_beginning_middle_and_end(tmp_path: Path, place: float) -> None:
    pixels = np.zeros((300, 300, 3), np.uint8)
    images = ArrayImages(pixels[None])
    before = content_digest(images)
    pixels.reshape(-1)[int(place * (pixels.size - 1))] = 1
    assert content_digest(images) != before and len(images.excerpt(0)) < pixels.size


def test_unreadable_image_and_pipe_have_a_digest(pictures: Path) -> None:
    images = images_in(pictures)
    before = content_digest(images)
    (pictures / "2.bmp").unlink()
    os.mkfifo(pictures / "2.bmp")
    assert content_digest(images) != before
    with pytest.raises(ImageError, match="not a regular file"):
        open_regular(pictures / "2.bmp")


def test_empty_set_has_a_digest() -> None:
    assert content_digest(ArrayImages(np.zeros((0, 4, 4, 3), np.uint8)))


def test_picture_of_an_array_and_its_copy() -> None:
    array = np.asarray(Image.effect_noise((8, 8), 50).convert("RGB"))[None]
    assert content_digest(ArrayImages(array)) == content_digest(ArrayImages(array.copy()))
