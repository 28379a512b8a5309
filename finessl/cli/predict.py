"""finessl predict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.train import Plugins


@app.command(no_args_is_help=True)
def predict(
    run: Annotated[Path, typer.Argument(help="Run directory, or its classifier/ folder.", show_default=False)],
    images: Annotated[
        list[Path],
        typer.Argument(
            help="Image files, folders of them, tables with a column path, lists (.txt); with --out DIR also tar shards "
            "and Parquet files with a column image.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output file; the suffix chooses .csv, .json, .jsonl or .parquet. Without a suffix: a folder of Parquet "
            "parts, which the same command resumes. (default: CSV to stdout)"
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="Show the N most likely classes per image.", min=1, metavar="N")] = 1,
    excel: Annotated[
        bool,
        typer.Option(
            "--excel", help="CSV for Excel: a UTF-8 byte order mark, and an apostrophe before text like a formula."
        ),
    ] = False,
    min_confidence: Annotated[
        float | None,
        typer.Option(help="Leave the label empty below this confidence, 0 to 1.", min=0, max=1, metavar="P"),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="Label this share of the images, the most confident first, 0 to 1.", min=0, max=1, metavar="C"
        ),
    ] = None,
    sort_into: Annotated[
        Path | None,
        typer.Option(help="Copy the images to DIR/<label>, those without a label to DIR/unsure.", metavar="DIR"),
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="With --sort-into: symbolic links instead of copies.")] = False,
    embeddings: Annotated[
        Path | None, typer.Option(help="Also write the tuned backbone's features: .npz or .parquet.", metavar="FILE")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="With --out DIR: processes. (default: one per core, or per GPU)", min=1)
    ] = None,
    engine: Annotated[str, typer.Option(help="With --out DIR: local, or ray for many machines.")] = "local",
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster. (default: start one here)")] = None,
    weights: Annotated[str | None, typer.Option(help="The backbone's weights, if they moved.")] = None,
    plugin: Plugins = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """Predict the classes of new images.

    Writes path, label and confidence for each image. Files that cannot be read are named and left out. The exit status
    is 1 if no image could be read. With --min-confidence or --coverage the label may be empty; a column guess then holds
    the most likely class of every image.
    """
    import sys

    from finessl.data.dataset import count_of
    from finessl.errors import FinesslError
    from finessl.inference.predict import (
        EMBEDDINGS,
        abstain,
        as_csv,
        check_output,
        predict_files,
        write_embeddings,
        write_predictions,
    )
    from finessl.inference.sorting import check_target
    from finessl.inference.sorting import sort_into as sort_images
    from finessl.registry import plugins
    from finessl.runtime.progress import Display

    if out is not None and not out.suffix:
        files_only = {
            "--coverage": coverage,
            "--sort-into": sort_into,
            "--embeddings": embeddings,
            "--excel": excel or None,
        }
        if given := [option for option, value in files_only.items() if value is not None]:
            raise FinesslError(f"{given[0]} needs all predictions at once; --out {out} is a folder. Name a file.")
        predict_parts(
            run, images, out, top=top, min_confidence=min_confidence, weights=weights, device=device, jobs=jobs,
            engine=engine, address=address,
        )  # fmt: skip
        return
    if jobs is not None or engine != "local" or any(path.suffix.lower() == ".tar" for path in images):
        raise FinesslError("tar shards, --jobs and --engine need --out DIR, a folder for Parquet parts.")
    if out is not None:
        check_output(out)
    if excel and out is not None and out.suffix.lower() != ".csv":
        raise FinesslError(f"--excel is for CSV; --out {out} is not.")
    if embeddings is not None:
        check_output(embeddings, EMBEDDINGS, "--embeddings")
    if sort_into is not None:
        check_target(sort_into, images)
    elif link:
        raise FinesslError("--link says how --sort-into puts images into folders; add --sort-into DIR.")
    plugins.load(plugin or ())
    with Display() as display:
        found = predict_files(
            run,
            images,
            top=top,
            embed=embeddings is not None,
            weights=weights,
            device=device,
            progress=lambda done, total: display.update("predicting", done, total),
        )
    for path, reason in found.broken:
        print(f"finessl: skipped {path}: {reason}", file=sys.stderr)
    for note in found.notes:
        print(f"finessl: {note}", file=sys.stderr)
    if min_confidence is not None or coverage is not None:
        sure = abstain(found, min_confidence, coverage)
        print(
            f"labeled {sure:,} of {count_of(len(found.rows), 'image')} ({sure / len(found.rows):.1%})", file=sys.stderr
        )
    if min_confidence is not None:
        print(stated_error(run, min_confidence), file=sys.stderr)
    if embeddings is not None:
        write_embeddings(found, embeddings)
    if sort_into is not None:
        added = sort_images(sort_into, [(row[0], row[1]) for row in found.rows], found.classes, link=link)
        print(f"{sort_into}: {count_of(added, 'image')} added", file=sys.stderr)
    if out is None:
        text = as_csv(found, excel).decode()
        sys.stdout.write(text.replace("\r\n", "\n"))
        return
    write_predictions(found, out, excel=excel)
    print(f"{out}: {count_of(len(found.rows), 'prediction')}")


def stated_error(run: Path, min_confidence: float) -> str:
    """What the run's audit says of answers that are this sure."""
    from finessl.inference.audit import error_rate, read_audit
    from finessl.inference.evaluate import run_folder

    audit = read_audit(run_folder(run))
    if audit is None:
        return f"error rate: not known; measure it with finessl audit {run}"
    found = error_rate(audit, min_confidence)
    if found is None:
        return f"error rate: not known; no audited image has a confidence of {min_confidence:g} or more"
    wrong, count, (low, high) = found
    return (
        f"error rate of these labels: {wrong / count:.1%} (95 % interval {100 * low:.1f}–{100 * high:.1f} %), from "
        f"{count:,} audited images with a confidence of {min_confidence:g} or more"
    )


def predict_parts(run: Path, images: list[Path], out: Path, **options: Any) -> None:
    import sys

    from finessl.data.dataset import count_of
    from finessl.inference.bulk import predict_bulk
    from finessl.runtime.progress import Display

    with Display() as display:
        totals = predict_bulk(
            run, images, out, **options, progress=lambda done, total: display.update("parts", done, total)
        )
    for path, reason in totals.examples:
        print(f"finessl: skipped {path}: {reason}", file=sys.stderr)
    if totals.broken > len(totals.examples):
        print(f"finessl: {totals.broken:,} images could not be read; the column error says why.", file=sys.stderr)
    print(f"{out}: {count_of(totals.images, 'prediction')} in {count_of(totals.parts, 'part')}")
