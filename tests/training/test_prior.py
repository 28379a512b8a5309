"""The prior on pseudo-labels: labels propagated over frozen features, annealed away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from finessl.frozen import choose
from finessl.methods.base import HeadOutputs
from finessl.recipe import Recipe
from finessl.training.diagnostics import hidden_truth
from finessl.training.experiment import prepare
from finessl.training.loop import Settings, train
from finessl.training.prior import FLOOR, Prior, frozen_prior, soft_labels

CPU = torch.device("cpu")
FIELDS = {
    "model.backbone": "embedded", "tuning.name": "linear", "method.name": "fixmatch", "split.labels_per_class": 2,
    "train.batch_size": 2, "train.steps": 2, "train.epoch_steps": 1, "train.prior": 1.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "cache"))


def test_prior_multiplies_probabilities_and_fades() -> None:
    prior = Prior(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), share=0.5, steps=10)
    weak = HeadOutputs(torch.zeros(3, 2), torch.zeros(3, 2))
    for step, weight in ((0, 1.0), (2, 0.6), (5, 0.0), (9, 0.0)):
        prior.before_step(step)
        found = prior.apply(weak, torch.tensor([0, 1, 0])).logits.softmax(1)[:, 0]
        sure = torch.tensor([1 - FLOOR / 2, FLOOR / 2]) ** weight
        torch.testing.assert_close(found, torch.stack([sure[0] / sure.sum(), torch.tensor(0.5), sure[0] / sure.sum()]))


def test_prior_knows_the_unlabeled_images(shapes: Path) -> None:
    """In their order, and better than chance; a method without weak views has none."""
    recipe = Recipe.read(None, {**FIELDS, "data.source": str(shapes)})
    experiment = prepare(recipe, None, CPU)
    prior = frozen_prior(experiment, "fp32", lambda label, done, total: None)
    assert prior is not None
    right = prior.log.argmax(1).numpy() == hidden_truth(experiment.dataset, experiment.split)
    assert len(right) == len(experiment.split.unlabeled) and right.mean() > 0.6
    supervised = Recipe.read(None, {**FIELDS, "data.source": str(shapes), "method.name": "supervised"})
    assert frozen_prior(prepare(supervised, None, CPU), "fp32", lambda label, done, total: None) is None


def test_images_outside_the_sample_of_a_large_set_have_soft_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, truth = np.random.default_rng(0), np.repeat(np.arange(3), 40)
    rows = (rng.normal(0, 1, (3, 8))[truth] + rng.normal(0, 0.2, (120, 8))).astype(np.float16)
    y = np.where(np.arange(120) % 40 < 2, truth, -1)
    monkeypatch.setattr(choose, "LARGEST", 60)
    soft = soft_labels(rows, y, 3, CPU)
    torch.testing.assert_close(soft.sum(1), torch.ones(120))
    assert (soft.argmax(1).numpy() == truth).mean() > 0.95


def test_run_with_prior_is_another_run(shapes: Path, tmp_path: Path) -> None:
    settings = Settings(device="cpu", log_every=1, quiet=True)
    for name, share in (("with", 1.0), ("without", 0.0)):
        fields = {**FIELDS, "data.source": str(shapes), "method.threshold": 0.0, "train.prior": share}
        train(Recipe.read(None, fields), tmp_path / name, settings)
    first, second = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("with", "without"))
    assert first != second
