"""finessl compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.grid import Format, engine_options, report
from finessl.cli.options import Data, Fields, Plugins, Set, Text, Texts, note, recipe_options


@app.command(no_args_is_help=True)
@recipe_options(
    "root", "labels", "path_column", "label_column", "labels_per_class", "backbone", "weights", "steps", "image_size",
    "precision",
)  # fmt: skip
@engine_options
def compare(
    *,
    data: Data,
    methods: Annotated[Text, typer.Option(help="Methods, separated by commas, or all.")] = None,
    tunings: Annotated[Text, typer.Option(help="Tuning strategies, separated by commas, or all that fit.")] = None,
    backbones: Annotated[Text, typer.Option(help="Backbones, separated by commas.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds per cell.", min=1)] = 1,
    axis: Annotated[
        Texts, typer.Option(help="Any recipe field as an axis: --axis method.alpha=2,4,8; repeatable.")
    ] = None,
    recipe: Annotated[
        Text, typer.Option(help="Recipe file or name (finessl list recipes). [default for sample: demo]")
    ] = None,
    fields: Fields,
    set_: Set = None,
    plugin: Plugins = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the cells. [default: runs/compare-DATA]")] = None,
    format_: Format = "table",
    how: dict[str, Any],
) -> None:
    """Train a grid of runs and print its table.

    Shows mean ± standard deviation over seeds. Finished cells are skipped: the same command resumes the grid.
    """
    from finessl.api import make_recipe
    from finessl.recipe import parse_setting
    from finessl.sweeps import compare as grid
    from finessl.sweeps.engines import run_cells
    from finessl.sweeps.table import check_format, show

    check_format(format_)
    axes = read_axes(methods, tunings, backbones, axis or [])
    names = [grid.axis_label(axis) for axis in axes]
    axes["seed"] = axes.get("seed", list(range(seeds)))
    data = data.rstrip("/") or data  # photos/ and photos are one grid
    settings = dict(map(parse_setting, set_ or []))
    base = make_recipe(
        recipe or ("demo" if data == "sample" else None),
        fields,
        {"data.source": data, **settings},
        plugins=plugin or (),
        check=False,
    )
    folder = out or Path("runs") / f"compare-{Path(data).stem}"
    cells = grid.make_cells(base, axes, folder, settings)
    if tunings == "all":
        cells = grid.without_misfits(cells, note)
    failed = run_cells(cells, **how, log=note)
    if how["engine"] == "print":
        return
    seeds = len(axes["seed"])
    over = f"mean ± deviation over {seeds} seeds" if seeds > 1 else "1 seed"
    table = grid.tabulate(grid.summarise(cells), [name for name in names if name != "seed"], f"{data}: {over}")
    grid.save_summary(table, folder)
    show(table, format_)
    if methods and "supervised" not in axes["method.name"]:
        note("labeled images alone are not in the table: add supervised to --methods to see what the others gain")
    report(failed, len(cells))


def read_axes(methods: str | None, tunings: str | None, backbones: str | None, others: list[str]) -> dict[str, Any]:
    """Dotted name → values."""
    from finessl.errors import FinesslError
    from finessl.recipe import parse_setting
    from finessl.recipe.catalog import registry
    from finessl.sweeps.compare import axis_values

    axes: dict[str, Any] = {}
    for name, text, kind in (("method.name", methods, "methods"), ("tuning.name", tunings, "tunings")):
        if text:
            axes[name] = axis_values(text, registry(kind).names(), name)
    if backbones:
        axes["model.backbone"] = axis_values(backbones, None, "backbones")
    for setting in others:
        name, _, values = setting.partition("=")
        if not values.strip(", "):
            raise FinesslError(f"--axis {setting} should read FIELD=A,B, for example --axis method.alpha=2,4,8.")
        axes[name] = [parse_setting(f"{name}={value}")[1] for value in axis_values(values, None, name)]
    if not axes:
        raise FinesslError("nothing to compare: give --methods, --tunings, --backbones or --axis.")
    return axes
