"""finessl compare, finessl paper, finessl resume: grids of runs, and one run of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.train import LABEL_COLUMN_HELP, PATH_COLUMN_HELP, Plugins

Text = str | None
Texts = list[str] | None
Only = Annotated[Texts, typer.Option(help="Parts of the table: cifar100,N4,finessl …", show_default=False)]
Format = Annotated[str, typer.Option("--format", help="table, markdown, csv, json or latex.")]
Jobs = Annotated[int, typer.Option(help="Cells at a time on this machine.", min=1)]
Retries = Annotated[int, typer.Option(help="Retry a failed cell up to N times, from its checkpoint.", min=0)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda …")]
Engine = Annotated[
    str, typer.Option(help="local; ray: tasks of a cluster; print: one command per cell, for your queue.")
]
Address = Annotated[Text, typer.Option(help="Of a running Ray cluster, or auto. (default: one started here)")]
Cpus = Annotated[float, typer.Option(help="Ray: CPUs per cell.")]
Gpus = Annotated[float | None, typer.Option(help="Ray: GPUs per cell, or a fraction of one. (default: 1 if available)")]


@app.command(no_args_is_help=True)
def resume(
    run: Annotated[Path, typer.Argument(help="Run directory with a recipe.toml.", show_default=False)],
    data: Annotated[Text, typer.Option(help="Folder or table with the data, if it moved.")] = None,
    root: Annotated[Text, typer.Option(help="Folder containing the named data set, if it moved.")] = None,
    weights: Annotated[Text, typer.Option(help="The backbone's weights, if they moved.")] = None,
    plugin: Plugins = None,
    device: Device = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Resume a run from its directory.

    A finished run is left as it is. The plug-ins that its recipe records are imported.
    """
    from finessl.cli.train import show_summary
    from finessl.recipe import Recipe, override
    from finessl.registry import plugins
    from finessl.runs.directory import RunDirectory
    from finessl.training.loop import Settings, train
    from finessl.training.quick import METHOD as QUICK

    plugins.load(plugin or ())
    directory = RunDirectory(run)
    recipe = directory.recipe()
    if recipe.method.name == QUICK and directory.finished():  # no training method: there is nothing to resume
        note(f"{run} is finished: nothing to do. finessl quick wrote it.")
        return
    moved = {"data.source": data, "data.root": root, "model.weights": weights}
    if given := {name: place for name, place in moved.items() if place is not None}:
        tree = recipe.tree()
        override(tree, given, "finessl resume")
        recipe = Recipe.from_tree(tree, check=False)
    meta = train(recipe, run, Settings(device=device, quiet=quiet))
    if meta and not quiet:
        show_summary(run, meta)


