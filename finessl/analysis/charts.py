"""Charts, each on one pair of matplotlib axes. figures.py arranges them as in the paper, the report shows them singly.

Each function returns whether there was anything to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from finessl.analysis.style import COLOURS, DASHES, GROUPS, HATCHES, INK, MARKERS, MUTED, PAPER
from finessl.inference.metrics import Interval, Reliability

Series = tuple[np.ndarray, np.ndarray]
MAX_MARKED = 12  # points of a line that get a marker each
BINS_PER_BAR = 5  # recorded bins of confidence in a bar of a histogram
NAMED = 25  # classes whose names fit on an axis
NAMES = {"novel": "novel class (OOD)", "unknown": "class not known"}


def draw_lines(
    axes: Any, series: Mapping[str, Series], xlabel: str, ylabel: str, *, percent: bool = False, whole: bool = False
) -> bool:
    """One line per name. A name without points keeps its colour: a run has one colour in all charts.

    series: name → (x, y).   percent: y is a share.   whole: the axis shows 0 to 100 %.
    """
    for number, (name, (x, y)) in enumerate(series.items()):
        if len(x):
            colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
            mark = MARKERS[number % len(MARKERS)] if len(x) <= MAX_MARKED else None
            axes.plot(x, y, linestyle=dash, color=colour, marker=mark, label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if xlabel == "step":
        axes.set_xlim(left=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
    if percent:
        as_percent(axes.yaxis)
        flat = len(axes.lines) and np.ptp(np.concatenate([line.get_ydata() for line in axes.lines])) < 0.005
        if whole or flat:  # equal values: show the whole scale, not rounding errors
            axes.set_ylim(0, 1.05)
    finish(axes, always=len(series) > 1)
    return bool(axes.lines)


def draw_shares(axes: Any, counts: Mapping[str, np.ndarray | None], classes: Sequence[str] = ()) -> bool:
    """Frequency of each class among the pseudo-labels, most favoured first, relative to an even share: a flat line at 1 has no
    bias.   counts: run → [C].   classes: names; with them all runs have the order of the last one."""
    order = None
    if classes and (last := [values for values in counts.values() if values is not None]):
        order = np.argsort(-last[-1], kind="stable")
    for number, (name, values) in enumerate(counts.items()):
        if values is None:
            continue
        ranked = np.sort(values)[::-1] if order is None else values[order]
        share = ranked * len(values) / values.sum()
        x = np.arange(len(share) + 1)
        y = np.append(share, share[-1])
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        axes.fill_between(x, y, step="post", color=colour, alpha=0.16, linewidth=0)
        axes.step(x, y, where="post", color=colour, linestyle=dash, label=name)
    if not axes.lines:
        return False
    axes.axhline(1, color=MUTED, lw=0.9)
    axes.annotate("even", (1, 1), (-2, 3), ("axes fraction", "data"), "offset points", ha="right", color=MUTED)
    axes.set(xlabel="classes, most favoured first", ylabel="pseudo-labels, in even shares")
    axes.set_xlim(0, max(len(values) for values in counts.values() if values is not None))
    axes.set_ylim(bottom=0)
    if order is None:
        axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        name_classes(axes, np.arange(len(order)) + 0.5, [classes[k] for k in order])
    finish(axes, always=len(counts) > 1)
    return True


def draw_groups(axes: Any, bins: Mapping[str, np.ndarray], xlabel: str, scale: float = 1.0) -> bool:
    """Histograms of confidence per group of images, as shares of the group.   scale: factor of the confidence (κ)."""
    for group, counts in bins.items():
        colour, dash, hatch = GROUPS[group]
        share = counts.reshape(-1, BINS_PER_BAR).sum(1) / counts.sum()
        edges = np.linspace(0, scale, len(share) + 1)
        axes.stairs(share, edges, fill=True, color=colour, alpha=0.2, hatch=hatch or None, edgecolor=colour, lw=0)
        axes.stairs(share, edges, color=colour, linestyle=dash, lw=1.6, label=NAMES.get(group, group))
    axes.set(xlabel=xlabel, ylabel="share of the group")
    axes.set_xlim(0, max(1.0, scale))
    as_percent(axes.xaxis)
    as_percent(axes.yaxis)
    finish(axes)
    return bool(bins)


def draw_reliability(axes: Any, runs: Mapping[str, Reliability | None]) -> bool:
    """Accuracy against confidence: below the diagonal, the model claims too much."""
    axes.plot([0, 1], [0, 1], color=MUTED, lw=0.9, zorder=1)
    axes.annotate("as sure as right", (0.03, 0.03), rotation=45, rotation_mode="anchor", xytext=(0, 5),
                  textcoords="offset points", color=MUTED, transform_rotates_text=True)  # fmt: skip
    for number, (name, bins) in enumerate(runs.items()):
        if bins is None:
            continue
        filled = bins.images > 0
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        mark = MARKERS[number % len(MARKERS)]
        axes.plot(bins.confidence[filled], bins.accuracy[filled], linestyle=dash, color=colour, lw=1.2, label=name)
        size = 8 + 110 * bins.images[filled] / bins.images.sum()
        axes.scatter(bins.confidence[filled], bins.accuracy[filled], s=size, color=colour, marker=mark, zorder=3, lw=0)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    as_percent(axes.xaxis)
    as_percent(axes.yaxis)
    finish(axes, always=len(runs) > 1)
    return bool(axes.collections)


def draw_bars(
    axes: Any,
    places: Sequence[str],
    bars: Mapping[str, Sequence[float | None]],
    ylabel: str,
    intervals: Mapping[str, Sequence[Interval | None]] | None = None,
) -> bool:
    """Groups of bars: `bars[name][i]` belongs to the group `places[i]`."""
    width = 0.8 / max(len(bars), 1)
    for number, (name, values) in enumerate(bars.items()):
        x = np.arange(len(places)) + (number - (len(bars) - 1) / 2) * width
        y = np.array([np.nan if value is None else value for value in values], float)
        colour, hatch = COLOURS[number % len(COLOURS)], HATCHES[number % len(HATCHES)]
        axes.bar(x, y, width * 0.92, color=colour, hatch=hatch, edgecolor=PAPER, lw=0, label=name)
        for at, value, interval in zip(x, y, (intervals or {}).get(name, [None] * len(x)), strict=True):
            if interval is not None:
                axes.plot([at, at], interval, color=INK, lw=1.1)
            if np.isfinite(value):
                top = value if interval is None else max(value, interval.high)
                text = f"{100 * value:.1f}"
                axes.annotate(text, (at, top), (0, 2), textcoords="offset points", ha="center", fontsize=8, color=INK)
    axes.set_xticks(np.arange(len(places)), places)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(ylabel)
    as_percent(axes.yaxis)
    finish(axes, always=len(bars) > 1)
    return bool(bars)


def draw_columns(axes: Any, names: Sequence[str], values: np.ndarray, ylabel: str) -> bool:
    """One bar per class, tallest first."""
    order = np.argsort(-values, kind="stable")
    axes.bar(np.arange(len(values)), values[order], 0.72, color=COLOURS[0], lw=0)
    name_classes(axes, np.arange(len(values)), [names[k] for k in order])
    axes.set_ylabel(ylabel)
    return True


def name_classes(axes: Any, places: np.ndarray, names: Sequence[str]) -> None:
    shown = [shorten(name, 12) for name in names]
    axes.set_xticks(places, shown, rotation=45, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", length=0)


def draw_confusion(axes: Any, table: np.ndarray, classes: Sequence[str]) -> bool:
    """Rows are true classes; a cell is the share of the row's images. Dark on the diagonal is good."""
    from matplotlib.patches import Rectangle

    share = table / np.maximum(table.sum(1, keepdims=True), 1)
    count = len(classes)
    axes.grid(False)
    for (i, j), value in np.ndenumerate(share):
        if table[i, j]:
            colour = COLOURS[0] if i == j else COLOURS[1]
            shade = 0.08 + 0.92 * float(value)
            axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=colour, alpha=shade, edgecolor="none"))
            if count <= 12:
                axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=8,
                          color=PAPER if value > 0.55 else INK)  # fmt: skip
    axes.set(
        xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), xlabel="predicted class", ylabel="true class", aspect=1
    )
    names = [shorten(name) for name in classes]
    axes.set_xticks(range(count), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(count), names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return True


def finish(axes: Any, always: bool = False) -> None:
    """A legend above the axes if there is more than one name.   always: also for one."""
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1 or (always and names):
        columns = 1 if max(map(len, names)) > 26 else 2 if len("".join(names)) > 32 else 3
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.4)


def as_percent(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")


def shorten(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
