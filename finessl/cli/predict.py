"""finessl predict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app


@app.command(no_args_is_help=True)
def predict(
    run: Annotated[Path, typer.Argument(help="Run directory, or its classifier/ folder.", show_default=False)],
    images: Annotated[list[Path], typer.Argument(help="Image files and folders of them.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Write a CSV: path, label, confidence.")] = None,
    top: Annotated[int, typer.Option(help="So many classes an image.", min=1)] = 1,
    weights: Annotated[str | None, typer.Option(help="The backbone's weights, if they moved.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """Classes of new images, with the model's confidence. Broken images are named and left out."""
    import csv
    import sys

    from finessl.evaluation import predict_files
    from finessl.training.progress import Display

    with Display() as display:
        rows, broken = predict_files(
            run,
            images,
            top=top,
            weights=weights,
            device=device,
            progress=lambda d, t: display.update("predicting", d, t),
        )
    for path, reason in broken:
        print(f"finessl: skipped {path}: {reason}", file=sys.stderr)
    header = ["path", *(name for k in range(1, top + 1) for name in (f"label{k}" if k > 1 else "label",
                                                                     f"confidence{k}" if k > 1 else "confidence"))]  # fmt: skip
    if out is None:
        writer = csv.writer(sys.stdout)
        writer.writerows([header, *rows])
        return
    from finessl.training.rundir import writing

    with writing(out), open(out, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    print(f"{out}: {len(rows)} predictions")
