"""Food-101, Semi-Aves, ImageNet and Parquet tables, in their published layouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from finessl.data.dataset import IMAGENET
from finessl.data.sources import open_dataset
from finessl.data.splits import make_split
from finessl.errors import FinesslError

# ---- Food-101 ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def food(tmp_path: Path, make) -> Path:
    folder = tmp_path / "food-101"
    lists = {"train": ["apple_pie/3", "apple_pie/1", "baby_back_ribs/7"], "test": ["baby_back_ribs/2", "apple_pie/9"]}
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "classes.txt").write_text("apple_pie\nbaby_back_ribs\n")
    (folder / "meta" / "labels.txt").write_text("Apple pie\nBaby back ribs\n")
    for part, names in lists.items():
        (folder / "meta" / f"{part}.txt").write_text("\n".join(names) + "\n")
        for name in names:
            make.write(folder / "images" / f"{name}.jpg")
    return tmp_path


def test_food101(food: Path) -> None:
    for root in (food, food / "food-101"):
        data = open_dataset("food101", root=root)
        assert data.classes == ["apple_pie", "baby_back_ribs"] and data.statistics == IMAGENET and data.given is None
        assert [data.train.key(i) for i in range(3)] == ["apple_pie/3.jpg", "apple_pie/1.jpg", "baby_back_ribs/7.jpg"]
        assert data.train_labels.tolist() == [0, 0, 1] and data.test_labels.tolist() == [1, 0]
        assert data.train.read(0).shape == (8, 8, 3)


def test_food101_incomplete(food: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (food / "food-101" / "images" / "apple_pie" / "1.jpg").unlink()
    with pytest.raises(FinesslError, match=r"train.txt names 1 of 3 files that are not there: apple_pie/1.jpg"):
        open_dataset("food101", root=food)
    with pytest.raises(FinesslError, match="download=true"):
        open_dataset("food101", root=tmp_path_factory.mktemp("empty"))


# ---- ImageNet ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["", "ILSVRC/Data/CLS-LOC"])
def test_imagenet(tmp_path: Path, make, inner: str) -> None:
    for wnid in ("n01440764", "n01443537"):
        for number in (2, 10):
            make.write(tmp_path / inner / "train" / wnid / f"{wnid}_{number}.JPEG")
        make.write(tmp_path / inner / "val" / wnid / f"ILSVRC2012_val_0000{number}.JPEG")
    make.write(tmp_path / inner / "test" / "ILSVRC2012_test_00001.JPEG")  # no labels
    data = open_dataset("imagenet", root=tmp_path)
    assert data.name == "imagenet" and data.classes == ["n01440764", "n01443537"] and data.statistics == IMAGENET
    assert data.train.key(1) == "train/n01440764/n01440764_10.JPEG" and len(data.test) == 2
    (tmp_path / "1percent.txt").write_text("n01443537_2.JPEG\nn01440764_10.JPEG\n")  # SimCLR's form
    split = make_split(data, kind="list", file=str(tmp_path / "1percent.txt"))
    assert split.labeled.tolist() == [1, 2] and len(split.unlabeled) == 4


def test_imagenet_not_ready(tmp_path: Path, make) -> None:
    with pytest.raises(FinesslError, match="image-net.org"):
        open_dataset("imagenet", root=tmp_path)
    make.class_folder(tmp_path / "train", {"n1": 1, "n2": 1})
    make.write(tmp_path / "val" / "ILSVRC2012_val_00001.JPEG")
    with pytest.raises(FinesslError, match="val/<wnid>/; sort them"):
        open_dataset("imagenet", root=tmp_path)


# ---- Semi-Aves ---------------------------------------------------------------------------------------------------------

AVES = {
    "l_train": [("trainval_images/0/0.jpg", 0), ("trainval_images/1/0.jpg", 1), ("trainval_images/0/1.jpg", 0)],
    "val": [("trainval_images/1/9.jpg", 1)],
    "u_train_in": [("u_train_in/0.jpg", -1), ("u_train_in/1.jpg", -1)],
    "u_train_out": [("u_train_out/0.jpg", -1)],
    "test": [("test/5.jpg", 1), ("test/2.jpg", 0)],
}


@pytest.fixture(params=["json", "lists"])
def aves(request: pytest.FixtureRequest, tmp_path: Path, make) -> Path:
    folder = tmp_path / "annotation" if request.param == "json" else tmp_path
    folder.mkdir(exist_ok=True)
    for part, rows in AVES.items():
        for name, _ in rows:
            make.write(tmp_path / name)
        if request.param == "json":
            images = [{"id": 10 + i, "file_name": name, "width": 8} for i, (name, _) in enumerate(rows)]
            notes = [{"id": i, "image_id": 10 + i, "category_id": label} for i, (_, label) in enumerate(rows)]
            content = {"info": {}, "images": images, "annotations": [] if part == "test" else notes[::-1]}
            (folder / f"anno_{part}.json").write_text(json.dumps(content))
        else:
            (folder / f"{part}.txt").write_text("".join(f"{name} {label}\n" for name, label in rows))
    if request.param == "json":
        (folder / "solution.csv").write_text("Id,Category\n5,1\n2,0\n")
        (folder / "semi_aves_class_names.txt").write_text("0 Charadrius_semipalmatus\n1 Tachycineta_thalassina\n")
    else:
        (folder / "species_names.txt").write_text("0 Charadrius_semipalmatus\n1 Tachycineta_thalassina\n")
    return tmp_path


def test_semi_aves(aves: Path) -> None:
    data = open_dataset("semi-aves", root=aves)
    assert data.classes == ["Charadrius semipalmatus", "Tachycineta thalassina"]
    assert [data.train.key(i) for i in range(5)] == [name for name, _ in AVES["l_train"] + AVES["u_train_in"]]
    assert data.train_labels.tolist() == [0, 1, 0, -1, -1] and data.test_labels.tolist() == [1, 0]
    split = make_split(data)
    assert split.kind == "given" and split.labeled.tolist() == [0, 1, 2] and len(split.unlabeled) == 5
    with_out = open_dataset("semi-aves", root=aves, out_of_class="true")
    assert len(with_out.train) == 6 and make_split(with_out).counts(with_out)[2] == 3
    assert open_dataset("semi-aves", root=aves, validation_labels=True).given.tolist() == [True] * 4 + [False] * 2


def test_semi_aves_oracle_is_for_diagnosis_only(aves: Path) -> None:
    folder = aves / "annotation" if (aves / "annotation").is_dir() else aves
    (folder / "u_train_in_oracle.txt").write_text("u_train_in/1.jpg 1\nu_train_in/0.jpg 0\n")
    data = open_dataset("semi-aves", root=aves)
    assert data.train_labels.tolist() == [0, 1, 0, 0, 1] and data.given.tolist() == [True] * 3 + [False] * 2
    assert make_split(data).labeled.tolist() == [0, 1, 2]


def test_semi_aves_names_files_that_are_not_there(aves: Path) -> None:
    (aves / "u_train_in" / "1.jpg").unlink()
    with pytest.raises(FinesslError, match="1 of 5 files that are not there: u_train_in/1.jpg"):
        open_dataset("semi-aves", root=aves)


def test_semi_aves_damaged(aves: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if (aves / "annotation").is_dir():
        (aves / "annotation" / "solution.csv").write_text("Id,Category\n5,1\n")
        with pytest.raises(FinesslError, match="1 labels for the 2 images of test"):
            open_dataset("semi-aves", root=aves)
        (aves / "annotation" / "solution.csv").unlink()
        with pytest.raises(FinesslError, match="solution.csv is missing"):
            open_dataset("semi-aves", root=aves)
        (aves / "annotation" / "anno_l_train.json").write_text("{}")
        with pytest.raises(FinesslError, match="not an annotation of Semi-Aves"):
            open_dataset("semi-aves", root=aves)
    else:
        (aves / "test.txt").write_text("test/5.jpg 7\n")
        with pytest.raises(FinesslError, match="test has labels outside 0 … 1"):
            open_dataset("semi-aves", root=aves)
        (aves / "test.txt").write_text("test/5.jpg\n")
        with pytest.raises(FinesslError, match="a path and a number"):
            open_dataset("semi-aves", root=aves)
    with pytest.raises(FinesslError, match="holds no semi-aves"):
        open_dataset("semi-aves", root=tmp_path_factory.mktemp("empty"))


@pytest.mark.parametrize("name", ["food101", "imagenet", "semi-aves"])
def test_root_is_needed(name: str) -> None:
    with pytest.raises(FinesslError, match=f"{name} needs root"):
        open_dataset(name)


# ---- Parquet -----------------------------------------------------------------------------------------------------------


def test_parquet(tmp_path: Path, make) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    make.class_folder(tmp_path / "x", {"a": 4})
    table = {"Path": [f"x/a/{i}.png" for i in range(4)], "label": ["dog", None, "cat", "dog"], "other": [1.0] * 4}
    parquet.write_table(pyarrow.table(table), tmp_path / "t.parquet")
    data = open_dataset(tmp_path / "t.parquet")
    assert data.classes == ["cat", "dog"] and data.train_labels.tolist() == [1, -1, 0, 1]
    numbers = {"path": table["Path"], "label": np.array([10, 9, 9, 10])}
    parquet.write_table(pyarrow.table(numbers), tmp_path / "n.parquet")
    assert open_dataset(tmp_path / "n.parquet").classes == ["9", "10"]
    parquet.write_table(pyarrow.table({"path": ["x"], "name": ["y"]}), tmp_path / "bad.parquet")
    with pytest.raises(FinesslError, match="no column 'label'; it has path"):
        open_dataset(tmp_path / "bad.parquet")
    parquet.write_table(pyarrow.table({"a": ["x"], "b": ["y"]}), tmp_path / "bad.parquet")
    with pytest.raises(FinesslError, match="no column 'path'; it has a, b"):
        open_dataset(tmp_path / "bad.parquet")
    whole = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "bad.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FinesslError, match="cannot be read as a Parquet table"):
        open_dataset(tmp_path / "bad.parquet")


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(FinesslError, match="the name of the data is empty"):
        open_dataset("")
