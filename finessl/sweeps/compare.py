"""Grids of runs: any recipe field as an axis, seeds averaged, finished cells skipped.

    finessl compare DATA --methods fixmatch,finessl --seeds 3 --jobs 2

A cell is a run directory under --out. `engines` runs the cells. The same command again continues with the missing ones.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from finessl.errors import FinesslError, Mistakes
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runtime.callbacks import Log
from finessl.runtime.files import write_output
from finessl.sweeps.table import Tabulated, as_csv

METRICS = {  # name in meta.json → heading and format
    "accuracy": ("accuracy", "{:.2%}"),
    "pseudo_accuracy": ("pseudo-label accuracy", "{:.2%}"),
    "confidence": ("mean confidence", "{:.2%}"),
    "seconds": ("seconds", "{:.0f}"),
}


@dataclass(frozen=True)
class Cell:
    """One run of the grid: its value on each axis, its recipe and its directory."""

    values: dict[str, Any]  # axis (dotted field, or 'seed') → value
    recipe: Recipe
    run: RunDirectory

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def group(self) -> tuple[Any, ...]:
        """The values without the seed; cells of one group make a row of the table."""
        return tuple(value for axis, value in self.values.items() if axis != "seed")


@dataclass
class Row:
    """A row of the table: mean and standard deviation over seeds."""

    group: tuple[Any, ...]
    figures: dict[str, list[float]] = field(default_factory=dict)  # metric → value of each finished run
    wanted: int = 0  # runs of the row, finished or not
    finished: int = 0

    def show(self, name: str, form: str = "{:.2%}") -> str:
        """ "81.20% ± 0.35%", or "–" without a finished run."""
        values = self.figures.get(name, [])
        if not values:
            return "–"
        shown = form.format(mean(values))
        return f"{shown} ± {form.format(stdev(values))}" if len(values) > 1 else shown


# ---- the grid -------------------------------------------------------------------------------------------------------


def make_cells(
    recipe: Recipe, axes: Mapping[str, Sequence[Any]], out: Path, settings: Mapping[str, Any] | None = None
) -> list[Cell]:
    """The product of the axes. An error names the mistakes of all cells.

    axes: dotted field → values.   out: folder of the run directories.   settings: dotted field → value for every cell; they
    hold also if an axis changes the method.
    """
    cells, mistakes = [], Mistakes()
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        name = ",".join(f"{axis_label(axis)}={file_safe(value)}" for axis, value in values.items())
        with mistakes:
            cells.append(
                Cell(values, recipe.with_fields({**(settings or {}), **values}, "axis"), RunDirectory(out / name))
            )
    mistakes.report()
    return cells


def axis_label(axis: str) -> str:
    """'method.name' → 'method', 'train.lr' → 'lr'."""
    return axis.removesuffix(".name").split(".")[-1]


def file_safe(value: Any) -> str:
    """A value as a part of a file name."""
    return "".join(c if c.isalnum() or c in "._+-" else "-" for c in str(value))


def axis_values(text: str, known: Sequence[str] | None = None, what: str = "value") -> list[str]:
    """'a,b' → ['a', 'b']; 'all' → `known`.   what: the axis, for messages."""
    if text == "all":
        if known is None:
            raise FinesslError(f"'all' has no meaning for {what}; name the values, separated by commas.")
        return list(known)
    return [part.strip() for part in text.split(",") if part.strip()]


def without_misfits(cells: Sequence[Cell], log: Log = print) -> list[Cell]:
    """The cells whose tuning strategy fits their backbone. The others are logged with the reason."""
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
            log(f"left out: {tuning.name} with {backbone} ({error})")
    return [cell for cell in cells if reasons[cell.recipe.model.backbone, cell.recipe.tuning.name] is None]


# ---- the table ------------------------------------------------------------------------------------------------------


def summarise(cells: Sequence[Cell]) -> list[Row]:
    """One row per group of cells, in the order of the grid, from finished runs."""
    rows: dict[tuple[Any, ...], Row] = {}
    for cell in cells:
        row = rows.setdefault(cell.group, Row(cell.group))
        row.wanted += 1
        if cell.run.finished():
            row.finished += 1
            figures = cell.run.figures()
            for name in METRICS:
                if figures.get(name) is not None:
                    row.figures.setdefault(name, []).append(figures[name])
    return list(rows.values())


def tabulate(rows: Sequence[Row], names: Sequence[str], caption: str) -> Tabulated:
    """The table of a grid.   rows: from `summarise`.   names: of the axes without the seed.   caption: above it."""
    header = [*names, *(heading for heading, _ in METRICS.values()), "runs"]
    shown = [
        [*map(str, row.group), *(row.show(n, form) for n, (_, form) in METRICS.items()), f"{row.finished}/{row.wanted}"]
        for row in rows
    ]
    records: list[dict[str, Any]] = []
    for row in rows:
        record: dict[str, Any] = dict(zip(names, row.group, strict=True))
        for name in METRICS:
            values = row.figures.get(name, [])
            record[name] = mean(values) if values else None
            record[f"{name}_std"] = stdev(values) if len(values) > 1 else None
        records.append({**record, "finished": row.finished, "runs": row.wanted})
    return Tabulated(caption, header, shown, records, left=len(names))


def save_summary(table: Tabulated, folder: Path) -> Path:
    """Write summary.csv to the folder of the runs."""
    path = folder / "summary.csv"
    write_output(path, as_csv(table) + "\n")
    return path
