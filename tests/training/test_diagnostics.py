"""Recorded diagnostics equal a slow recomputation from every step's pseudo-labels; they survive a crash; they cost little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finessl.data.sources import open_dataset
from finessl.frozen.features import FrozenEncoder, encode_images
from finessl.methods import METHODS, create
from finessl.methods.base import HeadOutputs, Result, Task
from finessl.models.backbones import create_backbone
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runtime.distributed import Processes
from finessl.training import diagnostics
from finessl.training.diagnostics import NOVEL, Diagnostics, evenly
from finessl.training.experiment import prepare
from finessl.training.loop import Settings, train

from .conftest import train_until

TINY = {
    "model.backbone": "vit_tiny_patch16_224", "model.pretrained": False, "data.image_size": 32, "tuning.length": 3,
    "split.labels_per_class": 4, "train.batch_size": 4, "train.mu": 2, "train.steps": 12, "train.epoch_steps": 5,
}  # fmt: skip
SETTINGS = Settings(device="cpu", log_every=3, checkpoint_seconds=0.0, quiet=True)


def recompute(seen: list[dict[str, np.ndarray]], classes: int) -> dict[str, Any]:
    """The line of an epoch, image by image."""
    line: dict[str, Any] = {"pseudo": [0] * classes, "truth": [0] * classes, "right": [0] * classes}
    values: dict[str, dict[str, list[float]]] = {}
    for step in seen:
        for i, (pseudo, truth) in enumerate(zip(step["pseudo"], step["truth"], strict=True)):
            if pseudo < 0:
                continue
            line["pseudo"][pseudo] += 1
            group = (
                "novel" if truth == -2 else "unknown" if truth == -1 else "correct" if pseudo == truth else "incorrect"
            )
            if truth >= 0:
                line["truth"][truth] += 1
                line["right"][truth] += int(pseudo == truth)
            for name in ("confidence", "confidence_aux", "weight"):
                if name in step:
                    values.setdefault(name, {}).setdefault(group, []).append(float(step[name][i]))
    for name, groups in values.items():
        line[name] = {g: np.histogram(v, 100, (0, 1))[0].tolist() for g, v in groups.items()}
        line.setdefault("mean", {})[name] = {g: float(np.mean(v)) for g, v in groups.items()}
    return line


def check(line: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("pseudo", "truth", "right", "confidence", "confidence_aux", "weight"):
        assert line.get(name) == expected.get(name), name
    for name, groups in expected["mean"].items():
        for group, value in groups.items():
            assert line["mean"][name][group] == pytest.approx(value, abs=2e-6)


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """What the method saw and answered in each step of a training."""
    seen: list[dict[str, np.ndarray]] = []

    observe = Diagnostics.observe

    def watch(self: Diagnostics, weak: HeadOutputs | None, index: torch.Tensor, result: Result) -> None:
        assert weak is not None and result.pseudo is not None and result.weight is not None
        step = {"pseudo": result.pseudo.numpy(), "weight": result.weight.numpy()}
        step["truth"] = self.truth[index].numpy()
        heads = {"confidence": weak.logits, "confidence_aux": weak.aux}
        step |= {n: z.detach().softmax(1).max(1)[0].numpy() for n, z in heads.items() if z is not None}
        seen.append(step)
        observe(self, weak, index, result)

    monkeypatch.setattr(Diagnostics, "observe", watch)
    return seen


@pytest.mark.parametrize("method", ["finessl", "fixmatch"])
def test_recorded_is_what_happened(shapes: Path, tmp_path: Path, spied: list, method: str) -> None:
    train(Recipe.read(None, {**TINY, "data.source": str(shapes), "method.name": method}), tmp_path / "run", SETTINGS)
    lines = [row for row in RunDirectory(tmp_path / "run").metrics() if row["kind"] == "diagnostics"]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]  # a tenth of the run
    for line in lines:
        check(line, recompute(spied[line["step"] - 2 : line["step"]], 3))
    assert sum(lines[0]["pseudo"]) == 2 * 8
    assert ("margin" in lines[0]) == (method == "finessl")
    assert 0 < sum(lines[0]["truth"]) < 16  # labeled images are among the unlabeled ones, and count as unknown


def test_open_set_images_are_novel(shapes: Path, tmp_path: Path, spied: list) -> None:
    fields = {
        **TINY,
        "data.source": str(shapes),
        "split.name": "open-set",
        "split.novel": 0.34,
        "method.name": "fixmatch",
    }
    train(Recipe.read(None, {**fields, "split.labels_per_class": 4}), tmp_path / "run", SETTINGS)
    line = next(row for row in RunDirectory(tmp_path / "run").metrics() if row["kind"] == "diagnostics")
    check(line, recompute(spied[:2], 2))
    assert sum(line["confidence"]["novel"]) > 0
    with np.load(tmp_path / "run" / "unlabeled.npz") as saved:
        assert (saved["truth"] == NOVEL).sum() == 24  # a third of 72 images; no labeled image is among them
        assert len(saved["index"]) == 72 - 8 and set(saved["truth"]) == {NOVEL, 0, 1}


def test_images_without_a_pseudo_label_do_not_count(tmp_path: Path) -> None:
    method = create("fpl", Task(3, 6, 10, labeled=3), {})
    watched = Diagnostics(method, np.array([0, 1, 2, 0, -1, -2]), torch.device("cpu"))
    logits = torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 2, 0], [0, 0, 0], [0, 0, 5], [0, 0, 5]])
    result = Result(torch.zeros(()), {}, torch.tensor([0, -1, 1, -1, 2, 2]), torch.ones(6))
    watched.observe(HeadOutputs(logits), torch.arange(6), result)
    line = watched.take(7)
    assert line is not None and line["step"] == 7
    assert (line["pseudo"], line["truth"], line["right"]) == ([1, 1, 2], [1, 0, 1], [1, 0, 0])
    assert {group: sum(row) for group, row in line["confidence"].items()} == {
        "correct": 1, "incorrect": 1, "novel": 1, "unknown": 1,
    }  # fmt: skip
    assert line["confidence"]["correct"][int(100 * np.exp(2) / (np.exp(2) + 2))] == 1
    assert watched.take(8) is None  # a fresh start


def test_a_run_stopped_before_its_end_was_written_ends_the_same(shapes: Path, tmp_path: Path) -> None:
    """Stopped after the last checkpoint, and in the middle of an epoch: the same metrics, to the byte."""
    recipe = Recipe.read(None, {**TINY, "data.source": str(shapes)})
    train(recipe, tmp_path / "whole", SETTINGS)
    for step in (7, 12):
        train_until(step, recipe, tmp_path / "stopped", SETTINGS)
    meta = train(recipe, tmp_path / "stopped", SETTINGS)
    whole = RunDirectory(tmp_path / "whole")
    assert (tmp_path / "stopped" / "metrics.jsonl").read_bytes() == whole.metrics_file.read_bytes()
    assert meta["pseudo_accuracy"] == whole.meta()["pseudo_accuracy"] and meta["accuracy"] == whole.meta()["accuracy"]
    for name in ("predictions.npz", "unlabeled.npz"):
        with np.load(tmp_path / "stopped" / name) as mine, np.load(tmp_path / "whole" / name) as theirs:
            for key in theirs.files:
                np.testing.assert_allclose(mine[key], theirs[key], atol=1e-6)


def test_predictions_for_unlabeled_images_are_saved(tmp_path: Path) -> None:
    import finessl

    fields = {"train.steps": 3, "train.epoch_steps": 3, "train.batch_size": 4, "train.precision": "fp32"}
    recipe = Recipe.read("demo", fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnostics, "MAX_PREDICTED", 40)  # both fewer than MIN_IMAGES
        patch.setattr(diagnostics, "MAX_ENCODED", 30)
        train(recipe, tmp_path / "run", SETTINGS)
    with np.load(tmp_path / "run" / "unlabeled.npz") as file:
        kept = dict(file)
    assert len(kept["index"]) == 40 and {"label", "confidence", "confidence_aux", "truth"} <= set(kept)
    dataset = open_dataset("sample")
    np.testing.assert_array_equal(kept["truth"], dataset.train_labels[kept["index"]])
    images = [dataset.train.read(int(i)) for i in kept["index"][:8]]
    p = finessl.load(tmp_path / "run", device="cpu", precision="fp32").predict_proba(images)
    np.testing.assert_array_equal(p.argmax(1), kept["label"][:8])
    np.testing.assert_allclose(p.max(1), kept["confidence"][:8], atol=1e-4)
    with np.load(tmp_path / "run" / "features.npz") as file:
        assert len(file["labeled"]) == 40 and len(file["unlabeled"]) == 30  # all labeled images are kept
        model = create_backbone("embedded")
        pixels = torch.from_numpy(np.stack([dataset.train.read(int(i)) for i in file["unlabeled"][:4]]))
        x = (pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(model.mean)[:, None, None]) / torch.tensor(model.std)[
            :, None, None
        ]
        with torch.no_grad():
            theirs = model.encoder.eval()(x).numpy()
        np.testing.assert_allclose(file["unlabeled_features"][:4], theirs, rtol=2e-3, atol=2e-3)


def test_kept_features_are_not_computed_again(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "cache"))
    encoder = FrozenEncoder(create_backbone("embedded"), torch.device("cpu"), "fp32")
    kept = encode_images(open_dataset(shapes).train, encoder).rows
    monkeypatch.setattr(diagnostics, "encode", None)
    fields = {"model.backbone": "embedded", "tuning.name": "linear", "method.name": "supervised", "train.steps": 1}
    fields |= {"train.epoch_steps": 1, "train.batch_size": 1, "train.precision": "fp32", "split.labels_per_class": 2}
    train(Recipe.read(None, {**fields, "data.source": str(shapes)}), tmp_path / "run", SETTINGS)
    with np.load(tmp_path / "run" / "features.npz") as found:
        np.testing.assert_array_equal(found["labeled_features"], kept[found["labeled"]])
        np.testing.assert_array_equal(found["unlabeled_features"], kept[found["unlabeled"]])


def test_evenly_spaced() -> None:
    assert evenly(3, 5).tolist() == [0, 1, 2]
    assert evenly(9, 3).tolist() == [0, 4, 8]


def test_nothing_waits_for_the_device() -> None:
    """No tensor becomes a Python number while a step is observed."""
    task = Task(10, 100, 10)
    method = create("finessl", task, {})
    watched = Diagnostics(method, np.zeros(100, np.int64), torch.device("cpu"))
    view = HeadOutputs(torch.randn(32, 10), torch.randn(32, 10))
    answer = Result(torch.zeros(()), {}, view.logits.argmax(1), torch.rand(32))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host waited for a tensor")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
            patch.setattr(torch.Tensor, name, refuse)
        watched.observe(view, torch.arange(32), answer)
    assert int(watched.counts[0].sum()) == 32


def test_looking_back_costs_a_share_of_training(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "MIN_IMAGES", 1)
    recipe = Recipe.read(None, {**TINY, "data.source": str(shapes), "method.name": "supervised"})
    train(recipe, tmp_path / "run", SETTINGS)
    passes = recipe.train.steps * recipe.train.batch_size  # labeled images alone
    with np.load(tmp_path / "run" / "unlabeled.npz") as saved:
        assert len(saved["index"]) == passes // 20


def test_methods_give_their_class_statistics() -> None:
    """By contract: [C] tensors, which an epoch's line of metrics then holds."""
    task = Task(classes=3, unlabeled=600, steps=1000, labeled=30)
    for name in METHODS.names():
        statistics = create(name, task).class_statistics()
        assert all(len(per_class) == 3 for per_class in statistics.values()), name
        assert list(statistics) == {"finessl": ["pace", "margin"], "flexmatch": ["pace"]}.get(name, [])


def test_the_loader_knows_no_hidden_label(shapes: Path) -> None:
    experiment = prepare(Recipe.read(None, {**TINY, "data.source": str(shapes)}), None, torch.device("cpu"))
    loader, split = experiment.loader(Processes()), experiment.split
    assert len(experiment.labels) == len(loader.labels) == len(split.labeled) < len(split.unlabeled)
    assert np.array_equal(loader.labels, split.labels(experiment.dataset)[split.labeled])
