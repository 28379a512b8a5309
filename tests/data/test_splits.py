"""Who is labeled: seeded draws, the released code's first N, what the data gives; saved, loaded, refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as cases
from hypothesis import settings
from hypothesis import strategies as st

from finessl.data.dataset import Dataset
from finessl.data.images import ArrayImages
from finessl.data.splits import Split, from_runs, make_split, to_runs
from finessl.errors import FinesslError


def dataset(
    labels: list[int], *, classes: int = 0, given: list[bool] | None = None, test: list[int] | None = None
) -> Dataset:
    """One-pixel images: only labels matter here."""
    images = ArrayImages(np.arange(len(labels) * 3, dtype=np.uint8).reshape(-1, 1, 1, 3), "train")
    names = [f"c{i}" for i in range(classes or max(labels) + 1)]
    data = Dataset("toy", names, images, np.array(labels), given=None if given is None else np.array(given))
    if test is not None:
        data.test, data.test_labels = ArrayImages(np.zeros((len(test), 1, 1, 3), np.uint8), "test"), np.array(test)
    return data


@settings(max_examples=40, deadline=None)
@cases(st.integers(0, 2**31), st.lists(st.integers(5, 30), min_size=2, max_size=8), st.integers(1, 5), st.booleans())
def test_per_class_counts(seed: int, sizes: list[int], count: int, both: bool) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    data = dataset(labels.tolist())
    split = make_split(data, kind="per-class", seed=seed, labels_per_class=count, labeled_in_unlabeled=both)
    assert np.bincount(labels[split.labeled]).tolist() == [count] * len(sizes)
    assert (np.diff(split.labeled) > 0).all()
    everything = np.arange(len(labels))
    assert (split.unlabeled == (everything if both else np.setdiff1d(everything, split.labeled))).all()
    again = make_split(data, kind="per-class", seed=seed, labels_per_class=count, labeled_in_unlabeled=both)
    assert (again.labeled == split.labeled).all()


def test_a_larger_draw_contains_the_smaller_and_classes_do_not_disturb_each_other() -> None:
    data = dataset([0] * 50 + [1] * 50)
    four = make_split(data, labels_per_class=4, seed=3).labeled
    ten = make_split(data, labels_per_class=10, seed=3).labeled
    assert set(four) <= set(ten)
    more = make_split(dataset([0] * 80 + [1] * 50), labels_per_class=4, seed=3).labeled
    assert (more[4:] - 80 == four[4:] - 50).all()  # class 1 draws the same images
    assert set(make_split(data, labels_per_class=4, seed=4).labeled) != set(four)


def test_draws_are_uniform() -> None:
    data = dataset([0] * 10 + [1] * 10)
    hits = sum(np.bincount(make_split(data, labels_per_class=3, seed=s).labeled, minlength=20) for s in range(600))
    assert np.abs(hits / 600 - 0.3).max() < 0.1  # 5 standard deviations of a binomial


def test_first_n_is_the_order_of_the_data() -> None:
    data = dataset([1, 0, 1, 0, 1, 0, 0])
    for seed in (0, 1):
        assert make_split(data, kind="first-n", labels_per_class=2, seed=seed).labeled.tolist() == [0, 1, 2, 3]


def test_auto_takes_what_is_given_and_never_hides_it() -> None:
    data = dataset([0, 0, 1, 1, -1, -1], given=[True, True, True, True, False, False])
    split = make_split(data)
    assert split.kind == "given" and split.labeled.tolist() == [0, 1, 2, 3] and len(split.unlabeled) == 6
    assert make_split(data, labels_per_class=None).kind == "given"
    assert make_split(data, labels_per_class=1).labeled.tolist() == [0, 1, 2, 3]  # for data without a division
    fewer = make_split(data, kind="per-class", labels_per_class=1)
    assert fewer.kind == "per-class" and len(fewer.labeled) == 2 and len(fewer.unlabeled) == 6
    assert make_split(data, labeled_in_unlabeled=False).unlabeled.tolist() == [4, 5]
    assert split.settings == {"labeled_in_unlabeled": True}
    assert fewer.settings == {"labels_per_class": 1, "labeled_in_unlabeled": True}


def test_labels_that_were_not_given_are_never_drawn() -> None:
    """Known for diagnosis (an oracle), but not labels."""
    data = dataset([0, 0, 0, 1, 1, 1], given=[True, False, False, True, False, False])
    assert make_split(data).labeled.tolist() == [0, 3]
    assert make_split(data, kind="per-class", labels_per_class=1).labeled.tolist() == [0, 3]
    with pytest.raises(FinesslError, match="too few labels in 2 of 2 classes: c0 has 1 of 2, c1 has 1 of 2"):
        make_split(data, kind="per-class", labels_per_class=2)


def test_counts_labels_and_test() -> None:
    data = dataset([0, 0, 1, 1, -1], given=[True, False, True, False, False], test=[1, 0, 1])
    split = make_split(data)
    labeled, unlabeled, other = split.counts(data)
    assert labeled.tolist() == [1, 1] and unlabeled.tolist() == [2, 2] and other == 1
    assert split.labels(data).tolist() == [0, 0, 1, 1, -1]
    data.exclude("test", [(0, "broken")])
    positions, labels = split.test(data)
    assert positions.tolist() == [1, 2] and labels.tolist() == [0, 1]


def test_broken_images_are_in_no_split_and_disturb_no_other_draw() -> None:
    data = dataset([0] * 20 + [1] * 20)
    before = make_split(data, labels_per_class=4)
    unlucky = int(before.labeled[1])
    data.exclude("train", [(unlucky, "broken")])
    after = make_split(data, labels_per_class=4)
    assert len(after.labeled) == 8 and unlucky not in after.labeled and unlucky not in after.unlabeled
    assert len(set(before.labeled) - set(after.labeled)) == 1
    first = make_split(data, kind="first-n", labels_per_class=4)
    assert unlucky not in first.labeled


def test_a_class_without_labels_is_an_error() -> None:
    data = dataset([0, 0, 1, -1], classes=4, given=[True, True, True, False])
    with pytest.raises(FinesslError, match="2 of 4 classes have no labeled image: c2, c3"):
        make_split(data)
    data = dataset([0, 0, 1, -1], given=[True, True, True, False])
    data.exclude("train", [(2, "broken")])
    with pytest.raises(FinesslError, match="1 of 2 classes have no labeled image: c1"):
        make_split(data)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "keep: --labels-per-class N"),
        ({"kind": "given"}, "keep: --labels-per-class N"),
        ({"labels_per_class": 3}, "too few labels in 1 of 2 classes: c1 has 2 of 3"),
        ({"labels_per_class": 0}, "labels_per_class = 0 should be an integer between 1"),
        ({"labels_per_class": "many"}, "labels_per_class = 'many' should be an integer"),
        ({"kind": "per-clas", "labels_per_class": 1}, "unknown split 'per-clas'; did you mean per-class"),
        ({"labels": 3}, "no option 'labels'"),
    ],
)
def test_bad_requests(options: dict, message: str) -> None:
    with pytest.raises(FinesslError, match=message):
        make_split(dataset([0, 0, 0, 1, 1]), **options)


def test_saved_and_loaded(tmp_path: Path) -> None:
    data = dataset([0] * 100 + [1] * 100)
    split = make_split(data, labels_per_class=5, seed=7, labeled_in_unlabeled=False)
    split.save(tmp_path / "split.json")
    loaded = Split.load(tmp_path / "split.json", data)
    assert (loaded.labeled == split.labeled).all() and (loaded.unlabeled == split.unlabeled).all()
    assert loaded.labeled.dtype == loaded.unlabeled.dtype == np.int64
    assert (loaded.kind, loaded.seed, loaded.settings, loaded.classes, loaded.fingerprint) == (
        *("per-class", 7, {"labels_per_class": 5, "labeled_in_unlabeled": False}),
        *(["c0", "c1"], data.fingerprint()),
    )
    assert [file.name for file in tmp_path.iterdir()] == ["split.json"]
    data.exclude("train", [(int(split.labeled[0]), "broken")])
    assert len(Split.load(tmp_path / "split.json", data).labeled) == 9


def test_a_split_of_other_data_is_refused(tmp_path: Path) -> None:
    make_split(dataset([0] * 9 + [1] * 9), labels_per_class=2).save(tmp_path / "s.json")
    for other, message in (
        (dataset([0] * 5 + [1] * 5), "the split names image 17 and the data has 10"),
        (dataset([1] * 9 + [0] * 9), "since the split was made, these have changed: the classes or labels"),
    ):
        with pytest.raises(FinesslError, match=f"does not belong to toy: {message}"):
            Split.load(tmp_path / "s.json", other)
    with pytest.raises(FinesslError, match="the data gives no label to 2 of the labeled images"):
        Split.load(tmp_path / "s.json", dataset([0] * 9 + [-1] * 9, classes=2))
    renamed = dataset([0] * 9 + [1] * 9)
    renamed.classes = ["c0", "new"]
    with pytest.raises(FinesslError, match="the data has no class c1"):
        Split.load(tmp_path / "s.json", renamed)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"labeled": 3}', "\u00e9"])
def test_not_a_split_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(FinesslError, match="is not a split file"):
        Split.load(tmp_path / "s.json", dataset([0, 1]))
    with pytest.raises(FinesslError, match="no split file"):
        Split.load(tmp_path / "gone.json", dataset([0, 1]))


def test_runs_keep_large_splits_small() -> None:
    assert to_runs(np.array([0, 1, 2, 3, 7, 9, 10, 20, 21, 22])) == [[0, 3], 7, 9, 10, [20, 22]]
    assert to_runs(np.empty(0, np.int64)) == []
    assert len(json.dumps(to_runs(np.arange(1_300_000)))) < 20


@cases(st.sets(st.integers(0, 200)))
def test_runs_round_trip(numbers: set[int]) -> None:
    array = np.array(sorted(numbers), np.int64)
    assert (from_runs(json.loads(json.dumps(to_runs(array))), int(array.max(initial=0)) + 1) == array).all()
