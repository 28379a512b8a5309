"""The shipped recipes: each says how it is run and what to expect, and is what the paper's table runs."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from typer.main import get_command

from finessl.cli import app
from finessl.recipe import Recipe, recipe_folder
from finessl.sweeps.paper.contents import read_table, table_names

RECIPES = sorted(path.stem for path in recipe_folder().glob("*.toml") if path.stem != "demo")


def header(name: str) -> str:
    lines = (recipe_folder() / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    return "\n".join(
        line.lstrip("# ") for line in lines[: next(i for i, s in enumerate(lines) if not s.startswith("#"))]
    )


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_in_the_header_is_one(name: str) -> None:
    """The command line takes the options of the command that the file recommends, and the recipe is this one."""
    command = re.search(r"^finessl train (.+(?:\\\n.+)*)$", header(name), re.M)
    assert command is not None
    words = shlex.split(command[1].replace("\\\n", " "))
    train: Any = get_command(app).get_command(None, "train")  # type: ignore[attr-defined]
    with train.make_context("train", words) as context:
        assert context.params["recipe"] == name and context.params["data"]


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "paper"])
def test_the_recipe_is_the_tables(name: str) -> None:
    found = re.search(r"Paper: (.+?)(?: %)? \((.+?): (.+?), (.+?, .+?)\)", header(name))
    assert found is not None
    value, number, row, column = found.groups()
    (table,) = (table for table in map(read_table, table_names()) if table.number == number)
    (line,) = (line for line in table.rows if line.name == row)
    (place,) = (place for place in table.columns if place.title == column)
    assert value in (table.values[row, column].text, "no number")
    wanted, made = table.recipe(line, place), Recipe.read(name)
    free = (
        {"data.source", "split.name", "split.labels_per_class"} if name == "released" else set()
    )  # the command says them
    assert {n: v for n, v in made.differences(wanted).items() if n not in free} == {}
