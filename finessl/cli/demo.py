"""finessl demo: real images, a small real backbone, 4 labels per class; labeled images alone, then FineSSL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finessl.cli import app
from finessl.cli.options import Device
from finessl.runtime.callbacks import Log

if TYPE_CHECKING:
    from finessl.sweeps.compare import Cell, Row

METHODS = ("supervised", "finessl")


@dataclass(frozen=True)
class Demo:
    cells: list[Cell]
    rows: list[Row]
    picture: Path
    report: Path
    frozen: list[float]  # accuracy of the answers from frozen features, one per seed


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the runs and the picture.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="Number of seeds; more than one: mean ± standard deviation.", min=1)] = 1,
    device: Device = "auto",
) -> None:
    """Train on the sample images that come with the package.

    4 labels per class, a small backbone; two to four minutes on two CPU cores.
    """
    from finessl.sweeps.compare import tabulate
    from finessl.sweeps.table import show

    result = run_demo(out, seeds=seeds, device=device)
    title = f"sample: 10 classes, 4 labels each, {seeds} seed{'s' if seeds > 1 else ''}"
    show(tabulate(result.rows, ["method"], title))
    frozen = sum(result.frozen) / seeds
    print(f"without training, from frozen features (finessl quick): {frozen:.2%}, in seconds")
    print(f"picture: {result.picture}")
    print(f"your turn: finessl train YOUR_FOLDER   or   finessl predict {result.cells[-1].run.path} IMAGE.jpg")
    print(f"report: {result.report.resolve()}")


def run_demo(out: Path, *, seeds: int = 1, device: str = "auto", log: Log = print) -> Demo:
    """Solve for frozen features and train both methods with the same steps, for each seed; then draw what happened."""
    from finessl.analysis.plots import demo_picture
    from finessl.analysis.report import write_report
    from finessl.recipe import Recipe
    from finessl.sweeps.compare import make_cells, summarise
    from finessl.training.loop import Settings, train
    from finessl.training.quick import quick

    recipe, frozen = Recipe.read("demo"), []
    for seed in range(seeds):
        log(f"frozen features, seed {seed} → {out / f'quick-s{seed}'}")
        seeded = recipe.model_copy(update={"seed": seed})
        answer = quick(seeded, out / f"quick-s{seed}", [(recipe.model.backbone, None)], device=device)
        frozen.append(answer.test_accuracy(answer.chosen, answer.candidate) or 0.0)
    cells = make_cells(recipe, {"method.name": METHODS, "seed": list(range(seeds))}, out)
    for number, cell in enumerate(cells, 1):
        log(f"[{number}/{len(cells)}] {cell.recipe.method.name}, seed {cell.recipe.seed} → {cell.run.path}")
        train(cell.recipe, cell.run.path, Settings(device=device, log_every=5))
    first = {cell.recipe.method.name: cell.run for cell in cells if cell.recipe.seed == 0}
    report = write_report([run.path for run in first.values()], out / "report.html")
    return Demo(cells, summarise(cells), demo_picture(first, out / "demo.png"), report, frozen)