@app.command(no_args_is_help=True)
def compare(
    data: Annotated[str, typer.Argument(help="As for finessl train.", show_default=False)],
    methods: Annotated[Text, typer.Option(help="Names separated by commas, or 'all'.")] = None,
    tunings: Annotated[Text, typer.Option(help="Names separated by commas, or 'all' that fit the backbone.")] = None,
    backbones: Annotated[Text, typer.Option(help="Names separated by commas.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds per cell.", min=1)] = 1,
    axis: Annotated[Texts, typer.Option(help="Any recipe field as an axis: --axis method.alpha=2,4,8")] = None,
    recipe: Annotated[Text, typer.Option(help="Recipe file or name. (default: demo's for sample)")] = None,
    root: Annotated[Text, typer.Option(help="Folder containing the named data set.")] = None,
    path_column: Annotated[Text, typer.Option(help=PATH_COLUMN_HELP)] = None,
    label_column: Annotated[Text, typer.Option(help=LABEL_COLUMN_HELP)] = None,
    labels_per_class: Annotated[
        int | None,
        typer.Option("--labels-per-class", "-n", help="Keep N labels per class and treat the rest as unlabeled."),
    ] = None,
    backbone: Annotated[Text, typer.Option(help="One for all cells.")] = None,
    weights: Annotated[Text, typer.Option(help="The backbone's weights.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    set_: Annotated[Texts, typer.Option("--set", help="Any recipe field, for all cells.")] = None,
    plugin: Plugins = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the cells. (default: runs/compare-DATA)")] = None,
    format_: Format = "table",
    jobs: Jobs = 1,
    device: Device = "auto",
    retries: Retries = 1,
    engine: Engine = "local",
    address: Address = None,
    cpus: Cpus = 1,
    gpus: Gpus = None,
) -> None:
    """Train a grid of runs and print its table.

    Shows mean ± standard deviation over seeds. Finished cells are skipped: the same command resumes the grid.
    """
    from finessl.api import make_recipe
    from finessl.errors import FinesslError
    from finessl.recipe import parse_setting
    from finessl.recipe.catalog import registry
    from finessl.registry import plugins
    from finessl.sweeps import compare as grid
    from finessl.sweeps.engines import run_cells
    from finessl.sweeps.table import check_format, show

    check_format(format_)
    plugins.load(plugin or ())
    axes: dict[str, Any] = {}
    for name, text, kind in (("method.name", methods, "methods"), ("tuning.name", tunings, "tunings")):
        if text:
            axes[name] = grid.axis_values(text, registry(kind).names(), name)
    if backbones:
        axes["model.backbone"] = grid.axis_values(backbones, None, "backbones")
    for setting in axis or []:
        name, _, values = setting.partition("=")
        if not values.strip(", "):
            raise FinesslError(f"--axis {setting} should read FIELD=A,B, for example --axis method.alpha=2,4,8.")
        axes[name] = [parse_setting(f"{name}={value}")[1] for value in grid.axis_values(values, None, name)]
    if not axes:
        raise FinesslError("nothing to compare: give --methods, --tunings, --backbones or --axis.")
    names = [grid.short(axis) for axis in axes]
    axes["seed"] = axes.get("seed", list(range(seeds)))
    data = data.rstrip("/") or data  # photos/ and photos are one grid
    settings = dict(map(parse_setting, set_ or []))
    base = make_recipe(
        recipe or ("demo" if data == "sample" else None),
        dict(
            root=root,
            path_column=path_column,
            label_column=label_column,
            labels_per_class=labels_per_class,
            backbone=backbone,
            weights=weights,
            steps=steps,
        ),
        {"data.source": data, **settings},
        plugins=plugin or (),
        check=False,
    )
    folder = out or Path("runs") / f"compare-{Path(data).stem}"
    cells = grid.make_cells(base, axes, folder, settings)
    if tunings == "all":
        cells = grid.without_misfits(cells, note)
    failed = run_cells(
        cells, engine=engine, jobs=jobs, device=device, retries=retries, address=address, cpus=cpus, gpus=gpus, say=note
    )
    if engine == "print":
        return
    table = grid.tabulate(
        grid.summarise(cells), [name for name in names if name != "seed"], f"{data}: {count_seeds(len(axes['seed']))}"
    )
    grid.save_summary(table, folder)
    show(table, format_)
    if methods and "supervised" not in axes["method.name"]:
        note("labeled images alone are not in the table: add supervised to --methods to see what the others gain")
    report(failed, len(cells))


@app.command()
def paper(
    table: Annotated[Text, typer.Argument(help="A table's name. (default: list them all)")] = None,
    only: Only = None,
    seeds: Annotated[
        int, typer.Option(help="Runs per table cell, each with its own labels and initial weights.", min=1)
    ] = 3,
    scale: Annotated[str, typer.Option(help="Fraction of the paper's steps: 0.1, 1/3 …")] = "1",
    root: Annotated[Texts, typer.Option(help="Folder with the data sets, or NAME=DIR for one; repeatable.")] = None,
    weights: Annotated[
        Texts, typer.Option(help="CLIP ViT-B/16's weights, or BACKBONE=FILE; repeatable. Otherwise timm's hub.")
    ] = None,
    text_features: Annotated[Text, typer.Option(help="FILE.npy with the class names' features, for FFT†.")] = None,
    text_weights: Annotated[Text, typer.Option(help="CLIP ViT-B/16's text tower, for CoOp. Otherwise the hub.")] = None,
    set_: Annotated[Texts, typer.Option("--set", help="Any recipe field, for all cells: --set train.lr=3e-4")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/paper"),
    show_only: Annotated[bool, typer.Option("--show", help="Train nothing: show what is finished.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be trained.")] = False,
    format_: Format = "table",
    jobs: Jobs = 1,
    device: Device = "auto",
    retries: Retries = 1,
    engine: Engine = "local",
    address: Address = None,
    cpus: Cpus = 1,
    gpus: Gpus = None,
) -> None:
    """Reproduce the paper's tables and figures.

    Trains the grid behind a table and prints the results next to the paper's values.
    """
    from finessl.errors import FinesslError
    from finessl.models.aliases import BACKBONES
    from finessl.recipe import parse_setting
    from finessl.recipe.catalog import registry
    from finessl.sweeps.compare import axis_values
    from finessl.sweeps.engines import run_cells
    from finessl.sweeps.paper import contents
    from finessl.sweeps.paper import report as reports
    from finessl.sweeps.paper.grid import make_grid, read_scale
    from finessl.sweeps.paper.needs import Places, named_places
    from finessl.sweeps.table import check_format, show

    check_format(format_)
    places = Places(
        named_places(root, "--root", registry("datasets").names()),
        named_places(weights, "--weights", list(BACKBONES)),
        text_features,
        text_weights,
    )
    if table is None and only:
        raise FinesslError("--only takes parts of one table: finessl paper TABLE --only …")
    if table is None and not show_only:
        show(reports.overview(places), format_)
        return
    for name in contents.table_names() if table is None else [table]:
        grid = make_grid(
            contents.read_table(name), out, only=axis_values(",".join(only or [])), seeds=seeds, scale=read_scale(scale),
            changes=dict(map(parse_setting, set_ or [])), places=places, train=not show_only,
        )  # fmt: skip
        failed: dict[str, str] = {}
        if dry_run:
            for cell in grid.cells:
                print(f"{'finished' if cell.run.finished() else f'{cell.recipe.train.steps:,} steps'}: {cell.run.path}")
        elif not show_only:
            failed = run_cells(
                grid.cells, engine=engine, jobs=jobs, device=device, retries=retries,
                address=address, cpus=cpus, gpus=gpus, say=note,
            )  # fmt: skip
        if engine != "print":
            show(reports.tabulate(grid), format_)
        report(failed, len(grid.cells))
        if table and not grid.cells and grid.missing() and not show_only and not dry_run:
            raise FinesslError(f"nothing of {name} could be run. Lacking: {'; '.join(grid.missing())}")


def report(failed: dict[str, str], cells: int) -> None:
    from finessl.errors import FinesslError

    if failed:
        raise FinesslError(
            f"{len(failed)} of {cells} cells failed ({'; '.join(f'{name}: {why}' for name, why in failed.items())}). "
            "The same command tries them again."
        )


def count_seeds(seeds: int) -> str:
    return f"mean ± deviation over {seeds} seeds" if seeds > 1 else "1 seed"


def note(message: str) -> None:
    """Aside from the table, which may go to a file."""
    print(message, file=sys.stderr)


def show_rows(rows: list[Any], names: list[str], title: str) -> None:
    """A grid's rows on the terminal."""
    from finessl.sweeps.compare import tabulate
    from finessl.sweeps.table import show

    show(tabulate(rows, names, title))
