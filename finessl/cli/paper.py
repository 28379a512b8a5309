"""finessl paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.grid import Format, engine_options, report
from finessl.cli.options import Plugins, Set, Text, Texts, note

if TYPE_CHECKING:
    from finessl.sweeps.paper.grid import Grid

Only = Annotated[Texts, typer.Option(help="Parts of the table: cifar100,N4,finessl …", show_default=False)]


@app.command()
@engine_options
def paper(
    *,
    table: Annotated[Text, typer.Argument(help="Table or figure of the paper. [default: list them all]")] = None,
    only: Only = None,
    seeds: Annotated[int, typer.Option(help="Runs per cell, each with its own labels and initial weights.", min=1)] = 3,
    scale: Annotated[str, typer.Option(help="Fraction of the paper's steps, such as 0.1 or 1/3.")] = "1",
    root: Annotated[Texts, typer.Option(help="Folder with the data sets, or NAME=DIR for one; repeatable.")] = None,
    weights: Annotated[
        Texts, typer.Option(help="CLIP ViT-B/16's weights, or BACKBONE=FILE; repeatable. [default: timm's hub]")
    ] = None,
    text_features: Annotated[Text, typer.Option(help="FILE.npy with the class names' features, for FFT†.")] = None,
    text_weights: Annotated[Text, typer.Option(help="CLIP ViT-B/16's text tower, for CoOp. [default: the hub]")] = None,
    set_: Set = None,
    plugin: Plugins = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/paper"),
    show_only: Annotated[bool, typer.Option("--show", help="Show what is finished; train nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be trained.")] = False,
    format_: Format = "table",
    how: dict[str, Any],
) -> None:
    """Reproduce the paper's tables and figures.

    Trains the grid behind a table and prints the results next to the paper's values.
    """
    from finessl.errors import FinesslError
    from finessl.models.aliases import BACKBONES
    from finessl.recipe import parse_setting
    from finessl.recipe.catalog import registry
    from finessl.sweeps.compare import axis_values
    from finessl.sweeps.paper import contents
    from finessl.sweeps.paper.grid import make_grid, read_scale
    from finessl.sweeps.paper.needs import Places, named_places
    from finessl.sweeps.paper.report import overview
    from finessl.sweeps.table import check_format, show

    check_format(format_)
    places = Places(
        named_places(root, "--root", registry("datasets").names()),
        named_places(weights, "--weights", list(BACKBONES)),
        text_features,
        text_weights,
    )
    changes = dict(map(parse_setting, set_ or [])) | ({"plugins": plugin} if plugin else {})
    if table is None and only:
        raise FinesslError("--only takes parts of one table: finessl paper TABLE --only …")
    if table is None and not show_only:
        show(overview(places), format_)
        return
    for name in contents.table_names() if table is None else [table]:
        grid = make_grid(
            contents.read_table(name), out, only=axis_values(",".join(only or [])), seeds=seeds, scale=read_scale(scale),
            changes=changes, places=places, train=not show_only,
        )  # fmt: skip
        run_grid(grid, how, format_, trains=not show_only and not dry_run, lists=dry_run)
        if table and not grid.cells and grid.missing() and not show_only and not dry_run:
            raise FinesslError(f"nothing of {name} could be run. Lacking: {'; '.join(grid.missing())}")


def run_grid(grid: Grid, how: dict[str, Any], format_: str, *, trains: bool, lists: bool) -> None:
    """Train the cells, or list them, and print the table."""
    from finessl.sweeps.engines import run_cells
    from finessl.sweeps.paper.report import tabulate
    from finessl.sweeps.table import show

    if lists:
        for cell in grid.cells:
            print(f"{'finished' if cell.run.finished() else f'{cell.recipe.train.steps:,} steps'}: {cell.run.path}")
    failed = run_cells(grid.cells, **how, log=note) if trains else {}
    if how["engine"] != "print":
        show(tabulate(grid), format_)
    report(failed, len(grid.cells))
