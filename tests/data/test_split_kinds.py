"""Counts of every kind of split against its formula, for many seeds, sizes and ratios."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import given as cases
from hypothesis import strategies as st

from finessl.data.dataset import Dataset
from finessl.data.images import ArrayImages, FileImages
from finessl.data.path_table import PathTable
from finessl.data.split_kinds import tail
from finessl.data.splits import Split, make_split
from finessl.errors import FinesslError

seeds = st.integers(0, 2**31)


def dataset(sizes: list[int], seed: int = 0, test: list[int] | None = None) -> Dataset:
    """sizes[k] one-pixel images of class k, in a random order."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    images = ArrayImages(np.zeros((len(labels), 1, 1, 3), np.uint8), "train")
    data = Dataset("toy", [f"c{i}" for i in range(len(sizes))], images, labels)
    if test is not None:
        data.test, data.test_labels = ArrayImages(np.zeros((len(test), 1, 1, 3), np.uint8), "test"), np.array(test)
    return data


def counts(data: Dataset, indices: np.ndarray) -> list[int]:
    return np.bincount(data.train_labels[indices], minlength=len(data.classes)).tolist()


# ---- fraction ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@cases(seeds, st.lists(st.integers(1, 60), min_size=2, max_size=8), st.floats(0.001, 1))
def test_fraction_of_each_class(seed: int, sizes: list[int], share: float) -> None:
    data = dataset(sizes, seed)
    split = make_split(data, kind="fraction", seed=seed, fraction=share)
    assert counts(data, split.labeled) == [max(1, math.floor(share * n + 0.5)) for n in sizes]
    assert (split.unlabeled == np.arange(sum(sizes))).all()


def test_ten_percent_contains_the_one_percent() -> None:
    data = dataset([1300] * 3)
    one, ten = (make_split(data, kind="fraction", fraction=f, seed=1).labeled for f in (0.01, 0.1))
    assert len(one) == 39 and len(ten) == 390 and set(one) <= set(ten)
    for share in (0, 1.5, -1):
        with pytest.raises(FinesslError, match="a number above 0 and of at most 1"):
            make_split(data, kind="fraction", fraction=share)


# ---- list --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def imagenet() -> Dataset:
    names = [f"train/n{c:04d}/n{c:04d}_{i}.JPEG" for c in range(3) for i in range(10)]
    return Dataset(
        "imagenet", ["n0", "n1", "n2"], FileImages(Path("/x"), PathTable.of(names, range(30))), np.arange(30) // 10
    )


def test_a_list_of_names(imagenet: Dataset, tmp_path: Path) -> None:
    """SimCLR's lists hold file names without folders, in any order."""
    (tmp_path / "1percent.txt").write_text(
        "n0002_7.JPEG\nn0000_3.JPEG\n\nn0001/n0001_0.JPEG\ntrain/n0000/n0000_9.JPEG\n"
    )
    split = make_split(imagenet, kind="list", file=str(tmp_path / "1percent.txt"))
    assert split.labeled.tolist() == [3, 9, 10, 27] and len(split.unlabeled) == 30


