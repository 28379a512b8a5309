"""Our results next to the paper's: the difference, and whether it is within the paper's standard deviation."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

import numpy as np

from finessl.inference.metrics import paired_gain
from finessl.recipe import Recipe
from finessl.runs.records import read_answers
from finessl.sweeps.paper.contents import PaperTable, Value, read_table, table_names
from finessl.sweeps.paper.grid import Entry, Grid
from finessl.sweeps.paper.needs import Places, kinds, lacking, locate
from finessl.sweeps.table import Tabulated

Measure = Callable[[dict[str, Any], Recipe], float | None]  # of a finished run's figures and the paper's recipe


def percent(*names: str) -> Measure:
    """The first of these figures that the run has."""
    return lambda meta, recipe: next((100 * meta[name] for name in names if meta.get(name) is not None), None)


METRICS: dict[str, tuple[Measure, int]] = {  # with the decimals to show
    "accuracy": (percent("accuracy"), 2),
    "pseudo-label accuracy": (percent("pseudo_accuracy"), 2),
    "confidence": (percent("confidence_aux", "confidence"), 2),
    "seconds per step": (lambda meta, recipe: meta["seconds"] / meta["steps"], 4),
    "steps": (lambda meta, recipe: recipe.train.steps, 0),
    "total seconds": (lambda meta, recipe: meta["seconds"] / meta["steps"] * recipe.train.steps, 1),
}
RECENT = {"pseudo-label accuracy", "confidence"}  # means over the last epoch; the others are of the last step
ANSWER = {None: "–", True: "yes", False: "no"}


def within(ours: float, paper: Value) -> bool | None:
    """None when the paper gives no spread."""
    if paper.mean is None or paper.spread is None:
        return None
    return abs(ours - paper.mean) <= paper.spread + 1e-9  # the tables' two decimals are not exact in binary


def tabulate(grid: Grid) -> Tabulated:
    """One row per cell of the table, setting by setting."""
    if any(entry.row.field for entry in grid.entries):
        return tabulate_settings(grid)
    rows, records, ends = [], [], set()
    for number, entry in enumerate(grid.entries):
        row, record = measured_row(grid.table, entry, grid.seeds)
        rows.append(row)
        records.append({**record, "scale": str(grid.scale), "changes": "; ".join(departures(grid))})
        if number + 1 == len(grid.entries) or grid.entries[number + 1].column != entry.column:
            ends.add(number)
    header = ["setting", "", "ours", "paper", "difference", "within spread", "runs"]
    return Tabulated(caption(grid), header, rows, records, 2, frozenset(ends), notes(grid))


def measured_row(table: PaperTable, entry: Entry, seeds: int) -> tuple[list[str], dict[str, Any]]:
    paper = table.values[entry.row.name, entry.column.title]
    measure, decimals = METRICS[entry.column.metric]
    full = table.recipe(entry.row, entry.column)
    figures = [measure(cell.run.figures(), full) for cell in entry.cells if cell.run.finished()]
    values = [figure for figure in figures if figure is not None]
    ours = mean(values) if values else None
    deviation = stdev(values) if len(values) > 1 else None
    difference = None if ours is None or paper.mean is None else ours - paper.mean
    inside = None if ours is None else within(ours, paper)
    shown = "–" if ours is None else f"{ours:.{decimals}f}"
    if deviation is not None and entry.column.metric != "steps":
        shown += f" ± {deviation:.{decimals}f}"
    row = [
        entry.column.title,
        entry.row.name,
        shown,
        paper.text or "–",
        "–" if difference is None else f"{difference:+.{decimals}f}".replace("-", "−"),
        ANSWER[inside],
        f"{len(values)}/{seeds}",
    ]
    record = {
        "table": table.id, "setting": entry.column.title, "row": entry.row.name, "metric": entry.column.metric,
        "ours": ours, "ours_std": deviation, "paper": paper.mean, "paper_std": paper.spread,
        "difference": difference, "within_spread": inside, "finished": len(values), "runs": seeds,
    }  # fmt: skip
    return row, record


def tabulate_settings(grid: Grid) -> Tabulated:
    """Fields of the base recipe ('a / b': their quotient) next to the paper's values."""
    rows, records = [], []
    for entry in grid.entries:
        assert entry.row.field is not None
        paper = grid.table.values[entry.row.name, entry.column.title]
        flat = entry.recipe.flat()
        first, *rest = (flat[name] for name in entry.row.field.split(" / "))
        ours = first // rest[0] if rest else first
        equal = None if paper.mean is None else float(ours) == paper.mean
        rows.append([entry.row.name, entry.row.field, str(ours), paper.text, ANSWER[equal]])
        records.append(
            {"row": entry.row.name, "field": entry.row.field, "ours": ours, "paper": paper.text, "equal": equal}
        )
    header = ["setting", "recipe field", "ours", "paper", "equal"]
    return Tabulated(caption(grid), header, rows, records, 2, notes=notes(grid))


