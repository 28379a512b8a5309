"""`finessl predict RUN INPUTS… --out DIR`: predictions for any number of images, in parts.

DIR/predictions.json        what is predicted, with which classifier; at the end, the totals
DIR/part-00000.parquet …    path, label, confidence, …, error (why an image could not be read)
DIR/skipped.csv             source, image, reason of all images that could not be read
DIR/all.csv …               all parts in one table, where asked for

A part is a piece of a tar shard or of a Parquet file with images, or some thousand files. It is computed by one
process with one thread, so that its content does not depend on the number of processes, and its file appears when it
is complete: the same command again computes the parts that are missing or damaged.

parts      inputs → parts → images
worker     one part: images → table
engines    many workers: processes, or actors of a Ray cluster
folder     the folder of parts: lock, manifest, which parts are whole
finish     what takes all parts: coverage, totals, one table, sorted images
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from finessl.data.dataset import count_of, some
from finessl.errors import FinesslError
from finessl.inference.bulk.engines import KEPT, run_local, run_ray
from finessl.inference.bulk.finish import Totals, all_columns, all_embeddings, all_images, all_rows, complete
from finessl.inference.bulk.folder import alone, check_part, open_folder, part_file
from finessl.inference.bulk.parts import PART_BYTES, Part, cut
from finessl.inference.bulk.worker import Settings, text
from finessl.inference.classifier import load, usual_precision
from finessl.inference.output import write_embeddings, write_rows
from finessl.inference.sorting import sort_into
from finessl.runtime.callbacks import Count, no_count
from finessl.runtime.device import resolve_device
from finessl.runtime.files import writing
from finessl.runtime.machine import usable_cores
from finessl.runtime.precision import resolve_precision

ENGINES = ("local", "ray")
TABLES = ("csv", "json", "jsonl", "parquet")


@dataclass(frozen=True)
class Results:
    """What to make of all parts, besides their files."""

    table: str | None = None  # DIR/all.<table>: one of TABLES
    excel: bool = False  # CSV as Excel reads it
    embeddings: Path | None = None  # .parquet or .npz
    sort_into: Path | None = None
    link: bool = False  # with sort_into: links instead of copies


def predict_bulk(
    run: str | Path,
    inputs: Sequence[Path],
    out: Path,
    *,
    top: int = 1,
    min_confidence: float | None = None,
    coverage: float | None = None,
    results: Results | None = None,
    weights: str | None = None,
    device: str = "auto",
    jobs: int | None = None,
    engine: str = "local",
    address: str | None = None,
    progress: Count = no_count,
) -> Totals:
    """Predict all images of `inputs` (tar shards, folders, tables and lists of files, Parquet files with images).

    run: its directory.   out: folder of the parts.   top: classes per image.   min_confidence, coverage: as in
    `predict.abstain`.   results: what else to make of the parts.   weights: the backbone's file, if it moved.
    jobs: workers; by default one per core, or per GPU.   engine: local, or ray for many machines (`address` as in
    `finessl compare`), where the run, the inputs and `out` must have the same paths.
    """
    results = results or Results()
    check(engine, address, results)
    target = resolve_device(device)
    classifier = load(run, weights=weights, device="cpu")  # refuses a run that is not finished, before any work
    workers = jobs or (torch.cuda.device_count() if target.type == "cuda" else usable_cores())
    settings = Settings(
        run=str(Path(run).absolute()),
        weights=weights and str(Path(weights).absolute()),
        device=target.type,
        precision=resolve_precision(usual_precision(classifier.description, target), target),
        top=min(top, len(classifier.classes)),
        min_confidence=min_confidence,
        coverage=coverage,
        embed=results.embeddings is not None,
        folder=os.getcwd(),
        threads=max(usable_cores() // workers, 1),
    )
    parts = cut(inputs, PART_BYTES // 8 if settings.embed else PART_BYTES)  # a part's features are kept in memory
    if results.link and any(part.kind in ("tar", "parquet") for part in parts):
        raise FinesslError("--link is for image files; images inside shards and tables can only be copied.")
    with writing(out, KEPT), alone(out):
        open_folder(out, settings, parts, classifier.classes)
        compute(settings, parts, out, engine, workers if engine == "local" else jobs, address, progress)
        totals = complete(out, parts, coverage, min_confidence)
        if results.table:
            write_rows(out / f"all.{results.table}", all_columns(out), all_rows(out, len(parts)), excel=results.excel)
        if results.embeddings:
            write_embeddings(results.embeddings, all_embeddings(out, len(parts)))
        if results.sort_into:
            classes = [text(name) for name in classifier.classes]
            totals.added = sort_into(results.sort_into, all_images(out, parts), classes, link=results.link)
    return totals


def check(engine: str, address: str | None, results: Results) -> None:
    """Refuse what cannot be done, before any work."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise FinesslError("predictions in parts are Parquet files: pip install 'finessl[tables]'.") from error
    if engine not in ENGINES:
        raise FinesslError(f"--engine {engine}: choose {' or '.join(ENGINES)}.")
    if address is not None and engine != "ray":
        raise FinesslError("--address is that of a Ray cluster; add --engine ray.")
    if results.table not in (None, *TABLES):
        raise FinesslError(f"--table {results.table}: choose {', '.join(TABLES)}.")
    if results.excel and results.table != "csv":
        raise FinesslError("--excel is for CSV; with --out DIR add --table csv.")


def compute(
    settings: Settings,
    parts: list[Part],
    out: Path,
    engine: str,
    jobs: int | None,
    address: str | None,
    progress: Count,
) -> None:
    """Write the parts that are missing or damaged; an error names those that failed."""
    waiting = [number for number in range(len(parts)) if check_part(part_file(out, number)) is None]
    tasks = [(number, parts[number], str(part_file(out, number).absolute())) for number in waiting]
    ended = run_ray(settings, tasks, jobs, address) if engine == "ray" else run_local(settings, tasks, jobs or 1)
    done, failed = len(parts) - len(tasks), dict[int, str]()
    progress(done, len(parts))
    for number, failure in ended:
        done += 1
        if failure:
            failed[number] = failure
        progress(done, len(parts))
    if failed:
        shown = some([f"{parts[n].source} ({reason})" for n, reason in sorted(failed.items())], 3)
        raise FinesslError(
            f"{len(failed)} of {count_of(len(parts), 'part')} failed: {shown}. The others are in {out}; the same "
            "command again tries these once more."
        )
