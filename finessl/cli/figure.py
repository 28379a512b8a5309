"""finessl figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app

RUNS_HELP = "Run directories, or folders of them."


@app.command()
def figure(
    name: Annotated[str | None, typer.Argument(help="Which figure. [default: list them]", show_default=False)] = None,
    runs: Annotated[list[Path] | None, typer.Argument(help=RUNS_HELP, show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="Folder for NAME.svg and NAME.png.")] = Path("figures"),
    axis: Annotated[
        str | None, typer.Option(help="Recipe field along which runs are compared: method.alpha, tuning.length …")
    ] = None,
) -> None:
    """Draw the paper's figures from runs.

    Pseudo-label distribution, confidence, calibration, sensitivity and others.
    """
    from finessl.analysis.figures import FIGURES, draw
    from finessl.errors import FinesslError

    if name is None:
        from rich.table import Table
        from rich.text import Text

        from finessl.runtime.terminal import console

        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for known in FIGURES.names():
            table.add_row(Text(known, style="bold"), FIGURES.summary(known))
        console().print(table)
        print("\nfinessl figure NAME RUN… --out DIR")
        return
    if not runs:
        FIGURES[name]  # an unknown name is the first thing to say
        raise FinesslError(f"which runs? finessl figure {name} RUN… --out DIR")
    for path in draw(name, runs, out, axis):
        print(path)
