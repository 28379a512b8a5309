"""What is made of all parts when they are complete. Each step can be interrupted and done again with the same result."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finessl.errors import FinesslError
from finessl.inference.bulk.folder import MANIFEST, check_part, part_file, read_part
from finessl.inference.bulk.parts import Part, open_part, source_of
from finessl.inference.bulk.worker import strings, write_table
from finessl.inference.output import encoded
from finessl.inference.sorting import Packed
from finessl.runtime.files import read_json, replacing, write_json

SKIPPED = "skipped.csv"
STEPS = 1_000_000  # confidences have six decimals: each of them has a place in an array


@dataclass
class Totals:
    images: int = 0
    labeled: int = 0  # of these, with a label
    broken: int = 0
    parts: int = 0
    broken_in: Counter[str] = field(default_factory=Counter)  # shard, table or folder → images that cannot be read
    examples: list[tuple[str, str]] = field(default_factory=list)  # (path, reason) of some of them
    added: int = 0  # images that were copied or linked into the folders of their classes


def whole_part(out: Path, number: int, columns: list[str] | None = None) -> Any:
    """A part that was checked before."""
    if (table := read_part(part_file(out, number), columns)) is None:
        raise damaged(out, number)
    return table


def damaged(out: Path, number: int) -> FinesslError:
    return FinesslError(f"{part_file(out, number)} is damaged; the same command again computes it once more.")


def complete(out: Path, parts: Sequence[Part], coverage: float | None, min_confidence: float | None) -> Totals:
    """Choose the labels where that takes all confidences, list what could not be read, and count."""
    if coverage is not None:
        apply_coverage(out, len(parts), coverage, min_confidence or 0.0)
    totals = Totals(parts=len(parts))
    with replacing(out / SKIPPED) as partial, open(partial, "wb") as file:
        file.write(csv_line("source", "image", "reason"))
        for number, part in enumerate(parts):
            if (found := check_part(part_file(out, number))) is None:
                raise damaged(out, number)
            totals.images += found.images
            totals.labeled += found.labeled
            totals.broken += len(found.broken)
            if found.broken:
                totals.broken_in[part.source] += len(found.broken)
            totals.examples += found.broken[: 5 - len(totals.examples)]
            file.writelines(csv_line(part.source, path, reason) for path, reason in found.broken)
    if not totals.broken:
        (out / SKIPPED).unlink()
    if not totals.images:
        reasons = "; ".join(f"{path} ({reason})" for path, reason in totals.examples[:3])
        raise FinesslError(f"nothing was predicted: no image could be read. {reasons}")
    manifest = read_json(out / MANIFEST, dict[str, Any])
    counts = {"images": totals.images, "labeled": totals.labeled, "broken": totals.broken}
    write_json(out / MANIFEST, {**manifest, "finished": counts})
    return totals


def csv_line(*cells: str) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerow(cells)
    return encoded(text.getvalue())


def apply_coverage(out: Path, parts: int, coverage: float, min_confidence: float) -> None:
    """Label the most confident `coverage` of all images, in the order of the parts where confidences are equal; as
    `predict.abstain` does, with memory that does not depend on the number of images."""
    counts = np.zeros(STEPS + 1, np.int64)
    for number in range(parts):
        steps = confidence_steps(whole_part(out, number, ["confidence"]))
        counts += np.bincount(steps[steps >= 0], minlength=STEPS + 1)
    wanted = math.ceil(coverage * int(counts.sum()))
    above = np.append(np.cumsum(counts[::-1])[::-1][1:], 0)  # images with a higher confidence
    lowest = int(np.argmax(above < wanted)) if wanted else STEPS + 1  # of those that keep their label
    equal = wanted - int(above[lowest]) if wanted else 0  # images of this confidence that keep their label
    for number in range(parts):
        table = whole_part(out, number)
        steps = confidence_steps(table)
        tied = steps == lowest
        sure = (steps > lowest) | (tied & (np.cumsum(tied) <= equal))
        equal = max(equal - int(tied.sum()), 0)
        sure &= steps >= round(min_confidence * STEPS, 9)
        labels = [name if keep else None for name, keep in zip(table["guess"].to_pylist(), sure, strict=True)]
        if labels != table["label"].to_pylist():
            place = table.column_names.index("label")
            write_table(table.set_column(place, "label", strings(labels)), part_file(out, number))


def confidence_steps(table: Any) -> np.ndarray:
    """Confidences in millionths; −1 for images that cannot be read."""
    values = table["confidence"].to_numpy(zero_copy_only=False)
    return np.where(np.isnan(values), -1, np.rint(np.nan_to_num(values) * STEPS)).astype(np.int64)


# ---- all parts in one file ------------------------------------------------------------------------------------------


def all_columns(out: Path) -> list[str]:
    from pyarrow import parquet

    return [name for name in parquet.read_schema(part_file(out, 0)).names if name != "embedding"]


def all_rows(out: Path, parts: int) -> Iterator[list[Any]]:
    """The rows of all parts."""
    columns = all_columns(out)
    for number in range(parts):
        table = whole_part(out, number, columns)
        yield from map(list, zip(*(table[name].to_pylist() for name in columns), strict=True))


def all_embeddings(out: Path, parts: int) -> Iterator[tuple[list[str], np.ndarray]]:
    """(paths, features) of the images of each part that could be read."""
    for number in range(parts):
        table = whole_part(out, number, ["path", "embedding"]).drop_null().combine_chunks()
        if len(table):
            column = table["embedding"].chunk(0)
            yield table["path"].to_pylist(), column.flatten().to_numpy().reshape(len(table), -1)


def all_images(out: Path, parts: Sequence[Part]) -> Iterator[tuple[Path | Packed, str | None]]:
    """(image, label) of all images that could be read."""
    for number, part in enumerate(parts):
        images, _ = open_part(part)
        table = whole_part(out, number, ["label", "confidence"])
        labels, confidences = table["label"].to_pylist(), table["confidence"].to_pylist()
        for i in range(len(images)):
            if confidences[i] is not None:
                yield source_of(part, images, i), labels[i]
