"""Image folders in the layouts that people have, and what is wrong with them when something is."""

from __future__ import annotations

from pathlib import Path

import pytest

from finessl.data.sources import open_dataset
from finessl.errors import FinesslError


def keys(images) -> list[str]:
    return [images.key(i) for i in range(len(images))]


def test_labeled_and_unlabeled(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path / "labeled", {"dog": 2, "cat": 1})
    make.write(tmp_path / "unlabeled" / "deep" / "u.jpg")
    make.write(tmp_path / "unlabeled" / "v.png")
    make.class_folder(tmp_path / "test", {"dog": 1})
    data = open_dataset(tmp_path)
    assert data.name == tmp_path.name and data.classes == ["cat", "dog"]
    assert keys(data.train) == [
        *("labeled/cat/0.png", "labeled/dog/0.png", "labeled/dog/1.png"),
        *("unlabeled/v.png", "unlabeled/deep/u.jpg"),
    ]
    assert data.train_labels.tolist() == [0, 1, 1, -1, -1]
    assert data.given is not None and data.given.tolist() == [True] * 3 + [False] * 2
    assert data.test is not None and data.test_labels is not None
    assert keys(data.test) == ["test/dog/0.png"] and data.test_labels.tolist() == [1]


def test_other_spelling_and_loose_images(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path / "labelled", {"a": 1, "b": 1})
    make.write(tmp_path / "unlabelled" / "u.png")
    make.write(tmp_path / "labelled" / "x.png")
    make.write(tmp_path / "y.png")
    data = open_dataset(tmp_path)
    assert data.train_labels.tolist() == [0, 1, -1] and data.given.tolist() == [True, True, False]
    assert sorted(key for key, _ in data.excluded) == ["labelled/x.png", "y.png"]


def test_plain_classes_with_nested_folders_in_natural_order(tmp_path: Path, make) -> None:
    for name in ("class10/x.png", "class2/img10.png", "class2/img9.png", "class2/sub/img1.png"):
        make.write(tmp_path / name)
    data = open_dataset(str(tmp_path))
    assert data.classes == ["class2", "class10"] and data.given is None and data.test is None
    assert keys(data.train) == ["class2/img9.png", "class2/img10.png", "class2/sub/img1.png", "class10/x.png"]
    assert data.train_labels.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("test", ["test", "val"])
def test_train_and_test(tmp_path: Path, make, test: str) -> None:
    make.class_folder(tmp_path / "train", {"a": 2, "b": 2})
    make.class_folder(tmp_path / test, {"b": 3})
    data = open_dataset(tmp_path)
    assert data.classes == ["a", "b"] and data.given is None and len(data.train) == 4
    assert data.test_labels is not None and data.test_labels.tolist() == [1, 1, 1]


def test_test_wins_over_val_and_a_flat_test_folder_is_none(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path / "train", {"a": 1, "b": 1})
    make.class_folder(tmp_path / "val", {"a": 2})
    make.write(tmp_path / "test" / "1.png")  # ImageNet's test images have no labels
    assert len(open_dataset(tmp_path).test or []) == 2
    make.class_folder(tmp_path / "test", {"a": 5})
    assert len(open_dataset(tmp_path).test or []) == 5


def test_plain_classes_beside_unlabeled_and_test(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path, {"a": 1, "b": 2})
    make.class_folder(tmp_path / "test", {"a": 1})
    make.write(tmp_path / "unlabeled" / "1.png")
    data = open_dataset(tmp_path)
    assert data.classes == ["a", "b"] and data.train_labels.tolist() == [0, 1, 1, -1]
    assert data.given is not None and data.given.sum() == 3 and len(data.test or []) == 1


