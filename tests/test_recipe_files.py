"""Recipe files: what is written is read back, old ones keep their meaning, `extends` lays them over each other."""

from __future__ import annotations

import json
import os
import string
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finessl.errors import FinesslError
from finessl.methods import METHODS
from finessl.methods.finessl import FORMS
from finessl.recipe import Choice, Recipe, override, read_toml, recipe_folder
from finessl.registry.options import Count, Probability

# ---- what is written is what is read --------------------------------------------------------------------------------


def read_back(recipe: Recipe, tmp_path: Path) -> Recipe:
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.toml(), encoding="utf-8")
    return Recipe.restore(file).checked()


def test_none_option_survives_writing_and_reading(tmp_path: Path) -> None:
    recipe = Recipe.read(None, {"method.aux_threshold": None})
    assert recipe.method.options == {"aux_threshold": None}
    assert 'aux_threshold = "none"' in recipe.toml()
    assert read_back(recipe, tmp_path) == recipe
    # neither as a difference, nor hidden from one
    assert recipe.differences(Recipe.restore(tmp_path / "recipe.toml")) == {}
    assert recipe.differences(Recipe()) == {"method.aux_threshold": ("none", None)}


def test_options_of_joined_strategies_survive(tmp_path: Path) -> None:
    joined = {"tuning.name": "adapter+adaptformer", "tuning.adapter.dim": 3, "tuning.adaptformer.dim": "5"}
    recipe = Recipe.read(None, joined)
    assert recipe.tuning.options == {"adapter.dim": 3, "adaptformer.dim": 5}
    assert read_back(recipe, tmp_path) == recipe and recipe.flat()["tuning.adapter.dim"] == 3
    by_hand = tmp_path / "mine.toml"
    by_hand.write_text('[tuning]\nname = "adapter+adaptformer"\nadapter.dim = 3\n[tuning.adaptformer]\ndim = 5\n')
    assert Recipe.read(by_hand) == recipe
    with pytest.raises(FinesslError, match=r"write adapter\.dim or adaptformer\.dim"):
        Recipe.read(None, {"tuning.name": "adapter+adaptformer", "tuning.dim": 3})


def test_options_of_views_can_be_set_in_every_form(tmp_path: Path) -> None:
    wanted = Choice("randaugment", {"ops": 3, "cutout": 16})
    file = tmp_path / "table.toml"
    file.write_text('[data.strong]\nname = "randaugment"\nops = 3\ncutout = 16\n')
    for recipe in (
        Recipe.read(file),
        Recipe.read(None, {"data.strong": "randaugment(ops=3, cutout=16)"}),
        Recipe.read(None, {"data.strong.ops": "3", "data.strong.cutout": 16}),
        Recipe.read(None, {"data.strong.cutout": 16, "data.strong.ops": 3, "data.strong.name": "randaugment"}),
    ):
        assert recipe.data.strong == wanted
        assert read_back(recipe, tmp_path) == recipe
        assert recipe.flat()["data.strong"] == "randaugment" and recipe.flat()["data.strong.ops"] == 3
    # another view: the old one's options are dropped
    assert Recipe.read(file, {"data.strong": "weak"}).data.strong == Choice("weak")
    assert Recipe().tree()["data"]["weak"] == "crop-flip"  # a view without options is a plain name


class Everything:
    """Options of all types."""

    labeled_in_unlabeled = True
    canonical = staticmethod(dict)

    def __init__(
        self,
        task: object,
        *,
        number: float | None = 0.5,
        count: Count | None = None,
        share: Probability = 0.5,
        text: str = "",
        words: str | None = None,
        on: bool = False,
        names: list[str] = [],  # noqa: B006 - never changed
        pairs: tuple[int | None, ...] = (),
        table: dict[str, float | None] = {},  # noqa: B006
        nested: dict[str, list[str]] = {},  # noqa: B006
        kind: Literal["none", "é", "a.b"] = "none",
        copy: bool = True,
        anything: Any = None,
    ) -> None: ...


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
numbers = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(-(2**63) + 1, 2**63 - 1)
OPTIONS = {
    "number": st.none() | numbers,
    "count": st.none() | st.integers(1, 10**6),
    "share": st.floats(0, 1),
    "text": texts,
    "words": st.none() | texts,
    "on": st.booleans(),
    "names": st.lists(texts),
    "pairs": st.lists(st.none() | whole).map(tuple),
    "table": st.dictionaries(texts, st.none() | numbers),
    "nested": st.dictionaries(texts, st.lists(texts)),
    "kind": st.sampled_from(["none", "é", "a.b"]),
    "copy": st.booleans(),
    "anything": texts | whole | st.lists(st.booleans()),
}


