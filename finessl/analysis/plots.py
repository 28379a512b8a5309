"""Pictures of runs. Colours are Okabe and Ito's, told apart by the colour-blind and, with the line styles, in grey."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from finessl.training.rundir import RunDirectory

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")


def figure(**arguments: Any) -> Any:
    """A matplotlib figure that needs no screen."""
    from matplotlib.figure import Figure

    return Figure(layout="constrained", **arguments)


def series(run: RunDirectory, kind: str, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one figure in metrics.jsonl."""
    rows = [row for row in run.metrics() if row["kind"] == kind and name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]


def draw_series(axes: Any, runs: Mapping[str, RunDirectory], kind: str, name: str, label: str) -> None:
    for number, (method, run) in enumerate(runs.items()):
        steps, values = series(run, kind, name)
        if steps:
            colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
            axes.plot(steps, values, style, color=colour, label=method, marker="o" if len(steps) < 12 else None, ms=3)
    axes.set(xlabel="step", ylabel=label)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False)


def draw_balance(axes: Any, predictions: Mapping[str, np.ndarray], classes: int) -> None:
    """How many test images each method gives to each class, most favoured first: flat is unbiased."""
    for number, (method, labels) in enumerate(predictions.items()):
        counts = np.sort(np.bincount(labels, minlength=classes))[::-1]
        colour = COLOURS[number % len(COLOURS)]
        axes.step(
            np.arange(1, classes + 1), counts, STYLES[number % len(STYLES)], where="mid", color=colour, label=method
        )
    if predictions:
        axes.axhline(len(next(iter(predictions.values()))) / classes, color="0.6", lw=0.8, zorder=0)
    axes.set(xlabel="class, by how often it is predicted", ylabel="predictions")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def demo_picture(runs: Mapping[str, RunDirectory], path: Path) -> Path:
    """Accuracy over training, balance of the predictions, and test images with the last method's answers."""
    from finessl.data.sources import open_dataset

    outcomes = {name: np.load(run.path / "predictions.npz") for name, run in runs.items()}
    last_run = list(runs.values())[-1]
    dataset = open_dataset(last_run.recipe().data.source, root=last_run.recipe().data.root)
    assert dataset.test is not None
    canvas = figure(figsize=(11, 7.2))
    above, below = canvas.subfigures(2, 1, height_ratios=[1, 1.25])
    left, right = above.subplots(1, 2)
    draw_series(left, runs, "test", "accuracy", "test accuracy")
    answers = {name: outcome["logits"].argmax(1) for name, outcome in outcomes.items()}
    draw_balance(right, answers, len(dataset.classes))

    outcome = list(outcomes.values())[-1]
    logits = outcome["logits"].astype(np.float64)
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    chosen = np.linspace(0, len(logits) - 1, 20).astype(int)
    for axes, i in zip(below.subplots(2, 10).flat, chosen, strict=True):
        axes.imshow(dataset.test.read(int(outcome["index"][i])))
        answer, right_answer = probabilities[i].argmax(), outcome["labels"][i]
        sign, colour = ("✓", COLOURS[2]) if answer == right_answer else ("✗", COLOURS[1])
        axes.set_title(f"{dataset.classes[answer]} {sign}\n{probabilities[i].max():.0%}", fontsize=8, color=colour)
        axes.set_axis_off()
    below.suptitle(f"{list(runs)[-1]}: predicted class and confidence for test images", fontsize=10)
    canvas.savefig(path, dpi=130)
    return path
