"""FineSSLClassifier with scikit-learn's own tools: real trainings of a frozen embedded backbone, and its checks."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted, validate_data

from finessl import FineSSLClassifier
from finessl.api import SHORT
from finessl.data.dataset import Dataset
from finessl.errors import FinesslError
from finessl.estimator import FIELDS
from finessl.inference.classifier import squash

FAST: dict[str, Any] = dict(
    backbone="embedded", tuning="linear", head_init="class-mean", method="supervised", image_size=16, cache_features=1,
    steps=4, batch_size=4, device="cpu",
)  # fmt: skip
NAMES = np.array(["red", "green", "blue"])


def colours(count: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Red, green and blue images, and 0, 1, 2."""
    rng, labels = np.random.default_rng(0), np.arange(count) % 3
    images = rng.integers(0, 60, (count, 16, 16, 3), dtype=np.uint8)
    images[np.arange(count), :, :, labels] += 150
    return images, labels


def test_arrays_with_unlabeled_images() -> None:
    X, colour = colours()
    y = np.where(np.arange(24) < 9, colour + 5, -1)  # labels need not be 0 … C−1
    model = FineSSLClassifier(**FAST).fit(X, y)
    assert model.classes_.tolist() == [5, 6, 7]
    assert model.score(X, colour + 5) == 1
    assert model.score(X, y) == 1, "unlabeled images are not scored"
    assert (model.transduction_ == colour + 5).all()
    assert model.predict_proba(X[:2]).shape == (2, 3)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


@pytest.mark.parametrize("kind", ["list", "object", "string"])
def test_string_labels(kind: str) -> None:
    X, colour = colours(12)
    names: list[Any] = NAMES[colour].tolist()
    if kind == "string":
        y = np.array([*names[:6], *[""] * 6])
    else:
        names[6:] = [-1, None, "", float("nan"), -1, None]
        y = names if kind == "list" else np.array(names, object)
    model = FineSSLClassifier(**FAST).fit(X, y)
    assert model.classes_.tolist() == ["blue", "green", "red"]
    assert model.classifier_.classes == ["blue", "green", "red"]
    assert (model.predict(X) == NAMES[colour]).all()
    assert model.score(X, NAMES[colour]) == 1


