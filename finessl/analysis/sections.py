"""What the report's sections show: tables, charts and sentences; None or empty where a run left nothing for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from finessl.analysis import charts, figures
from finessl.analysis.findings import data_differences, percent, span
from finessl.analysis.runs import Outcome
from finessl.analysis.style import COLOURS, canvas, inline_svg
from finessl.inference import metrics
from finessl.runtime.progress import duration

SHOWN = 20  # classes in the table before the others are folded away
HALVES = 200  # test images from which a temperature fitted on half of them is worth reporting
# Inches of a chart, by how many stand in a row: the page's text size and the charts' stay about the same.
SIZES = {1: (9.4, 2.9), 2: (4.7, 3.0), 3: (3.6, 2.9)}


@dataclass(frozen=True)
class Cell:
    """A table's cell with more than text."""

    text: str
    small: str = ""  # second line
    warning: bool = False  # the second line is a warning
    series: int | None = None  # colour of the run in all charts


@dataclass(frozen=True)
class Table:
    head: list[str] | None
    rows: list[list[str | Cell]]
    numbers: int  # columns from this one on hold numbers and are set flush right


@dataclass(frozen=True)
class Chart:
    """A drawing with its title and what it shows."""

    title: str
    text: str
    figure: Any

    @property
    def svg(self) -> Markup:
        return Markup(inline_svg(self.figure, f"{self.title}. {self.text}"))


@dataclass(frozen=True)
class Charts:
    """Charts in rows without a gap at the end."""

    charts: list[Chart]
    columns: int


def chart(title: str, text: str, draw: Callable[[Any], bool], size: tuple[float, float] = SIZES[2]) -> Chart | None:
    """None when there was nothing to draw."""
    figure = canvas(*size)
    return Chart(title, text, figure) if draw(figure.subplots()) else None


def grid(*parts: Chart | None) -> Charts | None:
    """One, two or three charts per row; None without any."""
    found = [part for part in parts if part]
    if not found:
        return None
    columns = len(found) if len(found) < 4 else 2 if len(found) % 2 == 0 else 3
    for part in found:
        part.figure.set_size_inches(*SIZES[columns])
    return Charts(found, columns)


# ---- runs -----------------------------------------------------------------------------------------------------------


def side_by_side(outcomes: Sequence[Outcome]) -> Table:
    """Test and training figures of each run. A run on other data is marked: its figures cannot be compared."""
    head = ["run", "test accuracy", "balanced accuracy", "calibration error", "mean confidence", "pseudo-label accuracy",
            "evenness of pseudo-labels", "time"]  # fmt: skip
    rows: list[list[str | Cell]] = []
    for number, outcome in enumerate(outcomes):
        apart = data_differences(outcomes[-1], outcome)
        warning = f"not comparable: {', '.join(apart)}" if apart else ""
        rows.append([Cell(outcome.label, warning, bool(apart), number % len(COLOURS)), *measures(outcome)])
    return Table(head, rows, numbers=1)


def measures(outcome: Outcome) -> list[str | Cell]:
    cells: list[str | Cell] = ["–"] * 7
    test = outcome.test
    if test is not None:
        classes, right = len(outcome.classes), test.correct
        balanced = lambda a, b: metrics.balanced_accuracy(a, b, classes)  # noqa: E731
        pairs = test.labels, test.predicted
        cells[0] = with_interval(right.mean(), metrics.wilson(right.sum(), len(right)))
        cells[1] = with_interval(balanced(*pairs), metrics.bootstrap(balanced, *pairs, resamples=300))
        arrays = test.confidence, right
        error = metrics.calibration_error
        cells[2] = with_interval(error(*arrays), metrics.bootstrap(error, *arrays, resamples=300))
        cells[3] = percent(float(test.confidence.mean()))
    elif outcome.accuracy is not None:
        cells[0] = percent(outcome.accuracy)
    accuracy, entropy = outcome.pseudo_accuracy()[1], outcome.pseudo_entropy()[1]
    if len(accuracy):
        cells[4] = percent(accuracy[-1])
    if len(entropy):
        cells[5] = percent(entropy[-1] / np.log(len(outcome.classes)))
    if outcome.meta.get("seconds") is not None:
        cells[6] = duration(outcome.meta["seconds"])
    return cells


