"""finessl report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app
from finessl.cli.figure import RUNS_HELP


@app.command(no_args_is_help=True)
def report(
    runs: Annotated[
        list[Path], typer.Argument(help=f"{RUNS_HELP} The last one is the subject, the others are compared with it.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file. [default: report.html in the run, or in the folder of the runs]")
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
