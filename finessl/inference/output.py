"""Predictions as files. The suffix chooses the form: .csv, .json (a list), .jsonl (one object per line) or .parquet.

Rows are written as they come, so that a table of any length takes little memory, and a file is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finessl.errors import FinesslError
from finessl.runtime.files import replacing, write_arrays, writing

FORMATS = (".csv", ".json", ".jsonl", ".parquet")
EMBEDDINGS = (".npz", ".parquet")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet takes text that begins with these for a formula
ROW_GROUP = 4096

Row = Sequence[Any]


def check_output(out: Path, formats: Sequence[str] = FORMATS, option: str = "--out") -> None:
    """Refuse what cannot be written, before any work."""
    if out.suffix.lower() not in formats:
        raise FinesslError(f"{option} {out}: the suffix chooses the form of the output; use {', '.join(formats)}.")
    if out.is_dir():
        raise FinesslError(f"{option} {out} is a folder; name a file.")
    if out.suffix.lower() == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise FinesslError(f"{option} {out}: Parquet needs pyarrow: pip install 'finessl[tables]'.") from error


def write_rows(out: Path, columns: Sequence[str], rows: Iterable[Row], *, excel: bool = False) -> None:
    """`excel`: CSV as Excel reads it (see `csv_lines`)."""
    suffix = out.suffix.lower()
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as partial:
            if suffix == ".parquet":
                write_parquet(partial, columns, rows)
                return
            lines = csv_lines(columns, rows, excel) if suffix == ".csv" else LINES[suffix](columns, rows)
            with open(partial, "wb") as file:
                file.writelines(lines)


def csv_lines(columns: Sequence[str], rows: Iterable[Row], excel: bool = False) -> Iterator[bytes]:
    """`excel`: with a byte order mark, so that Excel reads UTF-8, and with an apostrophe before text that a spreadsheet
    would run as a formula."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if excel:
        yield "\ufeff".encode()
    for row in itertools.chain([columns], rows):
        cells = [f"{value:.4f}" if isinstance(value, float) else value or "" for value in row]
        writer.writerow([f"'{cell}" if excel and cell.startswith(FORMULA) else cell for cell in cells])
        yield encoded(text.getvalue())
        text.seek(0)
        text.truncate()


def json_lines(columns: Sequence[str], rows: Iterable[Row]) -> Iterator[bytes]:
    before = "[\n"
    for row in rows:
        record = json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False, indent=1)
        yield encoded(before + " " + record.replace("\n", "\n "))
        before = ",\n"
    yield b"\n]\n" if before == ",\n" else b"[]\n"


def jsonl_lines(columns: Sequence[str], rows: Iterable[Row]) -> Iterator[bytes]:
    return (encoded(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n") for row in rows)


LINES: dict[str, Callable[[Sequence[str], Iterable[Row]], Iterator[bytes]]] = {
    ".json": json_lines,
    ".jsonl": jsonl_lines,
}


def write_parquet(out: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    import pyarrow
    from pyarrow import parquet

    kinds = [pyarrow.float64() if name.startswith("confidence") else pyarrow.string() for name in columns]
    schema = pyarrow.schema(list(zip(columns, kinds, strict=True)))
    left = iter(rows)
    with parquet.ParquetWriter(out, schema) as writer:
        while chunk := list(itertools.islice(left, ROW_GROUP)):
            clean = [[encoded(v).decode() if isinstance(v, str) else v for v in row] for row in chunk]
            arrays = [pyarrow.array(values, kind) for values, kind in zip(zip(*clean, strict=True), kinds, strict=True)]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def write_embeddings(out: Path, chunks: Iterable[tuple[list[str], np.ndarray]]) -> None:
    """(paths, features [n, dim]) chunk by chunk as .parquet with the columns path and embedding, or together as .npz with
    the arrays path and embedding."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix.lower() == ".npz":
            paths, features = zip(*chunks, strict=True)
            names = [encoded(path).decode() for path in itertools.chain(*paths)]
            write_arrays(out, {"path": np.array(names), "embedding": np.concatenate(features)})
            return
        import pyarrow
        from pyarrow import parquet

        with replacing(out) as partial, contextlib.ExitStack() as stack:
            writer = None
            for paths, features in chunks:
                values = pyarrow.array(features.ravel(), pyarrow.float32())
                lists = pyarrow.FixedSizeListArray.from_arrays(values, features.shape[1])
                table = pyarrow.table({"path": [encoded(path).decode() for path in paths], "embedding": lists})
                writer = writer or stack.enter_context(parquet.ParquetWriter(partial, table.schema))
                writer.write_table(table)


def encoded(text: str) -> bytes:
    """Bytes of a file name that are not UTF-8 are written as \\udcXX: the file itself stays valid UTF-8."""
    return text.encode("utf-8", "backslashreplace")