def test_a_pile_of_images_and_a_few_names(tmp_path: Path, make) -> None:
    for number in range(6):
        make.write(tmp_path / f"{number}.jpg")
    (tmp_path / "labels.csv").write_text("path,label\n4.jpg,cat\n0.jpg,dog\n")
    data = open_dataset(tmp_path)
    assert data.classes == ["cat", "dog"] and data.train_labels.tolist() == [1, -1, -1, -1, 0, -1]
    assert data.given is not None and data.given.sum() == 2
    (tmp_path / "labels.csv").rename(tmp_path.parent / f"{tmp_path.name}.csv")
    other = open_dataset(tmp_path, labels=str(tmp_path.parent / f"{tmp_path.name}.csv"))
    assert other.train_labels.tolist() == data.train_labels.tolist()
    (tmp_path / "labels.csv").write_text("path,label\n4.jpg,cat\nmissing.jpg,dog\n")
    with pytest.raises(
        FinesslError, match=r"names 1 image that is not in .*missing.jpg\. Paths are relative to that folder"
    ):
        open_dataset(tmp_path)


def test_a_class_that_may_be_misspelt_is_named(tmp_path: Path, make) -> None:
    for number in range(6):
        make.write(tmp_path / f"{number}.jpg")
    names = ["plastic", "plastic", "paper", "paper", "plasic", "glass"]
    (tmp_path / "labels.csv").write_text("path,label\n" + "".join(f"{i}.jpg,{name}\n" for i, name in enumerate(names)))
    data = open_dataset(tmp_path)
    assert data.notes == ["'plasic' has one label; did you mean 'plastic'?"] and len(data.classes) == 4


def test_a_list_that_nobody_has_filled_in(tmp_path: Path, make) -> None:
    make.write(tmp_path / "pile" / "0.jpg")
    (tmp_path / "list.csv").write_text("path,label\n0.jpg,\n")
    with pytest.raises(FinesslError, match=r"list.csv: no row has a label\. Fill in the column label"):
        open_dataset(tmp_path / "pile", labels=str(tmp_path / "list.csv"))


def test_a_separate_test_set(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path / "mine", {"a": 1, "b": 1})
    make.class_folder(tmp_path / "other", {"b": 2})
    data = open_dataset(tmp_path / "mine", test=tmp_path / "other")
    assert data.test_labels is not None and data.test_labels.tolist() == [1, 1]
    (tmp_path / "t.csv").write_text("path,label\nother/b/0.png,b\nmine/a/0.png,a\n")
    data = open_dataset(tmp_path / "mine", test=tmp_path / "t.csv")
    assert data.test_labels is not None and data.test_labels.tolist() == [1, 0]
    with pytest.raises(FinesslError, match="no such folder or table"):
        open_dataset(tmp_path / "mine", test=tmp_path / "gone")


def test_hidden_and_other_files_are_ignored(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path, {"a": 1, "b": 1, ".hidden": 1, "__MACOSX": 1})
    make.write(tmp_path / "a" / ".thumb.png")
    (tmp_path / "a" / "notes.txt").write_text("x")
    (tmp_path / "b" / "UPPER.PNG").write_bytes((tmp_path / "b" / "0.png").read_bytes())
    data = open_dataset(tmp_path)
    assert data.classes == ["a", "b"] and keys(data.train) == ["a/0.png", "b/0.png", "b/UPPER.PNG"]


def test_symlink_loops_end(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path / "data", {"a": 1, "b": 1})
    (tmp_path / "data" / "a" / "back").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "b" / "self").symlink_to("self")
    make.write(tmp_path / "elsewhere" / "x.png")
    (tmp_path / "data" / "b" / "more").symlink_to(tmp_path / "elsewhere")
    assert keys(open_dataset(tmp_path / "data").train) == ["a/0.png", "b/0.png", "b/more/x.png"]


