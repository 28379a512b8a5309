"""Real images, a real backbone: everything learns, and unlabeled images help."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from finessl.data.dataset import Dataset
from finessl.data.sources import open_dataset
from finessl.inference.probe import probe
from finessl.methods import METHODS
from finessl.models.backbones import create_backbone
from finessl.models.tuning import TUNINGS
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.training.loop import Settings, train

SHORT = {
    "data.source": "sample",
    "data.strong_views": 1,
    "model.backbone": "embedded",
    "split.labels_per_class": 4,
    "tuning.name": "lora",
    "tuning.layers": 2,
    "train.steps": 16,
    "train.batch_size": 8,
}
QUIET = Settings(device="cpu", log_every=1, eval_every=0, quiet=True)


@pytest.fixture(scope="module")
def small() -> Dataset:
    """Every tenth image of the sample set."""
    whole = open_dataset("sample")
    assert whole.test is not None and whole.test_labels is not None
    train_part, test_part = np.arange(0, 2000, 10), np.arange(0, 500, 10)
    return Dataset(
        "sample",
        whole.classes,
        whole.train.take(train_part),
        whole.train_labels[train_part],
        whole.test.take(test_part),
        whole.test_labels[test_part],
    )


def learns(fields: dict[str, object], dataset: Dataset, out: Path) -> list[dict]:
    """The loss on the labeled images falls clearly within 16 steps."""
    train(Recipe.read(None, {**SHORT, **fields}), out, QUIET, dataset)
    rows = [row for row in RunDirectory(out).metrics() if row["kind"] == "train"]
    losses = [row["loss_labeled"] for row in rows]
    assert len(losses) == 16 and np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    return rows


@pytest.mark.parametrize("method", METHODS.names())
def test_every_method_learns(method: str, small: Dataset, tmp_path: Path) -> None:
    fields: dict[str, object] = {"method.name": method}
    if method in ("ifpl", "grip"):
        fields |= {"method.iterations": 1, "method.balance": "none"}
    if method == "finessl":
        fields["method.without"] = ["bms"]  # margins that grow on purpose hide the fall of the loss
    rows = learns(fields, small, tmp_path / "run")
    if method != "supervised":
        assert "pseudo_accuracy" in rows[-1]


@pytest.mark.parametrize("tuning", [name for name in TUNINGS.names() if name != "bn"] + ["vpt-deep+lora"])
def test_every_tuning_learns(tuning: str, small: Dataset, tmp_path: Path) -> None:
    fields: dict[str, object] = {"method.name": "supervised", "tuning.name": tuning}
    if tuning in ("full", "lp-ft"):
        fields["train.backbone_lr"] = 1e-4
    short = {name: value for name, value in SHORT.items() if name != "tuning.layers"}  # an option of lora's
    train(Recipe.read(None, {**short, **fields}), tmp_path / "run", QUIET, small)
    losses = [row["loss_labeled"] for row in RunDirectory(tmp_path / "run").metrics() if row["kind"] == "train"]
    assert np.isfinite(losses).all() and np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])


@pytest.mark.parametrize("init", ["class-mean", "probe"])
def test_head_starts_help_from_the_first_step(init: str, small: Dataset, tmp_path: Path) -> None:
    first = []
    for start in ("random", init):
        fields = {**SHORT, "method.name": "supervised", "head.init": start, "train.steps": 1}
        train(Recipe.read(None, fields), tmp_path / start, QUIET, small)
        first.append(RunDirectory(tmp_path / start).metrics()[0]["loss_labeled"])
    assert first[1] < 0.8 * first[0]


def test_embedded_features_are_good() -> None:
    """k-NN on 500 test images; the model card says how good exactly."""
    result = probe("sample", backbone="embedded", device=torch.device("cpu"))
    assert (result.train_images, result.test_images) == (2000, 500)
    assert result.knn > 0.72 and result.linear > 0.74
    assert result.prototypes[0] > 0.55


def test_embedded_assets_are_small_and_described() -> None:
    assets = Path(__import__("finessl").__file__).parent / "assets"
    assert (assets / "embedded.safetensors").stat().st_size < 12e6
    assert sum(path.stat().st_size for path in (assets / "sample").rglob("*.webp")) < 5e6
    described = json.loads((assets / "embedded.json").read_text())
    backbone = create_backbone("embedded")
    assert backbone.image_size == described["image_size"] == 32
    assert "<measured>" not in (assets / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_sample_is_balanced() -> None:
    dataset = open_dataset("sample")
    assert len(dataset.classes) == 10 and dataset.test_labels is not None
    assert np.bincount(dataset.train_labels).tolist() == [200] * 10
    assert np.bincount(dataset.test_labels).tolist() == [50] * 10
