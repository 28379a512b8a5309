"""Style of charts: a colour-blind safe palette (Okabe and Ito), with dashes, markers and hatches for grey; SVG whose colours
are CSS variables, so that a chart follows the page's light or dark scheme."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++", "oo")
INK, MUTED, GRID, PAPER = "#1b1f24", "#5f6772", "#dfe2e6", "#fefefe"
GROUPS = {  # groups of images: colour, dash, hatch
    "correct": (COLOURS[0], "-", ""),
    "incorrect": (COLOURS[1], "--", "////"),
    "novel": (COLOURS[2], "-.", "...."),
    "unknown": (COLOURS[6], ":", ""),
}
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--rule", PAPER: "--paper"} | {
    colour: f"--series-{k}" for k, colour in enumerate(COLOURS)
}
SETTINGS: dict[str, Any] = {
    "font.family": ["Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "text.parse_math": False,  # a class may be called $x$
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.4,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
    "svg.hashsalt": "finessl",  # the same figure gives the same file
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    import logging

    import matplotlib

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # not every machine has every font
    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        yield


def canvas(width: float, height: float) -> Any:
    """A matplotlib figure of this size in inches, without a display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write name.svg and name.png."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=200)
    return paths


def inline_svg(figure: Any, description: str) -> str:
    """An <svg> element for a page, with CSS variables as colours and the width of its column."""
    import html

    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'<metadata>.*?</metadata>|<style type="text/css">.*?</style>|<!--.*?-->', "", text, flags=re.S)
    text = re.sub(
        r' id="(figure|patch|axes|matplotlib|text|line2d|xtick|ytick|legend|Quad|Fill|Line|Poly)[^"]*"', "", text
    )
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    label = html.escape(description, quote=True)
    return re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{label}">', text, count=1
    )
