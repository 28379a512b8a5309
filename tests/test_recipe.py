"""Recipes: defaults are the paper's, files and overrides lay over them, mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from finessl.errors import FinesslError
from finessl.recipe import Choice, Recipe, merge, parse_setting, recipe_folder, write_toml


def test_defaults_are_the_papers() -> None:
    recipe = Recipe()
    train = recipe.train
    assert (train.lr, train.momentum, train.weight_decay, train.batch_size, train.mu) == (0.03, 0.9, 5e-4, 32, 1)
    assert train.steps == 30 * 500 and train.epoch_steps == 500 and train.optimizer == "sgd"
    assert (recipe.method.name, recipe.tuning.name, recipe.head.name) == ("finessl", "vpt-deep", "cosine")


def test_options_stay_whatever_the_order() -> None:
    for fields in (
        {"method.name": "fixmatch", "method.threshold": 0.9},
        {"method.threshold": 0.9, "method.name": "fixmatch"},
    ):
        assert Recipe.read(None, fields).method == Choice("fixmatch", {"threshold": 0.9})


def test_toml_round_trip(tmp_path: Path) -> None:
    recipe = Recipe.read(
        None,
        {
            "method.name": "finessl",
            "method.without": ["bms", "ls"],
            "data.source": 'a "quoted" \\ name ü',
            "train.lr": 1e-5,
            "model.weights": None,
            "split.labels_per_class": 4,
        },
    )
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.toml(), encoding="utf-8")
    assert Recipe.read(file) == recipe


def test_overrides_lie_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('seed = 3\n[method]\nname = "fixmatch"\nthreshold = 0.9\n[train]\nsteps = 10\n')
    recipe = Recipe.read(file, {"train.steps": 20})
    assert recipe.seed == 3 and recipe.train.steps == 20
    assert recipe.method == Choice("fixmatch", {"threshold": 0.9})
    # another method: the old one's options are dropped, not handed on
    assert Recipe.read(file, {"method.name": "supervised"}).method == Choice("supervised", {})


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("first-n", {"labels_per_class": 25}),
        ("auto", {"labels_per_class": 25}),
        ("given", {}),
        ("long-tailed", {}),
        ("no-such-split", {}),
        (["no", "name"], {}),
    ],
)
def test_another_split_keeps_how_many_labels_a_class_has_if_it_takes_that(name: object, kept: dict[str, int]) -> None:
    tree = Recipe.read(None, {"split.name": "per-class", "split.labels_per_class": 25}).tree()
    merge(tree, {"split": {"name": name}}, "--set")
    assert tree["split"] == {"name": name, **kept}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train.step", 5, "did you mean steps"),
        ("trian.steps", 5, "no section 'trian'"),
        ("train.steps", "many", "train.steps = 'many' should be int"),
        ("train.steps", 0, "at least 1"),
        ("train.lr", -1.0, "positive"),
        ("train.optimizer", "adam", "not one of sgd, adamw"),
        ("train", 3, "train is a section"),
        ("train.momentum", 1.0, r"\[0, 1\)"),
    ],
)
def test_mistakes_are_named(name: str, value: object, message: str) -> None:
    with pytest.raises(FinesslError, match=message):
        Recipe.read(None, {name: value})


def test_bad_files_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 3")
    with pytest.raises(FinesslError, match="not valid TOML"):
        Recipe.read(broken)
    with pytest.raises(FinesslError, match="Shipped recipes: .*released"):
        Recipe.read("no-such-recipe")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("method.alpha=4", ("method.alpha", 4)),
        ("train.lr=1e-3", ("train.lr", 1e-3)),
        ("data.strict=true", ("data.strict", True)),
        ('method.without=["bms"]', ("method.without", ["bms"])),
        ("model.backbone=clip-vit-b16", ("model.backbone", "clip-vit-b16")),
        ("data.root=/a=b", ("data.root", "/a=b")),
    ],
)
def test_settings_from_the_command_line(text: str, parsed: tuple[str, object]) -> None:
    assert parse_setting(text) == parsed


def test_setting_without_value() -> None:
    with pytest.raises(FinesslError, match=r"section\.field=value"):
        parse_setting("train.lr")


def test_differences() -> None:
    here, there = Recipe.read(None, {"method.alpha": 4.0}), Recipe.read(None, {"train.lr": 0.1})
    assert here.differences(there) == {"method.alpha": (4.0, None), "train.lr": (0.03, 0.1)}
    assert here.differences(here) == {}


@pytest.mark.parametrize("path", sorted(recipe_folder().glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    """Each reads, opens with a comment, and names options that its method and tuning take."""
    from finessl.methods import create
    from finessl.methods.base import Task
    from finessl.models.tuning import create as create_tuning

    recipe = Recipe.read(path)
    assert path.read_text(encoding="utf-8").startswith("# ")
    create(
        recipe.method.name, Task(classes=10, unlabeled=100, steps=recipe.train.steps, labeled=40), recipe.method.options
    )
    create_tuning(recipe.tuning.name, recipe.tuning.options)


def test_written_toml_is_ordered_and_plain() -> None:
    text = write_toml({"seed": 1, "train": {"lr": 0.5, "none": None, "names": ["a", "b"], "on": True}})
    assert text == 'seed = 1\n\n[train]\nlr = 0.5\nnames = ["a", "b"]\non = true\n'
