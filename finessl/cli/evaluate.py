"""finessl evaluate."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finessl.cli import app
from finessl.cli.options import Device, Fields, Json, Moved, Plugins, Run, note, recipe_options

if TYPE_CHECKING:
    from finessl.inference.evaluate import Evaluation


@app.command(no_args_is_help=True)
@recipe_options("root", "path_column", "label_column")
def evaluate(
    *,
    run: Run,
    data: Annotated[
        str | None,
        typer.Argument(
            help="Labeled images: class folders, a table, or a data set's name. [default: the run's test images]"
        ),
    ] = None,
    fields: Fields,
    include_unlabeled: Annotated[
        bool,
        typer.Option(
            "--include-unlabeled", help="Also measure on images of DATA that training used without their labels."
        ),
    ] = False,
    weights: Moved = None,
    plugin: Plugins = None,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Measure the accuracy of a trained classifier.

    Uses the run's test images, or other labeled images. Images that training used are not measured.
    """
    from finessl.inference.evaluate import evaluate_run
    from finessl.runtime.progress import Display

    with Display() as display:
        result = evaluate_run(
            run, data, **fields, weights=weights, device=device, include_unlabeled=include_unlabeled,
            progress=partial(display.update, "evaluating"),
        )  # fmt: skip
    for image, reason in result.unreadable:
        note(f"finessl: skipped {image}: {reason}")
    if json_:
        import json
        from dataclasses import asdict

        print(json.dumps(asdict(result)))
    else:
        show(run, result)


def show(run: Path, result: Evaluation) -> None:
    from rich.table import Table

    from finessl.data.dataset import count_of
    from finessl.runtime.terminal import console

    low, high = result.interval
    table = Table(title=f"{run} on {result.data}", title_justify="left")
    table.add_column("class", overflow="fold")
    table.add_column("images", justify="right")
    table.add_column("recall", justify="right")
    for name, count, recall in result.classes:
        table.add_row(name, f"{count:,}", "–" if count == 0 else f"{recall:.1%}")
    out = console()
    out.print(table)
    out.print(
        f"accuracy {result.accuracy:.2%} of {count_of(result.images, 'test image')} "
        f"(95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
    )
    if count := len(result.unreadable):
        out.print(f"{count_of(count, 'image')} could not be read and {'is' if count == 1 else 'are'} not counted.")
    for sentence in result.notes:
        out.print(sentence)
