"""Training from kept features: they equal those of the images, every method takes them, and a run resumes exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from finessl.cli import app
from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.recipe.catalog import registry
from finessl.runtime.distributed import Processes
from finessl.training import feature_cache as cached
from finessl.training.experiment import Experiment, prepare
from finessl.training.feature_cache import CachedLoader
from finessl.training.loop import Settings, train
from finessl.training.optimizers import make_optimizer
from finessl.training.step import TrainingStep

from .conftest import TINY, train_until

FIELDS = {**TINY, "tuning.name": "linear", "train.steps": 6, "train.epoch_steps": 4, "train.cache_features": 2}
CPU = torch.device("cpu")
SETTINGS = Settings(device="cpu", log_every=2, checkpoint_seconds=0.0, quiet=True)


def recipe(data: Path | str, **changes: object) -> Recipe:
    return Recipe.read(None, {**FIELDS, "data.source": str(data), **changes})


def filled(experiment: Experiment, draws: int) -> CachedLoader:
    loader = experiment.loader(Processes())
    assert isinstance(loader, CachedLoader)
    loader.fill(experiment.network, draws, "fp32", lambda label, done, total: None)
    return loader


def weights(run: Path) -> dict[str, bytes]:
    tensors = load_file(run / "classifier" / "classifier.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("method", ["finessl", "supervised", "pseudo-label"])
def test_features_are_those_of_the_images(shapes: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Where nothing about a view is random, a step sees the same as without the cache."""
    monkeypatch.setattr(cached, "BATCH", 32)
    still = {"data.weak": "none", "data.strong": "weak", "method.name": method}
    experiment = prepare(recipe(shapes, **still), None, CPU)
    kept = filled(experiment, 2)
    plain = prepare(recipe(shapes, **still, **{"train.cache_features": 0}), None, CPU).loader(Processes())
    for step in (0, 5):
        mine, theirs = kept.load(step), plain.load(step)
        assert mine.counts == theirs.counts and torch.equal(mine.labels, theirs.labels)
        assert (mine.index is None) == (theirs.index is None)
        assert (mine.weak is None) == (theirs.weak is None)
        with torch.no_grad():
            torch.testing.assert_close(mine.trained, experiment.network.features(theirs.trained))
            if mine.weak is not None and theirs.weak is not None:
                torch.testing.assert_close(mine.weak, experiment.network.features(theirs.weak))


def test_draws_differ_and_only_what_is_needed_is_encoded(shapes: Path) -> None:
    loader = filled(prepare(recipe(shapes), None, CPU), 3)
    for kept in loader.kept:
        assert kept.features.shape == (72, 3, 192)
        assert not torch.equal(kept.features[:, 0], kept.features[:, 1])
    assert not torch.equal(loader.kept[0].features, loader.kept[1].features)
    views = loader.load(0)
    one, other = views.trained[4:].chunk(2)  # the strong views of the same images
    assert (one != other).any(1).all()
    assert views.weak is not None and views.index is not None
    images = loader.unlabeled[views.index.numpy()]
    for kept, view in zip(loader.kept, (views.weak, one), strict=True):
        own = kept.features[kept.row_of[images]]  # [images, draws, dim]
        assert (own == view[:, None]).all(2).any(1).all()

    labeled = filled(prepare(recipe(shapes, **{"method.name": "supervised"}), None, CPU), 3)
    assert [len(kept.features) for kept in labeled.kept] == [12]


@pytest.mark.parametrize("method", registry("methods").names())
def test_every_method_trains_and_resumes(shapes: Path, tmp_path: Path, method: str) -> None:
    one = recipe(shapes, **{"method.name": method})
    train(one, tmp_path / "whole", SETTINGS)
    train_until(3, one, tmp_path / "halved", SETTINGS)
    train(one, tmp_path / "halved", SETTINGS)
    assert weights(tmp_path / "whole") == weights(tmp_path / "halved")
    whole, halved = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "halved"))
    assert whole == halved


def test_steps_do_without_the_encoder_and_learn_as_much() -> None:
    """On the sample with the embedded backbone: about the same loss at the end."""
    fields = {
        "data.source": "sample", "model.backbone": "embedded", "tuning.name": "linear", "method.name": "supervised",
        "split.labels_per_class": 4, "train.batch_size": 16, "train.lr": 0.3, "train.steps": 40,
    }  # fmt: skip
    losses, encoded = [], []
    for draws in (0, 8):
        experiment = prepare(Recipe.read(None, {**fields, "train.cache_features": draws}), None, CPU)
        loader = filled(experiment, draws) if draws else experiment.loader(Processes())
        train_recipe, network = experiment.recipe.train, experiment.network.train()
        optimizer = make_optimizer(network, train_recipe, CPU)
        step = TrainingStep(network, experiment.method, optimizer, train_recipe, CPU, "fp32", Processes())
        calls: list[int] = []
        network.encoder.register_forward_pre_hook(lambda module, images, calls=calls: calls.append(len(images[0])))
        found = [step(number, loader.load(number)).loss.item() for number in range(40)]
        encoded.append(sum(calls))
        losses.append(np.mean(found[-10:]))
        assert losses[-1] < 0.7 * found[0]
    assert encoded == [40 * 16, 0]  # images
    assert losses[1] == pytest.approx(losses[0], rel=0.2)


def test_a_trained_backbone_is_refused(shapes: Path, tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="needs a frozen backbone, and tuning 'lora' trains inside it: use --tuning"):
        recipe(shapes, **{"tuning.name": "lora"})
    with pytest.raises(FinesslError, match="frozen backbone"):
        app(["train", str(shapes), "--out", str(tmp_path / "run"), "--cache-features", "2"], standalone_mode=False)
    assert not (tmp_path / "run").exists()
    with pytest.raises(FinesslError, match="train.cache_features = -1 should be an integer between 0 and"):
        recipe(shapes, **{"train.cache_features": -1})


def test_too_much_for_the_memory(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "memory_limit", lambda: 500)
    with pytest.raises(FinesslError, match=r"train.cache_features = 2 would keep 0.0 GB .* keep fewer draws"):
        filled(prepare(recipe(shapes), None, CPU), 2)
