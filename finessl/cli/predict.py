"""finessl predict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app


@app.command(no_args_is_help=True)
def predict(
    run: Annotated[Path, typer.Argument(help="Run directory, or its classifier/ folder.", show_default=False)],
    images: Annotated[
        list[Path],
        typer.Argument(help="Image files, folders of them, or tables with a column path.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Output file; the suffix chooses .csv, .json, .jsonl or .parquet. (default: CSV to stdout)"),
    ] = None,
    top: Annotated[int, typer.Option(help="Show the N most likely classes per image.", min=1, metavar="N")] = 1,
    excel: Annotated[
        bool,
        typer.Option(
            "--excel", help="CSV for Excel: a UTF-8 byte order mark, and an apostrophe before text like a formula."
        ),
    ] = False,
    weights: Annotated[str | None, typer.Option(help="The backbone's weights, if they moved.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """Predict the classes of new images.

    Writes path, label and confidence for each image. Files that cannot be read are named and left out. The exit status
    is 1 if no image could be read.
    """
    import sys

    from finessl.data.dataset import count_of
    from finessl.errors import FinesslError
    from finessl.prediction import as_csv, check_output, predict_files, write_predictions
    from finessl.training.progress import Display

    if out is not None:
        check_output(out)
    if excel and out is not None and out.suffix.lower() != ".csv":
        raise FinesslError(f"--excel is for CSV; --out {out} is not.")
    with Display() as display:
        found = predict_files(
            run,
            images,
            top=top,
            weights=weights,
            device=device,
            progress=lambda done, total: display.update("predicting", done, total),
        )
    for path, reason in found.broken:
        print(f"finessl: skipped {path}: {reason}", file=sys.stderr)
    for note in found.notes:
        print(f"finessl: {note}", file=sys.stderr)
    if out is None:
        text = as_csv(found, excel).decode()
        sys.stdout.write(text.replace("\r\n", "\n"))
        return
    write_predictions(found, out, excel=excel)
    print(f"{out}: {count_of(len(found.rows), 'prediction')}")