def with_interval(value: float, interval: metrics.Interval) -> Cell:
    return Cell(percent(float(value)), span(interval))


def learning(outcomes: Sequence[Outcome]) -> Charts | None:
    """Curves over the steps of training."""
    sure = {o.label: o.series("train", "confidence") for o in outcomes}
    sure |= {f"{o.label}, auxiliary head": s for o in outcomes if len((s := o.series("train", "confidence_aux"))[0])}
    tested = {o.label: o.series("test", "accuracy") for o in outcomes}
    labeled = {o.label: o.pseudo_accuracy() for o in outcomes}
    used = {o.label: o.series("train", "used") for o in outcomes}

    def curves(title: str, text: str, series: Mapping[str, charts.Series]) -> Chart | None:
        return chart(title, text, lambda axes: charts.draw_lines(axes, series, "step", "", percent=True, whole=True))

    return grid(
        curves("Test accuracy", "Measured during training; never used for model selection.", tested),
        curves("Pseudo-label accuracy", "Of unlabeled images whose class the data set knows.", labeled),
        curves("Mean confidence", "On weak views of unlabeled images.", sure),
        curves("Pseudo-labels used", "Share of a batch's unlabeled images with a weight above 0.", used),
    )


def bias(outcomes: Sequence[Outcome]) -> Charts | None:
    """How pseudo-labels are spread over the classes."""
    counts, subject = figures.pseudo_counts(outcomes), outcomes[-1]
    same = all(o.classes == subject.classes for o in outcomes)
    named = subject.classes if same and len(subject.classes) <= charts.NAMED else []
    evenness = {o.label: (steps, values / np.log(max(len(o.classes), 2))) for o in outcomes
                for steps, values in [o.pseudo_entropy()]}  # fmt: skip
    parts = [
        chart(
            "Pseudo-labels over classes",
            "At the end of training. A steep curve: a few favoured classes take most of them.",
            lambda axes: charts.draw_shares(axes, counts, named),
        ),
        chart(
            "Evenness over training",
            "Entropy of the pseudo-labels' classes; 100 %: all classes are equally frequent.",
            lambda axes: charts.draw_lines(axes, evenness, "step", "", percent=True, whole=True),
        ),
    ]
    last = subject.diagnostics[-1] if subject.diagnostics else {}
    if "margin" in last and len(subject.classes) <= charts.NAMED:
        parts.append(
            chart(
                "Class margins at the end",
                "Slowly learned classes get a larger margin in the loss.",
                lambda axes: charts.draw_columns(axes, subject.classes, np.array(last["margin"]), "margin"),
            )
        )
    return grid(*parts)


def confidence(outcomes: Sequence[Outcome]) -> Charts | None:
    """Confidence against accuracy, and its distribution over right and wrong answers."""
    subject = outcomes[-1]
    tested = {
        o.label: None if o.test is None else metrics.reliability(o.test.confidence, o.test.correct) for o in outcomes
    }
    parts = [
        chart(
            "Confidence against accuracy",
            "Test images in 15 bins; larger marks hold more. Below the line the model claims too much.",
            lambda axes: charts.draw_reliability(axes, tested),
        )
    ]
    main, auxiliary = (figures.known_groups(subject, name) for name in ("confidence", "confidence_aux"))
    apart = "Unlabeled images, at the end of training. "
    apart += (
        "Whether they are right is not known." if "unknown" in main else "The further apart, the better it can tell."
    )
    parts += [
        chart("Confidence, main head", apart, lambda axes: charts.draw_groups(axes, main, "confidence")),
        chart(
            "Confidence, auxiliary head",
            "The same, of the head that gives each image its weight (decoupled label smoothing).",
            lambda axes: charts.draw_groups(axes, auxiliary, "confidence"),
        ),
    ]
    found = figures.rectified(subject)
    if found is not None:
        groups, kappa = found
        parts.append(
            chart(
                "Rectified confidence",
                f"Brought to the pseudo-labels' accuracy by κ = accuracy / mean confidence = {kappa:.2f}.",
                lambda axes: charts.draw_groups(axes, groups, "κ · confidence", scale=kappa),
            )
        )
    return grid(*parts)


