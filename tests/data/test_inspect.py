"""What `report` finds in data that has everything wrong with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from finessl.data.dataset import Dataset
from finessl.data.images import ArrayImages
from finessl.data.inspection import report
from finessl.data.near_duplicates import Signatures, difference_hash, equal_groups, join_pairs, near_pairs
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError


def photo(seed: int, size: int = 96) -> Image.Image:
    """Shapes on a gradient: what a hash can tell apart, unlike noise."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(*rng.integers(0, 256, 2), size)
    image = Image.fromarray(np.broadcast_to(ramp[:, None, None], (size, size, 3)).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        (x, y), side = rng.integers(0, size, 2), int(rng.integers(10, 40))
        draw.ellipse((x, y, x + side, y + side), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return image


def save(image: Image.Image, path: Path, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    for name, first in (("cat", 0), ("dog", 100)):
        for i in range(5):
            save(photo(first + i), tmp_path / "train" / name / f"{i}.png")
            save(photo(first + 50 + i), tmp_path / "test" / name / f"{i}.png")
    train, test = tmp_path / "train", tmp_path / "test"
    shutil.copy(train / "cat" / "0.png", train / "cat" / "0-copy.png")  # the same file again
    shutil.copy(train / "cat" / "1.png", train / "dog" / "wrong.png")  # and under another label
    save(photo(102).resize((70, 70)), train / "dog" / "2-small.jpg", quality=80)  # the same picture, smaller
    shutil.copy(train / "dog" / "3.png", test / "dog" / "leak.png")
    save(photo(104), test / "dog" / "near-leak.jpg", quality=70)
    (train / "cat" / "broken.png").write_bytes(b"junk")
    (test / "cat" / "empty.png").write_bytes(b"")
    save(photo(7).resize((20, 30)), train / "cat" / "tiny.png")
    return tmp_path


def test_everything_that_is_wrong(messy: Path) -> None:
    told: list[tuple[int, int | None]] = []
    found = report(open_dataset(messy), progress=lambda *step: told.append(step))
    assert found.classes == ["cat", "dog"] and found.labeled.tolist() == [7, 7] and found.unlabeled == 0
    assert found.tested is not None and found.tested.tolist() == [5, 7]
    assert [key for key, _ in found.broken] == ["train/cat/broken.png", "test/cat/empty.png"]
    assert found.duplicates == [
        ["train/cat/0-copy.png", "train/cat/0.png"],
        ["train/cat/1.png", "train/dog/wrong.png"],
    ]
    assert found.near == [["train/dog/2-small.jpg", "train/dog/2.png"]]
    assert found.leaks == [
        ("test/dog/leak.png", "train/dog/3.png", "same"),
        ("test/dog/near-leak.jpg", "train/dog/4.png", "near"),
    ]
    assert found.conflicts == [[("train/cat/1.png", "cat"), ("train/dog/wrong.png", "dog")]]
    assert found.smallest == (30, 20) and found.median == (96, 96) and found.largest == (96, 96)
    assert told[-1] == (28, 28)
    text = "\n".join(found.advice)
    assert "fewer than 10 test images: cat, dog" in text and "2 test images are also in the training set" in text
    assert "1 image is smaller than 32 pixels" in text


def test_broken_files_are_advised_on_once(messy: Path) -> None:
    """Encoding for --backbone leaves broken images out of the data set; they are still one finding."""
    dataset = open_dataset(messy)
    dataset.excluded.append(("train/cat/broken.png", "not an image"))
    assert report(dataset).advice == report(open_dataset(messy)).advice


def test_every_finding_has_its_advice(messy: Path) -> None:
    text = report(open_dataset(messy)).advice
    for part in (
        "2 images cannot be read and are left out of training and testing. Mend or remove them.",
        "2 training images are copies of another. Keep one of each",
        "1 group of training images is nearly identical.",
        "2 test images are also in the training set: accuracy will be overstated. Remove them",
        "1 group of identical or nearly identical images has different labels. Correct the labels",
    ):
        assert any(line.startswith(part) for line in text), part


def test_inspect_and_train_count_alike(messy: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same words and the same numbers: broken images count in neither."""
    from finessl.cli import app

    save(photo(300), messy / "unlabeled" / "x.png")
    (messy / "unlabeled" / "y.png").write_bytes(b"junk")
    (messy / "train").rename(messy / "labeled")
    app(["inspect", str(messy)], standalone_mode=False)
    out = capfd.readouterr().out
    assert "14 labeled and 1 unlabeled training images, 2 broken" in out and "5 to 7 per class, 1 broken" in out
    options = ["--backbone", "embedded", "--method", "supervised", "--steps", "1", "--out", str(tmp_path / "run")]
    app(["train", str(messy), *options], standalone_mode=False)
    said = " ".join(capfd.readouterr().err.split())
    assert "14 labeled and 1 unlabeled training images, 12 test images; labeled images are also used without" in said
    assert "3 files are left out" in said or "2 files are left out: not an image in a known format" in said


def test_damaged_metadata_is_counted_not_printed(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    damaged = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0\x01\0\0\0\x06\0"
    for i in range(4):
        save(photo(i), tmp_path / "ab"[i % 2] / f"{i}.jpg", exif=damaged if i < 2 else b"")
    found = report(open_dataset(tmp_path))
    assert [key for key, _ in found.damaged] == ["a/0.jpg", "b/1.jpg"] and not recwarn.list
    assert any(line.startswith("2 images can be read with a warning") for line in found.advice)


def test_copies_of_near_images_are_found_as_before() -> None:
    """Copies are compared once; groups and leaks name them all."""
    first, second = (np.asarray(photo(1).resize((side, side))) for side in (96, 90))
    near = np.asarray(Image.fromarray(second).resize((96, 96)))
    train = ArrayImages(np.stack([first, first, near, np.asarray(photo(2)), near]), "train")
    data = Dataset("d", ["a", "b"], train, np.array([0, 0, 1, 1, -1]), ArrayImages(near[None].repeat(2, 0), "test"))
    data.test_labels = np.array([1, 1])
    found = report(data)
    assert found.near == [["train/0", "train/1", "train/2", "train/4"]]
    assert found.leaks == [("test/0", "train/2", "same"), ("test/1", "train/2", "same")]


@pytest.mark.parametrize("verb", [["inspect", "--backbone", "embedded"], ["probe", "--backbone", "embedded"]])
def test_data_in_which_everything_is_broken(tmp_path: Path, verb: list[str]) -> None:
    from finessl.cli import app

    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "x.png").write_bytes(b"junk")
    with pytest.raises(FinesslError, match="none of the 2 train images can be read"):
        app([verb[0], str(tmp_path), *verb[1:]], standalone_mode=False)


def test_clean_data_has_nothing_to_report() -> None:
    """Different images of one kind are no duplicates, blank ones neither hide nor make any."""
    pixels = np.stack([np.asarray(photo(i, 48)) for i in range(60)] + [np.full((48, 48, 3), v) for v in (0, 40, 250)])
    labels = np.arange(63) % 3
    test = ArrayImages(np.stack([np.asarray(photo(200 + i, 48)) for i in range(30)]), "test")
    data = Dataset(
        "clean", ["a", "b", "c"], ArrayImages(pixels.astype(np.uint8), "train"), labels, test, np.arange(30) % 3
    )
    found = report(data)
    assert not (found.broken or found.duplicates or found.near or found.leaks or found.conflicts or found.advice)


def test_what_is_too_little(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path / "labeled", {"a": 30, "b": 2, "c": 1})
    (tmp_path / "labeled" / "d").mkdir()
    make.write(tmp_path / "unlabeled" / "x.png", 999)
    text = "\n".join(report(open_dataset(tmp_path)).advice)
    for part in (
        "1 class has no labeled image: d",
        "2 classes have fewer than 4 labels: b, c",
        "the largest class has 30 labels and the smallest 0",
        "there is only 1 unlabeled image and 33 labeled ones",
        "no test set",
    ):
        assert part in text


def test_difference_hash_by_hand() -> None:
    """Brighter to the right everywhere: all bits set; to the left: none."""
    ramp = np.broadcast_to(np.linspace(0, 255, 90).astype(np.uint8)[None, :, None], (80, 90, 3))
    assert difference_hash(Image.fromarray(ramp.copy())) == np.uint64(2**64 - 1)
    assert difference_hash(Image.fromarray(ramp[:, ::-1].copy())) == 0


def test_near_pairs_against_all_pairs() -> None:
    """The search by quarters finds what comparing every pair finds."""
    rng = np.random.default_rng(0)
    count = 400
    signatures = Signatures.empty(count)
    signatures.content[:] = np.arange(count)
    signatures.difference[:] = rng.integers(0, 2**63, count, dtype=np.uint64)
    for i in range(0, 200, 2):  # partners that differ in 0 … 5 bits
        flips = rng.choice(64, int(rng.integers(0, 6)), replace=False)
        signatures.difference[i + 1] = signatures.difference[i] ^ np.uint64(sum(1 << int(b) for b in flips))
    signatures.thumbnail[:] = rng.integers(0, 2, count)[:, None] * 100  # half of the partners look different
    expected = [
        [i, j]
        for i in range(count)
        for j in range(i + 1, count)
        if bin(int(signatures.difference[i] ^ signatures.difference[j])).count("1") <= 3
        and abs(int(signatures.thumbnail[i, 0]) - int(signatures.thumbnail[j, 0])) <= 6
    ]
    assert 10 < len(expected) < 100 and near_pairs(signatures).tolist() == expected


def test_groups() -> None:
    assert [g.tolist() for g in equal_groups(np.array([5, 1, 5, 2, 1, 5]))] == [[0, 2, 5], [1, 4]]
    assert [g.tolist() for g in join_pairs(np.array([[3, 4], [1, 7], [4, 9], [2, 7]]))] == [[1, 2, 7], [3, 4, 9]]
    assert join_pairs(np.empty((0, 2), np.int64)) == [] and equal_groups(np.empty(0)) == []
