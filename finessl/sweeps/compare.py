"""Grids of runs: any recipe field as an axis, seeds averaged, finished cells skipped.

    finessl compare DATA --methods fixmatch,finessl --seeds 3 --jobs 2

A cell is a run directory under --out; `engines` carries the cells out, and starting the grid again goes on with what is
missing.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from finessl.errors import FinesslError, Mistakes
from finessl.recipe import Recipe, override
from finessl.runs.directory import RunDirectory
from finessl.runtime.files import write_atomically, writing
from finessl.sweeps.table import Tabulated, as_csv

FIGURES = {  # meta.json's name → heading and form
    "accuracy": ("accuracy", "{:.2%}"),
    "pseudo_accuracy": ("pseudo-label accuracy", "{:.2%}"),
    "confidence": ("mean confidence", "{:.2%}"),
    "seconds": ("seconds", "{:.0f}"),
}


@dataclass(frozen=True)
class Cell:
    """One run of the grid: where it stands on each axis, its recipe and its directory."""

    place: dict[str, Any]  # dotted field → value; 'seed' among them
    recipe: Recipe
    run: RunDirectory

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def group(self) -> tuple[Any, ...]:
        """The place without the seed: what a row of the table is."""
        return tuple(value for axis, value in self.place.items() if axis != "seed")


@dataclass
class Row:
    """A row of the table: the seeds' mean and spread."""

    group: tuple[Any, ...]
    figures: dict[str, list[float]] = field(default_factory=dict)
    wanted: int = 0  # runs that the row is made of, finished or not
    finished: int = 0

    def show(self, name: str, form: str = "{:.2%}") -> str:
        values = self.figures.get(name, [])
        if not values:
            return "–"
        shown = form.format(mean(values))
        return f"{shown} ± {form.format(stdev(values))}" if len(values) > 1 else shown


# ---- the grid -------------------------------------------------------------------------------------------------------


def make_cells(
    recipe: Recipe, axes: Mapping[str, Sequence[Any]], out: Path, settings: Mapping[str, Any] | None = None
) -> list[Cell]:
    """The product of the axes over the recipe. `settings` hold for every cell, also where an axis names its method.
    An error names the mistakes of all cells."""
    cells, mistakes = [], Mistakes()
    for values in itertools.product(*axes.values()):
        place = dict(zip(axes, values, strict=True))
        name = ",".join(f"{short(axis)}={plain(value)}" for axis, value in place.items())
        with mistakes:
            cells.append(Cell(place, overlay(recipe, {**(settings or {}), **place}), RunDirectory(out / name)))
    mistakes.report()
    return cells


def overlay(recipe: Recipe, place: Mapping[str, Any]) -> Recipe:
    """The recipe at a place. Names first: another method drops the old one's options, which other axes may then set."""
    tree = recipe.tree()
    override(tree, place, "axis")
    return Recipe.from_tree(tree)


def short(axis: str) -> str:
    """'method.name' → 'method', 'train.lr' → 'lr'."""
    return axis.removesuffix(".name").split(".")[-1]


def plain(value: Any) -> str:
    """Fit for a file's name."""
    return "".join(c if c.isalnum() or c in "._+-" else "-" for c in str(value))


def axis_values(text: str, known: Sequence[str] | None = None, what: str = "value") -> list[str]:
    """'a,b' → ['a', 'b']; 'all' → everything known."""
    if text == "all":
        if known is None:
            raise FinesslError(f"'all' has no meaning for {what}; name the values, separated by commas.")
        return list(known)
    return [part.strip() for part in text.split(",") if part.strip()]


def without_misfits(cells: Sequence[Cell], say: Callable[[str], None] = print) -> list[Cell]:
    """The cells whose tuning strategy fits their backbone; of the others it is said why they are left out."""
    from finessl.models.backbones import create_backbone
    from finessl.models.tuning import create

    reasons: dict[tuple[str, str], str | None] = {}
    encoders: dict[tuple[str, int | None], Any] = {}
    for cell in cells:
        backbone, size, tuning = cell.recipe.model.backbone, cell.recipe.data.image_size, cell.recipe.tuning
        if (backbone, tuning.name) in reasons:
            continue
        if (backbone, size) not in encoders:
            encoders[backbone, size] = create_backbone(backbone, image_size=size, pretrained=False).encoder
        try:
            create(tuning.name, tuning.options).apply(copy.deepcopy(encoders[backbone, size]))
            reasons[backbone, tuning.name] = None
        except FinesslError as error:
            reasons[backbone, tuning.name] = str(error)
            say(f"left out: {tuning.name} with {backbone} ({error})")
    return [cell for cell in cells if reasons[cell.recipe.model.backbone, cell.recipe.tuning.name] is None]


# ---- the figures ----------------------------------------------------------------------------------------------------


def summarise(cells: Sequence[Cell]) -> list[Row]:
    """A row for each place but the seed, in the grid's order; only finished runs count."""
    rows: dict[tuple[Any, ...], Row] = {}
    for cell in cells:
        row = rows.setdefault(cell.group, Row(cell.group))
        row.wanted += 1
        if cell.run.finished():
            row.finished += 1
            figures = cell.run.figures()
            for name in FIGURES:
                if figures.get(name) is not None:
                    row.figures.setdefault(name, []).append(figures[name])
    return list(rows.values())


def tabulate(rows: Sequence[Row], names: Sequence[str], caption: str) -> Tabulated:
    """The rows with the names of their axes."""
    header = [*names, *(heading for heading, _ in FIGURES.values()), "runs"]
    shown = [
        [*map(str, row.group), *(row.show(n, form) for n, (_, form) in FIGURES.items()), f"{row.finished}/{row.wanted}"]
        for row in rows
    ]
    records: list[dict[str, Any]] = []
    for row in rows:
        record: dict[str, Any] = dict(zip(names, row.group, strict=True))
        for name in FIGURES:
            values = row.figures.get(name, [])
            record[name] = mean(values) if values else None
            record[f"{name}_std"] = stdev(values) if len(values) > 1 else None
        records.append({**record, "finished": row.finished, "runs": row.wanted})
    return Tabulated(caption, header, shown, records, left=len(names))


def save_summary(table: Tabulated, folder: Path) -> Path:
    """summary.csv beside the runs."""
    path = folder / "summary.csv"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, as_csv(table) + "\n")
    return path
