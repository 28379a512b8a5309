"""The report's sections, from figures to pictures; each is None when a run left nothing for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from finessl.analysis import charts, figures
from finessl.analysis.findings import data_differences, percent, span
from finessl.analysis.galleries import Gallery
from finessl.analysis.page import Html, el, join, table
from finessl.analysis.runs import Outcome
from finessl.analysis.style import COLOURS, canvas, inline_svg
from finessl.inference import metrics

SHOWN = 20  # classes in the table before the others are folded away
HALVES = 200  # test images from which a temperature fitted on half of them is worth reporting
# Inches of a chart, by how many stand in a row: the page's text size and the charts' stay about the same.
SIZES = {1: (9.4, 2.9), 2: (4.7, 3.0), 3: (3.6, 2.9)}

# ---- runs -----------------------------------------------------------------------------------------------------------


def side_by_side(outcomes: Sequence[Outcome]) -> Html:
    head = ["run", "test accuracy", "balanced accuracy", "calibration error", "mean confidence", "pseudo-label accuracy",
            "evenness of pseudo-labels", "time"]  # fmt: skip
    subject = outcomes[-1]
    rows = [[join(keyed(number, o.label), apart(subject, o)), *measures(o)] for number, o in enumerate(outcomes)]
    note = (
        "95 % intervals in grey. Calibration error: mean gap between confidence and accuracy, 15 bins. Evenness: entropy of "
        "the last pseudo-labels over classes, 100 % when all classes are equally frequent."
    )
    return el(
        "section",
        el("h2", "Figures" if len(outcomes) == 1 else "Side by side"),
        table(head, rows, numbers=1),
        el("p", note, class_="quiet"),
    )


def apart(subject: Outcome, other: Outcome) -> Html | None:
    """A mark on a run whose figures cannot be compared with the subject's."""
    found = data_differences(subject, other)
    return el("small", f"not comparable: {', '.join(found)}", class_="warning") if found else None


def measures(outcome: Outcome) -> list[Any]:
    cells: list[Any] = ["–"] * 7
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


def with_interval(value: float, interval: metrics.Interval) -> Html:
    return join(percent(float(value)), el("small", span(interval)))


def duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def keyed(number: int, label: str) -> Html:
    return join(el("span", class_="key", style=f"background:var(--series-{number % len(COLOURS)})"), label)


@dataclass(frozen=True)
class Chart:
    """A drawing with its title and what it shows."""

    title: str
    text: str
    figure: Any

    def html(self, size: tuple[float, float] | None = None) -> Html:
        if size is not None:
            self.figure.set_size_inches(*size)
        svg = Html(inline_svg(self.figure, f"{self.title}. {self.text}"))
        return el("figure", el("figcaption", el("strong", self.title), self.text), svg)


def chart(title: str, text: str, draw: Callable[[Any], bool], size: tuple[float, float] = SIZES[2]) -> Chart | None:
    """None when there was nothing to draw."""
    figure = canvas(*size)
    return Chart(title, text, figure) if draw(figure.subplots()) else None


def section(title: str, lead: str, *parts: Html | None) -> Html | None:
    if not any(parts):
        return None
    return el("section", el("h2", title), el("p", lead, class_="lead"), parts)


def grid(*parts: Chart | None) -> Html | None:
    """Charts in rows without a gap at the end: one, two or three in a row."""
    found = [part for part in parts if part]
    if not found:
        return None
    columns = len(found) if len(found) < 4 else 2 if len(found) % 2 == 0 else 3
    return el("div", [part.html(SIZES[columns]) for part in found], class_=f"charts in-{columns}")


def learning(outcomes: Sequence[Outcome]) -> Html | None:
    sure = {o.label: o.series("train", "confidence") for o in outcomes}
    sure |= {f"{o.label}, auxiliary head": s for o in outcomes if len((s := o.series("train", "confidence_aux"))[0])}
    tested = {o.label: o.series("test", "accuracy") for o in outcomes}
    labeled = {o.label: o.pseudo_accuracy() for o in outcomes}
    used = {o.label: o.series("train", "used") for o in outcomes}

    def curves(title: str, text: str, series: Mapping[str, charts.Series]) -> Chart | None:
        return chart(title, text, lambda axes: charts.draw_lines(axes, series, "step", "", percent=True, whole=True))

    made = grid(
        curves("Test accuracy", "Measured during training; never used for model selection.", tested),
        curves("Pseudo-label accuracy", "Of unlabeled images whose class the data set knows.", labeled),
        curves("Mean confidence", "On weak views of unlabeled images.", sure),
        curves("Pseudo-labels used", "Share of a batch's unlabeled images with a weight above 0.", used),
    )
    return section("How it learned", "Over the steps of training.", made)


def bias(outcomes: Sequence[Outcome]) -> Html | None:
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
    return section("Is it biased?", "Pseudo-labels drift towards classes that the backbone favours.", grid(*parts))


def confidence(outcomes: Sequence[Outcome]) -> Html | None:
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
    lead = "An answer with 80 % should be right 8 times out of 10."
    return section("Can its confidence be trusted?", lead, grid(*parts), temperature(subject))


