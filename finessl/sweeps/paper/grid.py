"""A table as a grid of runs. Tables share runs: a run of the same recipe is found anywhere under --out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from finessl.errors import FinesslError, Mistakes
from finessl.recipe import Recipe
from finessl.registry import nearest
from finessl.runs.directory import RunDirectory
from finessl.sweeps.compare import Cell, axis_label, file_safe
from finessl.sweeps.paper.contents import Column, Line, PaperTable
from finessl.sweeps.paper.needs import Places, data_changes, data_lacks, lacking, locate


@dataclass(frozen=True)
class Entry:
    """One cell of the table and its runs: one per seed, none if something is missing."""

    row: Line
    column: Column
    recipe: Recipe  # of seed 0
    cells: list[Cell] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Grid:
    table: PaperTable
    entries: list[Entry]
    seeds: int
    scale: Fraction = Fraction(1)
    changes: Mapping[str, Any] = field(default_factory=dict)  # dotted name → value, departures from the paper

    @property
    def cells(self) -> list[Cell]:
        return [cell for entry in self.entries for cell in entry.cells]

    def missing(self) -> dict[str, list[str]]:
        """Missing item → rows and columns that need it."""
        found: dict[str, list[str]] = {}
        for entry in self.entries:
            for reason in entry.lacks:
                found.setdefault(reason, []).append(f"{entry.row.name} ({entry.column.title})")
        return found


def make_grid(
    table: PaperTable,
    out: Path,
    *,
    only: Sequence[str] = (),
    seeds: int = 3,
    scale: Fraction = Fraction(1),
    changes: Mapping[str, Any] | None = None,
    places: Places | None = None,
    train: bool = True,
) -> Grid:
    """The grid of a table.

    out: folder of the runs.   only: words that select rows, columns and strategies.   seeds: runs per entry.   scale:
    factor of the number of steps.   changes: dotted field → value, departures from the paper.   places: of data and
    weights.   train: False to show finished runs only; then nothing is reported as missing.
    """
    changes = dict(changes or {})
    runs = find_runs(out)
    entries, mistakes = [], Mistakes()
    for row, column in select(table, only):
        if column.metric == "field" or row.lacks:
            reason = [row.lacks] if row.lacks else []
            entries.append(Entry(row, column, table.recipe(row, column), [], reason))
            continue
        with mistakes:
            full = table.recipe(row, column, changes)
            steps = {"train.steps": max(round(full.train.steps * scale), 1)}
            recipe = locate(full.with_fields(steps, check=False), places or Places())
            recipe = recipe.checked() if train else recipe
        if mistakes.sentences:
            continue
        cells = make_cells(table, row, column, recipe, seeds, runs, out, changes)
        if train:
            for cell in cells:
                check_data(cell, recipe)
        else:  # a directory that holds another run is not shown
            cells = [cell for cell in cells if not cell.run.finished() or own_recipe(cell.run, cell.recipe)]
        lacks = lacking(recipe) if train else []
        if lacks:  # runs that were trained elsewhere can still be shown
            cells = [cell for cell in cells if cell.run.finished()]
        entries.append(Entry(row, column, recipe, cells, lacks if len(cells) < seeds else []))
    mistakes.report()
    return Grid(table, entries, seeds, scale, changes)


def make_cells(
    table: PaperTable,
    row: Line,
    column: Column,
    recipe: Recipe,
    seeds: int,
    runs: dict[str, Path],
    folder: Path,
    changes: Mapping[str, Any],
) -> list[Cell]:
    """One run per seed: a known one of `runs`, or a new one in `folder`, which is then added to `runs`."""
    settings = {axis_label(name): value for name, value in changes.items() if name != "plugins"}
    settings["steps"] = recipe.train.steps
    name = ",".join(
        [*map(file_safe, (column.group, column.name, row.name)), *(f"{n}={file_safe(v)}" for n, v in settings.items())]
    )
    cells = []
    for seed in range(seeds):
        seeded = recipe.with_fields({"seed": seed}, check=False)
        run = RunDirectory(runs.setdefault(identity(seeded), folder / table.id / f"{name},seed={seed}"))
        values = {"setting": column.title, "row": row.name, "seed": seed}
        cells.append(Cell(values, own_recipe(run, seeded) or seeded, run))
    return cells


def own_recipe(run: RunDirectory, recipe: Recipe) -> Recipe | None:
    """The recipe of a finished run if it equals `recipe` except for paths, else None."""
    try:
        return own if run.finished() and identity(own := run.recipe()) == identity(recipe) else None
    except FinesslError:  # of another version
        return None


def check_data(cell: Cell, recipe: Recipe) -> None:
    """Refuse a finished run that was trained on other data than `recipe` names. Checked only if the folder differs."""
    data, known = recipe.data, cell.run.meta().get("data_fingerprint")
    if not known or data.root is None or data.root == cell.recipe.data.root:
        return
    options = tuple(sorted(recipe.source.options.items()))
    if data_lacks(data.source, data.root, options) or not data_changes(data.source, data.root, options, known):
        return
    raise FinesslError(
        f"{cell.run.path} was trained on other images, labels or another order of them ({cell.recipe.data.root}) than "
        f"{data.root} holds. Name another --out, or that --root."
    )


def read_scale(text: str) -> Fraction:
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise FinesslError(f"--scale {text} should be a number, such as 0.1 or 1/3.") from error
    if scale <= 0:
        raise FinesslError(f"--scale {text} should be above 0.")
    return scale


# ---- runs that exist already ----------------------------------------------------------------------------------------


def find_runs(out: Path) -> dict[str, Path]:
    """Identity → run directory under `out`; finished runs first."""
    found: dict[str, Path] = {}
    for file in sorted(out.rglob("recipe.toml")):
        run = RunDirectory(file.parent)
        try:
            same = identity(run.recipe())
        except FinesslError:
            continue
        if same not in found or run.finished():
            found[same] = run.path
    return found


def identity(recipe: Recipe) -> str:
    """A recipe without paths: equal for recipes with equal results."""
    flat = {
        name: float(value) if isinstance(value, int) and not isinstance(value, bool) else value  # 4 and 4.0 are one
        for name, value in recipe.identity().items()
    }
    return json.dumps(flat, sort_keys=True)


# ---- --only ---------------------------------------------------------------------------------------------------------


def select(table: PaperTable, only: Sequence[str]) -> list[tuple[Line, Column]]:
    """The (row, column) pairs that `only` selects. Words of one kind (data, setting, row, strategy) are alternatives."""
    places = [
        (row, column) for column in table.columns for row in table.rows if (row.name, column.title) in table.values
    ]
    facets = [facets_of(table, row, column) for row, column in places]
    exact = {word(row.name) for row in table.rows}
    wanted: dict[str, set[str]] = {}
    for text in only:
        kinds = [kind for kind in facets[0] if any(word(text) in facet[kind] for facet in facets)]
        if word(text) in exact:
            kinds = ["name"]
        if not kinds:
            known = sorted({w for facet in facets for words in facet.values() for w in words})
            raise FinesslError(f"--only {text}: {table.id} has no such part{nearest(word(text), known) or '.'} "
                               f"Known: {', '.join(known)}.")  # fmt: skip
        # 'name' and 'method' are both about rows: "supervised,finessl" asks for either
        wanted.setdefault("row" if kinds[0] in ("name", "method") else kinds[0], set()).add(word(text))
    chosen = [
        place
        for place, facet in zip(places, facets, strict=True)
        if all(words & (facet["name"] | (facet["method"] - exact) if kind == "row" else facet[kind])
               for kind, words in wanted.items())
    ]  # fmt: skip
    if not chosen:
        raise FinesslError(
            f"--only {','.join(only)}: {table.id} has each of these, but no place with all of them. Its columns: "
            f"{'; '.join(column.title for column in table.columns)}."
        )
    return chosen


def facets_of(table: PaperTable, row: Line, column: Column) -> dict[str, set[str]]:
    recipe = table.recipe(row, column)
    return {
        "name": {word(row.name)},
        "method": set() if row.lacks or row.field else {word(recipe.method.name)},
        "data": {word(column.group), word(recipe.data.source)},
        "setting": {word(column.name)},
        "tuning": set() if row.lacks or row.field else {word(recipe.tuning.name)},
    }


def word(text: str) -> str:
    """'CIFAR-100' → 'cifar100'."""
    return "".join(c for c in text.lower() if c.isalnum() or c in "%+.†")
