"""A recipe field is declared once: the command line, Python, `finessl list` and the documentation show it by themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from finessl.api import SHORT
from finessl.cli import app
from finessl.cli.options import expand
from finessl.data.sources.folder import open_folder
from finessl.data.split_kinds import per_class
from finessl.models.heads import Start
from finessl.recipe import Recipe
from finessl.recipe.catalog import SHORT_OPTIONS, default_of, entries, fields_table, settings, short_names
from finessl.recipe.schema import TrainRecipe, declare
from finessl.registry.options import expected, options_of

ROOT = Path(__file__).parents[1]


def verbs(group: Any = None, within: str = "") -> dict[str, Any]:
    """Every command by its full name."""
    group = group or get_command(app)
    found: dict[str, Any] = {}
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        found |= verbs(command, f"{name} ") if hasattr(command, "commands") else {within + name: command}
    return found


def test_every_field_says_what_it_is() -> None:
    for setting in settings():
        assert re.fullmatch(r"[A-Z].*[.?]", setting.help), setting.name
        assert "default" not in setting.help, "the default is taken from the declaration"
    names = {setting.name for setting in settings()}
    assert set(Recipe().flat()) - {"plugins"} <= names and set(SHORT.values()) <= names


def test_train_has_an_option_for_each_short_name() -> None:
    options = {option.name: option for option in verbs()["train"].params}
    for name, setting in short_names().items():
        option, default = options[name], default_of(setting)
        assert option.help.startswith(setting.help) and option.default is None
        assert (f"[default: {default}]" in option.help) == bool(default and setting.kind is not bool), name
        assert ("-n" in option.opts) == (name == "labels_per_class")
    assert {name: setting.name for name, setting in short_names().items()} == SHORT


def test_a_new_field_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Train(TrainRecipe):
        patience: int = declare(7, "Epochs without progress before training stops.", short="patience")

    class Extended(Recipe):
        train: Train = Train()

    monkeypatch.setattr(settings, "__defaults__", (Extended, ""))
    short_names.cache_clear()
    try:
        about = {name: (text, more) for name, text, more in entries("fields", True)}
        assert about["train.patience"][0] == "Epochs without progress before training stops."
        assert about["train.patience"][1] == ["= 7  (an integer); --patience"]
        from finessl.cli.train import train

        (option,) = expand(train).__annotations__["patience"].__metadata__
        assert option.help == "Epochs without progress before training stops. [default: 7]"
        assert Extended.read(None, {"train.patience": 3}, check=False).train.patience == 3  # type: ignore[attr-defined]
    finally:
        short_names.cache_clear()


def test_options_with_a_short_name_are_declared_so_elsewhere() -> None:
    declared = {f"head.{name}": (field.default, field.annotation) for name, field in Start.model_fields.items()}
    declared |= {f"source.{n}": (p.default, None) for n, p in options_of(open_folder).items()}
    declared |= {f"split.{n}": (p.default, None) for n, p in options_of(per_class).items()}
    for option in SHORT_OPTIONS:
        if option.name not in ("source.download", "split.labels_per_class"):  # of some sources; required by the split
            assert declared[option.name][0] == option.default, option.name
    (init,) = (option for option in SHORT_OPTIONS if option.name == "head.init")
    assert all(word in init.help for word in expected(declared["head.init"][1]).removeprefix("one of ").split(", "))


@pytest.mark.parametrize("name", sorted(verbs()))
def test_every_option_has_a_help_text(name: str) -> None:
    """What it does, as a sentence."""
    command = verbs()[name]
    assert re.match(r"[A-Z].*[.?]", command.help)
    for option in command.params:
        assert option.name == "help" or re.match(r"[A-Za-z].*", option.help), option.name
        assert not re.search(r"\bso (many|often)\b|\banew\b|\(default:", option.help), option.help


def test_list_shows_the_fields() -> None:
    shown = CliRunner().invoke(app, ["list", "fields", "--options"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    for setting in settings():
        assert setting.name in shown.output


def test_the_documentation_has_a_table_of_them() -> None:
    """Generated when the site is built, in place of a comment of docs/recipes.md."""
    table = fields_table().splitlines()
    assert "| `train.steps` | `--steps` | 15000 | an integer between 1 and 1,000,000,000 | Training steps. |" in table
    assert len(table) == 2 + len(list(settings())) and all(line.count(" | ") == 4 for line in table)
    hooks = (ROOT / "tools" / "site_hooks.py").read_text(encoding="utf-8")
    (pattern,) = re.findall(r'FIELDS = re\.compile\("(.*)"\)', hooks)
    assert len(re.findall(pattern, (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"))) == 1


def test_the_documented_recipe_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), re.S)
    (tmp_path / "my.toml").write_text(example)
    recipe = Recipe.read(tmp_path / "my.toml")
    assert (
        recipe.data.strong.options == {"ops": 3} and recipe.method.options["gamma"] == 1.0 and recipe.train.lr == 0.01
    )


def test_a_misspelt_verb_is_answered_with_the_nearest() -> None:
    shown = CliRunner().invoke(app, ["trian"])
    assert shown.exit_code == 2 and "Did you mean 'train'" in shown.output