@pytest.mark.parametrize(
    "text, message",
    [
        ("n0001_0.JPEG\nn0009_1.JPEG\ncat.jpg\n", "2 of 3 images that are not in imagenet: n0009_1.JPEG, cat.jpg"),
        ("n0001_0.JPEG\nn0002_1.JPEG\n", "1 of 3 classes have no labeled image: n0"),
    ],
)
def test_bad_lists(imagenet: Dataset, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(FinesslError, match=message):
        make_split(imagenet, kind="list", file=str(tmp_path / "list.txt"))


def test_ambiguous_unknown_and_missing_lists(tmp_path: Path) -> None:
    names = ["a/1.png", "b/1.png", "b/2.png", "u/3.png"]
    images = FileImages(Path("/x"), PathTable.of(names, range(4)))
    data = Dataset("d", ["a", "b"], images, np.array([0, 1, 1, -1]))
    (tmp_path / "l").write_text("1.png\n2.png\n")
    with pytest.raises(FinesslError, match="several images have the name 1.png"):
        make_split(data, kind="list", file=str(tmp_path / "l"))
    (tmp_path / "l").write_text("3.png\n2.png\n")
    with pytest.raises(FinesslError, match="without a label: u/3.png"):
        make_split(data, kind="list", file=str(tmp_path / "l"))
    with pytest.raises(FinesslError, match="cannot be read"):
        make_split(data, kind="list", file=str(tmp_path / "gone"))


# ---- long-tailed -------------------------------------------------------------------------------------------------------


def formula(most: int, ratio: float, k: int, classes: int) -> int:
    """N_k = N₁·ρ^(−(k−1)/(C−1)), k = 1 … C, in exact enough arithmetic of its own."""
    return int(most / ratio) if k == classes else int(most * math.exp(-math.log(ratio) * (k - 1) / (classes - 1)))


@settings(max_examples=60, deadline=None)
@cases(seeds, st.integers(2, 12), st.integers(20, 60), st.integers(0, 60), st.floats(1, 20), st.booleans())
def test_long_tail_counts(seed: int, classes: int, most: int, more: int, ratio: float, both: bool) -> None:
    values = [most * math.exp(-math.log(ratio) * k / (classes - 1)) for k in range(classes - 1)]
    assume(all(abs(v - round(v)) > 1e-6 for v in values[1:]))  # rounding could go either way at a whole number
    more += 20
    data = dataset([most + more] * classes, seed)
    for direction in ("same", "reversed", "uniform"):
        split = make_split(
            data,
            kind="long-tailed",
            seed=seed,
            labeled_max=most,
            unlabeled_max=more,
            ratio=ratio,
            unlabeled=direction,
            labeled_in_unlabeled=both,
        )
        labels = [formula(most, ratio, k, classes) for k in range(1, classes + 1)]
        extra = [formula(more, ratio, k, classes) for k in range(1, classes + 1)]
        extra = {"same": extra, "reversed": extra[::-1], "uniform": [more] * classes}[direction]
        assert counts(data, split.labeled) == labels
        unlabeled = counts(data, split.unlabeled)
        assert unlabeled == ([n + m for n, m in zip(labels, extra, strict=True)] if both else extra)
        assert len(np.intersect1d(split.labeled, split.unlabeled)) == (len(split.labeled) if both else 0)


def test_the_papers_long_tails() -> None:
    """CIFAR-100, (N₁, M₁) = (50, 400) and (150, 300), ρ = 10 and 20: first, middle and last counts by hand."""
    data = dataset([500] * 100)
    for most, more, ratio, first, middle, last in (
        (50, 400, 10, (50, 400), (15, 125), (5, 40)),  # class 51: 50·10^(−50/99) = 15.63, 400·10^(−50/99) = 125.03
        (150, 300, 20, (150, 300), (33, 66), (7, 15)),  # 150·20^(−50/99) = 33.04, 66.07; the last: 7.5 and 15
    ):
        split = make_split(data, kind="long-tailed", labeled_max=most, unlabeled_max=more, ratio=ratio)
        labeled, unlabeled, other = split.counts(data)
        for k, expected in ((0, first), (50, middle), (99, last)):
            assert (labeled[k], unlabeled[k] - labeled[k]) == expected
        assert (np.diff(labeled) <= 0).all() and other == 0


def test_long_tail_options() -> None:
    data = dataset([100] * 5)
    split = make_split(
        data, kind="long-tailed", labeled_max=20, unlabeled_max=60, ratio=4, unlabeled_ratio=2, order="first"
    )
    labeled, unlabeled, _ = split.counts(data)
    assert labeled.tolist() == [20, 14, 10, 7, 5] and (unlabeled - labeled).tolist() == [60, 50, 42, 35, 30]
    first = [np.flatnonzero(data.train_labels == k)[: labeled[k]] for k in range(5)]
    assert (split.labeled == np.sort(np.concatenate(first))).all()
    assert tail(9, 3, 2).tolist() == [9, 3] and tail(5, 1, 3).tolist() == [5, 5, 5]
    for options, message in (
        ({"labeled_max": 50, "unlabeled_max": 80}, "c0 has 100 of 130"),
        ({"labeled_max": 5, "ratio": 10}, "leaves the last class without a label"),
        ({"ratio": 0.5}, "ratio = 0.5 should be a number between 1 and"),
        ({"unlabeled": "sideways"}, "one of same, reversed, uniform"),
    ):
        with pytest.raises(FinesslError, match=message):
            make_split(data, kind="long-tailed", **options)


# ---- open set ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@cases(seeds, st.integers(4, 20), st.floats(0, 0.5), st.integers(1, 4), st.sampled_from(["first", "random"]))
def test_open_set(seed: int, classes: int, novel: float, count: int, seen: str) -> None:
    data = dataset([6] * classes, seed, test=list(range(classes)) * 2)
    split = make_split(data, kind="open-set", seed=seed, labels_per_class=count, novel=novel, seen=seen)
    known = classes - round(novel * classes)
    ids = [data.classes.index(name) for name in split.classes]
    assert len(ids) == known and sorted(ids) == ids and (seen == "random" or ids == list(range(known)))
    assert counts(data, split.labeled) == [count if k in ids else 0 for k in range(classes)]
    assert len(split.unlabeled) == 6 * classes  # the novel images stay
    labels = split.labels(data)
    for i in range(len(data.train)):
        k = data.train_labels[i]
        assert labels[i] == (ids.index(k) if k in ids else -1)
    positions, targets = split.test(data)
    assert len(positions) == 2 * known
    assert [ids[t] for t in targets] == [data.test_labels[p] for p in positions]  # type: ignore[index]
    labeled, unlabeled, other = split.counts(data)
    assert unlabeled.sum() + other == 6 * classes and other == 6 * (classes - known)


def test_the_papers_open_set(tmp_path: Path) -> None:
    """CIFAR-100: 50 seen classes with 5 labels each, 50 novel ones."""
    data = dataset([500] * 100, test=list(range(100)) * 100)
    split = make_split(data, kind="open-set", labels_per_class=5)
    assert len(split.classes) == 50 and len(split.labeled) == 250 and len(split.test(data)[0]) == 5000
    assert split.counts(data)[2] == 25_000
    split.save(tmp_path / "s.json")
    assert Split.load(tmp_path / "s.json", data).classes == split.classes


@pytest.mark.parametrize(("novel", "message"), [(0.8, "leaves 1 of 6"), (1.0, "below 1"), (-0.1, "at least 0")])
def test_open_set_needs_two_seen_classes(novel: float, message: str) -> None:
    with pytest.raises(FinesslError, match=f"novel = {novel} .*{message}"):
        make_split(dataset([5] * 6), kind="open-set", labels_per_class=1, novel=novel)
