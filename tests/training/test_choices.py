"""What a recipe chooses is what is trained: seeds, labels, views and options reach the run, and survive its directory."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import finessl
from finessl.cli import app
from finessl.data.views import STRONG, WEAK, create_view
from finessl.methods import create
from finessl.methods.base import Task
from finessl.models.backbones import create_backbone
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runs.inputs import make_or_load_split, open_source
from finessl.training.experiment import prepare
from finessl.training.step import lr_factor

SHORT = {"model.backbone": "embedded", "tuning.name": "linear", "train.steps": 2, "train.batch_size": 4}


def call(*words: Any) -> None:
    app([str(word) for word in words], standalone_mode=False)


def recipe(data: Path, **fields: Any) -> Recipe:
    return Recipe.read(None, {"data.source": str(data), "split.labels_per_class": 2, **SHORT, **fields})


@pytest.fixture(scope="module")
def own(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """labeled/ with 5 images of each class, and unlabeled/."""
    folder = tmp_path_factory.mktemp("own") / "photos"
    for kind in sorted((shapes / "train").iterdir()):
        files = sorted(kind.iterdir())
        for place, chosen in ((folder / "labeled" / kind.name, files[:5]), (folder / "unlabeled", files[5:])):
            place.mkdir(parents=True, exist_ok=True)
            for file in chosen:
                shutil.copy(file, place / f"{kind.name}-{file.name}")
    return folder


# ---- seeds ----------------------------------------------------------------------------------------------------------


def test_a_backbone_from_scratch_starts_from_the_seed(shapes: Path, tmp_path: Path) -> None:
    def stem(made: Any) -> torch.Tensor:
        return made.encoder.model.stem.weight.detach()

    starts = {}
    for seed in (0, 1):
        fields = {"model.backbone": "wide-resnet-28-2", "seed": seed}
        starts[seed] = stem(prepare(recipe(shapes, **fields), None, torch.device("cpu")).backbone)
    assert not torch.equal(starts[0], starts[1])
    assert torch.equal(starts[1], stem(create_backbone("wide-resnet-28-2", seed=1)))
    # a frozen random backbone is part of the classifier, which has to draw it again
    call("train", shapes, "--backbone", "wide-resnet-28-2", "--tuning", "linear", "--seed", "1", "-n", "2", "-q",
         "--steps", "1", "--batch-size", "3", "--strong-views", "1", "--out", tmp_path / "run", "--device", "cpu")  # fmt: skip
    assert torch.equal(stem(finessl.load(tmp_path / "run", device="cpu", precision="fp32").network), starts[1])


# ---- labels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "overlap"), [("fpl", 0), ("ifpl", 0), ("grip", 0), ("fixmatch", 6), ("finessl", 6)])
def test_self_training_never_pseudo_labels_labeled_images(shapes: Path, method: str, overlap: int) -> None:
    def shared(**fields: Any) -> int:
        made = recipe(shapes, **{"method.name": method, **fields})
        split = make_or_load_split(made, open_source(made), None, False)
        return len(np.intersect1d(split.labeled, split.unlabeled))

    assert shared() == overlap
    assert shared(**{"data.labeled_in_unlabeled": True}) == 6
    assert shared(**{"data.labeled_in_unlabeled": False}) == 0


def test_grip_recipes_and_the_papers_table_leave_labeled_images_out() -> None:
    from finessl.sweeps.paper.contents import read_table

    table = read_table("self-training")
    recipes = [
        table.recipe(line, table.columns[0]) for line in table.rows if line.changes["method"]["name"] != "finessl"
    ]
    for made in [*recipes, Recipe.read("grip"), Recipe.read("grip-coop")]:
        assert not made.labeled_in_unlabeled()


def test_a_recipes_number_of_labels_does_not_drop_the_users_labels(
    own: Path, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def labels(made: Recipe) -> int:
        return len(make_or_load_split(made, open_source(made), None, False).labeled)

    assert labels(Recipe.read("demo", {"data.source": str(own)})) == 15
    assert labels(Recipe.read("demo", {"data.source": str(own), "split.labels_per_class": 2})) == 6
    assert labels(Recipe.read("demo", {"data.source": str(shapes)})) == 12  # class folders: every image has a label
    table = own / "labels.csv"
    rows = [f"{path.relative_to(own)},{path.parent.name}" for path in sorted(own.glob("labeled/*/*.png"))]
    rows += [f"{path.relative_to(own)}," for path in sorted(own.glob("unlabeled/*.png"))]
    table.write_text("\n".join(["path,label", *rows]))
    try:
        assert labels(Recipe.read("demo", {"data.source": str(table)})) == 15
    finally:
        table.unlink()
    run = tmp_path / "run"
    call("train", own, "--recipe", "demo", "-n", "2", "--steps", "1", "--batch-size", "2", "--set", "train.mu=1",
         "--out", run, "--device", "cpu")  # fmt: skip
    told = " ".join(capsys.readouterr().err.split())
    assert "9 of the 15 labels that the data gives are not used" in told


def test_a_run_with_all_labels_is_not_resumed_with_fewer(own: Path, tmp_path: Path) -> None:
    run, kept = RunDirectory(tmp_path), Recipe.read("demo", {"data.source": str(own)})
    make_or_load_split(kept, open_source(kept), run, True)
    fewer = Recipe.read("demo", {"data.source": str(own), "split.labels_per_class": 4})
    with pytest.raises(finessl.FinesslError, match="begun with the split given, and per-class is asked for"):
        make_or_load_split(fewer, open_source(fewer), run, True)


# ---- views and schedules --------------------------------------------------------------------------------------------


def test_options_of_views_reach_the_loader(shapes: Path) -> None:
    from finessl.runtime.distributed import processes

    made = recipe(shapes, **{"data.strong": "randaugment(ops=3, cutout=5)", "data.weak.padding": 0.25})
    with processes("cpu") as alone:
        loader = prepare(made, None, torch.device("cpu")).loader(alone)
    assert (loader.strong_view.ops, loader.strong_view.cutout, loader.weak_view.padding) == (3, 5, 8)


def test_the_wide_resnet_recipe_has_fixmatchs_views_and_rate() -> None:
    made = Recipe.read("wide-resnet")
    weak, strong = create_view(WEAK, made.data.weak, 32), create_view(STRONG, made.data.strong, 32)
    assert (weak.resized, weak.padding, strong.cutout) == (32, 4, 16)
    steps = made.train.steps
    for step in (0, steps // 3, steps - 1):
        assert lr_factor(made.train, step) == pytest.approx(math.cos(7 * math.pi / 16 * step / steps))


# ---- the run directory ----------------------------------------------------------------------------------------------


def test_none_option_survives_resume(shapes: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    made = recipe(shapes, **{"method.aux_threshold": None})
    run.open(made)
    method = create("finessl", Task(3, 10, 2, labeled=6), run.recipe().checked().method.options)
    assert method.switches.aux_threshold is None  # all images; the default is 0.7
    run.metrics_file.touch()
    run.check(made)
    with pytest.raises(finessl.FinesslError, match="method.aux_threshold: 'none' there, None now"):
        run.check(recipe(shapes))


def test_joined_strategies_with_options_train_resume_and_load(shapes: Path, tmp_path: Path) -> None:
    words = ("train", shapes, "--tuning", "adapter+adaptformer", "--set", "tuning.adapter.dim=3", "--set",
             "tuning.adaptformer.dim=2", "--backbone", "embedded", "--steps", "1", "--batch-size", "3", "-n", "2", "-q",
             "--method", "supervised", "--out", tmp_path / "run", "--device", "cpu")  # fmt: skip
    call(*words)
    call(*words)  # finished: the same recipe
    call("resume", tmp_path / "run", "-q")
    network = finessl.load(tmp_path / "run", device="cpu").network
    assert network.encoder.adapters["0"].down.out_features == 3
    assert network.encoder.branches["0"].down.out_features == 2
