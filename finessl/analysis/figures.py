"""The paper's figures from run directories: `finessl figure NAME RUN… --out DIR` writes NAME.svg and NAME.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finessl.analysis import charts
from finessl.analysis.runs import Outcome, plain, read_runs, short
from finessl.analysis.style import canvas, save, styled
from finessl.errors import FinesslError
from finessl.inference import metrics
from finessl.inference.metrics import Interval
from finessl.registry import Registry

HERE = "finessl.analysis.figures:"
FIGURES = Registry(
    "figure",
    {
        "accuracy": (HERE + "accuracy", "test accuracy over training"),
        "pseudo-labels": (HERE + "pseudo_labels", "how often each class is the pseudo-label (figure 2, left)"),
        "confidence-by-labels": (HERE + "confidence_by_labels", "mean confidence against labels per class, with and "
                                 "without DLS (figure 2, right)"),
        "pseudo-label-quality": (HERE + "pseudo_label_quality", "accuracy and entropy of pseudo-labels over training "
                                 "(figure 3, a and b)"),
        "confidence": (HERE + "confidence", "confidence of correct, incorrect and OOD images (figure 4)"),
        "calibration": (HERE + "calibration", "calibration error, and rectified confidence (appendix C)"),
        "sensitivity": (HERE + "sensitivity", "accuracy against a recipe field: --axis method.alpha (figures 3 and 5)"),
        "strategies": (HERE + "strategies", "accuracy of tuning strategies or backbones as bars (figure 1)"),
        "confusion": (HERE + "confusion", "which classes the last run takes for which"),
    },
    plugins=False,
)  # fmt: skip


def draw(name: str, paths: Sequence[str | Path], out: Path, axis: str | None = None) -> list[Path]:
    """Write NAME.svg and NAME.png.   name: an entry of FIGURES.   paths: run directories, or folders of them.   out: folder.
    axis: recipe field along which runs are compared, by dotted name; None: as the figure has it."""
    function = FIGURES[name]
    outcomes = read_runs(paths)
    with styled():
        return save(function(outcomes, axis), out, name)


def nothing(what: str, outcomes: Sequence[Outcome]) -> FinesslError:
    return FinesslError(f"there is nothing to draw: {', '.join(str(o.path) for o in outcomes)} {what}.")


# ---- over training --------------------------------------------------------------------------------------------------


def accuracy(outcomes: Sequence[Outcome], axis: str | None = None) -> Any:
    figure = canvas(5, 3.4)
    series = {o.label: o.series("test", "accuracy") for o in outcomes}
    if not charts.draw_lines(figure.subplots(), series, "step", "test accuracy", percent=True):
        raise nothing("measured no test accuracy", outcomes)
    return figure


def pseudo_labels(outcomes: Sequence[Outcome], axis: str | None = None) -> Any:
    figure = canvas(5, 3.4)
    if not charts.draw_shares(figure.subplots(), pseudo_counts(outcomes)):
        raise nothing("recorded no pseudo-labels", outcomes)
    return figure


def pseudo_counts(outcomes: Sequence[Outcome]) -> dict[str, np.ndarray | None]:
    """Run → pseudo-labels per class in the last epoch."""
    return {o.label: np.array(o.diagnostics[-1]["pseudo"]) if o.diagnostics else None for o in outcomes}


def pseudo_label_quality(outcomes: Sequence[Outcome], axis: str | None = None) -> Any:
    figure = canvas(9, 3.4)
    left, right = figure.subplots(1, 2)
    drawn = charts.draw_lines(right, {o.label: o.pseudo_entropy() for o in outcomes}, "step", "entropy (nats)")
    if not drawn:
        raise nothing("recorded no pseudo-labels", outcomes)
    charts.draw_lines(left, {o.label: o.pseudo_accuracy() for o in outcomes}, "step", "accuracy", percent=True)
    left.set_title("pseudo-label accuracy", pad=24)
    right.set_title("entropy of the pseudo-labels' classes", pad=24)
    return figure


# ---- confidence -----------------------------------------------------------------------------------------------------


def weighing_head(outcome: Outcome) -> str:
    """The head whose confidence weights unlabeled images: the auxiliary one if there is one (DLS)."""
    return "confidence_aux" if outcome.histogram("confidence_aux") is not None else "confidence"


def known_groups(outcome: Outcome, name: str) -> dict[str, np.ndarray]:
    """Bins of the groups with known truth, or of all images if it is unknown."""
    found = {g: outcome.histogram(name, g) for g in ("correct", "incorrect", "novel")}
    groups = {group: bins for group, bins in found.items() if bins is not None}
    unknown = outcome.histogram(name, "unknown")
    return groups or ({} if unknown is None else {"unknown": unknown})


def mean_confidence(outcome: Outcome, name: str) -> float | None:
    """Over the last epoch's unlabeled images."""
    bins = outcome.histogram(name)
    if bins is None:
        return None
    means, last = outcome.diagnostics[-1]["mean"][name], outcome.diagnostics[-1][name]
    return float(sum(means[g] * sum(last[g]) for g in means) / bins.sum())


