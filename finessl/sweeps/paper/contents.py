"""The tables and figures: their numbers, and for each cell the recipe that reproduces it."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from finessl.errors import FinesslError
from finessl.recipe import Recipe, merge, override
from finessl.registry import nearest

Tree = dict[str, Any]
NO_CELL = "-"  # in place of a value: the table has no experiment there


@dataclass(frozen=True)
class Value:
    """What the paper prints: '80.44 ± 0.24', '30 × 500', 'SGD', or nothing where a figure shows no number."""

    text: str = ""
    mean: float | None = None
    spread: float | None = None

    @classmethod
    def read(cls, text: str) -> Value:
        center, _, spread = (part.strip() for part in text.partition("±"))
        try:
            product = 1.0
            for factor in center.split("×"):
                product *= float(factor)
            return cls(text, product, float(spread) if spread else None)
        except ValueError:
            return cls(text)


@dataclass(frozen=True)
class Column:
    group: str  # data set or strategy
    name: str  # N4, in, 1% …
    changes: Tree  # what it changes in the recipe
    metric: str = "accuracy"

    @property
    def title(self) -> str:
        return f"{self.group}, {self.name}"


@dataclass(frozen=True)
class Line:
    """A row."""

    name: str
    changes: Tree
    lacks: str | None = None  # why finessl cannot run it
    field: str | None = None  # of the recipe, in the table of settings


@dataclass(frozen=True)
class PaperTable:
    id: str
    number: str  # in the paper
    title: str
    columns: list[Column]
    rows: list[Line]
    values: dict[tuple[str, str], Value]  # (row's name, column's title); those absent are no experiments
    changes: Tree = field(default_factory=dict)  # for all cells
    notes: list[str] = field(default_factory=list)
    against: dict[str, str] = field(default_factory=dict)  # row → row of equal compute that it is compared with

    @property
    def figure(self) -> bool:
        return self.number.startswith("Figure") and self.id != "openssl"

    def recipe(self, row: Line, column: Column, more: Mapping[str, Any] | None = None) -> Recipe:
        """Base, table, column, row, the exceptions that then hold, and at last `more` by dotted name."""
        common = contents()
        tree = Recipe.read(common["base"], check=False).tree()
        for changes in (self.changes, column.changes, row.changes):
            merge(tree, changes, f"{self.id}: {row.name}")
        for rule in common["rules"]:
            if holds(tree, rule["when"]):
                merge(tree, rule["set"], rule["why"])
        override(tree, more or {})
        return Recipe.from_tree(tree, check=False)


def holds(tree: Tree, condition: Tree) -> bool:
    return all(
        holds(tree[name], wanted) if isinstance(wanted, dict) else tree.get(name) == wanted
        for name, wanted in condition.items()
    )


# ---- reading --------------------------------------------------------------------------------------------------------


@functools.cache
def contents() -> Tree:
    """settings.toml."""
    return tomllib.loads((resources.files("finessl.sweeps.paper") / "settings.toml").read_text(encoding="utf-8"))


def table_names() -> list[str]:
    """Tables in the paper's order, ours, then its figures."""
    folder = resources.files("finessl.sweeps.paper") / "tables"
    names = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return sorted(sorted(names), key=lambda name: place_in_paper(read_table(name)))


def place_in_paper(table: PaperTable) -> tuple[bool, bool, int, str]:
    number = int((re.findall(r"\d+", table.number) or ["99"])[0])
    return table.figure, not table.number.startswith("Table"), number, table.number


@functools.cache
def read_table(name: str) -> PaperTable:
    folder = resources.files("finessl.sweeps.paper") / "tables"
    file = folder / f"{name}.toml"
    if not file.is_file():
        known = table_names()
        raise FinesslError(f"the paper has no table {name!r}{nearest(name, known) or '.'} Known: {', '.join(known)}.")
    raw = tomllib.loads(file.read_text(encoding="utf-8"))
    columns = [read_column(entry, raw.get("metric", "accuracy")) for entry in raw["columns"]]
    rows = [read_row(row, raw) for row in raw["values"]]
    values = {
        (row, column.title): Value.read(text)
        for row, texts in raw["values"].items()
        for column, text in zip(columns, texts, strict=True)
        if text != NO_CELL
    }
    return PaperTable(
        name, raw["number"], raw["title"], columns, rows, values, raw.get("set", {}), raw.get("notes", []),
        raw.get("against", {}),
    )  # fmt: skip


def read_column(entry: str | Tree, metric: str) -> Column:
    """A setting's name, or a table with a name, a setting to start from and what it sets besides."""
    entry = {"name": entry, "setting": entry} if isinstance(entry, str) else entry
    group, _, name = entry["name"].partition(", ")
    start = contents()["settings"][entry["setting"]] if "setting" in entry else {}
    changes = {section: dict(values) for section, values in start.items()}
    for section, values in entry.get("set", {}).items():
        changes[section] = {**changes.get(section, {}), **values}
    return Column(group, name, changes, entry.get("metric", metric))


def read_row(name: str, raw: Tree) -> Line:
    lacks, named = raw.get("lacks", {}).get(name), raw.get("fields", {}).get(name)
    changes = raw.get("rows", {}).get(name, contents()["rows"].get(name))
    if changes is None and lacks is None and named is None:
        raise FinesslError(f"the row {name!r} has neither settings nor a reason why it lacks them.")
    return Line(name, changes or {}, lacks, named)
