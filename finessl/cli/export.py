"""finessl export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app
from finessl.cli.options import Moved, Plugins, Run


@app.command(no_args_is_help=True)
def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder to write; it must be new or empty.", show_default=False)],
    format: Annotated[
        str, typer.Option(help="onnx: for ONNX Runtime. pt2: for PyTorch alone. timm: merged weights for timm.")
    ] = "onnx",
    precision: Annotated[
        str, typer.Option(help="Numbers of the onnx model: fp32, fp16, int8 or int8-dynamic.")
    ] = "fp32",
    opset: Annotated[int | None, typer.Option(help="ONNX opset. [default: 18]", show_default=False)] = None,
    weights: Moved = None,
    plugin: Plugins = None,
) -> None:
    """Write a finished run as files that need no finessl.

    The files are compared with the run on real images first. Nothing is written if they do not agree.
    """
    from finessl.inference.export import export_run
    from finessl.runtime.progress import Display

    with Display() as display:
        found = export_run(run, out, format=format, precision=precision, opset=opset, weights=weights, log=display.log)
    print(f"{out}: {found}")