def confidence_by_labels(outcomes: Sequence[Outcome], axis: str | None = None) -> Any:
    """One line per kind of run, over labels per class; a second one, DLS, if there is an auxiliary head."""
    points: dict[str, dict[float, list[float]]] = {}
    for outcome in outcomes:
        kind = f"{outcome.recipe.method.name}, {outcome.recipe.tuning.name}"
        for name, label in (("confidence", kind), ("confidence_aux", f"{kind}, DLS head")):
            value = mean_confidence(outcome, name)
            if value is not None and outcome.labels_per_class is not None:
                points.setdefault(label, {}).setdefault(float(outcome.labels_per_class), []).append(value)
    places = sorted({labels for group in points.values() for labels in group})
    series = {
        label: (np.array([places.index(n) for n in sorted(g)]), np.array([np.mean(g[n]) for n in sorted(g)]))
        for label, g in points.items()
    }
    figure = canvas(5, 3.4)
    axes = figure.subplots()
    if not charts.draw_lines(axes, series, "labels per class", "mean confidence", percent=True):
        raise nothing("recorded no confidence", outcomes)
    axes.set_xticks(range(len(places)), [f"N{n:g}" for n in places])
    axes.margins(x=0.1)
    return figure


def confidence(outcomes: Sequence[Outcome], axis: str | None = None) -> Any:
    """One panel per run, and a second one for its auxiliary head."""
    panels = [(o, name) for o in outcomes for name in ("confidence", "confidence_aux") if known_groups(o, name)]
    if not panels:
        raise nothing("recorded no confidence", outcomes)
    figure = canvas(3.6 * len(panels), 3.4)
    for axes, (outcome, name) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        head = "confidence, auxiliary head" if name == "confidence_aux" else "confidence"
        charts.draw_groups(axes, known_groups(outcome, name), head)
        axes.set_title(outcome.label, pad=38 if len(known_groups(outcome, name)) > 2 else 24)
    return figure


def rectified(outcome: Outcome) -> tuple[dict[str, np.ndarray], float] | None:
    """Bins of correct and incorrect pseudo-labels by the weighting head, and κ; None if the truth is unknown."""
    name = weighing_head(outcome)
    groups = {g: bins for g, bins in known_groups(outcome, name).items() if g in ("correct", "incorrect")}
    if "correct" not in groups:
        return None
    means, sizes = outcome.diagnostics[-1]["mean"][name], {g: bins.sum() for g, bins in groups.items()}
    mean = sum(means[g] * sizes[g] for g in groups) / sum(sizes.values())
    return groups, float(sizes["correct"] / sum(sizes.values()) / mean)


def recorded_calibration(outcome: Outcome) -> float | None:
    """Expected calibration error of the weighting head on the last epoch's pseudo-labels, from 20 recorded bins."""
    found = rectified(outcome)
    if found is None:
        return None
    right = found[0]["correct"].reshape(20, -1).sum(1)
    wrong = found[0]["incorrect"].reshape(20, -1).sum(1) if "incorrect" in found[0] else np.zeros(20)
    centre, total = (np.arange(20) + 0.5) / 20, right + wrong
    return float(np.abs(right - centre * total).sum() / total.sum())


def calibration(outcomes: Sequence[Outcome], axis: str | None = None) -> Any:
    panels = [(o, found) for o in outcomes if (found := rectified(o)) is not None]
    tested: list[float | None] = []
    intervals: list[Interval | None] = []
    for o in outcomes:
        arrays = None if o.test is None else (o.test.confidence, o.test.correct)
        tested.append(None if arrays is None else metrics.calibration_error(*arrays))
        intervals.append(
            None if arrays is None else metrics.bootstrap(metrics.calibration_error, *arrays, resamples=300)
        )
    recorded = [recorded_calibration(o) for o in outcomes]
    bars = {"test images": tested, "pseudo-labels": recorded}
    bars = {name: values for name, values in bars.items() if any(v is not None for v in values)}
    if not bars:
        raise nothing("have neither test predictions nor pseudo-labels of known truth", outcomes)
    figure = canvas(3.2 * len(panels) + max(3.2, 1.2 * len(outcomes)), 3.4)
    ratios = [max(1.0, 0.4 * len(outcomes)), *([1.0] * len(panels))]
    first, *others = figure.subplots(1, len(panels) + 1, squeeze=False, width_ratios=ratios)[0]
    charts.draw_bars(first, [o.label for o in outcomes], bars, "calibration error", {"test images": intervals})
    first.set_title("expected calibration error", pad=24)
    for axes, (outcome, (groups, kappa)) in zip(others, panels, strict=True):
        charts.draw_groups(axes, groups, f"κ · confidence, κ = {kappa:.2f}", scale=kappa)
        axes.set_title(outcome.label, pad=24)
    return figure


