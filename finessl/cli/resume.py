"""finessl resume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app
from finessl.cli.options import Compile, Device, Moved, Plugins, Quiet, Text, note


@app.command(no_args_is_help=True)
def resume(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    data: Annotated[Text, typer.Option(help="Folder or table with the data, if it moved.")] = None,
    root: Annotated[Text, typer.Option(help="Folder containing the named data set, if it moved.")] = None,
    weights: Moved = None,
    plugin: Plugins = None,
    device: Device = "auto",
    compile_: Compile = None,
    quiet: Quiet = False,
) -> None:
    """Resume a run from its directory.

    A finished run is left as it is. The plug-ins that its recipe records are imported.
    """
    from finessl.cli.train import show_summary
    from finessl.runs.directory import RunDirectory
    from finessl.training.loop import Settings, train
    from finessl.training.quick import METHOD as QUICK

    directory = RunDirectory(run)
    recipe = directory.recipe()
    if recipe.method.name == QUICK and directory.finished():  # no training method: there is nothing to resume
        note(f"{run} is finished: nothing to do. finessl quick wrote it.")
        return
    moved = {"data.source": data, "data.root": root, "model.weights": weights}
    if given := {name: place for name, place in moved.items() if place is not None}:
        recipe = recipe.with_fields(given, "finessl resume", check=False)
    meta = train(recipe, run, Settings(device=device, compile=compile_, quiet=quiet))
    if meta and not quiet:
        show_summary(run, meta)