def test_image_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X, colour = colours(12)
    for i, image in enumerate(X):
        Image.fromarray(image).save(tmp_path / f"{i:02}.png")
    paths = sorted(tmp_path.glob("*.png"))
    model = FineSSLClassifier(**FAST).fit(paths, colour)
    np.testing.assert_allclose(model.predict_proba([str(path) for path in paths]), model.predict_proba(X), atol=1e-6)
    assert model.score(np.array([str(path) for path in paths]), colour) == 1
    monkeypatch.chdir(tmp_path)
    assert (model.predict(["00.png", "01.png"]) == [0, 1]).all()
    (tmp_path / "03.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"1 image cannot be used: .*03.png"):
        model.predict(paths)
    with pytest.raises(FinesslError, match=r"03.png"):
        clone(model).fit(paths, colour)
    with pytest.raises(FinesslError, match=r"1 of 2 files that are not there: gone.png"):
        model.predict(["00.png", "gone.png"])
    with pytest.raises(FinesslError, match="X is one path"):
        model.predict("00.png")


def test_search_cross_validation_and_pipeline() -> None:
    X, y = colours()
    model = FineSSLClassifier(**FAST)
    assert is_classifier(model)
    assert cross_val_score(model, X, NAMES[y], cv=2, error_score="raise").tolist() == [1, 1]
    search = GridSearchCV(model, {"lr": [1e-3, 1e-2]}, cv=2, error_score="raise").fit(X, y)
    assert search.best_score_ == 1 and search.best_params_["lr"] in (1e-3, 1e-2)
    pipeline = make_pipeline(FunctionTransformer(lambda images: images[:, ::2, ::2]), model)
    assert pipeline.fit(X, y).score(X, y) == 1


def test_a_fold_with_one_class_is_explained() -> None:
    X, y = colours()
    with pytest.raises(FinesslError, match="y holds 1 class, 1;.*StratifiedKFold"):
        cross_val_score(FineSSLClassifier(**FAST), X[:8], np.repeat([0, 1], 4), cv=KFold(2), error_score="raise")


def test_parameters() -> None:
    model = FineSSLClassifier(backbone="embedded", settings={"method.alpha": 4.0})
    names = {name for name in inspect.signature(FineSSLClassifier).parameters}
    assert names >= set(FIELDS), "each short name of finessl.train is a parameter"
    assert names - set(SHORT) <= {"recipe", "settings", "plugins", "out", "device", "quiet"}
    assert clone(model).get_params() == model.get_params()
    assert repr(model) == "FineSSLClassifier(backbone='embedded', settings={'method.alpha': 4.0})"
    with pytest.raises(TypeError, match="bakbone"):
        FineSSLClassifier(bakbone="embedded")
    with pytest.raises(ValueError, match="Invalid parameter 'foo'"):
        model.set_params(foo=1)
    assert model.set_params(steps=7).steps == 7
    with pytest.raises(NotFittedError):
        model.predict(colours()[0])


IMAGES = np.zeros((4, 8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (IMAGES, np.zeros(3), "one label per image"),
        (IMAGES, np.full(4, -1), "no label"),
        (IMAGES, ["", "", None, -1], "no label"),
        (IMAGES, np.zeros(4, int), "1 class"),
        (IMAGES, np.array(["-1", "cat", "dog", "dog"]), "string '-1'"),
        (IMAGES, ["-1", "cat", "dog", "dog"], "string '-1'"),
        (IMAGES, ["cat", "dog", 3, 3], "mixes strings"),
        (IMAGES, [0.5, 1.5, 2.5, 3.5], "Unknown label type"),
        (IMAGES[..., :2], np.zeros(4), "expected"),
        (IMAGES[:0], [], "no image"),
        (np.full((4, 8, 8, 3), 7.0), np.zeros(4), "floats outside"),
        (np.full((4, 8, 8, 3), "x"), np.zeros(4), "values of type"),
        ([np.zeros((8, 8, 3)), np.zeros((9, 9, 3))], [0, 1], "images of one size"),
    ],
)
def test_bad_input_is_a_value_error_in_plain_words(X: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FineSSLClassifier(**FAST).fit(X, y)


class Rows(FineSSLClassifier):
    """scikit-learn's checks feed rows of numbers: here a row is an image of one line."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = True, False
        tags.input_tags.one_d_array = tags.input_tags.string = tags.input_tags.positive_only = False
        return tags

    def fit(self, X: Any, y: Any) -> Rows:
        X = validate_data(self, X, ensure_min_samples=2)
        return super().fit(lines(X), y)

    def predict_proba(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        if getattr(X, "ndim", 2) != 3:
            X = lines(validate_data(self, X, reset=False))
        return super().predict_proba(X)


def lines(X: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-X[:, None].astype(float)))


class NaiveBayes:
    """A classifier that trains in no time: the checks are of the protocol, with hundreds of fits."""

    def __init__(self, dataset: Dataset, **_: Any) -> None:
        self.image_size = dataset.train.array.shape[2]  # as wide as a row, so that no feature is lost
        images, labels = [squash(image, self.image_size) for image in dataset.train.array], dataset.train_labels
        self.model = GaussianNB().fit(flat(images)[labels >= 0], labels[labels >= 0])

    def expect(self, images: int) -> None: ...

    def predict_proba(self, images: list[np.ndarray]) -> np.ndarray:
        return self.model.predict_proba(flat(images))


def flat(images: list[np.ndarray]) -> np.ndarray:
    return np.stack(images)[:, 0, :, 0]


EXPECTED_FAILURES = {"check_classifiers_classes": "it trains on the classes −1 and 1, and −1 marks an unlabeled image"}


@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finessl.estimator.train", NaiveBayes)
    results = check_estimator(Rows(), expected_failed_checks=EXPECTED_FAILURES)
    status = {result["check_name"]: result["status"] for result in results}
    assert {name for name, word in status.items() if word == "xfail"} == set(EXPECTED_FAILURES)
    assert list(status.values()).count("passed") > 40  # a few are skipped without pandas or array-API
