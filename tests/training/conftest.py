"""A small run on images of equal file size, finished and stopped half-way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finessl.recipe import Recipe
from finessl.runs import checkpoint
from finessl.training.loop import Settings, train

from ..conftest import write_photos

# For `shapes`: a small transformer with weights drawn at random.
TINY = {
    "model.backbone": "vit_tiny_patch16_224",
    "model.pretrained": False,
    "data.image_size": 32,
    "split.labels_per_class": 4,
    "train.batch_size": 4,
    "train.precision": "fp32",  # on every machine: in bf16 an accuracy depends on the batch
}
QUICK = Settings(device="cpu", log_every=2, checkpoint_seconds=0.0, quiet=True)
FIELDS = {
    "model.backbone": "embedded",
    "tuning.name": "linear",
    "method.name": "fixmatch",
    "split.labels_per_class": 2,
    "train.batch_size": 2,
    "train.steps": 6,
    "train.epoch_steps": 3,
}


def quick_recipe(data: Path | str, **changes: Any) -> Recipe:
    return Recipe.read(None, {**FIELDS, "data.source": str(data), **changes})


@pytest.fixture(autouse=True)
def views_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled run makes the process compile its views from then on; the next test starts without."""
    monkeypatch.setattr("finessl.runtime.compile.fusing", False, raising=False)


class Stop(Exception):
    """A kill after a checkpoint."""


def train_until(step: int, recipe: Recipe, out: Path, settings: Settings = QUICK) -> None:
    """Train until the checkpoint of `step` is written, then stop as a kill would."""
    original = checkpoint.save

    def save(folder: Path, at: int, trained: dict[str, Any], state: dict[str, Any]) -> Path:
        path = original(folder, at, trained, state)
        if at == step:
            raise Stop
        return path

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(checkpoint, "save", save)
        train(recipe, out, settings)


@pytest.fixture(scope="session")
def made_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("photos") / "photos", np.random.default_rng(0)

    def pixels(k: int) -> np.ndarray:
        return rng.integers((20, 140)[k], (100, 220)[k], (32, 32, 3), np.uint8)

    return write_photos(root, {"train": 8, "test": 4}, ("dark", "light"), pixels, "{}.bmp")


@pytest.fixture(scope="session")
def made_runs(made_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """finished/ and, stopped after step 4 with checkpoints of steps 3 and 4, stopped/."""
    folder = tmp_path_factory.mktemp("runs")
    train(quick_recipe(made_photos), folder / "finished", QUICK)
    train_until(4, quick_recipe(made_photos), folder / "stopped")
    return folder


@pytest.fixture
def photos(made_photos: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made_photos, tmp_path / "photos"))


@pytest.fixture
def copy_of(made_runs: Path, tmp_path: Path) -> Callable[[str], Path]:
    """copy_of("finished"), copy_of("stopped"): copies that a test may change."""
    return lambda name: Path(shutil.copytree(made_runs / name, tmp_path / name))
