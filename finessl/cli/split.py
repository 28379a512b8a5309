"""finessl split."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.options import Data, Fields, Set, recipe_options


@app.command(no_args_is_help=True)
@recipe_options("root", "labels", "path_column", "label_column", "labels_per_class", "seed")
def split(
    *,
    data: Data,
    kind: Annotated[str, typer.Option(help="How labels are chosen (finessl list splits --options).")] = "auto",
    fields: Fields,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="Split file to write, for finessl train --split FILE.json.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Picture of the images per class. [default: next to --out]")
    ] = None,
    labeled_in_unlabeled: Annotated[bool, typer.Option(help="Use the labeled images as unlabeled ones, too.")] = True,
) -> None:
    """Show or save which images are labeled."""
    import shlex

    from finessl.analysis.split_figure import draw_split
    from finessl.api import make_recipe
    from finessl.recipe import parse_setting
    from finessl.runs.inputs import make_or_load_split, open_source
    from finessl.runtime.files import writing
    from finessl.runtime.progress import Display

    more: dict[str, Any] = dict(map(parse_setting, set_ or []))
    recipe = make_recipe(
        None,
        {"split": kind, **fields},
        {"data.source": data, "data.labeled_in_unlabeled": labeled_in_unlabeled, **more},
    )
    with Display() as display:
        dataset = open_source(recipe, display.update)
    made = make_or_load_split(recipe, dataset, None, False)
    show_split(made, dataset)
    if out is not None:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            made.save(out)
        print(f"split: {out}   (finessl train {shlex.quote(data)} --split {shlex.quote(str(out))})")
    target = picture or (out.with_suffix(".png") if out is not None else None)
    if target is not None:
        with writing(target):
            draw_split(made, dataset, target)
        print(f"picture: {target}")


def show_split(made: Any, dataset: Any) -> None:
    import numpy as np
    from rich.table import Table

    from finessl.runtime.terminal import console

    labeled, unlabeled, other = made.counts(dataset)
    both = np.intersect1d(made.labeled, made.unlabeled)  # their labels are known: not counted as unlabeled here
    unlabeled = unlabeled - np.bincount(made.labels(dataset)[both], minlength=len(made.classes))
    positions, test_labels = made.test(dataset)
    tested = [int((test_labels == k).sum()) for k in range(len(made.classes))]
    settings = ", ".join(f"{name} {value}" for name, value in made.settings.items() if value is not None)
    table = Table(title=f"{dataset.name}: {made.kind}, seed {made.seed} ({settings})", title_justify="left")
    table.add_column("class")
    for name in ("labeled", "unlabeled", "test"):
        table.add_column(name, justify="right")
    shown = (
        range(len(made.classes))
        if len(made.classes) <= 30
        else [*range(12), None, *range(len(made.classes) - 12, len(made.classes))]
    )
    for k in shown:
        row = ("…",) * 4 if k is None else (made.classes[k], f"{labeled[k]:,}", f"{unlabeled[k]:,}", f"{tested[k]:,}")
        table.add_row(*row)
    if other:
        table.add_row("(none of them, or unknown)", "", f"{other:,}", "")
    table.add_section()
    table.add_row("all", f"{labeled.sum():,}", f"{len(made.unlabeled) - len(both):,}", f"{len(positions):,}")
    console().print(table)
    if len(both):
        console().print("The labeled images are also used without their labels.")
