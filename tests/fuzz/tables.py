"""CSV and Parquet tables: encodings, quotes, columns, values, and spoilt bytes."""

from __future__ import annotations

import csv
import datetime
import io
import json
import random
from pathlib import Path

from fuzz.base import FAST
from fuzz.damage import spoil
from fuzz.harness import Box, kind

ODD = (
    "", " ", "\0", "a\0b", "\n", "a\nb", '"', '""', "'", ",", ";", "\t", "=cmd|' /C calc'!A0", "<script>", "[/]",
    "é", "\u202e", "-1",
    "nan", "None", "NULL", "2020-01-01", "x" * 200_000, "../ant", "~", "$\\frac$", "0", "1e5", "ant ", "ANT",
    "\ufeffant",
)  # fmt: skip


@kind("tables", 8)
def tables(box: Box) -> None:
    rng, photos = box.rng, box.copy("photos")
    paths = sorted(str(path.relative_to(photos)) for path in (photos / "labeled").rglob("*.png"))
    rows = [[path, Path(path).parent.name, "train"] for path in paths]
    rows += [[f"unlabeled/{i}.png", "", "train"] for i in range(6)]
    parquet = rng.random() < 0.35
    table = photos / ("table.parquet" if parquet else rng.choice(("table.csv", "table.csv", "table.tsv")))
    intact = rng.random() < 0.15
    if not intact:
        rows = edit(rng, rows)
    (write_parquet if parquet else write_csv)(rng, table, rows, intact)
    if not intact and rng.random() < 0.3:
        table.write_bytes(spoil(rng, table.read_bytes()))
    verb = rng.choice(("inspect", "split", "train")) if not intact else "train"
    if verb != "train":
        box.run(verb, table)
        return
    out = box.folder / "run"
    result = box.run("train", table, "--out", out, *FAST, must="work" if intact else None)
    if result.ok:
        meta = json.loads((out / "meta.json").read_text())
        box.expect(not intact or meta["labeled"] == len(paths), f"{meta['labeled']} of {len(paths)} labels were used")
    else:
        box.expect(not (out / "recipe.toml").exists(), "a refused table left a run directory")


def edit(rng: random.Random, rows: list[list[str]]) -> list[list[str]]:
    """One to three changes of cells, rows or their order."""
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(rows)) if rows else 0
        how = rng.choice(
            (
                "cell",
                "cell",
                "cell",
                "duplicate",
                "conflict",
                "short",
                "long",
                "absolute",
                "missing",
                "remove",
                "shuffle",
                "none",
            )
        )
        if not rows or how == "none":
            rows = []
        elif how == "cell":
            column = rng.randrange(len(rows[i])) if rows[i] else 0
            rows[i] = [*rows[i][:column], rng.choice(ODD), *rows[i][column + 1 :]]
        elif how == "duplicate":
            rows.append([*rows[i]])
        elif how == "conflict":
            rows.append(["./" + rows[i][0], "bee", "train"] if rows[i] else [])
        elif how in ("short", "long"):
            rows[i] = rows[i][:1] if how == "short" else [*rows[i], "more", "more"]
        elif how == "absolute":
            rows[i] = ["/etc/passwd", *rows[i][1:]]
        elif how == "missing":
            rows[i] = ["gone.png", *rows[i][1:]]
        elif how == "remove":
            del rows[i]
        else:
            rng.shuffle(rows)
    return rows


def write_csv(rng: random.Random, table: Path, rows: list[list[str]], intact: bool) -> None:
    header = ["path", "label", "split"]
    if not intact and rng.random() < 0.3:
        header = rng.choice(
            (
                ["path", "label", "path"],
                ["path"],
                ["a", "b"],
                [],
                ["PATH", "Label"],
                ["path", "label", "label"],
                ["label", "path"],
            )
        )
    buffer = io.StringIO(newline="")
    delimiter = "\t" if table.suffix == ".tsv" else rng.choice(",;\t")
    quoting = (
        rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
        if intact
        else rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONE))
    )
    writer = csv.writer(
        buffer, delimiter=delimiter, quoting=quoting, escapechar="\\", lineterminator=rng.choice(("\n", "\r\n"))
    )
    writer.writerow(header)
    writer.writerows(rows)
    encoding = (
        rng.choice(("utf-8", "utf-8-sig"))
        if intact
        else rng.choice(("utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-32", "latin-1"))
    )
    table.write_bytes(buffer.getvalue().encode(encoding, "replace"))


def write_parquet(rng: random.Random, table: Path, rows: list[list[str]], intact: bool) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    width = 3
    columns = [[(row[k] if k < len(row) else "").replace("\udcff", "") for row in rows] for k in range(width)]
    arrays = [pa.array(column, pa.string()) for column in columns]
    names = ["path", "label", "split"]
    if not intact and rows:
        count, k = len(rows), rng.randrange(width)
        odd = rng.choice((
            lambda: pa.array([datetime.date(2020, 1, 1)] * count),
            lambda: pa.array([2**55] * count, pa.timestamp("ms")),
            lambda: pa.array([-(2**62)] * count, pa.timestamp("us", "Europe/Berlin")),
            lambda: pa.array([1.5, *[float("nan")] * (count - 1)]),
            lambda: pa.array([[1, 2]] * count),
            lambda: pa.array([{"a": 1}] * count),
            lambda: pa.array([b"\xff\0"] * count),
            lambda: pa.nulls(count),
            lambda: pa.array([2**62] * count, pa.duration("s")),
            lambda: pa.array(columns[k]).dictionary_encode(),
            lambda: pa.array([True] * count),
            lambda: pa.array([None, *columns[k][1:]], pa.large_string()),
        ))  # fmt: skip
        if rng.random() < 0.7:
            arrays[k] = odd()
        if rng.random() < 0.3:
            names = rng.choice(
                (
                    ["path", "path", "label"],
                    ["path", "label", "label"],
                    ["PATH", "path", "label"],
                    ["a", "b", "c"],
                    ["", "path", "label"],
                )
            )
    parquet.write_table(pa.Table.from_arrays(arrays, names), table)
