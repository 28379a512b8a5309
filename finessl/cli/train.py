"""finessl train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.options import Compile, Data, Device, Fields, Plugins, Quiet, Set, Text, recipe_options


@app.command(no_args_is_help=True)
@recipe_options()
def train(
    *,
    data: Data,
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory. The same command again resumes it. [default: runs/DATA-METHOD-sSEED]"),
    ] = None,
    recipe: Annotated[
        Text, typer.Option(help="Recipe file, or the name of a shipped recipe (finessl list recipes).")
    ] = None,
    fields: Fields,
    set_: Set = None,
    plugin: Plugins = None,
    device: Device = "auto",
    compile_: Compile = None,
    eval_every: Annotated[
        int | None,
        typer.Option(help="Steps between evaluations; 0: only at the end. [default: about ten evaluations]"),
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Maximum seconds between checkpoints.")] = 120.0,
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for decoded images that do not fit into memory (see finessl cache)."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train a classifier from a few labels and a pile of images."""
    from finessl.api import make_recipe
    from finessl.recipe import parse_setting
    from finessl.training.loop import Settings
    from finessl.training.loop import train as run

    settings = Settings(
        device=device,
        compile=compile_,
        eval_every=eval_every,
        checkpoint_seconds=checkpoint_seconds,
        cache_dir=cache_dir,
        quiet=quiet,
    )
    more = {"data.source": data, **dict(map(parse_setting, set_ or []))}
    made = make_recipe(recipe, fields, more, plugins=plugin or (), source=True)
    folder = out or default_out(data, made.method.name, made.seed)
    meta = run(made, folder, settings)
    if meta and not quiet:
        show_summary(folder, meta)


def default_out(data: str, method: str, seed: int) -> Path:
    return Path("runs") / f"{Path(data).stem or Path(data).resolve().name or 'data'}-{method}-s{seed}"


def show_summary(folder: Path, meta: dict[str, Any]) -> None:
    import shlex

    from rich.table import Table

    from finessl.runtime.terminal import console

    table = Table(title=str(folder), show_header=False, title_justify="left")
    if meta.get("accuracy") is not None:
        table.add_row("test accuracy", f"{meta['accuracy']:.2%} of {meta['test']:,} images, last step")
    if meta.get("pseudo_accuracy") is not None:
        table.add_row("pseudo-label accuracy", f"{meta['pseudo_accuracy']:.2%} (last epoch)")
    table.add_row("used with / without label", f"{meta['labeled']:,} / {meta['unlabeled']:,} images")
    table.add_row("trained parameters", f"{meta['trained_parameters']:,} of {meta['parameters']:,}")
    table.add_row("time", f"{meta['seconds']:,.0f} s on {meta['device']}")
    table.add_row("use it", f"finessl predict {shlex.quote(str(folder))} IMAGES…")
    console().print(table)