def temperature(subject: Outcome) -> Html | None:
    """Fitted on one half of the test images and applied to the other, and the other way round."""
    test = subject.test
    if test is None or len(test.labels) < HALVES:
        return None
    scaled, found = np.empty(len(test.labels)), []
    for fit, rest in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        found.append(metrics.fit_temperature(test.logits[fit], test.labels[fit]))
        scaled[rest] = metrics.softmax(test.logits[rest] / found[-1]).max(1)
    before, after = (metrics.calibration_error(c, test.correct) for c in (test.confidence, scaled))
    effect = f"takes the calibration error from {percent(before)} to {percent(after)}"
    if after >= before:
        effect = f"does not help: the calibration error is {percent(before)} without and {percent(after)} with it"
    return el(
        "p",
        f"Temperature scaling, dividing the logits by {np.mean(found):.2f}, {effect}. (Fitted on one half of the test images, "
        "applied to the other half.)",
    )


# ---- classes, images, provenance ------------------------------------------------------------------------------------


def classes(outcomes: Sequence[Outcome]) -> Html | None:
    subject, tested = outcomes[-1], [o for o in outcomes if o.test is not None and o.classes == outcomes[-1].classes]
    if subject.test is None:
        return None
    confused, names = subject.test.confusion, subject.classes
    recall, precision = metrics.recalls(confused), metrics.precisions(confused)
    order = np.argsort(np.nan_to_num(recall, nan=2.0), kind="stable")
    others = [o for o in tested if o is not subject]
    theirs = [metrics.recalls(o.test.confusion) for o in others if o.test is not None]
    head = ["class", "test images", "recall", "precision", "predicted", *(f"recall, {o.label}" for o in others)]
    rows = [
        [names[k], f"{confused[k].sum():,}", share(recall[k]), share(precision[k]), f"{confused[:, k].sum():,}",
         *(share(values[k]) for values in theirs)]
        for k in order
    ]  # fmt: skip
    folded = rows[SHOWN:]
    more = (
        el("details", el("summary", f"{len(folded):,} more classes"), table(head, folded, numbers=1))
        if folded
        else None
    )
    picture = None
    if len(names) <= charts.NAMED:
        side = max(3.6, 0.26 * len(names) + 1.7)
        picture = chart(
            "Confusion",
            "A row is a true class, in per cent of its images; off the diagonal are mistakes.",
            lambda axes: charts.draw_confusion(axes, confused, names),
            (side, side),
        )
    off = confused - np.diag(np.diag(confused))
    pairs = [np.unravel_index(i, off.shape) for i in np.argsort(-off, axis=None, kind="stable")[:8]]
    mixed = [
        [names[i], names[j], f"{off[i, j]:,}", share(off[i, j] / confused[i].sum())] for i, j in pairs if off[i, j]
    ]
    columns: list[Any] = ["class", "taken for", "images", "of the class"]
    mistakes = el("div", el("h3", "Most frequent mistakes"), table(columns, mixed, numbers=2)) if mixed else None
    both = [picture.html() if picture else None, mistakes]
    return section(
        "Classes",
        "Least recognised first.",
        table(head, rows[:SHOWN], numbers=1),
        more,
        el("div", both, class_="charts in-2") if any(both) else None,
    )


def share(value: float) -> str:
    return "–" if np.isnan(value) else percent(float(value), 0)


def pictures(found: Sequence[Gallery]) -> Html | None:
    by_class = [gallery for gallery in found if gallery.of_class]
    surest = el(
        "div",
        el("h3", "Most confident, by class"),
        el("p", "Unlabeled images. On the right: how many get this class. An orange frame: wrong.", class_="about"),
        el("div", [gallery_block(gallery) for gallery in by_class], class_="by-class"),
    )
    others = [gallery_block(gallery) for gallery in found if not gallery.of_class]
    lead = "What the figures look like. Click on an image to enlarge it."
    return section("Images", lead, surest if by_class else None, *others)


def gallery_block(gallery: Gallery) -> Html:
    shown = []
    block = "g" + hashlib.blake2b(gallery.title.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    for number, one in enumerate(gallery.pictures):
        text = f"{one.name}: {one.answer}, {one.detail}"
        place = f"{block}-{number}"
        picture = el("a", el("img", src=one.uri, alt=text, title=text), href=f"#{place}")
        names = el("span", PurePosixPath(one.name).name, class_="name"), el("span", one.name, class_="path")
        caption = el("figcaption", el("b", one.answer), el("span", one.detail), names)
        close = el("a", "close", href=f"#{block}", class_="close")
        shown.append(el("figure", picture, caption, close, id=place, class_="wrong" if one.right is False else None))
    if gallery.of_class:
        head = el("h3", el("span", gallery.title), el("span", gallery.about, class_="about"))
    else:
        head = join(el("h3", gallery.title), el("p", gallery.about, class_="about"))
    files = None
    if not gallery.of_class:  # a list that can be copied
        listed = "\n".join(one.name for one in gallery.pictures)
        files = el("details", el("summary", "File names"), el("pre", listed))
    return el("div", head, el("div", shown, class_="pictures"), files, class_="gallery", id=block)
