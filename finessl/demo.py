"""The demo: real images, a small real backbone, 4 labels a class; labeled images alone, then FineSSL, on this machine.

finessl demo
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from finessl.compare import Cell, Row, make_cells, summarise
from finessl.recipe import Recipe
from finessl.training.loop import Settings, train

METHODS = ("supervised", "finessl")


@dataclass(frozen=True)
class Demo:
    cells: list[Cell]
    rows: list[Row]
    picture: Path
    report: Path


def run_demo(out: Path, *, seeds: int = 1, device: str = "auto", say: Callable[[str], None] = print) -> Demo:
    """Train both methods with the same budget for each seed, then draw what happened."""
    recipe = Recipe.read("demo")
    cells = make_cells(recipe, {"method.name": METHODS, "seed": list(range(seeds))}, out)
    for number, cell in enumerate(cells, 1):
        say(f"[{number}/{len(cells)}] {cell.recipe.method.name}, seed {cell.recipe.seed} → {cell.run.path}")
        train(cell.recipe, cell.run.path, Settings(device=device, log_every=5))
    from finessl.analysis.plots import demo_picture
    from finessl.analysis.report import write_report

    first = {cell.recipe.method.name: cell.run for cell in cells if cell.recipe.seed == 0}
    report = write_report([run.path for run in first.values()], out / "report.html")
    return Demo(cells, summarise(cells), demo_picture(first, out / "demo.png"), report)