def temperature(subject: Outcome) -> str | None:
    """What temperature scaling would do: fitted on each half of the test images, applied to the other half."""
    test = subject.test
    if test is None or len(test.labels) < HALVES:
        return None
    scaled, found = np.empty(len(test.labels)), []
    for fit, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        found.append(metrics.fit_temperature(test.logits[fit], test.labels[fit]))
        scaled[other] = metrics.softmax(test.logits[other] / found[-1]).max(1)
    before, after = (metrics.calibration_error(c, test.correct) for c in (test.confidence, scaled))
    effect = f"takes the calibration error from {percent(before)} to {percent(after)}"
    if after >= before:
        effect = f"does not help: the calibration error is {percent(before)} without and {percent(after)} with it"
    return (
        f"Temperature scaling, dividing the logits by {np.mean(found):.2f}, {effect}. (Fitted on one half of the test images, "
        "applied to the other half.)"
    )


# ---- classes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Classes:
    shown: Table
    folded: Table  # the classes after the first SHOWN
    confusion: Chart | None
    mistakes: Table


def classes(outcomes: Sequence[Outcome]) -> Classes | None:
    """Recall and precision per class, the least recognised first; None without test images."""
    subject = outcomes[-1]
    if subject.test is None:
        return None
    confused, names = subject.test.confusion, subject.classes
    recall, precision = metrics.recalls(confused), metrics.precisions(confused)
    others = [o for o in outcomes[:-1] if o.test is not None and o.classes == names]
    theirs = [metrics.recalls(o.test.confusion) for o in others if o.test is not None]
    head = ["class", "test images", "recall", "precision", "predicted", *(f"recall, {o.label}" for o in others)]
    rows: list[list[str | Cell]] = [
        [names[k], f"{confused[k].sum():,}", share(recall[k]), share(precision[k]), f"{confused[:, k].sum():,}",
         *(share(values[k]) for values in theirs)]
        for k in np.argsort(np.nan_to_num(recall, nan=2.0), kind="stable")
    ]  # fmt: skip
    shown, folded = Table(head, rows[:SHOWN], numbers=1), Table(head, rows[SHOWN:], numbers=1)
    return Classes(shown, folded, confusion_chart(confused, names), mistakes(confused, names))


def confusion_chart(confused: np.ndarray, names: Sequence[str]) -> Chart | None:
    if len(names) > charts.NAMED:
        return None
    side = max(3.6, 0.26 * len(names) + 1.7)
    text = "A row is a true class, in per cent of its images; off the diagonal are mistakes."
    return chart("Confusion", text, lambda axes: charts.draw_confusion(axes, confused, names), (side, side))


def mistakes(confused: np.ndarray, names: Sequence[str]) -> Table:
    """The pairs of classes that are confused most often."""
    off = confused - np.diag(np.diag(confused))
    pairs = [np.unravel_index(i, off.shape) for i in np.argsort(-off, axis=None, kind="stable")[:8]]
    rows: list[list[str | Cell]] = [
        [names[i], names[j], f"{off[i, j]:,}", share(off[i, j] / confused[i].sum())] for i, j in pairs if off[i, j]
    ]
    return Table(["class", "taken for", "images", "of the class"], rows, numbers=2)


def share(value: float) -> str:
    return "–" if np.isnan(value) else percent(float(value), 0)
