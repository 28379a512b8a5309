"""The plan of `finessl train DATA`: what fits into a budget, and that given choices win."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import finessl
from finessl import api
from finessl.cli import app
from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.training import affordable as encoding
from finessl.training import plan as planning
from finessl.training.plan import LONGEST, Sizes, Way, decide, read_budget, with_prior
from finessl.training.timing import SMALL, STEPS, Cost, time_training

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "text, seconds", [("90", 90), ("90s", 90), ("15m", 900), ("15 min", 900), ("2h", 7200), ("1.5h", 5400), (30, 30)]
)
def test_budget_is_a_time(text: str | float, seconds: float) -> None:
    assert read_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5m", "0", "5 days", "1e400", "m"])
def test_budget_that_is_no_time(text: str) -> None:
    with pytest.raises(FinesslError, match="such as 90s, 15m or 2h"):
        read_budget(text)


# ---- the choice, with costs that are given -----------------------------------------------------------------------------


def way(title: str, kind: str, step: float, **fields: Any) -> Way:
    fields = {"data.source": "photos", "model.backbone": "embedded", **fields}
    recipe = Recipe.read(None, {"tuning.name": "linear", **fields})
    return Way(title, kind, {"tuning.name": "linear", **fields}, recipe, Cost(step, 0.01), Sizes(1000, 100, 5.0))


def choose(seconds: float, *, trains: bool = True, step: float = 1.0) -> planning.Plan:
    ways = [
        way("all", "tuned", step),
        way("part", "tuned", step / 4, seed=1),
        way("kept", "cached", step / 100, seed=2),
    ]
    return decide(ways, None, ways[0].recipe, seconds / 0.9, seconds, trains=trains, device=CPU)


def test_more_time_buys_the_better_way_and_more_steps() -> None:
    """Seed 0, 1, 2 marks which way it is."""
    chosen = [choose(seconds) for seconds in (20, 400, 2000, 100_000)]
    assert [plan.recipe.seed for plan in chosen] == [2, 1, 0, 0]
    steps = [plan.recipe.train.steps for plan in chosen]
    assert steps[2] < steps[3] == LONGEST
    assert all(plan.seconds <= plan.budget * 0.9 for plan in chosen)


def test_the_whole_run_scales_with_its_steps() -> None:
    plan = choose(2000)
    assert plan.recipe.train.epoch_steps == -(-plan.recipe.train.steps // 10)
    assert choose(100_000).recipe.train.epoch_steps == 500


def solved(*solvers: str) -> Any:
    """An answer from frozen features, of which the plan knows the solvers."""
    return SimpleNamespace(
        chosen=SimpleNamespace(choice=SimpleNamespace(candidates=[SimpleNamespace(solver=s) for s in solvers]))
    )


def test_frozen_features_are_a_prior_where_they_were_propagated() -> None:
    tuned, kept = way("all", "tuned", 1.0), way("kept", "cached", 1.0)
    assert with_prior(tuned, solved("ridge", "propagation"), 990) == {"train.prior": 1.0, "train.warmup": 50}
    other = way("all", "tuned", 1.0, **{"method.name": "fixmatch"})
    for case in (
        (tuned, None),
        (tuned, solved("ridge")),
        (kept, solved("propagation")),
        (other, solved("propagation")),
    ):
        assert with_prior(*case, 990) == {}


def test_plan_says_what_it_gives_up_and_what_more_time_buys() -> None:
    text = "\n".join(choose(400).lines)
    assert "part" in text and "It also gives up all, which has room from --budget " in text and "GPU" in text
    needed = read_budget(text.split("which has room from --budget ")[1].split()[0])
    assert needed is not None
    assert choose(0.9 * needed).recipe.seed == 0 and choose(0.9 * (needed - 90)).recipe.seed == 1


def test_too_little_time_for_anything_is_said() -> None:
    plan = choose(3)
    assert plan.recipe.train.steps == 1 and "more than the budget" in "\n".join(plan.lines)


# ---- with a clock that is not a clock ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, scale", [(8, 8 / SMALL), (1, 1)])
def test_step_is_timed_small_and_scaled(batch: int, scale: float) -> None:
    recipe = Recipe.read(
        None,
        {"data.source": "x", "model.backbone": "embedded", "tuning.name": "linear", "train.batch_size": batch},
    )
    ticks = itertools.count()
    cost = time_training(recipe, 2, CPU, clock=lambda: 10.0 * next(ticks))  # ten seconds between two looks
    assert cost == Cost(10 / STEPS * scale, 10 / 8)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., tuple[str, dict[str, Any]]]]:
    """`finessl train` on a machine whose steps take one second; the output, and the recipe that it wrote."""
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encoding, "candidate_backbones", lambda asked, files: [("embedded", None)])
    monkeypatch.setattr(encoding, "hub_lacks", lambda name: "no network")
    monkeypatch.setattr(planning, "time_training", lambda recipe, *more: Cost(1.0, 0.001, 0.001))
    monkeypatch.setattr(encoding, "time_encoding", lambda encoder, clock: 0.001)
    monkeypatch.setattr(planning, "FEWEST", {"tuned": 16, "cached": 16})  # two steps of 8
    monkeypatch.setattr(planning, "time_reading", lambda images, clock: 0.0)
    ticks = itertools.count()

    original = planning.make_plan
    monkeypatch.setattr(api, "make_plan", lambda *a, **k: original(*a, **k, clock=lambda: 1e-6 * next(ticks)))

    def run(*words: Any) -> tuple[str, dict[str, Any]]:
        out = tmp_path / "run"
        words = ("train", *words, "--out", out, "--device", "cpu")
        result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output, tomllib.loads((out / "recipe.toml").read_text())

    yield run


def test_train_plans_own_data_and_records_the_choice(planned: Any, shapes: Path, tmp_path: Path) -> None:
    text, recipe = planned(shapes, "-n", 4, "--budget", "3s")
    assert "Plan for 3 s on" in text
    assert "Frozen features: embedded at 32 px, propagation, ridge and discriminants" in text
    assert recipe["model"]["backbone"] == "embedded" and recipe["tuning"]["name"] == "adaptformer"
    assert recipe["train"]["steps"] == 2 and recipe["train"]["batch_size"] == 8  # a second each, a tenth in reserve
    assert recipe["train"]["lr"] == 0.03 / 4 and recipe["train"]["warmup"] == 1  # for a quarter of the batch
    assert "frozen features alone" in text and "a prior on its pseudo-labels" in " ".join(text.split())
    assert recipe["train"]["prior"] == 1.0
    again, same = planned(shapes, "-n", 4, "--budget", "2h")  # it resumes what was planned
    assert "nothing to do" in again and same == recipe
    finessl.train(shapes, out=tmp_path / "copy", recipe=tmp_path / "run" / "recipe.toml", quiet=True)
    assert (tmp_path / "copy" / "recipe.toml").read_bytes() == (tmp_path / "run" / "recipe.toml").read_bytes()


def test_frozen_features_are_the_result_where_training_has_no_room(planned: Any, shapes: Path, tmp_path: Path) -> None:
    text, recipe = planned(shapes, "-n", 4, "--budget", "1s")
    assert "This is what finessl recommends for this time" in text and recipe["method"]["name"] == "quick"
    assert "last step" not in text and "after encoding" in text
    assert "give --weights dinov2-vit-s14=FILE" in " ".join(text.split())  # the hub cannot be reached
    again, same = planned(shapes, "-n", 4, "--budget", "1s")
    assert same == recipe and "is finished: nothing to do. For another plan" in " ".join(again.split())
    finessl.train(shapes, out=tmp_path / "copy", recipe=tmp_path / "run" / "recipe.toml", quiet=True)
    assert tomllib.loads((tmp_path / "copy" / "recipe.toml").read_text()) == recipe


def test_given_choices_win(planned: Any, shapes: Path) -> None:
    """Also over the advice to leave it at frozen features."""
    text, recipe = planned(shapes, "-n", 4, "--budget", "1s", "--tuning", "lora", "--batch-size", 3, "--lr", 0.01)
    assert recipe["tuning"]["name"] == "lora" and recipe["method"]["name"] == "finessl"
    assert recipe["train"]["batch_size"] == 3 and recipe["train"]["lr"] == 0.01 and recipe["train"]["steps"] == 1


def test_no_plan_with_steps_and_adaptformer_by_default(planned: Any, shapes: Path) -> None:
    text, recipe = planned(shapes, "-n", 4, "--backbone", "embedded", "--steps", 1, "--batch-size", 2)
    assert "Plan" not in text and recipe["tuning"]["name"] == "adaptformer"


@pytest.mark.parametrize("more", [["--steps", "1"], ["--backbone", "embedded"], ["--recipe", "demo"]])
def test_budget_with_a_fixed_length_is_refused(shapes: Path, tmp_path: Path, more: list[str]) -> None:
    with pytest.raises(FinesslError, match="whose length is open"):
        app(["train", str(shapes), "--out", str(tmp_path / "r"), "--budget", "5m", *more], standalone_mode=False)
    with pytest.raises(FinesslError, match="whose length is open"):
        app(["train", "sample", "--out", str(tmp_path / "r"), "--budget", "5m"], standalone_mode=False)


@pytest.fixture
def two_backbones(monkeypatch: pytest.MonkeyPatch, shapes: Path) -> Callable[..., encoding.Encodable]:
    """`affordable` for the 96 images of `shapes`: a second each with "strong" at 224 px, a quarter at half of that."""
    from finessl.runs.inputs import open_source

    def create(name: str, weights: None, image_size: int | None) -> SimpleNamespace:
        return SimpleNamespace(name=name, image_size=image_size or (32 if name == "embedded" else 224))

    stand_ins = {
        "candidate_backbones": lambda asked, files: [("strong", None), ("embedded", None)],
        "create_backbone": create,
        "FrozenEncoder": lambda backbone, *more: backbone,
        "time_encoding": lambda backbone, clock: (backbone.image_size / 224) ** 2,
        "count_missing": lambda part, encoder: len(part),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(encoding, name, stand_in)

    def fits(budget: float, **fields: Any) -> encoding.Encodable:
        recipe = Recipe.read(None, {"data.source": str(shapes), **fields})
        return encoding.affordable(recipe, open_source(recipe), {}, budget, CPU, lambda: 0.0)

    return fits


@pytest.mark.parametrize(
    ("budget", "names", "size", "said"),
    [
        (200, ["strong", "embedded"], None, ""),
        (130, ["strong", "embedded"], None, ""),  # more than half of the budget: nothing is left for training
        (100, ["strong"], 112, "At its own image size, encoding the images with strong would take 2 min"),
        (20, ["embedded"], None, "strong is left out: encoding the images would take 2 min"),
        (1, [], None, "embedded is left out"),
    ],
)
def test_the_strong_backbone_before_training_the_embedded_one(
    two_backbones: Any, budget: float, names: list[str], size: int | None, said: str
) -> None:
    found = two_backbones(budget)
    assert [name for name, _ in found.backbones] == names and found.image_size == size
    assert said in "\n".join(found.notes) and bool(said) == bool(found.notes)


def test_a_given_image_size_is_kept(two_backbones: Any) -> None:
    found = two_backbones(100, **{"data.image_size": 224})
    assert found.backbones == [] and found.image_size == 224


def test_weights_by_name() -> None:
    from finessl.cli.train import split_weights

    fields: dict[str, Any] = {"weights": "a.pt"}
    assert split_weights(fields) == {} and fields == {"weights": "a.pt"}
    fields = {"weights": "dinov2-vit-s14=a.pt,embedded=b.pt"}
    assert split_weights(fields) == {"dinov2-vit-s14": "a.pt", "embedded": "b.pt"} and not fields
    fields = {"weights": "embedded=b.pt", "backbone": "embedded"}
    assert split_weights(fields) == {} and fields["weights"] == "b.pt"
    with pytest.raises(FinesslError, match="should name the file of the backbone embedded"):
        split_weights({"weights": "clip-vit-b16=a.pt", "backbone": "embedded"})
