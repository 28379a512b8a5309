"""finessl quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.options import Data, Device, Fields, Json, Quiet, Set, Weights, recipe_options

BACKBONE_HELP = (
    "Backbones to compare, separated by commas (finessl list backbones); a+b joins two; auto: those given by --weights, "
    "fetched before, or built in."
)


@app.command(no_args_is_help=True)
@recipe_options(
    "labels", "root", "path_column", "label_column", "test", "labels_per_class", "split", "text_features", "seed",
    "image_size", "precision",
)  # fmt: skip
def quick(
    *,
    data: Data,
    out: Annotated[Path | None, typer.Option(help="Run directory to write. [default: only print the table]")] = None,
    backbone: Annotated[str, typer.Option(help=BACKBONE_HELP)] = "auto",
    weights: Weights = None,
    fields: Fields,
    set_: Set = None,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Classify with frozen features, in seconds.

    Encodes every image once. Compares class means, ridge regression, label propagation, EM and the default, which joins
    some of them, by cross-validation on the labels, and prints one table. With --out it writes a run for predict,
    evaluate and report.
    """
    from finessl.runtime.startup import warm_up

    warm_up(device)
    from finessl.api import make_recipe
    from finessl.models.backbones import candidate_backbones
    from finessl.recipe import parse_setting
    from finessl.runtime.progress import Display
    from finessl.training.quick import quick as run

    text_features = fields.pop("text_features", None)
    recipe = make_recipe(None, fields, {"data.source": data, **dict(map(parse_setting, set_ or []))})
    backbones = candidate_backbones(backbone, named_files(weights or []))
    with Display(quiet=quiet) as display:
        answer = run(recipe, out, backbones, device=device, text_features=text_features, display=display)
    if json_:
        import json

        from finessl.training.quick import table

        print(json.dumps({"candidates": table(answer), "reason": answer.reason, "notes": answer.notes}))
    elif not quiet:
        show(answer, out)


def named_files(given: list[str]) -> dict[str, str]:
    """NAME=FILE … as a dict."""
    from finessl.errors import FinesslError

    files = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not equals or not name or not file:
            raise FinesslError(
                f"--weights {text!r} should read NAME=FILE, for example dinov2-vit-s14=dinov2.safetensors."
            )
        files[name.strip()] = file.strip()
    return files


def show(answer: Any, out: Path | None) -> None:
    import shlex

    import numpy as np
    from rich.table import Table

    from finessl.data.dataset import count_of
    from finessl.frozen.choose import SOLVERS
    from finessl.runtime.terminal import console
    from finessl.training.quick import table

    rows, split = table(answer), answer.split
    several, tested = len(answer.solved) > 1, any(row["test"] is not None for row in rows)
    title = (
        f"{answer.dataset.name}: {len(split.classes)} classes, {len(split.labeled):,} labeled, "
        f"{len(np.setdiff1d(split.unlabeled, split.labeled)):,} unlabeled"
    )
    shown = Table(title=title, title_justify="left")
    for name in (*(["backbone"] if several else []), "method"):
        shown.add_column(name, overflow="fold")
    for name in ("held-out", "95 % interval", *(["test"] if tested else []), "seconds"):
        shown.add_column(name, justify="right")
    for row in rows:
        interval = row["interval"]
        cells = [row["backbone"]] if several else []
        cells += [
            (row["solver"] if several else SOLVERS.get(row["solver"], row["solver"])) + (" *" if row["chosen"] else ""),
            "–" if row["held_out"] is None else f"{row['held_out']:.1%}",
            "–" if interval is None else f"{100 * interval[0]:.0f}–{100 * interval[1]:.0f} %",
        ]
        cells += ["–" if row["test"] is None else f"{row['test']:.1%}"] if tested else []
        shown.add_row(*cells, f"{row['seconds']:.1f}")
    printer = console()
    printer.print(shown)
    for solved in answer.solved:
        if solved.encoded:
            printer.print(
                f"{solved.name}: {count_of(solved.encoded, 'image')} encoded in {solved.encoding:.0f} s, and kept."
            )
    printer.print(f"* {answer.reason}")
    for note in answer.notes:
        printer.print(f"Note: {note}")
    if answer.dataset.excluded:
        printer.print(f"{len(answer.dataset.excluded):,} images are left out, broken or in no class folder.")
    if out is not None:
        printer.print(f"run: {out}   (finessl predict {shlex.quote(str(out))} IMAGES…)")
