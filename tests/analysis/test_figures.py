"""Figures hold what the runs hold: lines, areas and bars are read back from the drawing, words from the SVG."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from finessl.analysis import figures
from finessl.analysis.runs import read_runs
from finessl.analysis.style import COLOURS, inline_svg, styled
from finessl.errors import FinesslError

from .conftest import diagnostics

Maker = Callable[..., Path]


def words(path: Path) -> str:
    """All text of an SVG."""
    return " ".join(ElementTree.parse(path).getroot().itertext())


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_every_figure_is_written_as_svg_and_png(make_run: Maker, tmp_path: Path) -> None:
    runs = [make_run("a", method="fixmatch"), make_run("b")]
    names = set(figures.FIGURES.names()) - {"sensitivity"}
    for name in sorted(names):
        svg, png = figures.draw(name, runs, tmp_path / "out")
        assert svg.name == f"{name}.svg" and png.name == f"{name}.png"
        with Image.open(png) as image:
            pixels = np.asarray(image.convert("RGB"))
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20, name  # not an empty sheet
        assert "fixmatch" in words(svg) or name == "confusion", name


def test_pseudo_labels_are_sorted_even_shares(make_run: Maker) -> None:
    outcomes = read_runs([make_run(rows=[diagnostics(5, [1, 1, 8]), diagnostics(10, [2, 6, 4])])])
    with styled():
        axes = figures.pseudo_labels(outcomes).axes[0]
    x, y = lines(axes)["finessl"]
    assert x == [0, 1, 2, 3]
    assert y == pytest.approx([6 * 3 / 12, 4 * 3 / 12, 2 * 3 / 12, 2 * 3 / 12])  # the last epoch's, largest first


def test_quality_is_accuracy_and_entropy_per_epoch(make_run: Maker) -> None:
    outcomes = read_runs([make_run()])
    with styled():
        left, right = figures.pseudo_label_quality(outcomes).axes
    assert lines(left)["finessl"] == ([5, 10], [0.6, 0.8])
    entropy = lambda *p: -sum(q * math.log(q) for q in p)  # noqa: E731
    assert lines(right)["finessl"][1] == pytest.approx([entropy(0.6, 0.3, 0.1), entropy(0.4, 0.3, 0.3)])


def test_confidence_by_labels_has_a_line_for_each_head(make_run: Maker) -> None:
    low, high = make_run("n4"), make_run("n25", rows=[diagnostics(10, [4, 3, 3], right=10)])
    meta = (high / "meta.json").read_text().replace('"labeled": 12', '"labeled": 75')
    (high / "meta.json").write_text(meta)
    with styled():
        axes = figures.confidence_by_labels(read_runs([low, high])).axes[0]
    drawn = lines(axes)
    assert drawn["finessl, vpt-deep"] == ([0, 1], pytest.approx([0.8 * 0.95 + 0.2 * 0.55, 0.95]))
    assert drawn["finessl, vpt-deep, DLS head"] == ([0, 1], pytest.approx([0.8 * 0.605 + 0.2 * 0.205, 0.605]))
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["N4", "N25"]


def test_rectified_confidence_uses_kappa_of_the_weighing_head(make_run: Maker) -> None:
    outcome = read_runs([make_run()])[0]
    found = figures.rectified(outcome)
    assert found is not None
    groups, kappa = found
    assert kappa == pytest.approx(0.8 / (0.8 * 0.605 + 0.2 * 0.205))
    assert groups["correct"][60] == 8 and groups["incorrect"][20] == 2
    # 8 right in (0.60, 0.65], 2 wrong in (0.20, 0.25]: ECE = 0.8 · (1 − 0.625) + 0.2 · 0.225
    assert figures.recorded_calibration(outcome) == pytest.approx(0.8 * 0.375 + 0.2 * 0.225)


def test_novel_images_get_their_own_histogram(make_run: Maker, tmp_path: Path) -> None:
    row = diagnostics(10, [4, 3, 3])
    row["confidence"]["novel"] = row["confidence"]["incorrect"]
    row["mean"]["confidence"]["novel"] = 0.55
    svg, _ = figures.draw("confidence", [make_run(rows=[row])], tmp_path / "out")
    assert "novel class (OOD)" in words(svg)


def test_sensitivity_finds_its_axis_and_groups_the_rest(make_run: Maker) -> None:
    runs = [
        make_run(f"{alpha}-{n}", right=right, fields={"method.alpha": alpha, "split.labels_per_class": n})
        for alpha, n, right in ((2.0, 4, 9), (4.0, 4, 10), (8.0, 4, 11), (2.0, 25, 15), (8.0, 25, 16))
    ]
    with styled():
        axes = figures.sensitivity(read_runs(runs)).axes[0]
    assert axes.get_xlabel() == "alpha"
    assert lines(axes) == {
        "labels 4": ([2, 4, 8], pytest.approx([9 / 18, 10 / 18, 11 / 18])),
        "labels 25": ([2, 8], pytest.approx([15 / 18, 16 / 18])),
    }


def test_sensitivity_asks_when_it_cannot_tell(make_run: Maker) -> None:
    with pytest.raises(FinesslError, match="--axis"):
        figures.sensitivity(read_runs([make_run()]))


def test_strategies_average_seeds(make_run: Maker) -> None:
    runs = [
        make_run(f"{tuning}{seed}", right=right, fields={"tuning.name": tuning, "seed": seed})
        for tuning, seed, right in (("linear", 0, 8), ("linear", 1, 10), ("lora", 0, 16))
    ]
    with styled():
        axes = figures.strategies(read_runs(runs)).axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([9 / 18, 16 / 18])
    assert axes.get_legend_handles_labels()[1] == ["linear", "lora"]


def test_series_differ_without_colour(make_run: Maker) -> None:
    """In grey, runs are told apart by dashes and markers."""
    runs = [make_run(str(k), fields={"seed": k}) for k in range(4)]
    with styled():
        axes = figures.pseudo_label_quality(read_runs(runs)).axes[0]
    looks = {(line._dash_pattern[1] and tuple(line._dash_pattern[1]), line.get_marker()) for line in axes.lines}
    assert len(looks) == 4


def test_nothing_to_draw_is_said(make_run: Maker, tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="recorded no pseudo-labels"):
        figures.draw("pseudo-labels", [make_run(rows=[])], tmp_path)
    with pytest.raises(FinesslError, match="did you mean confusion"):
        figures.draw("confusio", [], tmp_path)
    with pytest.raises(FinesslError, match="no recipe.toml"):
        figures.draw("confusion", [tmp_path / "nowhere"], tmp_path)


def test_a_page_can_recolour_an_inline_figure(make_run: Maker) -> None:
    with styled():
        text = inline_svg(figures.confusion(read_runs([make_run()])), 'a "quoted" < description')
    assert text.startswith("<svg viewBox=") and 'aria-label="a &quot;quoted&quot; &lt; description"' in text
    assert "var(--series-0)" in text and "var(--ink)" in text
    assert not any(colour in text for colour in COLOURS)
    assert "&lt;b&gt;birch&amp;co" in text  # a class name with markup stays text
    ElementTree.fromstring(text.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1))
