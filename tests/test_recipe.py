"""Recipes: defaults are the paper's, files and overrides lay over them, mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from finessl.errors import FinesslError
from finessl.recipe import Choice, Recipe, merge, parse_setting, recipe_folder
from finessl.recipe.small_batch import small_batch


def test_defaults_are_the_papers() -> None:
    recipe = Recipe()
    train = recipe.train
    assert (train.lr, train.momentum, train.weight_decay, train.batch_size, train.mu) == (0.03, 0.9, 5e-4, 32, 1)
    assert train.steps == 30 * 500 and train.epoch_steps == 500 and train.optimizer == "sgd"
    assert (recipe.method.name, recipe.tuning.name, recipe.head.name) == ("finessl", "vpt-deep", "cosine")


def test_options_do_not_depend_on_their_order() -> None:
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
        ("trian.steps", 5, "no section 'trian'; did you mean train"),
        ("train.steps", "many", "train.steps = 'many' should be an integer"),
        ("train.steps", 0, "train.steps = 0 should be an integer between 1 and"),
        ("train.steps", 10**20, "train.steps is a number beyond 64 bits"),
        ("train.lr", -1.0, "above 0"),
        ("train.lr", float("nan"), "train.lr = nan should be a number"),
        ("train.optimizer", "adam", "should be one of sgd, adamw; did you mean adamw"),
        ("train", 3, "train is a section"),
        ("train.momentum", 1.0, "train.momentum = 1.0 should be a number of at least 0 and below 1"),
        ("train.clip_norm", -1, "train.clip_norm = -1 should be a number above 0 or none"),
        ("train.clip_norm", 0, "above 0"),
        ("train.clip_norm", float("inf"), "train.clip_norm = inf"),
        ("train.weight_decay", float("nan"), "train.weight_decay = nan"),
        ("train.typo.lr", 0.5, "--set train.typo.lr: no field has this name; did you mean train.lr"),
        ("a.b.c.d", 0.5, "no field has this name"),
        ("method.alhpa", 4, "method 'finessl' has no option 'alhpa'; did you mean alpha"),
        ("method.alpha", float("inf"), "method finessl: alpha = inf should be a number"),
        ("method.alpha", -1, "alpha = -1 should be a number between 0 and"),
        ("method.name", "finesl", "unknown method 'finesl'; did you mean finessl"),
        ("tuning.name", "lora+adaptor", "unknown tuning 'adaptor'; did you mean adapter"),
        ("tuning.lora.rank", 4, "tuning 'vpt-deep' has no part 'lora'"),
        ("tuning.length", 10**20, "beyond 64 bits"),
        ("tuning.length", 10**9, "between 1 and 1,000,000"),
        ("head.name", "cosin", "unknown head 'cosin'; did you mean cosine"),
        ("head.init", 3, "head.init = 3 should be one of random, class-mean"),
        ("head.init", "classmean", "did you mean class-mean"),
        ("head.scale", 1e308, "head cosine: scale = 1e\\+308 should be"),
        ("split.name", "perclass", "unknown split 'perclass'; did you mean per-class"),
        ("split.labels_per_class", 0, "labels_per_class = 0 should be an integer between 1"),
        ("split.seed", -1, "split.seed = -1"),
        ("data.weak", "crop", "unknown weak view 'crop'; did you mean crop-flip"),
        ("data.strong", "randaugment(opps=3)", "strong view 'randaugment' has no option 'opps'; did you mean ops"),
        ("data.strong", "randaugment(ops=", "should be a name, such as"),
        ("data.strong", "randaugment(ops=a b)", "options are written name"),
        ("data.strong.probability", 1.5, "between 0 and 1"),
        ("data.image_size", 10**12, "data.image_size = 1000000000000 should be an integer between 8 and 8,192"),
        ("model.backbone", "clip-vit-b61", "unknown backbone 'clip-vit-b61'; did you mean clip-vit-b16"),
        ("source.name", "folder", "recognised from the data"),
        ("data.source", "a\0b", "NUL"),
        ("data.source", "\ud800", "surrogate pair"),
    ],
)
def test_mistakes_are_named(name: str, value: object, message: str) -> None:
    with pytest.raises(FinesslError, match=message):
        Recipe.read(None, {name: value})


def test_all_mistakes_are_reported_at_once() -> None:
    wrong = {
        "train.step": 5, "train.typo.lr": 0.5, "method.alhpa": 3, "tuning.name": "vtp-deep", "head.init": 3,
        "split.name": "perclass", "data.strong.opps": 3, "model.backbone": "clip-vit-b61", "data.source": "no-such-data",
        "sead": 3,
    }  # fmt: skip
    with pytest.raises(FinesslError) as caught:
        Recipe.read(None, wrong, source=True)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(wrong)
    for word in (
        "steps",
        "train.lr",
        "alpha",
        "vpt-deep",
        "class-mean",
        "per-class",
        "ops",
        "clip-vit-b16",
        "no-such-data",
    ):
        assert word in str(caught.value)


def test_a_step_that_no_machine_holds_is_refused_with_its_bytes() -> None:
    with pytest.raises(FinesslError, match=r"ask for 4,\d{3},\d{3},\d{3},\d{3},\d{3} bytes of images in one step"):
        Recipe.read(None, {"train.batch_size": 1_000_000, "train.mu": 2300})


@pytest.mark.parametrize("value", ["2020-01-01", "12:30:00", "2020-01-01T10:00:00Z", "{a = 1}", "[2020-01-01]"])
def test_dates_times_and_tables_are_refused(value: str) -> None:
    for name in ("method.alpha", "train.lr", "tuning.length", "data.strong.ops"):
        with pytest.raises(FinesslError, match=name.rpartition(".")[2]):
            Recipe.read(None, dict([parse_setting(f"{name}={value}")]))


def test_bad_files_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 3")
    with pytest.raises(FinesslError, match="not valid TOML"):
        Recipe.read(broken)
    broken.write_text("[train]\nsteps = " + "[" * 5000)
    with pytest.raises(FinesslError, match="nested too deeply|not valid TOML"):
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
        ("train.steps=²", ("train.steps", "²")),
        ("train.steps=+-5", ("train.steps", "+-5")),
        ("train.steps=1__0", ("train.steps", "1__0")),
        ("train.steps=" + "9" * 5000, ("train.steps", "9" * 5000)),
        ("train.steps=" + "[" * 5000, ("train.steps", "[" * 5000)),
        ("train.steps=5\ntrain.lr=1", ("train.steps", "5\ntrain.lr=1")),
    ],
)
def test_settings_from_the_command_line(text: str, parsed: tuple[str, object]) -> None:
    assert parse_setting(text) == parsed


@pytest.mark.parametrize("value", ["²", "--5", "+-5", "1__0", "9" * 400, "9" * 5000, "[" * 5000, "[" * 50 + "]" * 50])
@pytest.mark.parametrize("name", ["train.steps", "train.lr", "method.alpha", "method.without", "tuning.length"])
def test_odd_settings_end_in_a_sentence(name: str, value: str) -> None:
    with pytest.raises(FinesslError, match=name.rpartition(".")[2]) as caught:
        Recipe.read(None, dict([parse_setting(f"{name}={value}")]))
    assert len(str(caught.value)) < 400


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


def test_small_batches_have_a_small_learning_rate() -> None:
    assert small_batch(8, 150) == {"train.lr": 0.0075, "train.warmup": 15}
    assert small_batch(32, 150) == small_batch(64, 150) == {}
