"""Run directories made by hand: every number in them is chosen, nothing is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finessl.data.sources import open_dataset
from finessl.data.splits import make_split
from finessl.recipe import Recipe

from ..conftest import write_photos

BINS = 100


def bins(**at: int) -> list[int]:
    """bins(b95=3) → three images in the bin that begins at 0.95."""
    row = [0] * BINS
    for name, count in at.items():
        row[int(name[1:])] = count
    return row


def diagnostics(step: int, pseudo: list[int], right: int = 6) -> dict[str, Any]:
    """Ten images known to be of three classes; `right` of them pseudo-labeled rightly."""
    groups = {"correct": bins(b95=right), "incorrect": bins(b55=10 - right)}
    mean = {"correct": 0.95, "incorrect": 0.55}
    aux = {"correct": bins(b60=right), "incorrect": bins(b20=10 - right)}
    return {
        "kind": "diagnostics", "step": step, "pseudo": pseudo, "truth": [4, 3, 3], "right": [right - 4, 2, 2],
        "confidence": groups, "confidence_aux": aux, "weight": aux, "margin": [0.0, 1.0, 2.0], "pace": [5, 3, 1],
        "mean": {"confidence": mean, "confidence_aux": {"correct": 0.605, "incorrect": 0.205},
                 "weight": {"correct": 0.605, "incorrect": 0.205}},
    }  # fmt: skip


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders train/<class>, test/<class> of three classes, one with markup in its name; each class has its colour."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)

    def pixels(k: int) -> np.ndarray:
        return (rng.integers(0, 90, (40, 30, 3)) + 150 * np.eye(3, dtype=int)[k]).astype(np.uint8)

    return write_photos(root, {"train": 12, "test": 6}, ("ash", "<b>birch&co", "cedar"), pixels)


@pytest.fixture
def own_photos(photos: Path, tmp_path: Path) -> Path:
    """A copy of the photos that a test may change."""
    return Path(shutil.copytree(photos, tmp_path / "photos"))


@pytest.fixture
def make_run(tmp_path: Path, photos: Path) -> Callable[..., Path]:
    """make_run(name, method=…, right=[…], …) → a finished run's directory with the given answers for 18 test images."""

    def make(
        name: str = "run",
        *,
        method: str = "finessl",
        right: int = 14,
        fields: dict[str, Any] | None = None,
        rows: list[dict[str, Any]] | None = None,
        finished: bool = True,
        tested: bool = True,
        labels: int = 4,
        source: Path | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        recipe = Recipe.read(
            None,
            {
                "data.source": str(source or photos),
                "method.name": method,
                "split.labels_per_class": labels,
                **(fields or {}),
            },
        )
        (folder / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
        dataset = open_dataset(source or photos)
        split = make_split(dataset, kind="per-class", labels_per_class=labels)
        split.save(folder / "split.json")
        lines = [{"kind": "train", "step": 10, "loss": 1.0, "used": 0.4, "confidence": 0.7}]
        lines += [{"kind": "test", "step": 10, "accuracy": 0.5}] if tested else []
        lines += rows if rows is not None else [diagnostics(5, [6, 3, 1]), diagnostics(10, [4, 3, 3], right=8)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if not finished:
            return folder
        rng = np.random.default_rng(0)
        if tested:
            true = np.repeat(np.arange(3), 6)
            answers = np.where(np.arange(18) < right, true, (true + 1) % 3)
            logits = 2.0 * np.eye(3)[answers] + rng.uniform(0, 1, (18, 3))
            np.savez(folder / "predictions.npz", logits=logits.astype(np.float32), labels=true, index=np.arange(18))
        others = np.setdiff1d(split.unlabeled, split.labeled)
        truth = split.labels(dataset)
        np.savez(
            folder / "unlabeled.npz", index=others, label=truth[others], truth=truth[others],
            confidence=np.linspace(0.4, 0.99, len(others)), confidence_aux=np.linspace(0.3, 0.8, len(others)),
        )  # fmt: skip
        centres = 3 * np.eye(3, 8)
        features = lambda images: (centres[truth[images]] + rng.normal(0, 0.3, (len(images), 8))).astype(np.float16)  # noqa: E731
        np.savez(
            folder / "features.npz", labeled=split.labeled, labels=truth[split.labeled], unlabeled=others,
            labeled_features=features(split.labeled), unlabeled_features=features(others),
        )  # fmt: skip
        meta = {
            "finished": True, "accuracy": right / 18 if tested else None, "steps": 10, "seconds": 75.0, "labeled": 3 * labels,
            "unlabeled": 36, "test": 18 if tested else 0, "trained_parameters": 10, "parameters": 100,
            "data_fingerprint": dataset.fingerprint(), "device": "a machine", "versions": {"finessl": "0.1.0"},
        }  # fmt: skip
        (folder / "meta.json").write_text(json.dumps(meta))
        return folder

    return make
