"""finessl demo: real images, a small real backbone, 4 labels per class; labeled images alone, then FineSSL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app
from finessl.cli.options import Device

METHODS = ("supervised", "finessl")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the runs and the picture.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="Number of seeds; more than one: mean ± standard deviation.", min=1)] = 1,
    device: Device = "auto",
) -> None:
    """Train on the sample images that come with the package.

    4 labels per class, a small backbone; two to six minutes on two CPU cores.
    """
    from statistics import mean

    from finessl.analysis.plots import demo_picture
    from finessl.analysis.report import write_report
    from finessl.recipe import Recipe
    from finessl.sweeps.compare import make_cells, summarise, tabulate
    from finessl.sweeps.table import show
    from finessl.training.loop import Settings, train
    from finessl.training.quick import quick

    recipe, frozen = Recipe.read("demo"), []
    for seed in range(seeds):
        print(f"frozen features, seed {seed} → {out / f'quick-s{seed}'}")
        seeded = recipe.model_copy(update={"seed": seed})
        answer = quick(seeded, out / f"quick-s{seed}", [(recipe.model.backbone, None)], device=device)
        frozen.append(answer.test_accuracy(answer.chosen, answer.candidate) or 0.0)
    cells = make_cells(recipe, {"method.name": METHODS, "seed": list(range(seeds))}, out)
    for number, cell in enumerate(cells, 1):
        print(f"[{number}/{len(cells)}] {cell.recipe.method.name}, seed {cell.recipe.seed} → {cell.run.path}")
        train(cell.recipe, cell.run.path, Settings(device=device, log_every=5))
    first = {cell.recipe.method.name: cell.run for cell in cells if cell.recipe.seed == 0}
    report = write_report([run.path for run in first.values()], out / "report.html")
    title = f"sample: 10 classes, 4 labels each, {seeds} seed{'s' if seeds > 1 else ''}"
    show(tabulate(summarise(cells), ["method"], title))
    print(f"without training, from frozen features (finessl quick): {mean(frozen):.2%}, in seconds")
    print(f"picture: {demo_picture(first, out / 'demo.png')}")
    print(f"your turn: finessl train YOUR_FOLDER   or   finessl predict {cells[-1].run.path} IMAGE.jpg")
    print(f"report: {report.resolve()}")