# ---- several runs ---------------------------------------------------------------------------------------------------


def sensitivity(outcomes: Sequence[Outcome], axis: str | None = None) -> Any:
    """Accuracy over one numeric field; one line per value of the other fields in which the runs differ."""
    flats = [o.recipe.flat() for o in outcomes]
    name = axis or varying_number(flats)
    if any(not isinstance(flat.get(name), (int, float)) for flat in flats):
        raise FinesslError(f"--axis {name}: not every run has a number there; method options must be set explicitly.")
    others = [n for n in flats[0] if n not in (name, "seed") and len({repr(f.get(n)) for f in flats}) > 1]
    points: dict[str, dict[float, list[float]]] = {}
    for outcome, flat in zip(outcomes, flats, strict=True):
        if outcome.accuracy is not None:
            parts = [f"{short(n)} {plain(flat.get(n))}".strip() for n in others]
            group = ", ".join(parts) or outcome.recipe.method.name
            points.setdefault(group, {}).setdefault(float(flat[name]), []).append(outcome.accuracy)
    series = {g: (np.array(sorted(p)), np.array([np.mean(p[x]) for x in sorted(p)])) for g, p in points.items()}
    figure = canvas(4.6, 3.4)
    if not charts.draw_lines(figure.subplots(), series, short(name), "test accuracy", percent=True):
        raise nothing("measured no test accuracy", outcomes)
    return figure


def varying_number(flats: Sequence[dict[str, Any]]) -> str:
    found = [
        name for name in flats[0]
        if name not in ("seed", "split.labels_per_class")
        and all(isinstance(f.get(name), (int, float)) and not isinstance(f.get(name), bool) for f in flats)
        and len({f[name] for f in flats}) > 1
    ]  # fmt: skip
    if len(found) == 1:
        return found[0]
    what = (
        f"the runs differ in {', '.join(found)}"
        if found
        else "the runs differ in no numeric field that all of them set"
    )
    raise FinesslError(f"{what}; name the field to draw along with --axis, for example --axis method.alpha.")


def strategies(outcomes: Sequence[Outcome], axis: str | None = None) -> Any:
    """One bar per strategy (or backbone, or value of the field --axis), grouped by labels per class."""
    flats = [o.recipe.flat() for o in outcomes]
    fields = [axis] if axis else [n for n in ("model.backbone", "tuning.name", "method.name") if differ(flats, n)]
    values: dict[str, dict[float, list[float]]] = {}
    for outcome, flat in zip(outcomes, flats, strict=True):
        if outcome.accuracy is not None:
            name = ", ".join(str(flat.get(f)) for f in fields or ["tuning.name"])
            values.setdefault(name, {}).setdefault(float(outcome.labels_per_class or 0), []).append(outcome.accuracy)
    if not values:
        raise nothing("measured no test accuracy", outcomes)
    places = sorted({labels for group in values.values() for labels in group})
    bars = {name: [float(np.mean(g[n])) if n in g else None for n in places] for name, g in values.items()}
    figure = canvas(max(4.6, 0.55 * len(places) * len(bars) + 1.5), 3.4)
    charts.draw_bars(figure.subplots(), [f"N{n:g}" if n else "all" for n in places], bars, "test accuracy")
    return figure


def differ(flats: Sequence[dict[str, Any]], name: str) -> bool:
    return len({flat.get(name) for flat in flats}) > 1


def confusion(outcomes: Sequence[Outcome], axis: str | None = None) -> Any:
    outcome = outcomes[-1]
    if outcome.test is None:
        raise nothing("has no test predictions", [outcome])
    if len(outcome.classes) > 60:
        raise FinesslError(
            f"{len(outcome.classes)} classes are too many to be read in a picture; see `finessl report`."
        )
    side = max(4.0, 0.34 * len(outcome.classes) + 1.6)
    figure = canvas(side, side)
    charts.draw_confusion(figure.subplots(), outcome.test.confusion, outcome.classes)
    return figure
