"""finessl demo, finessl compare, finessl resume, finessl probe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli import app


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the runs and the picture go.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="Repeat with so many seeds: mean ± deviation.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """See it work: 4 labels a class, real images, the small backbone inside the package; two minutes on a laptop."""
    from finessl.demo import run_demo

    result = run_demo(out, seeds=seeds, device=device)
    show_rows(result.rows, ["method"], f"sample: 10 classes, 4 labels each, {seeds} seed{'s' if seeds > 1 else ''}")
    print(f"picture: {result.picture}")
    print(f"your turn: finessl train YOUR_FOLDER   or   finessl predict {result.cells[-1].run.path} IMAGE.jpg")


@app.command(no_args_is_help=True)
def resume(
    run: Annotated[Path, typer.Argument(help="Run directory with a recipe.toml.", show_default=False)],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only errors.")] = False,
) -> None:
    """Go on with a run from its directory alone; a finished one is left as it is."""
    from finessl.cli.train import show_summary
    from finessl.training.loop import Settings, train
    from finessl.training.rundir import RunDirectory

    meta = train(RunDirectory(run).recipe(), run, Settings(device=device, quiet=quiet))
    if meta and not quiet:
        show_summary(run, meta)


@app.command(no_args_is_help=True)
def compare(
    data: Annotated[str, typer.Argument(help="As for finessl train.", show_default=False)],
    methods: Annotated[str | None, typer.Option(help="Names separated by commas, or 'all'.")] = None,
    tunings: Annotated[
        str | None, typer.Option(help="Names separated by commas, or 'all' that fit the backbone.")
    ] = None,
    backbones: Annotated[str | None, typer.Option(help="Names separated by commas.")] = None,
    seeds: Annotated[int, typer.Option(help="So many seeds a cell.", min=1)] = 1,
    axis: Annotated[
        list[str] | None, typer.Option(help="Any recipe field as an axis: --axis method.alpha=2,4,8")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe file or name. [default: demo's for sample]")] = None,
    root: Annotated[str | None, typer.Option(help="Where a named data set lies.")] = None,
    labels_per_class: Annotated[
        int | None, typer.Option("--labels-per-class", "-n", help="Labels kept a class.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="The backbone's weights.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any recipe field, for all cells.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the cells go. [default: runs/compare-DATA]")] = None,
    jobs: Annotated[int, typer.Option(help="Cells at a time.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    engine: Annotated[
        str, typer.Option(help="local, or print: one command a cell, for a queue of your own.")
    ] = "local",
) -> None:
    """A grid of runs and its table: mean ± deviation over seeds. Finished cells are skipped, so it resumes."""
    from finessl import compare as grid
    from finessl.api import make_recipe
    from finessl.catalog import registry
    from finessl.errors import FinesslError
    from finessl.recipe import parse_setting

    axes: dict[str, Any] = {}
    for name, text, kind in (("method.name", methods, "methods"), ("tuning.name", tunings, "tunings")):
        if text:
            axes[name] = grid.axis_values(text, registry(kind).names(), name)
    if backbones:
        axes["model.backbone"] = grid.axis_values(backbones, None, "backbones")
    for setting in axis or []:
        name, _, values = setting.partition("=")
        axes[name] = [parse_setting(f"{name}={value}")[1] for value in grid.axis_values(values, None, name)]
    if not axes:
        raise FinesslError("nothing to compare: give --methods, --tunings, --backbones or --axis.")
    axes["seed"] = list(range(seeds))
    fields = dict(root=root, labels_per_class=labels_per_class, weights=weights, steps=steps)
    base = make_recipe(
        recipe or ("demo" if data == "sample" else None),
        fields,
        {"data.source": data, **dict(map(parse_setting, set_ or []))},
    )
    folder = out or Path("runs") / f"compare-{Path(data).stem}"
    cells = grid.make_cells(base, axes, folder)
    if engine == "print":
        for cell in cells:
            cell.run.open(cell.recipe)
            print(" ".join(grid.cell_command(cell, device)))
        return
    if engine != "local":
        raise FinesslError(f"--engine {engine}: choose local or print.")
    failed = grid.run_cells(cells, jobs=jobs, device=device)
    names = [axis.removesuffix(".name").split(".")[-1] for axis in axes if axis != "seed"]
    show_rows(grid.summarise(cells), names, f"{data}: mean ± deviation over {seeds} seed{'s' if seeds > 1 else ''}")
    if failed:
        raise FinesslError(
            f"{len(failed)} of {len(cells)} cells failed ({', '.join(failed)}); each has an error.log. "
            "The same command tries them again."
        )


def show_rows(rows: list[Any], names: list[str], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for name in ("accuracy", "pseudo-label accuracy", "mean confidence", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        shown = [
            row.show("accuracy"),
            row.show("pseudo_accuracy"),
            row.show("confidence"),
            row.show("seconds", "{:.0f}"),
        ]
        table.add_row(*map(str, row.group), *shown)
    Console().print(table)


@app.command(no_args_is_help=True)
def probe(
    data: Annotated[str, typer.Argument(help="A source with train and test images.", show_default=False)],
    root: Annotated[str | None, typer.Option(help="Where a named data set lies.")] = None,
    backbone: Annotated[str, typer.Option(help="Alias or timm name.")] = "embedded",
    weights: Annotated[str | None, typer.Option(help="The backbone's weights.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels at the input.")] = None,
    labels_per_class: Annotated[
        int, typer.Option("--labels-per-class", "-n", help="For the few-label prototypes.")
    ] = 4,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How good a backbone's frozen features are for some data: k-NN, linear probe, few-label prototypes."""
    from dataclasses import asdict

    from finessl.probe import probe as measure
    from finessl.training.loop import resolve_device
    from finessl.training.progress import Display
    from finessl.training.step import resolve_precision

    target = resolve_device(device)
    with Display() as display:
        result = measure(
            data, root=root, backbone=backbone, weights=weights, image_size=image_size, device=target,
            labels_per_class=labels_per_class, precision=resolve_precision("auto", target), progress=display.update,
        )  # fmt: skip
    if json_:
        import json

        print(json.dumps(asdict(result)))
        return
    print(f"{backbone} on {data}: {result.train_images:,} training and {result.test_images:,} test images")
    print(f"  k-NN (k = 20)                  {result.knn:.2%}")
    print(f"  linear probe                   {result.linear:.2%}")
    mean, deviation = result.prototypes or (0.0, 0.0)
    print(f"  class means of {result.labels_per_class} labels each   {mean:.2%} ± {deviation:.2%} (10 seeds)")
