"""WebDataset shards: read in place, labels next to the images, damage found."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from finessl.data import shards
from finessl.data.decoding import ImageError
from finessl.data.pixel_store import PixelStore
from finessl.data.sources import open_dataset, webdataset
from finessl.data.splits import make_split
from finessl.errors import FinesslError

from .conftest import tar_bytes


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, members: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members, "w", format))
    return path


@pytest.fixture
def folder(tmp_path: Path, make) -> Path:
    """Two training shards, one of unlabeled images, one for testing."""
    for number in range(2):
        members = {}
        for i in range(3):
            members[f"{number}{i}.png"] = png(make.picture(10 * number + i))
            members[f"{number}{i}.cls"] = str(i % 2).encode()
        write_tar(tmp_path / "w" / f"train-{number}.tar", members)
    write_tar(tmp_path / "w" / "unlabeled-0.tar", {"u/0.png": png(make.picture(50)), "u/0.cls": b"1"})
    write_tar(
        tmp_path / "w" / "val-0.tar", {"v.png": png(make.picture(60)), "v.json": json.dumps({"label": 1}).encode()}
    )
    (tmp_path / "w" / "classes.txt").write_text("cat\ndog\n")
    return tmp_path / "w"


def test_samples_and_labels(folder: Path, make) -> None:
    data = open_dataset(folder)
    assert data.name == "w" and data.classes == ["cat", "dog"]
    assert data.train_labels.tolist() == [0, 1, 0, 0, 1, 0, -1] and data.test_labels.tolist() == [1]
    assert data.train.key(4) == "train-1.tar/11.png" and data.train.key(6) == "unlabeled-0.tar/u/0.png"
    for i, seed in enumerate([0, 1, 2, 10, 11, 12, 50]):
        assert (data.train.read(i) == make.picture(seed)).all() and data.train.size(i) == (8, 8)
    taken = data.train.take(np.array([6, 1]))
    assert (taken.read(1) == make.picture(1)).all() and taken.key(0) == data.train.key(6)
    assert make_split(data).counts(data)[0].tolist() == [4, 2]
    assert PixelStore.build(data.train, shorter=256).array.shape == (7, 8, 8, 3)


def test_text_labels_and_a_single_file(tmp_path: Path, make) -> None:
    image = png(make.picture())
    members = {
        "./a/1.left.png": image,
        "./a/1.cls": b"dog\n",
        "b.png": image,
        "b.cls": b"-1",
        "c.png": image,
        "c.cls": b"ant",
    }
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        data = open_dataset(write_tar(tmp_path / "x.tar", members, format))
        assert data.name == "x" and data.classes == ["ant", "dog"] and data.train_labels.tolist() == [1, -1, 0]


def test_long_names(tmp_path: Path, make) -> None:
    names = [f"{'deep/' * 60}{i}" for i in range(2)]
    members = {}
    for i, name in enumerate(names):
        members |= {f"{name}.png": png(make.picture(i)), f"{name}.cls": str(i).encode()}
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        data = open_dataset(write_tar(tmp_path / "x.tar", members, format))
        assert data.train.key(1) == f"x.tar/{names[1]}.png" and (data.train.read(1) == make.picture(1)).all()


def test_the_index_is_cached_until_a_shard_changes(folder: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_dataset(folder)
    read: list[Path] = []
    real = shards.read_shard
    monkeypatch.setattr(webdataset, "read_shard", lambda path: read.append(path) or real(path))
    again = open_dataset(folder)
    assert (
        read == [] and again.fingerprint() == first.fingerprint() and (again.train.read(3) == first.train.read(3)).all()
    )
    write_tar(folder / "train-1.tar", {"n.png": png(make.picture(99)), "n.cls": b"0"})
    assert len(open_dataset(folder).train) == 5 and len(read) == 4


def test_a_shard_cut_short(folder: Path) -> None:
    """Anywhere: in a header, in an image, between members, in the end mark."""
    whole = (folder / "train-1.tar").read_bytes()
    ends = [len(whole.rstrip(b"\0")) // 512 * 512 + 512]
    for length in (100, 512, 700, 1024, 1024 + 512 + 100, ends[0], len(whole) // 3):
        (folder / "train-1.tar").write_bytes(whole[:length])
        with pytest.raises(FinesslError, match=r"train-1.tar is cut short.*images are whole"):
            open_dataset(folder)
    for content in (b"", b"no tar at all" * 100, gzip.compress(whole)):
        (folder / "train-1.tar").write_bytes(content)
        with pytest.raises(FinesslError, match="train-1.tar is cut short, compressed or no tar file"):
            open_dataset(folder)


def test_cut_short_after_indexing(folder: Path) -> None:
    data = open_dataset(folder)
    with open(folder / "train-0.tar", "r+b") as file:
        file.truncate(600)
    with pytest.raises(ImageError, match="cut short since"):
        data.train.read(1)
    (folder / "train-0.tar").unlink()
    with pytest.raises(ImageError, match="cannot be read"):
        data.train.read(1)


def test_hostile_members_are_never_written(tmp_path: Path, make) -> None:
    image = png(make.picture())
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name, label in (("../../evil", b"a"), ("/abs/evil", b"b")):
            for extension, content in ((".png", image), (".cls", label)):
                info = tarfile.TarInfo(name + extension)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    data = open_dataset(path)
    assert len(data.train) == 2 and (data.train.read(0) == make.picture()).all()
    assert [p.name for p in tmp_path.rglob("*")] == ["x.tar"]


def test_broken_images_and_labels_inside(tmp_path: Path, make) -> None:
    image = png(make.picture())
    members = {
        "a.png": image,
        "a.cls": b"0",
        "b.png": b"",
        "b.cls": b"1",
        "c.png": image[:30],
        "c.cls": b"1",
        "d.png": image,
    }
    data = open_dataset(write_tar(tmp_path / "x.tar", members | {"d.cls": b"1"}))
    built = PixelStore.build(data.train, shorter=8)
    assert [i for i, _ in built.failures] == [1, 2] and built.failures[0][1] == "empty file (0 bytes)"
    (tmp_path / "classes.txt").write_text("only\n")
    with pytest.raises(FinesslError, match="classes.txt has 1 classes; the shards have labels 1"):
        open_dataset(tmp_path / "x.tar")
    with pytest.raises(FinesslError, match="hold no images"):
        open_dataset(write_tar(tmp_path / "y.tar", {"a.txt": b"x"}))
    (tmp_path / "classes.txt").unlink()
    write_tar(tmp_path / "z" / "train.tar", {"a.png": image, "a.cls": b"0", "b.png": image, "b.cls": b"1"})
    write_tar(tmp_path / "z" / "test.tar", {"a.png": image, "a.cls": b"7"})
    with pytest.raises(FinesslError, match="unknown to the training data: 7"):
        open_dataset(tmp_path / "z")
    write_tar(tmp_path / "z" / "test.tar", {"a.png": image})
    with pytest.raises(FinesslError, match="1 test images have no label"):
        open_dataset(tmp_path / "z")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("10.json", b"{", r"train-1.tar: the label 10.json cannot be read \(.*\); mend or remove it"),
        ("10.cls", b"\xff", "train-1.tar: the label 10.cls cannot be read"),
        ("10.json", b"[" * 100_000, "the label 10.json cannot be read"),
        ("10.cls", b" " * 2_000_000, "10.cls has 2,000,000 bytes, which is no label"),
        ("10.json", b'{"label": "\\ud800"}', "class name is not valid UTF-8"),
    ],
)
def test_bad_label_is_named(folder: Path, make, name: str, content: bytes, message: str) -> None:
    """The archive is whole: getting it again would not help."""
    (folder / "classes.txt").unlink()
    write_tar(folder / "train-1.tar", {"10.png": png(make.picture(1)), name: content})
    with pytest.raises(FinesslError, match=message):
        open_dataset(folder)


def test_images_in_other_formats_and_pipes(folder: Path, make) -> None:
    write_tar(folder / "train-1.tar", {"10.png": png(make.picture(1)), "10.cls": b"0", "11.tga": b"x", "11.cls": b"1"})
    for _ in range(2):  # scanned, then from the cache
        assert open_dataset(folder).excluded == [("train-1.tar/11.tga", ".tga is not read; convert it to JPEG or PNG")]
    os.mkfifo(folder / "train-2.tar")
    with pytest.raises(FinesslError, match="train-2.tar cannot be read: not a regular file"):
        open_dataset(folder)
