"""Labeled images that are drawn without their label keep it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from finessl.errors import FinesslError
from finessl.methods.base import HeadOutputs
from finessl.recipe import Recipe
from finessl.runtime.distributed import Processes
from finessl.training.experiment import Experiment, prepare
from finessl.training.known import KnownLabels, known_labels
from finessl.training.loop import Settings, train
from finessl.training.step import TrainingStep

FIELDS = {
    "model.backbone": "embedded", "tuning.name": "linear", "method.name": "fixmatch", "split.labels_per_class": 2,
    "train.batch_size": 4, "train.steps": 4, "train.epoch_steps": 2, "train.known_labels": True,
}  # fmt: skip


def experiment_of(shapes: Path, **more: object) -> Experiment:
    recipe = Recipe.read(None, {**FIELDS, "data.source": str(shapes), **more})
    return prepare(recipe, None, torch.device("cpu"))


def test_a_known_label_is_the_pseudo_label() -> None:
    weak = HeadOutputs(torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [5.0, 0.0, 0.0]]), None)
    found = KnownLabels(torch.tensor([-1, 2])).apply(weak, torch.tensor([1, 0, 1]))
    assert found.logits.tolist() == [[0.0, 0.0, 30.0], [0.0, 2.0, 1.0], [0.0, 0.0, 30.0]] and found.aux is None
    both = KnownLabels(torch.tensor([-1, 2])).apply(weak._replace(aux=weak.logits), torch.tensor([1, 0, 1]))
    assert both.aux is not None and torch.equal(both.aux, found.logits)


def test_labels_are_those_of_the_labeled_images(shapes: Path) -> None:
    experiment = experiment_of(shapes)
    known = known_labels(experiment)
    assert known is not None
    split = experiment.split
    expected = dict(zip(split.labeled.tolist(), experiment.labels.tolist(), strict=True))
    assert known.labels.tolist() == [expected.get(i, -1) for i in split.unlabeled.tolist()]
    assert int((known.labels >= 0).sum()) == len(split.labeled)
    assert known_labels(experiment_of(shapes, **{"train.known_labels": False})) is None
    with pytest.raises(FinesslError, match=r"data\.labeled_in_unlabeled = false leaves none there"):
        experiment_of(shapes, **{"data.labeled_in_unlabeled": False})
    assert known_labels(experiment_of(shapes, **{"method.name": "supervised"})) is None


def test_a_step_learns_from_them(shapes: Path) -> None:
    """With every image's label known, all pseudo-labels count and are right."""
    experiment = experiment_of(shapes)
    step = TrainingStep(
        experiment.network.train(), experiment.method, experiment.optimizer(), experiment.recipe.train,
        torch.device("cpu"), "fp32", Processes(),
    )  # fmt: skip
    views = experiment.loader(Processes()).load(0)
    assert views.index is not None
    labels = torch.arange(len(experiment.split.unlabeled)) % len(experiment.split.classes)
    before = step(0, views)
    assert before.pseudo is not None and not torch.equal(before.pseudo, labels[views.index])
    step.known = KnownLabels(labels)
    after = step(0, views)
    assert after.pseudo is not None and torch.equal(after.pseudo, labels[views.index])
    assert after.weight is not None and bool((after.weight == 1).all())


def test_a_run_uses_them(shapes: Path, tmp_path: Path) -> None:
    """No view is confident enough, so that the labels which are kept are all that the unlabeled loss learns from."""
    used = {}
    for kept in (True, False):
        fields = {"train.known_labels": kept, "method.threshold": 0.9999, "split.labels_per_class": 4}
        out = tmp_path / str(kept)
        train(experiment_of(shapes, **fields).recipe, out, Settings(device="cpu", quiet=True))
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        used[kept] = [row["loss_unlabeled"] for row in rows if "loss_unlabeled" in row]
    assert max(used[True]) > 0 and used[False] and not any(used[False]), used
