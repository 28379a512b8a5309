"""The loop: seeds, evaluation, self-training restarts, open sets, memory, compilation's fall-back."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from finessl.errors import FinesslError
from finessl.models.build import compile_encoder
from finessl.recipe import Recipe, TrainRecipe
from finessl.runs.directory import RunDirectory
from finessl.runtime.device import describe_device
from finessl.runtime.precision import resolve_precision
from finessl.training.experiment import prepare
from finessl.training.loop import Settings, train
from finessl.training.settings import evaluation_interval
from finessl.training.step import TrainingStep, lr_factor

from .conftest import TINY, train_until

SHORT = {**TINY, "train.steps": 12, "train.epoch_steps": 5, "train.lr": 0.01}
SETTINGS = Settings(device="cpu", log_every=3, checkpoint_seconds=0.0, quiet=True)


def recipe(data: Path, **changes: object) -> Recipe:
    return Recipe.read(None, {**SHORT, "data.source": str(data), **changes})


def trained(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "classifier" / "classifier.safetensors")


def same(a: Path, b: Path) -> bool:
    mine, theirs = trained(a), trained(b)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_seed_is_a_run(shapes: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        train(recipe(shapes, seed=seed), tmp_path / name, SETTINGS)
    assert same(tmp_path / "one", tmp_path / "again")
    assert not same(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "metrics.jsonl").read_bytes() == (tmp_path / "again" / "metrics.jsonl").read_bytes()


def test_metrics_and_evaluations(shapes: Path, tmp_path: Path) -> None:
    meta = train(recipe(shapes), tmp_path / "run", SETTINGS)
    rows = RunDirectory(tmp_path / "run").metrics()
    assert [row["step"] for row in rows if row["kind"] == "test"] == [4, 8, 12]
    lines = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in lines] == [3, 6, 9, 12]
    for row in lines:
        assert {"loss", "loss_labeled", "loss_unlabeled", "used", "confidence", "pseudo_accuracy", "lr"} <= set(row)
    assert lines[0]["lr"] == pytest.approx(0.01 * 0.5 * (1 + np.cos(np.pi * 2 / 12)))
    for name in ("confidence", "pseudo_accuracy"):  # in the mean over the last epoch, 5 steps: the last two lines
        assert meta[name] == pytest.approx((lines[2][name] + lines[3][name]) / 2)


@pytest.mark.parametrize(("method", "stop"), [("grip", 7), ("pseudo-label", 5), ("freematch", 4)])
def test_state_of_other_methods_resumes_too(shapes: Path, tmp_path: Path, method: str, stop: int) -> None:
    """Self-training pools, ramps and moving averages survive an interruption (dropout as well)."""
    one = recipe(shapes, **{"method.name": method, "tuning.name": "adaptformer", "train.steps": 12})
    train(one, tmp_path / "whole", SETTINGS)
    train_until(stop, one, tmp_path / "broken", SETTINGS)
    train(one, tmp_path / "broken", SETTINGS)
    assert same(tmp_path / "whole", tmp_path / "broken")
    assert (tmp_path / "whole" / "metrics.jsonl").read_bytes() == (tmp_path / "broken" / "metrics.jsonl").read_bytes()


def test_open_set(shapes: Path, tmp_path: Path) -> None:
    """Two of three classes are learned; the third stays among the unlabeled images and out of the test."""
    one = recipe(shapes, **{"split.name": "open-set", "split.novel": 0.34, "split.labels_per_class": 4})
    meta = train(one, tmp_path / "run", SETTINGS)
    assert (meta["classes"], meta["labeled"], meta["unlabeled"], meta["test"]) == (2, 8, 72, 16)


def test_nothing_piles_up(shapes: Path) -> None:
    """As many tensors are alive after 40 steps as after 10."""
    experiment = prepare(recipe(shapes), None, torch.device("cpu"))
    network, device = experiment.network.train(), torch.device("cpu")
    from finessl.runtime.distributed import Processes
    from finessl.training.optimizers import make_optimizer

    train_recipe = experiment.recipe.train
    optimizer = make_optimizer(network, train_recipe, device)
    step = TrainingStep(network, experiment.method, optimizer, train_recipe, device, "fp32", Processes())
    loader, counts = experiment.loader(Processes()), []
    for number in range(40):
        step(number, loader.load(number))
        if number in (9, 39):
            gc.collect()
            counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    assert counts[1] <= counts[0]


def test_compilation_that_fails_is_done_without(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = prepare(recipe(shapes), None, torch.device("cpu"))
    images = torch.randn(2, 3, 32, 32)
    plain = experiment.network.features(images)

    def broken(*arguments: object, **options: object) -> object:
        def call(*images: torch.Tensor) -> torch.Tensor:
            raise torch._dynamo.exc.TorchDynamoException("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    compile_encoder(experiment.network.encoder)
    with pytest.warns(UserWarning, match="going on without"):
        assert torch.equal(experiment.network.features(images), plain)
    assert torch.equal(experiment.network.features(images), plain)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "cosine", "steps": 100}, {0: 1.0, 50: 0.5, 99: 0.5 * (1 + np.cos(np.pi * 0.99))}),
        ({"schedule": "cosine-epoch", "steps": 1000, "epoch_steps": 500}, {0: 1.0, 499: 1.0, 500: 0.5, 999: 0.5}),
        ({"schedule": "constant", "steps": 10, "warmup": 4}, {0: 0.25, 3: 1.0, 9: 1.0}),
    ],
)
def test_learning_rate(fields: dict, expected: dict[int, float]) -> None:
    for step, factor in expected.items():
        assert lr_factor(TrainRecipe(**fields), step) == pytest.approx(factor)


def test_learning_rate_of_a_phase_runs_its_own_course() -> None:
    train_recipe = TrainRecipe(steps=100)
    assert lr_factor(train_recipe, 50, (50, 100)) == 1.0
    assert lr_factor(train_recipe, 75, (50, 100)) == pytest.approx(0.5)


def test_released_schedule_has_the_released_rates() -> None:
    """Epoch e of 30: 0.015 (1 + cos(π e / 30)); the last 8.2e-5."""
    train_recipe = TrainRecipe(schedule="cosine-epoch")
    rates = [0.03 * lr_factor(train_recipe, 500 * epoch + 3) for epoch in range(30)]
    assert rates == pytest.approx([0.015 * (1 + np.cos(np.pi * epoch / 30)) for epoch in range(30)])
    assert rates[-1] == pytest.approx(8.2e-5, rel=0.01)


def test_display_without_a_terminal(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(recipe(shapes), tmp_path / "run", Settings(device="cpu", log_every=3))
    text = capsys.readouterr().err
    assert "3 classes, 12 labeled and 60 unlabeled training images, 24 test images" in text.replace("\n", " ")
    assert "step 12: test accuracy" in text
    assert describe_device(torch.device("cpu"))


@pytest.mark.parametrize(("amx", "avx512", "expected"), [(1, 0, "bf16"), (0, 1, "bf16"), (0, 0, "fp32")])
def test_bf16_where_the_cpu_supports_it(monkeypatch: pytest.MonkeyPatch, amx: int, avx512: int, expected: str) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: bool(amx), raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bool(avx512), raising=False)
    assert resolve_precision("auto", torch.device("cpu")) == expected
    assert resolve_precision("fp32", torch.device("cpu")) == "fp32"


@pytest.mark.parametrize(
    ("steps", "epoch", "every"), [(15_000, 500, 1500), (5000, 500, 500), (340, 85, 34), (20, 500, 2), (5, 10, 1)]
)
def test_ten_evaluations_are_enough(steps: int, epoch: int, every: int) -> None:
    recipe = Recipe.read(None, {"data.source": "sample", "train.steps": steps, "train.epoch_steps": epoch})
    assert evaluation_interval(recipe.train, images_per_step=128, test_images=1) == every


def test_a_short_run_records_and_evaluates_about_ten_times(shapes: Path, tmp_path: Path) -> None:
    """The method's epochs stay as they are; only the records come more often."""
    fields = {**SHORT, "data.source": str(shapes), "train.steps": 20, "train.epoch_steps": 500}
    recipe = Recipe.read(None, fields)
    train(recipe, tmp_path / "run", Settings(device="cpu", quiet=True))
    rows = RunDirectory(tmp_path / "run").metrics()
    steps = {kind: [row["step"] for row in rows if row["kind"] == kind] for kind in ("train", "diagnostics", "test")}
    assert steps["train"] == list(range(1, 21))
    assert steps["diagnostics"] == list(range(2, 21, 2))
    assert steps["test"] == list(range(4, 21, 4))  # 24 test images, 320 images in training: half of them allows six
    train(recipe, tmp_path / "once", Settings(device="cpu", quiet=True, eval_every=0, log_every=20))
    ours, theirs = (load_file(tmp_path / name / "classifier/classifier.safetensors") for name in ("run", "once"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "diagnostics changed the result"


@pytest.mark.parametrize(
    ("fields", "inside"),
    [
        ({"tuning.name": "full"}, 1e-4),
        ({"tuning.name": "lp-ft"}, 1e-4),
        ({"tuning.name": "full", "train.lr": 1e-5}, 1e-5),
        ({"tuning.name": "full", "train.backbone_lr": 0.02}, 0.02),
        ({"tuning.name": "full", "model.backbone": "wide-resnet-28-2"}, 0.03),
        ({"tuning.name": "full", "model.backbone": "vit_tiny_patch16_224", "model.pretrained": False}, 0.03),
        ({"tuning.name": "vpt-deep+full"}, 1e-4),
        ({"tuning.name": "lora"}, 0.03),
    ],
)
def test_pretrained_weights_learn_at_a_rate_they_stand(fields: dict[str, object], inside: float) -> None:
    recipe = Recipe.read(
        None, {"data.source": "sample", "split.labels_per_class": 4, "model.backbone": "embedded", **fields}
    )
    groups = prepare(recipe, None, torch.device("cpu")).optimizer().param_groups
    assert {group["name"]: group["lr"] for group in groups} == {"backbone": inside, "heads": recipe.train.lr}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("[enforce] not enough memory: you tried")]
)
def test_too_little_memory_is_a_sentence(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(TrainingStep, "compute", fail)
    with pytest.raises(FinesslError, match=r"too little memory.* smaller --batch-size \(now 4\)"):
        train(recipe(shapes), tmp_path / "run", SETTINGS)
