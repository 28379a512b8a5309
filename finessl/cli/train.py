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
    budget: Annotated[
        Text,
        typer.Option(
            help="Time that a planned run may take: 90s, 15m, 2h; a number alone is seconds. A run on your own data without "
            "--recipe, --steps and --backbone is planned. [default: 15m, on a GPU 10m]"
        ),
    ] = None,
    set_: Set = None,
    plugin: Plugins = None,
    device: Device = "auto",
    compile_: Compile = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations; 0: only at the end. [default: about ten evaluations]")
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Maximum seconds between checkpoints.")] = 120.0,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for decoded images that do not fit into memory (see finessl cache).")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train a classifier from a few labels and a pile of images.

    On your own data, without --recipe, --steps and --backbone: times a few steps, then plans backbone, tuning, batch and
    steps to end within --budget. Tuning is then adaptformer. The defaults below are those of named data sets.
    """
    from finessl.runtime.startup import warm_up

    warm_up(device)
    from finessl.api import carry_out, dotted
    from finessl.recipe import Recipe, parse_setting
    from finessl.training.loop import Settings

    settings = Settings(
        device=device,
        compile=compile_,
        eval_every=eval_every,
        checkpoint_seconds=checkpoint_seconds,
        cache_dir=cache_dir,
        quiet=quiet,
    )
    files = split_weights(fields)
    given = dotted(fields, {"data.source": data, **dict(map(parse_setting, set_ or []))}, plugins=plugin or ())
    asked = Recipe.read(recipe, given, check=False)
    folder = out or default_out(data, asked.method.name, asked.seed)
    meta, plan = carry_out(recipe, given, folder, settings, budget=budget, files=files)
    if meta and not quiet:
        show_summary(folder, meta, None if plan is None or plan.frozen else plan.answer)


def split_weights(fields: Fields) -> dict[str, str]:
    """The files of --weights NAME=FILE,NAME=FILE…, for the plan to choose from; that of --backbone stays a field."""
    from finessl.cli.quick import named_files
    from finessl.errors import FinesslError
    from finessl.models.backbones import files_of
    from finessl.models.joint import part_names

    text, backbone = fields.get("weights") or "", fields.get("backbone")
    if "=" not in text or Path(text).exists():
        return {}
    files = named_files(text.split(","))
    del fields["weights"]
    if backbone is None:
        return files
    if set(files) != set(part_names(backbone)):
        raise FinesslError(
            f"--weights {text} should name the file of the backbone {backbone}, or of each one it joins."
        )
    fields["weights"] = files_of(backbone, files)
    return {}


def default_out(data: str, method: str, seed: int) -> Path:
    return Path("runs") / f"{Path(data).stem or Path(data).resolve().name or 'data'}-{method}-s{seed}"


def show_summary(folder: Path, meta: dict[str, Any], frozen: Any = None) -> None:
    """frozen: the answer from frozen features, to compare with."""
    import shlex

    from rich.table import Table

    from finessl.methods import METHODS
    from finessl.runs.directory import RunDirectory
    from finessl.runtime.terminal import console

    method = RunDirectory(folder).recipe().method.name
    solved = method == "quick"  # from frozen features, without steps
    table = Table(title=str(folder), show_header=False, title_justify="left")
    if meta.get("accuracy") is not None:
        when = "" if solved else ", last step"
        table.add_row("test accuracy", f"{meta['accuracy']:.2%} of {meta['test']:,} images{when}")
        if frozen is not None and (before := frozen.test_accuracy(frozen.chosen, frozen.candidate)) is not None:
            table.add_row("frozen features alone", f"{before:.2%} of them (finessl quick)")
    if meta.get("pseudo_accuracy") is not None:
        table.add_row("pseudo-label accuracy", f"{meta['pseudo_accuracy']:.2%} (last epoch)")
    if method in METHODS and not METHODS[method].uses_unlabeled():
        table.add_row("used", f"{meta['labeled']:,} labeled images")
    else:
        table.add_row("used with / without label", f"{meta['labeled']:,} / {meta['unlabeled']:,} images")
    table.add_row("trained parameters", f"{meta['trained_parameters']:,} of {meta['parameters']:,}")
    table.add_row("time", f"{meta['seconds']:,.0f} s {'after encoding, ' if solved else ''}on {meta['device']}")
    table.add_row("use it", f"finessl predict {shlex.quote(str(folder))} IMAGES…")
    console().print(table)
