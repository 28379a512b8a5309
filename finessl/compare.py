"""Grids of runs: any recipe field as an axis, seeds averaged, finished cells skipped.

    finessl compare DATA --methods fixmatch,finessl --seeds 3 --jobs 2

A cell is a run directory under --out; each runs in a process of its own (`finessl resume CELL`), so one that fails
takes nothing with it and starting the grid again goes on with what is missing.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.training.rundir import RunDirectory


@dataclass(frozen=True)
class Cell:
    """One run of the grid: where it stands on each axis, its recipe and its directory."""

    place: dict[str, Any]  # dotted field → value; 'seed' among them
    recipe: Recipe
    run: RunDirectory

    @property
    def group(self) -> tuple[Any, ...]:
        """The place without the seed: what a row of the table is."""
        return tuple(value for axis, value in self.place.items() if axis != "seed")


@dataclass(frozen=True)
class Row:
    """A row of the table: the seeds' mean and spread."""

    group: tuple[Any, ...]
    figures: dict[str, list[float]]
    wanted: int

    def show(self, name: str, form: str = "{:.2%}") -> str:
        values = self.figures.get(name, [])
        if not values:
            return "–"
        shown = form.format(mean(values))
        return f"{shown} ± {form.format(stdev(values))}" if len(values) > 1 else shown


def make_cells(recipe: Recipe, axes: Mapping[str, Sequence[Any]], out: Path) -> list[Cell]:
    """The product of the axes over the recipe."""
    cells = []
    for values in itertools.product(*axes.values()):
        place = dict(zip(axes, values, strict=True))
        tree = recipe.tree()
        changed = Recipe.from_tree(tree)
        overrides = recipe_overrides(place)
        changed = overlay(changed, overrides)
        name = ",".join(f"{axis.removesuffix('.name').split('.')[-1]}={plain(value)}" for axis, value in place.items())
        cells.append(Cell(place, changed, RunDirectory(out / name)))
    return cells


def recipe_overrides(place: Mapping[str, Any]) -> dict[str, Any]:
    """Names first: choosing another method drops the old one's options, which other axes may then set."""
    return dict(sorted(place.items(), key=lambda item: not item[0].endswith(".name")))


def overlay(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    from finessl.recipe import merge

    tree = recipe.tree()
    for name, value in overrides.items():
        section, _, field = name.rpartition(".")
        merge(tree, {section: {field: value}} if section else {field: value}, f"axis {name}")
    return Recipe.from_tree(tree)


def plain(value: Any) -> str:
    return "".join(c if c.isalnum() or c in "._+-" else "-" for c in str(value))


def run_cells(
    cells: Sequence[Cell], *, jobs: int = 1, device: str = "auto", retries: int = 1, say: Callable[[str], None] = print
) -> dict[str, str]:
    """Run what is not finished; returns cell name → last line of its error, for those that failed every time."""
    waiting = [cell for cell in cells if not cell.run.finished()]
    if len(waiting) < len(cells):
        say(f"{len(cells) - len(waiting)} of {len(cells)} cells are finished already")
    for cell in waiting:
        cell.run.open(cell.recipe)
    failed: dict[str, str] = {}
    threads = max((os.cpu_count() or 1) // jobs, 1)
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run_cell, cell, device, threads, retries): cell for cell in waiting}
        for done, future in enumerate(as_completed(futures), 1):
            cell, error = futures[future], future.result()
            name = cell.run.path.name
            if error:
                failed[name] = error
                say(f"[{done}/{len(waiting)}] {name}: failed: {error}")
            else:
                meta = cell.run.meta()
                accuracy = "no test images" if meta["accuracy"] is None else f"{meta['accuracy']:.2%}"
                say(f"[{done}/{len(waiting)}] {name}: {accuracy} in {meta['seconds']:.0f} s")
    return failed


def cell_command(cell: Cell, device: str = "auto") -> list[str]:
    return [sys.executable, "-m", "finessl", "resume", str(cell.run.path), "--device", device, "--quiet"]


def run_cell(cell: Cell, device: str, threads: int, retries: int) -> str | None:
    """None, or the error's last line after `retries` more tries."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    for _ in range(retries + 1):
        done = subprocess.run(cell_command(cell, device), capture_output=True, text=True, env=environment)
        if done.returncode == 0:
            return None
    (cell.run.path / "error.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def summarise(cells: Sequence[Cell]) -> list[Row]:
    """A row for each place but the seed, in the grid's order; only finished runs count."""
    rows: dict[tuple[Any, ...], Row] = {}
    for cell in cells:
        row = rows.setdefault(cell.group, Row(cell.group, {}, 0))
        rows[cell.group] = row = Row(row.group, row.figures, row.wanted + 1)
        if cell.run.finished():
            meta = cell.run.meta()
            for name in ("accuracy", "pseudo_accuracy", "confidence", "seconds"):
                if meta.get(name) is not None:
                    row.figures.setdefault(name, []).append(meta[name])
    return list(rows.values())


def axis_values(text: str, known: Sequence[str] | None = None, what: str = "value") -> list[str]:
    """'a,b' → ['a', 'b']; 'all' → everything known."""
    if text == "all":
        if known is None:
            raise FinesslError(f"'all' has no meaning for {what}; name the values, separated by commas.")
        return list(known)
    return [part.strip() for part in text.split(",") if part.strip()]
