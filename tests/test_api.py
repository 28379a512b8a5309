"""The Python interface: train, load, predict on every kind of image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import finessl
from finessl.errors import FinesslError

TINY = dict(backbone="vit_tiny_patch16_224", image_size=32, steps=3, batch_size=4, device="cpu", quiet=True)
RANDOM = {"model.pretrained": False, "tuning.length": 2}


@pytest.fixture(scope="module")
def classifier(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> finessl.Classifier:
    out = tmp_path_factory.mktemp("api") / "run"
    return finessl.train(shapes, out=out, labels_per_class=4, settings=RANDOM, **TINY)


def test_every_kind_of_image_gives_the_same_answer(classifier: finessl.Classifier, shapes: Path) -> None:
    path = shapes / "test" / "down" / "00.png"
    array = np.array(Image.open(path))
    images = [
        path,
        str(path),
        Image.open(path),
        array,
        array / 255.0,
        torch.from_numpy(array).permute(2, 0, 1),
        torch.from_numpy(array).permute(2, 0, 1) / 255,
    ]
    probabilities = classifier.predict_proba(images)
    assert probabilities.shape == (7, 3)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(probabilities, np.repeat(probabilities[:1], 7, 0), rtol=1e-5)
    assert classifier.predict(path) == classifier.predict([path])
    assert classifier.predict(path)[0] in classifier.classes == ["across", "diagonal", "down"]
    assert classifier.embed(path).shape == (1, 192)
    assert classifier.predict_proba([]).shape == (0, 3)


def test_a_compiled_classifier_gets_full_batches(
    classifier: finessl.Classifier, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [*sorted((shapes / "test").rglob("*.png"))] * 40
    paths, sizes = paths[:37], []
    plain = classifier.predict_proba(paths)
    watching = classifier.network.register_forward_pre_hook(lambda network, inputs: sizes.append(len(inputs[0])))
    monkeypatch.setattr(classifier, "compiled", True)
    np.testing.assert_allclose(classifier.predict_proba(paths), plain, atol=2e-2)
    watching.remove()
    assert sizes == [32, 32]


def test_loaded_classifier_is_the_trained_one(classifier: finessl.Classifier, shapes: Path, tmp_path: Path) -> None:
    """Its answers on the test set are those that the run recorded at its end."""
    out = tmp_path / "run"
    again = finessl.train(shapes, out=out, labels_per_class=4, settings=RANDOM, **TINY)
    recorded = np.load(out / "predictions.npz")
    paths = sorted((shapes / "test").rglob("*.png"))
    logits = torch.from_numpy(recorded["logits"]).softmax(1).numpy()
    np.testing.assert_allclose(again.predict_proba(paths), logits, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        finessl.load(out / "classifier", device="cpu").predict_proba(paths), logits, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 5), np.uint8), r"shape \(4, 4, 5\)"),
        (np.full((4, 4, 3), 2.0), "floats outside"),
        (np.full((4, 4, 3), 300), "outside 0…255"),
    ],
)
def test_images_that_are_none(classifier: finessl.Classifier, image: np.ndarray, message: str) -> None:
    with pytest.raises(FinesslError, match=message):
        classifier.predict(image)


def test_unknown_argument(shapes: Path, tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="unknown argument 'step'; did you mean steps"):
        finessl.train(shapes, out=tmp_path, step=3)


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="holds no classifier"):
        finessl.load(tmp_path)


def test_a_classifier_follows_its_runs_precision(shapes: Path, tmp_path: Path) -> None:
    made = finessl.train(
        shapes, out=tmp_path / "run", labels_per_class=4, settings={**RANDOM, "train.precision": "fp32"}, **TINY
    )
    assert made.precision == "fp32" and finessl.load(tmp_path / "run", device="cpu").precision == "fp32"
    assert finessl.load(tmp_path / "run", device="cpu", precision="bf16").precision == "bf16"
    with pytest.raises(FinesslError, match="no precision 'float32'; choose auto, bf16"):
        finessl.load(tmp_path / "run", device="cpu", precision="float32")
