"""quick, select, tables of labels, and what finessl keeps in its cache: odd options, hostile tables, damaged caches."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

from fuzz.base import FAST, FROZEN
from fuzz.damage import TEXTS, VALUES
from fuzz.harness import Box, kind
from fuzz.names import hostile_name
from fuzz.places import hostile_place
from fuzz.runs import damage, files_of
from fuzz.tables import edit, write_csv, write_parquet
from fuzz.weights import BACKBONE, make

QUICK = (
    "--seed", "--image-size", "--precision", "--backbone", "--weights", "--labels-per-class", "--split", "--test",
    "--root", "--labels", "--text-features", "--device", "--set",
)  # fmt: skip
SELECT = ("--count", "--strategy", "--seed", "--precision", "--backbone", "--weights", "--labels", "--root", "--device")


def odd_options(box: Box, names: tuple[str, ...]) -> list[str]:
    """One or two options with a value of another kind."""
    changes: list[str] = []
    for _ in range(box.rng.choice((1, 1, 2))):
        name, text = box.rng.choice(names), box.rng.choice((*TEXTS, ",", ", ,")).replace("\0", "")
        if name == "--weights" and box.rng.random() < 0.7:
            make(box, box.folder / "weights.pt")
            changes += ["--backbone", BACKBONE]
            text = f"{BACKBONE}={box.rng.choice((box.folder / 'weights.pt', text))}"
        changes += [name, text]
    return changes


@kind("quick", 4)
def quick(box: Box) -> None:
    """Odd options and places; a run that it writes can be used, and its table holds numbers."""
    rng, photos = box.rng, box.base / "photos"
    changes = odd_options(box, QUICK) if rng.random() < 0.7 else []
    out: list[object] = ["--out", hostile_place(box) if rng.random() < 0.6 else "run"] if rng.random() < 0.7 else []
    result = box.run("quick", photos, *out, *FROZEN, "--json", *changes)
    box.expect(not (box.folder / "file").is_dir(), "a file was replaced by a folder")
    if not result.ok:
        return
    check_candidates(box, result.out)
    if out:
        box.run("predict", box.folder / str(out[1]), photos / "unlabeled", "--device", "cpu", must="work")


def check_candidates(box: Box, text: str) -> list[dict[str, Any]]:
    """The table of quick, without the seconds."""
    rows = json.loads(text)["candidates"]
    figures = [value for row in rows for value in row.values() if isinstance(value, float)]
    box.expect(bool(rows) and all(map(math.isfinite, figures)), f"figures that are not finite: {text}")
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@kind("select", 3)
def select(box: Box) -> None:
    """Odd options, places and names; a list that it writes can be filled in and used."""
    rng, photos = box.rng, box.copy("photos")
    if rng.random() < 0.3:
        shutil.copy(photos / "unlabeled" / "0.png", photos / "unlabeled" / f"{hostile_name(box).replace('/', '|')}.png")
    changes = odd_options(box, SELECT) if rng.random() < 0.6 else []
    place = hostile_place(box) if rng.random() < 0.5 else "list.csv"
    before = (box.folder / "file").exists() and (box.folder / "file").read_text()
    result = box.run("select", photos, "--out", place, *FROZEN, *changes)
    box.expect(not before or (box.folder / "file").read_text() == before, "a file of somebody was overwritten")
    if not result.ok:
        return
    listed = box.folder / place
    with open(listed, encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = list(csv.reader(file))
    box.expect(len(rows) > 1 and rows[0] == ["rank", "path", "suggested", "label"], f"no list: {rows[:2]}")
    with open(listed, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        csv.writer(file).writerows([rows[0], *([*row[:3], "ant"] for row in rows[1:])])
    box.run("quick", photos, "--labels", listed, *FROZEN, must="work")
    box.run("select", photos, "--out", listed, *FROZEN, must="fail")  # labels that somebody has filled in
    box.refused = False


@kind("labels", 4)
def labels(box: Box) -> None:
    """--labels: a table next to a folder of images."""
    rng, photos = box.rng, box.copy("photos")
    rows = [[f"unlabeled/{i}.png", ("ant", "bee", "cow", hostile_name(box))[i % 4], "train"] for i in range(6)]
    intact = rng.random() < 0.15
    rows = rows[:3] if intact else edit(rng, rows)
    parquet = rng.random() < 0.3
    table = box.folder / "tables" / ("labels.parquet" if parquet else "labels.csv")
    table.parent.mkdir()
    (write_parquet if parquet else write_csv)(rng, table, rows, intact)
    if not intact and rng.random() < 0.4:
        damage(box, table)
    verb = rng.choice(("quick", "select", "train"))
    more = {
        "quick": FROZEN, "select": ("--out", box.folder / "list.csv", *FROZEN),
        "train": ("--out", box.folder / "run", *FAST),
    }[verb]  # fmt: skip
    # The six unlabeled images resemble each other: select may rightly say that only near-duplicates are left.
    result = box.run(verb, photos, "--labels", table, *more, must="work" if intact and verb != "select" else None)
    if verb == "train" and intact:
        meta = json.loads((box.folder / "run" / "meta.json").read_text())
        box.expect(meta["labeled"] == 9, f"{meta['labeled']} of 9 labels were used")
    box.expect(result.ok or not (box.folder / "run" / "recipe.toml").exists(), "a refused table left a run directory")


@kind("feature-caches", 5)
def feature_caches(box: Box) -> None:
    """Kept features cut, spoilt, gone or of another type: refused, or the answer of a new cache."""
    cache = Path(shutil.copytree(box.base / "cache", box.folder / "cache"))
    files = [path for path in files_of(cache / "features") if path.suffix != ".lock"]
    for path in box.rng.sample(files, box.rng.choice((1, 1, 2))):
        if path.suffix == ".jsonl" and path.stat().st_size and box.rng.random() < 0.5:
            chunks = [json.loads(line) for line in path.read_text().splitlines()]
            box.rng.choice(chunks)[box.rng.choice(("first", "crc", "keys"))] = box.rng.choice(
                (*VALUES, 1, "AAAA", 2**62)
            )
            path.write_text("".join(json.dumps(chunk) + "\n" for chunk in chunks))
        else:
            damage(box, path)
    for _ in range(2):  # the second time with what the first has mended
        result = box.run("quick", box.base / "photos", *FROZEN, "--json")
        if result.ok:
            expected = check_candidates(box, (box.base / "quick.txt").read_text())
            same = check_candidates(box, result.out) == expected
            box.expect(same, f"quick changed after damage to {path.name}: {result.out}")


@kind("caches", 2)
def caches(box: Box) -> None:
    """finessl cache over entries that are damaged, of another type or somebody else's."""
    rng = box.rng
    cache = Path(shutil.copytree(box.base / "cache", box.folder / "cache"))
    damage(box, rng.choice(files_of(cache)))
    for part in ("pixels", "features", "index", "shards"):
        entry = cache / part / f"{rng.getrandbits(96):024x}"
        how = rng.choice(("none", "file", "folder", "loop", "fifo", "store", "mine"))
        if how == "none":
            continue
        (cache / part).mkdir(exist_ok=True)
        if how in ("folder", "store"):
            entry.mkdir()
        if how == "store":
            (entry / "offsets.npy").write_bytes(b"")
            value = rng.choice(VALUES)
            for name in ("store.json", "encoder.json"):
                (entry / name).write_text(json.dumps({"about": value, "backbone": value}), "utf-8", "surrogatepass")
            os.utime(entry / "store.json", (2**33, 2**33))
        elif how == "file":
            entry.write_bytes(b"x")
        elif how == "loop":
            entry.symlink_to(rng.choice((entry.name, "..", box.base)))
        elif how == "fifo":
            os.mkfifo(entry)
        elif how == "mine":
            (cache / part / "mine").write_text("mine")
    mine, kept = sorted(cache.rglob("mine")), sorted((box.base / "photos").rglob("*"))
    changes = {"FINESSL_CACHE_GB": rng.choice(TEXTS)} if rng.random() < 0.2 else {}
    if rng.random() < 0.2:
        changes["FINESSL_CACHE"] = hostile_place(box)
    folder = ["--cache-dir", hostile_place(box)] if rng.random() < 0.2 else []
    with mock.patch.dict(os.environ, changes):
        box.run("cache", *folder)
        box.run("cache", *rng.choice((["clear"], ["clear", *folder])))
    there = all(path.exists() for path in (*mine, *kept))
    box.expect(there and sorted((box.base / "photos").rglob("*")) == kept, "cache clear removed what is not its own")