def caption(grid: Grid) -> str:
    text = f"{grid.table.number}: {grid.table.title}"
    if grid.cells:
        some = "up to " if grid.seeds > 1 and not all(cell.run.finished() for cell in grid.cells) else ""
        when = "epoch" if {entry.column.metric for entry in grid.entries} & RECENT else "step"
        text += f". Ours: {some}{grid.seeds} seed{'s' if grid.seeds > 1 else ''}, last {when}"
    share = [f"{grid.scale} of the paper's steps" if grid.scale < 1 else f"{grid.scale} times the paper's steps"]
    other = [*(share if grid.scale != 1 else []), *departures(grid)]
    return text + (f". NOT THE PAPER'S SETTING: {', '.join(other)}" if other else "")


def departures(grid: Grid) -> list[str]:
    return [f"{name} = {value}" for name, value in grid.changes.items()]


def notes(grid: Grid) -> list[str]:
    missing = [
        f"lacking: {reason} [{len(places)} place{'s' if len(places) > 1 else ''}: {', '.join(places[:3])}"
        f"{' …' if len(places) > 3 else ''}]"
        for reason, places in grid.missing().items()
    ]
    return [*grid.table.notes, *gains(grid), *missing, *other_weights(grid)]


def gains(grid: Grid) -> list[str]:
    """By how much rows are ahead of those that the table compares them with, from the seeds that both have answers of."""
    entries = {(entry.row.name, entry.column.title): entry for entry in grid.entries}
    sentences = []
    for (row, column), entry in entries.items():
        other = entries.get((grid.table.against.get(row, ""), column))
        if other is None:
            continue
        ours, theirs = kept_answers(entry), kept_answers(other)
        both = sorted(ours.keys() & theirs.keys())
        if shared := [seed for seed in both if np.array_equal(ours[seed][1], theirs[seed][1])]:  # the same images
            first, second = (np.stack([np.equal(*runs[seed]) for seed in shared]) for runs in (ours, theirs))
            gain, (low, high) = paired_gain(first, second)
            sentences.append(
                f"{column}: {row} is {100 * gain:+.2f} against {other.row.name} (95 %: {100 * low:+.2f} to {100 * high:+.2f}; "
                f"paired bootstrap of {len(shared)} seed{'s' if len(shared) > 1 else ''} and {first.shape[1]:,} images)"
            )
    return sentences


def kept_answers(entry: Entry) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Seed → answers and labels, of the finished runs that have kept them."""
    found = {cell.recipe.seed: read_answers(cell.run) for cell in entry.cells if cell.run.finished()}
    return {seed: kept for seed, kept in found.items() if kept is not None}


def other_weights(grid: Grid) -> list[str]:
    """Finished runs whose weights had another path than the ones named now: whether they are equal is not known."""
    pairs = {
        (entry.recipe.model.weights, cell.recipe.model.weights)
        for entry in grid.entries
        for cell in entry.cells
        if entry.recipe.model.weights and cell.run.finished()
    }
    return [
        f"finished with the weights {old or 'of the hub'}, taken to be those of {new}"
        for new, old in sorted(pairs, key=str)
        if old != new
    ]


def overview(places: Places) -> Tabulated:
    """All tables and figures and what they need; a star marks missing items."""
    tables = [read_table(name) for name in table_names()]
    rows, records = [], []
    reasons: set[str] = set()
    for table in tables:
        grid = [
            table.recipe(row, column)
            for row in table.rows
            for column in table.columns
            if (row.name, column.title) in table.values and not row.lacks and not row.field
        ]
        needed = sorted({kind for recipe in grid for kind in kinds(recipe)})
        lacks = sorted({reason for recipe in grid for reason in lacking(locate(recipe, places))})
        reasons.update(lacks)
        absent = {reason.partition(":")[0].removeprefix("data ").removeprefix("weights of ") for reason in lacks}
        marked = ", ".join(f"{kind}*" if kind in absent else kind for kind in needed)
        subject = re.split("[:;]", table.title)[0]  # the whole title is the caption of the table itself
        rows.append([table.id, table.number, subject, marked or "–"])
        values = {f"{row}; {column}": value.text for (row, column), value in table.values.items()}
        records.append({"id": table.id, "number": table.number, "title": table.title, "needs": ", ".join(needed),
                        "lacks": "; ".join(lacks), "values": values})  # fmt: skip
    header = ["name", "in the paper", "what", "needs"]
    ends = frozenset({sum(not table.figure for table in tables) - 1})
    more = ["finessl paper NAME runs one; --show prints its numbers and what is finished."]
    if reasons:
        more += ["* is not there yet:", *(f"  {reason}" for reason in sorted(reasons))]
    return Tabulated("The paper's tables and figures", header, rows, records, 4, ends, more)