def test_loose_images_beside_the_classes_are_reported(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path, {"a": 1, "b": 1})
    make.write(tmp_path / "overview.png")
    data = open_dataset(tmp_path)
    assert len(data.train) == 2
    assert data.excluded == [("overview.png", "in no class folder; unlabeled images belong in unlabeled/")]


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="no images in this folder"):
        open_dataset(tmp_path)
    (tmp_path / "a.mp4").write_text("x")
    with pytest.raises(FinesslError, match=r"other files: 1 \.mp4"):
        open_dataset(tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(FinesslError, match="for cifar10, give that name, with root"):
        open_dataset(tmp_path)


def test_one_class_only(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path, {"only": 3})
    with pytest.raises(FinesslError, match="two classes or more.*'only'"):
        open_dataset(tmp_path)


def test_images_without_classes(tmp_path: Path, make) -> None:
    make.write(tmp_path / "1.png")
    with pytest.raises(FinesslError, match=r"1 images but no classes.*labels\.csv"):
        open_dataset(tmp_path)
    (tmp_path / "labeled").mkdir()
    with pytest.raises(FinesslError, match="labeled/<class>"):
        open_dataset(tmp_path)


def test_labels_unknown_to_train(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path / "train", {"a": 1, "b": 1})
    make.class_folder(tmp_path / "test", {"a": 1, "zebra": 1})
    with pytest.raises(FinesslError, match="test: labels unknown to the training data: zebra"):
        open_dataset(tmp_path)


def test_unknown_names_and_options(tmp_path: Path, make) -> None:
    with pytest.raises(FinesslError, match="cifer100: there is no such folder.*did you mean cifar100"):
        open_dataset("cifer100")
    make.class_folder(tmp_path, {"a": 1, "b": 1})
    with pytest.raises(FinesslError, match="no option 'lables'"):
        open_dataset(tmp_path, lables="x")


def test_broken_images_are_left_out_or_refused(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path, {"a": 2, "b": 2})
    data = open_dataset(tmp_path)
    data.exclude("train", [(1, "broken: cut off")])
    data.exclude("train", [(1, "broken: cut off")])  # told twice, listed once
    assert data.excluded == [("a/1.png", "broken: cut off")] and data.broken.tolist() == [1]
    strict = open_dataset(tmp_path, strict=True)
    with pytest.raises(FinesslError, match=r"1 image cannot be used: a/1\.png \(broken: cut off\)"):
        strict.exclude("train", [(1, "broken: cut off")])


def test_fingerprint_follows_names_sizes_and_labels(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path, {"a": 2, "b": 2})
    first = open_dataset(tmp_path).fingerprint()
    assert open_dataset(tmp_path).fingerprint() == first
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert open_dataset(moved).fingerprint() == first
    make.write(moved / "a" / "1.png", 99, 20, 20)
    assert open_dataset(moved).fingerprint() != first


def test_table_of_labels_adds_to_the_labels_that_the_folder_gives(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    make.class_folder(tmp_path / "photos" / "labeled", {"cat": 2, "dog": 1})
    make.class_folder(tmp_path / "photos" / "unlabeled", {"": 3}, seed=50)
    table = tmp_path / "to-label.csv"
    table.write_text(
        "rank,path,suggested,label\n1,unlabeled/1.png,dog,owl\n2,labeled/cat/0.png,,dog\n3,unlabeled/2.png,,\n"
    )
    dataset = open_dataset(tmp_path / "photos", labels=str(table))
    named = {dataset.train.key(i): dataset.classes[k] for i, k in enumerate(dataset.train_labels) if k >= 0}
    assert named == {
        "labeled/cat/0.png": "dog",  # the table has the last word
        "labeled/cat/1.png": "cat",
        "labeled/dog/0.png": "dog",
        "unlabeled/1.png": "owl",
    }
    assert len(dataset.train) == 6 and dataset.given is not None and dataset.given.sum() == 4


def test_table_of_labels_adds_to_labels_csv(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    make.class_folder(tmp_path / "photos", {"": 4})
    (tmp_path / "photos" / "labels.csv").write_text("path,label\n0.png,cat\n1.png,cat\n")
    (tmp_path / "more.csv").write_text("path,label\n1.png,dog\n2.png,dog\n")
    dataset = open_dataset(tmp_path / "photos", labels=str(tmp_path / "more.csv"))
    assert [dataset.classes[k] if k >= 0 else "" for k in dataset.train_labels] == ["cat", "dog", "dog", ""]
