"""finessl quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.train import DATA_HELP, LABEL_COLUMN_HELP, PATH_COLUMN_HELP

Text = str | None
WEIGHTS_HELP = "A backbone's weights file, NAME=FILE; repeat for several. (default: the hub's cache)"
BACKBONE_HELP = (
    "Backbones to compare, with commas (finessl list backbones); auto: those given by --weights, fetched before, or "
    "built in."
)
LABELS_HELP = "Table with the columns path and label, such as the filled-in list of finessl select."


@app.command(no_args_is_help=True)
def quick(
    data: Annotated[str, typer.Argument(help=DATA_HELP, show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Run directory to write. (default: only print the table)")] = None,
    labels: Annotated[Text, typer.Option(help=LABELS_HELP)] = None,
    root: Annotated[Text, typer.Option(help="Folder containing the named data set.")] = None,
    path_column: Annotated[Text, typer.Option(help=PATH_COLUMN_HELP)] = None,
    label_column: Annotated[Text, typer.Option(help=LABEL_COLUMN_HELP)] = None,
    test: Annotated[Text, typer.Option(help="Folder or table of labeled images to test on.")] = None,
    labels_per_class: Annotated[
        int | None,
        typer.Option("--labels-per-class", "-n", help="Keep N labels per class and treat the rest as unlabeled."),
    ] = None,
    split: Annotated[
        Text, typer.Option(help="How labels are chosen, or a saved split file (finessl list splits).")
    ] = None,
    backbone: Annotated[str, typer.Option(help=BACKBONE_HELP)] = "auto",
    weights: Annotated[list[str] | None, typer.Option(help=WEIGHTS_HELP)] = None,
    text_features: Annotated[
        Text, typer.Option(help="FILE.npy with the class names' text features, for zero-shot without a text tower.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    image_size: Annotated[int | None, typer.Option(help="Pixels at the input. (default: the backbone's)")] = None,
    precision: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any recipe field: --set source.download=true")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Classify with frozen features, in seconds.

    Encodes every image once. Compares class means, ridge regression, label propagation and EM by cross-validation on
    the labels, and prints one table. With --out it writes a run for predict, evaluate and report.
    """
    from finessl.api import make_recipe
    from finessl.models.backbones import candidate_backbones
    from finessl.recipe import parse_setting
    from finessl.runtime.progress import Display
    from finessl.training.quick import quick as run

    fields: dict[str, Any] = dict(
        root=root, path_column=path_column, label_column=label_column, test=test,
        labels=labels, labels_per_class=labels_per_class, split=split, image_size=image_size,
        seed=seed, precision=precision,
    )  # fmt: skip
    recipe = make_recipe(None, fields, {"data.source": data, **dict(map(parse_setting, set_ or []))})
    backbones = candidate_backbones(backbone, named_files(weights or []))
    with Display(quiet=quiet) as display:
        answer = run(
            recipe,
            out,
            backbones,
            device=device,
            text_features=text_features,
            display=display,
        )
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
        shown.add_column(name)
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
            printer.print(f"{solved.name}: {solved.encoded:,} images encoded in {solved.encoding:.0f} s, and kept.")
    printer.print(f"* {answer.reason}")
    for note in answer.notes:
        printer.print(f"Note: {note}")
    if answer.dataset.excluded:
        printer.print(f"{len(answer.dataset.excluded):,} images are left out, broken or in no class folder.")
    if out is not None:
        printer.print(f"run: {out}   (finessl predict {shlex.quote(str(out))} IMAGES…)")
