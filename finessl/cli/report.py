"""finessl figure, finessl report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app

RUNS_HELP = "Run directories, or folders of them."


@app.command()
def figure(
    name: Annotated[str | None, typer.Argument(help="Which figure. (default: list them)", show_default=False)] = None,
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


@app.command(no_args_is_help=True)
def report(
    runs: Annotated[
        list[Path], typer.Argument(help=f"{RUNS_HELP} The last one is the subject, the others are compared with it.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file. (default: report.html in the run, or in the folder of the runs)")
    ] = None,
    images: Annotated[bool, typer.Option("--images/--no-images", help="Show images of the data set.")] = True,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the web browser.")] = False,
) -> None:
    """Write a report on one or more runs as a web page.

    One self-contained HTML file: accuracy, confidence, warnings, and the images behind them.
    """
    from finessl.analysis.report import write_report
    from finessl.runtime.progress import Display

    with Display() as display:
        path = write_report(runs, out, images=images, progress=display.update)
    print(f"report: {path}")
    if open_:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