@settings(max_examples=150, deadline=None)
@given(
    method=st.fixed_dictionaries({}, optional=OPTIONS),
    source=texts,
    root=st.none() | texts,
    clip_norm=st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    cutout=st.integers(0, 100) | st.floats(0, 1),
    dim=st.none() | st.integers(1, 10**6),
)
def test_reading_back_what_was_written_gives_the_same_recipe(
    method: dict[str, Any], source: str, root: str | None, clip_norm: float | None, cutout: float, dim: int | None
) -> None:
    METHODS.entries["everything"] = (Everything, "for this test")
    try:
        fields = {
            "data.source": source, "data.root": root, "train.clip_norm": clip_norm, "data.strong.cutout": cutout,
            "tuning.name": "adapter+lora", "tuning.adapter.layers": dim, "method.name": "everything",
        }  # fmt: skip
        recipe = Recipe.read(None, {**fields, **{f"method.{name}": value for name, value in method.items()}})
        for name, value in method.items():
            kept = recipe.method.options[name]
            assert kept == (
                list(value) if isinstance(value, tuple) else None if name == "words" and value in NONE else value
            )
        saved = tomllib.loads(recipe.toml())
        assert saved.pop("format") == 2
        again = Recipe.from_tree({**Recipe().tree(), **saved})
        assert again == recipe and again.toml() == recipe.toml() and again.differences(recipe) == {}
        # without knowing the method either, as a report reads it
        unchecked = Recipe.from_tree({**Recipe().tree(), **saved}, check=False)
        assert unchecked.tree() == recipe.tree()
    finally:
        del METHODS.entries["everything"]


NONE = ("none", "None", "")
keys = st.text(string.ascii_letters + ".\"'= é\n", min_size=1).filter(lambda key: key != "name")
anything = st.recursive(
    st.booleans() | whole | numbers | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=6
)


@settings(max_examples=100, deadline=None)
@given(name=texts, options=st.dictionaries(keys, anything))
def test_a_recipe_of_an_unknown_method_keeps_every_option(name: str, options: dict[str, Any]) -> None:
    """A report of a run whose plug-in is not there."""
    recipe = Recipe(method=Choice(name, options))
    saved = tomllib.loads(recipe.toml())
    del saved["format"]
    assert Recipe.from_tree({**Recipe().tree(), **saved}, check=False) == recipe


# ---- recipes of earlier versions ------------------------------------------------------------------------------------

OLD = Path(__file__).parent / "old_recipes"


def test_an_old_recipe_file_loads() -> None:
    recipe = Recipe.read(OLD / "released.toml", {"data.source": "cifar100", "split.labels_per_class": 4})
    assert recipe.method.options["aux_threshold"] == 0.7 and recipe.train.schedule == "cosine-epoch"
    assert recipe.tuning == Choice("vpt-deep", {"length": 50}) and recipe.data.strong == Choice("randaugment")


def test_the_recipe_of_an_old_run_keeps_its_meaning() -> None:
    """FlexMatch's `warmup` was on, and labels_per_class held for every kind of data."""
    recipe = Recipe.restore(OLD / "run.toml")
    assert recipe.method == Choice("flexmatch", {"threshold": 0.9, "warmup": True})
    assert recipe.split == Choice("per-class", {"labels_per_class": 4})
    assert recipe.labeled_in_unlabeled() and recipe.checked() == recipe
    command = {
        "data.source": "sample", "model.backbone": "embedded", "tuning.name": "lora", "tuning.rank": 4,
        "split.labels_per_class": 4, "method.name": "flexmatch", "method.threshold": 0.9, "method.warmup": True,
        "train.steps": 4, "train.batch_size": 8, "data.image_size": 32,
    }  # fmt: skip
    assert Recipe.read(None, command).differences(recipe) == {}


