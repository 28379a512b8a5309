"""The demo's picture: accuracy over training, frequency of predicted classes, and test images with predictions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from finessl.analysis import charts
from finessl.analysis.runs import Outcome
from finessl.analysis.style import COLOURS, canvas, styled
from finessl.errors import FinesslError
from finessl.runs.directory import RunDirectory
from finessl.runs.inputs import open_source


def demo_picture(runs: Mapping[str, RunDirectory], path: Path) -> Path:
    """Curves of these runs, and 20 test images with the last run's predictions."""
    outcomes = {name: Outcome(run, run.recipe(), name) for name, run in runs.items()}
    subject = list(outcomes.values())[-1]
    dataset = open_source(subject.recipe)
    if subject.test is None or dataset.test is None:
        raise FinesslError(f"{subject.path} has no test predictions to draw.")
    with styled():
        figure = canvas(11, 7.2)
        above, below = figure.subfigures(2, 1, height_ratios=[1, 1.25])
        left, right = above.subplots(1, 2)
        series = {name: outcome.series("test", "accuracy") for name, outcome in outcomes.items()}
        charts.draw_lines(left, series, "step", "test accuracy", percent=True)
        given = {
            name: None if o.test is None else np.bincount(o.test.predicted, minlength=len(o.classes))
            for name, o in outcomes.items()
        }
        charts.draw_shares(right, given)
        right.set_ylabel("predictions, in even shares")
        test, classes = subject.test, subject.classes
        chosen = np.linspace(0, len(test.labels) - 1, 20).astype(int)
        for axes, i in zip(below.subplots(2, 10).flat, chosen, strict=True):
            axes.imshow(dataset.test.read(int(test.index[i])))
            sign, colour = ("✓", COLOURS[2]) if test.correct[i] else ("✗", COLOURS[1])
            title = f"{classes[test.predicted[i]]} {sign}\n{test.confidence[i]:.0%}"
            axes.set_title(title, fontsize=8, color=colour, loc="center", pad=4)
            axes.set_axis_off()
        below.suptitle(f"{subject.label}: predicted class and confidence for test images", fontsize=10)
        figure.savefig(path, dpi=130)
    return path
