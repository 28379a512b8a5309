"""finessl predict."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.options import Device, Moved, Plugins, Run, note

if TYPE_CHECKING:
    from finessl.inference.bulk import Results
    from finessl.inference.predict import Predictions


@app.command(no_args_is_help=True)
def predict(
    run: Run,
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
            "parts, which the same command resumes. [default: CSV to stdout]"
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="Top-k classes per image.", min=1, metavar="N")] = 1,
    excel: Annotated[
        bool,
        typer.Option(
            "--excel", help="CSV for Excel: a UTF-8 byte order mark, and an apostrophe before text like a formula."
        ),
    ] = False,
    min_confidence: Annotated[
        float | None,
        typer.Option(help="Minimum confidence, 0 to 1; below it the label is empty.", min=0, max=1, metavar="P"),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(help="Share of the images to label, 0 to 1, the most confident first.", min=0, max=1, metavar="C"),
    ] = None,
    sort_into: Annotated[
        Path | None,
        typer.Option(help="Copy the images to DIR/<label>, those without a label to DIR/unsure.", metavar="DIR"),
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="Symbolic links instead of copies (with --sort-into).")] = False,
    embeddings: Annotated[
        Path | None, typer.Option(help="Also write the tuned backbone's features: .npz or .parquet.", metavar="FILE")
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            help="Also all parts as one file, DIR/all.FORM: csv, json, jsonl or parquet (with --out DIR).",
            metavar="FORM",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes, or actors of Ray (with --out DIR). [default: one per core, or per GPU]", min=1),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Where parts run (with --out DIR): local, or ray for many machines.")
    ] = "local",
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster. [default: start one here]")] = None,
    weights: Moved = None,
    plugin: Plugins = None,
    device: Device = "auto",
) -> None:
    """Predict the classes of new images.

    Writes path, label and confidence for each image. Files that cannot be read are named and left out. The exit status
    is 1 if no image could be read. With --min-confidence or --coverage the label may be empty; a column guess then holds
    the most likely class of every image.
    """
    from finessl.errors import FinesslError
    from finessl.inference.output import EMBEDDINGS, check_output
    from finessl.inference.sorting import check_target

    if embeddings is not None:
        check_output(embeddings, EMBEDDINGS, "--embeddings")
    check_files({"--out": out, "--embeddings": embeddings}, images)
    if sort_into is not None:
        check_target(sort_into, images)
    elif link:
        raise FinesslError("--link says how --sort-into puts images into folders; add --sort-into DIR.")
    common: dict[str, Any] = {"top": top, "weights": weights, "device": device}
    if out is not None and not out.suffix:
        from finessl.inference.bulk import Results

        predict_parts(
            run, images, out, min_confidence=min_confidence, coverage=coverage, jobs=jobs, engine=engine, address=address,
            results=Results(table, excel, embeddings, sort_into, link), **common,
        )  # fmt: skip
        return
    if jobs or table or address or engine != "local" or any(path.suffix.lower() == ".tar" for path in images):
        raise FinesslError(
            "tar shards, --jobs, --engine, --address and --table need --out DIR, a folder for Parquet parts."
        )
    if out is not None:
        check_output(out)
    if excel and out is not None and out.suffix.lower() != ".csv":
        raise FinesslError(f"--excel is for CSV; --out {out} is not.")
    found = predict_at_once(run, images, min_confidence, coverage, embeddings is not None, common)
    write_answers(found, out, embeddings, sort_into, excel=excel, link=link)


def check_files(outputs: dict[str, Path | None], inputs: list[Path]) -> None:
    """Refuse to write over an input, or twice to one file."""
    from finessl.errors import FinesslError

    taken = {os.path.realpath(path): "one of the inputs" for path in inputs}
    for option, path in outputs.items():
        if path is not None and (other := taken.setdefault(os.path.realpath(path), option)) != option:
            raise FinesslError(f"{option} {path} is {other}; choose another.")


def predict_at_once(
    run: Path,
    images: list[Path],
    min_confidence: float | None,
    coverage: float | None,
    embed: bool,
    options: dict[str, Any],
) -> Predictions:
    from finessl.inference.predict import abstain, predict_files
    from finessl.runtime.progress import Display

    with Display() as display:
        found = predict_files(run, images, embed=embed, progress=partial(display.update, "predicting"), **options)
    for path, reason in found.broken:
        note(f"finessl: skipped {path}: {reason}")
    for sentence in found.notes:
        note(f"finessl: {sentence}")
    if min_confidence is not None or coverage is not None:
        print_labeled(run, abstain(found, min_confidence, coverage), len(found.rows), min_confidence)
    return found


def write_answers(
    found: Predictions, out: Path | None, embeddings: Path | None, sort_into: Path | None, *, excel: bool, link: bool
) -> None:
    from finessl.data.dataset import count_of
    from finessl.inference.output import csv_lines, write_embeddings, write_rows
    from finessl.inference.sorting import sort_into as sort_images

    if embeddings is not None and found.embeddings is not None:
        write_embeddings(embeddings, [([row[0] for row in found.rows], found.embeddings)])
    if sort_into is not None:
        added = sort_images(sort_into, [(Path(row[0]), row[1]) for row in found.rows], found.classes, link=link)
        note(f"{sort_into}: {count_of(added, 'image')} added")
    if out is None:
        for line in csv_lines(found.columns, found.rows, excel):
            print(line.decode().replace("\r\n", "\n"), end="")
        return
    write_rows(out, found.columns, found.rows, excel=excel)
    print(f"{out}: {count_of(len(found.rows), 'prediction')}")


def print_labeled(run: Path, labeled: int, images: int, min_confidence: float | None) -> None:
    from finessl.data.dataset import count_of

    note(f"labeled {labeled:,} of {count_of(images, 'image')} ({labeled / images:.1%})")
    if min_confidence is not None:
        note(stated_error(run, min_confidence))


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


def predict_parts(run: Path, images: list[Path], out: Path, *, results: Results, **options: Any) -> None:
    from finessl.data.dataset import count_of
    from finessl.inference.bulk import predict_bulk
    from finessl.runtime.progress import Display

    with Display() as display:
        totals = predict_bulk(run, images, out, results=results, progress=partial(display.update, "parts"), **options)
    for path, reason in totals.examples:
        note(f"finessl: skipped {path}: {reason}")
    for source, count in totals.broken_in.most_common(10):
        note(f"finessl: {source}: {count_of(count, 'image')} could not be read")
    if totals.broken:
        note(
            f"finessl: {count_of(totals.broken, 'image')} in {count_of(len(totals.broken_in), 'input')} could not be "
            f"read; {out}/skipped.csv lists them."
        )
    if options["min_confidence"] is not None or options["coverage"] is not None:
        print_labeled(run, totals.labeled, totals.images, options["min_confidence"])
    if results.sort_into is not None:
        note(f"{results.sort_into}: {count_of(totals.added, 'image')} added")
    print(f"{out}: {count_of(totals.images, 'prediction')} in {count_of(totals.parts, 'part')}")
