"""The moving average of trained parameters: its values, and that a run evaluates, exports and resumes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finessl.inference.classifier import load
from finessl.recipe import Recipe
from finessl.runs import checkpoint
from finessl.runs.directory import RunDirectory
from finessl.training.ema import Ema
from finessl.training.loop import Settings, train

from .conftest import TINY, train_until

SETTINGS = Settings(device="cpu", log_every=2, checkpoint_seconds=0.0, quiet=True)


def recipe(data: Path, **changes: Any) -> Recipe:
    fields = {**TINY, "tuning.length": 2, "train.steps": 8, "train.epoch_steps": 4, "train.ema": 0.5}
    return Recipe.read(None, {**fields, "data.source": str(data), **changes})


def test_average_by_hand() -> None:
    parameter = torch.tensor([0.0, 8.0])
    ema = Ema([parameter], decay=0.25)  # w = max(0.75, 9/10), max(0.75, 9/11), then 0.75
    expected = parameter.double()
    for step, weight in enumerate((9 / 10, 9 / 11, 0.75, 0.75)):
        parameter.add_(torch.tensor([1.0, -2.0]))
        ema.before_step(step)
        ema.update()
        expected += weight * (parameter.double() - expected)
    torch.testing.assert_close(ema.average[0].double(), expected, rtol=1e-6, atol=1e-6)


def test_a_network_computes_with_the_average_for_a_while() -> None:
    parameter, ema = torch.tensor([1.0]), Ema([torch.tensor([1.0])], 0.9)
    ema.parameters = [parameter]
    parameter.fill_(5.0)
    with ema.applied():
        assert parameter.item() == 1.0
    assert parameter.item() == 5.0 and ema.average[0].item() == 1.0
    ema.restart()
    assert ema.average[0].item() == 5.0


def test_a_run_exports_what_it_evaluates(shapes: Path, tmp_path: Path) -> None:
    meta = train(recipe(shapes), tmp_path / "run", SETTINGS)
    saved = checkpoint.newest_resumable(RunDirectory(tmp_path / "run"))
    assert saved is not None
    trained, state = saved
    exported = load_file(tmp_path / "run" / "classifier" / "classifier.safetensors")
    averages = {tuple(tensor.flatten().tolist()) for tensor in state["ema"]}
    shared = [name for name in trained if name in exported]
    assert shared and all(tuple(exported[name].flatten().tolist()) in averages for name in shared)
    assert any(not torch.equal(exported[name], trained[name]) for name in shared)
    files = sorted((shapes / "test").glob("*/*.png"))
    answers = load(tmp_path / "run", device="cpu").predict(files)
    right = sum(answer == file.parent.name for answer, file in zip(answers, files, strict=True))
    assert right / len(files) == pytest.approx(meta["accuracy"])


def test_a_resumed_run_has_the_same_average(shapes: Path, tmp_path: Path) -> None:
    train(recipe(shapes), tmp_path / "whole", SETTINGS)
    train_until(5, recipe(shapes), tmp_path / "resumed", SETTINGS)
    train(recipe(shapes), tmp_path / "resumed", SETTINGS)
    one, other = (load_file(tmp_path / run / "classifier" / "classifier.safetensors") for run in ("whole", "resumed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_training_does_not_depend_on_the_average(shapes: Path, tmp_path: Path) -> None:
    trained = []
    for decay in (0.0, 0.9):
        train(recipe(shapes, **{"train.ema": decay}), tmp_path / str(decay), SETTINGS)
        found = checkpoint.newest_resumable(RunDirectory(tmp_path / str(decay)))
        assert found is not None
        trained.append(found[0])
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