def test_each_shipped_recipe_is_what_it_was() -> None:
    """shipped.json: the recipes when each wrote out all of its fields. `released` and `demo` against the defaults, the
    others against `released`; under another name the options of the old one are dropped."""
    old = json.loads((OLD / "shipped.json").read_text(encoding="utf-8"))
    assert set(old) == {path.stem for path in recipe_folder().glob("*.toml")}
    for name, fields in old.items():
        tree = Recipe.read(None, old["released"] if name != "demo" else {}).tree()
        override(tree, fields)
        assert Recipe.read(name).differences(Recipe.from_tree(tree)) == {}, name


def test_a_recipe_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("format = 99\n")
    with pytest.raises(FinesslError, match="newer finessl"):
        Recipe.restore(tmp_path / "recipe.toml")


# ---- extends --------------------------------------------------------------------------------------------------------


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder / f"{next(iter(files))}.toml"


def test_a_recipe_extends_others(tmp_path: Path) -> None:
    """A shipped name, a file relative to the one that extends it, and several in their order."""
    (tmp_path / "sub").mkdir()
    written(tmp_path / "sub", base='extends = "paper"\nseed = 1\nmethod.alpha = 2.0\ntrain.lr = 0.5')
    file = written(
        tmp_path,
        mine='extends = ["sub/base.toml", "other.toml"]\ntrain.steps = 7',
        other="train.lr = 0.25\nmethod.gamma = 1.5",
    )
    recipe, paper = Recipe.read(file), Recipe.read("paper")
    assert recipe.differences(paper) == {
        "seed": (1, 0), "method.alpha": (2.0, 8.0), "method.gamma": (1.5, 3.0), "train.lr": (0.25, 0.03),
        "train.steps": (7, 15000),
    }  # fmt: skip
    assert Recipe.read(file, {"train.steps": 9}).train.steps == 9
    (tmp_path / "recipe.toml").write_text(recipe.toml())  # what a run keeps needs no other file
    file.unlink()
    assert Recipe.restore(tmp_path / "recipe.toml") == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "mine.toml"', "in a circle: mine.toml → mine.toml"),
        ('extends = "other.toml"', "in a circle: mine.toml → other.toml → mine.toml"),
        ('extends = "relesed"', "mine.toml extends no recipe file 'relesed'; did you mean released"),
        ('extends = "absent.toml"', "mine.toml extends no recipe file 'absent.toml'"),
        ("extends = 3", "extends = 3 should be a recipe's name or a list of names"),
        ("extends = [3]", "should be a recipe's name or a list"),
        ('extends = "wrong.toml"\n[train]\nlr = -1', r"wrong.toml: a recipe has no section 'trian'.*\n.*train.lr = -1"),
    ],
)
def test_mistakes_of_extends_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, mine=text, other='extends = "mine.toml"', wrong="[trian]\nsteps = 1")
    with pytest.raises(FinesslError, match=message):
        Recipe.read(file)


def test_switches_and_form_that_say_the_same_are_one_recipe() -> None:
    paper = FORMS["paper"]._asdict()
    written_out = Recipe.read(None, {f"method.{name}": value for name, value in paper.items()})
    assert written_out.differences(Recipe.read(None, {"method.form": "paper"})) == {}
    assert Recipe.read(None, {"method.form": "released", "method.pace_reset": "form"}).differences(Recipe()) == {}
    most = Recipe.read(None, {"method.form": "paper", "method.aux_margin": False})
    assert most.differences(written_out) == {"method.aux_margin": (False, None)}
    assert most.differences(Recipe())["method.form"] == ("paper", "released")


# ---- labels ---------------------------------------------------------------------------------------------------------


def test_labels_per_class_of_a_user_names_the_split(tmp_path: Path) -> None:
    """A recipe's number is for data without a division of its own; a user's number always holds."""
    file = tmp_path / "mine.toml"
    file.write_text("[split]\nlabels_per_class = 4\n")
    assert Recipe.read(file).split == Choice("auto", {"labels_per_class": 4})
    assert Recipe.read(file, {"split.labels_per_class": 2}).split == Choice("per-class", {"labels_per_class": 2})
    assert Recipe.read(file, {"split.name": "first-n"}).split == Choice("first-n", {"labels_per_class": 4})
    tree = Recipe.read(file).tree()
    override(tree, {"split.labels_per_class": None})
    assert tree["split"]["name"] == "auto"


def test_a_pipe_is_no_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.toml")
    with pytest.raises(FinesslError, match="regular file"):
        read_toml(tmp_path / "recipe.toml")
