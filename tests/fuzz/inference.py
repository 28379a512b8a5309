"""audit, export, and predict with its options: hostile answers, damaged parts, cut shards, absurd values and places."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

from fuzz.archives import add, odd_member, png
from fuzz.base import CLASSES
from fuzz.damage import TEXTS, spoil, spoil_tree
from fuzz.harness import Box, kind
from fuzz.names import hostile_name
from fuzz.places import hostile_place
from fuzz.runs import damage, files_of
from fuzz.tables import edit, write_csv, write_parquet

CPU = ("--device", "cpu")


@kind("audits", 5)
def audits(box: Box) -> None:
    """Answers of every kind; a run that was audited still predicts, and its figures are shares."""
    rng, run = box.rng, box.copy("quick")
    if rng.random() < 0.25:
        place = hostile_place(box)
        count = ["--count", rng.choice(TEXTS)] if rng.random() < 0.5 else []
        box.run("audit", run, "--out", place, *count, *(["--seed", rng.choice(TEXTS)] if rng.random() < 0.3 else []))
        box.expect(not (box.folder / "file").is_dir(), "a file was replaced by a folder")
        return
    few = rng.choice((1, 5, 40, 40))
    given = rng.choice((["ant"], [*CLASSES], [*CLASSES], [*CLASSES, hostile_name(box)], ["none of them"]))
    rows = [[f"unlabeled/{i}.png", given[i % len(given)], "train"] for i in range(few)]
    intact = rng.random() < 0.3
    if not intact:
        rows = edit(rng, rows)
    parquet = rng.random() < 0.2
    answers = box.folder / "tables" / ("answers.parquet" if parquet else "answers.csv")
    answers.parent.mkdir()
    (write_parquet if parquet else write_csv)(rng, answers, rows, intact)
    if not intact and rng.random() < 0.3:
        damage(box, answers)
    elif rng.random() < 0.3:
        intact = False
        damage(box, rng.choice([path for path in files_of(run) if path.name in ("unlabeled.npz", "split.json")]))
    odd = any(not row[1].strip() for row in rows if len(row) > 1)  # a name of blanks is no answer
    result = box.run("audit", run, "--answers", answers, *CPU, must="work" if intact and not odd else None)
    box.expect("nan" not in result.out, f"an audit that is no number: {result.out}")
    if result.ok:
        audit = run / "audit.json"
        found = json.loads(audit.read_text("utf-8", "surrogateescape"))
        right = 0 <= found["low"] <= found["accuracy"] <= found["high"] <= 1
        box.expect(right and 0 < found.get("temperature", 1) < math.inf, f"an audit of no sense: {result.out}")
        if rng.random() < 0.4:
            damage(box, audit)
            intact = False
    images = box.base / "pile" / "unlabeled"
    box.run("predict", run, images, "--min-confidence", "0.5", *CPU, must="work" if intact else None)


@kind("parts", 6)
def parts(box: Box) -> None:
    """predict --out DIR: cut shards, odd lists, Parquet files with anything for images."""
    rng, inputs = box.rng, box.folder / "inputs"
    inputs.mkdir()
    given: Path = inputs
    how = rng.choice(("tar", "tar", "list", "list", "parquet", "parquet", "photos"))
    if how == "tar":
        for name in ("0.tar", "1.tar"):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode=rng.choice(("w", "w", "w", "w:gz"))) as tar:
                for i in range(4):
                    add(tar, f"{i}.png", png(i) if rng.random() < 0.9 else spoil(rng, png(i)))
                if rng.random() < 0.4:
                    odd_member(box, tar)
            data = buffer.getvalue()
            (inputs / name).write_bytes(spoil(rng, data) if rng.random() < 0.5 else data)
        if rng.random() < 0.2:
            (inputs / "2.tar").mkdir()
    elif how == "list":
        given = inputs / "list.txt"
        lines = [str(box.base / "photos" / "unlabeled" / f"{i}.png") for i in range(3)]
        odd = ("\0", "gone.png", "/dev/zero", "/dev/tty", "..", "/", "x" * 300, "list.txt", "é\udcff.png", "~", "a\0b")
        lines += [rng.choice((*odd, *TEXTS)) for _ in range(rng.randint(0, 3))]
        given.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
        if rng.random() < 0.3:
            (inputs / "other").write_bytes(rng.randbytes(50))
            damage(box, given)
    elif how == "parquet":
        given = inputs / "images.parquet"
        write_images(box, given)
    else:
        given = box.base / "photos" / "unlabeled"
    place = hostile_place(box) if rng.random() < 0.3 else "parts"
    if "." in os.path.basename(place).strip("."):
        place = "parts"
    command = ["predict", box.base / "quick", given, "--out", place, "--jobs", "1", *CPU]
    result = box.run(*command)
    box.expect(not (box.folder / "file").is_dir(), "a file was replaced by a folder")
    if result.ok:
        check_parts(box, box.folder / place)
        box.run(*command, must="work")  # finished already


def write_images(box: Box, path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rng = box.rng
    values: list[Any] = rng.choice((
        [png(0), png(1)], [png(0), None, spoil(rng, png(1)), b""], [{"bytes": png(0), "path": None}, None],
        [{"path": "x.png"}], ["", "text"], ["text"], [0, 5], [1.5], [[1]], [True], [None], [], [{"bytes": "text"}],
    ))  # fmt: skip
    parquet.write_table(pa.table({"image": pa.array(values)}), path, row_group_size=rng.choice((1, 2, 100)))
    if rng.random() < 0.4:
        path.write_bytes(spoil(rng, path.read_bytes()))


def check_parts(box: Box, folder: Path) -> list[dict[str, Any]]:
    """Rows of all parts: a known class with a probability, or an error that says why."""
    from pyarrow import parquet

    about = json.loads((folder / "predictions.json").read_text())
    rows = [
        row
        for path in sorted(folder.glob("part-*.parquet"))
        for row in parquet.read_table(path, partitioning=None).to_pylist()
    ]
    for row in rows:
        good = row["label"] in CLASSES and 0 <= row["confidence"] <= 1 and not row["error"]
        box.expect(good or (row["label"] is None and bool(row["error"])), f"a row of no sense: {row}")
    predicted = sum(row["label"] is not None for row in rows)
    box.expect(predicted == about["finished"]["images"], f"{predicted} predictions, predictions.json says {about}")
    return rows


@kind("damaged-parts", 4)
def damaged_parts(box: Box) -> None:
    """A folder of parts of which some are damaged: refused, or all predictions are there."""
    rng, out = box.rng, box.copy("parts")
    path = rng.choice(sorted(out.iterdir()))
    by_chance = damage(box, path)
    if rng.random() < 0.3:
        rng.choice(sorted(out.iterdir())).rename(out / rng.choice(("x", ".hidden", "part-99999.parquet")))
    inputs = [box.base / "photos" / name for name in ("unlabeled", "labeled")]
    result = box.run("predict", box.base / "quick", *inputs, "--out", out, "--jobs", "1", *CPU)
    if result.ok and by_chance and not path.is_symlink() and not (out / "part-99999.parquet").exists():
        found = len(check_parts(box, out))
        box.expect(found == 12, f"{found} of 12 predictions after damage to {path.name}")


@kind("predict-options", 6)
def predict_options(box: Box) -> None:
    """Absurd values and places; images that are sorted stay where they are."""
    rng, photos = box.rng, box.copy("photos")
    numbers = ("0", "1", "0.5", "0.9", "1e-320") if rng.random() < 0.6 else (*TEXTS, "1.0000001", "NaN")
    changes: list[str] = []
    for option in rng.sample(("--min-confidence", "--coverage", "--top"), rng.choice((0, 1, 1, 2))):
        changes += [option, rng.choice(numbers)]
    if rng.random() < 0.5:
        changes += ["--sort-into", rng.choice((hostile_place(box), "sorted", "photos", "photos/unlabeled/x"))]
        changes += ["--link"] if rng.random() < 0.4 else []
    if rng.random() < 0.3:
        changes += ["--embeddings", hostile_place(box) + rng.choice(("", ".npz", ".parquet"))]
    if rng.random() < 0.4:
        changes += ["--out", rng.choice(("p.csv", "p.json", "p.jsonl", "p.parquet", "parts", hostile_place(box)))]
    run = box.base / "quick"
    if rng.random() < 0.3:
        run = box.copy("quick")
        judged = {"path": "a", "label": "ant", "predicted": "bee", "confidence": 0.9}
        audit = {"date": "", "judged": 1, "right": 0, "accuracy": 0.0, "low": 0.0, "high": 0.5, "method": "wilson"}
        audit |= {"unlabeled": 0, "images": [judged]}
        (run / "audit.json").write_text(json.dumps(spoil_tree(rng, audit)), "utf-8", "surrogatepass")
    names = sorted(photos.rglob("*.png"))
    result = box.run("predict", run, photos / "unlabeled", *changes, *CPU)
    box.expect(all(path.is_file() for path in names), "predict removed an image")
    box.expect("nan" not in result.out.lower(), f"predict printed nan: {result.out}")
    absurd = [
        value
        for option, value in zip(changes, changes[1:], strict=False)
        if option in ("--min-confidence", "--coverage")
    ]
    for value in absurd:
        box.expect(not result.ok or 0 <= float(value) <= 1, f"the share {value} was taken: {result.err}")
    if result.ok and "--out" not in changes:
        rows = list(csv.DictReader(io.StringIO(result.out)))
        box.expect(len(rows) == 6 and {row["label"] for row in rows} <= {"", *CLASSES}, f"odd rows: {rows}")


@kind("sorted-names", 2)
def sorted_names(box: Box) -> None:
    """--sort-into with hostile names of classes and files: all copies are inside the folder."""
    run = box.copy("quick")
    about = run / "classifier" / "classifier.json"
    description = json.loads(about.read_text())
    description["classes"] = box.rng.sample(
        ("..", ".", "/etc", "../../x", "a/b", "unsure", "Unsure", " ", "ant", "ANT", "a\0b", "x" * 300, "\udcff", "é"),
        3,
    )
    about.write_text(json.dumps(description))
    images = Path(shutil.copytree(box.base / "photos" / "unlabeled", box.folder / "images"))
    (images / "0.png").rename(images / f"{hostile_name(box).replace('/', '|')}.png")
    before = {path for path in box.folder.rglob("*") if not path.name.startswith("command-")}
    result = box.run("predict", run, images, "--sort-into", "sorted", "--out", "p.csv", *CPU)
    after = {path for path in box.folder.rglob("*") if not path.name.startswith("command-")}
    more = {path for path in after - before if not path.is_relative_to(box.folder / "sorted")} - {box.folder / "p.csv"}
    box.expect(not more and not before - after, f"files outside of the folder: {sorted(more)}")
    copies = [path for path in (box.folder / "sorted").rglob("*") if path.is_file()]
    if result.ok:
        with open(box.folder / "p.csv", encoding="utf-8", newline="") as file:
            rows = len(list(csv.reader(file))) - 1
        box.expect(
            len(copies) == rows >= 5, f"{len(copies)} of {rows} images were sorted"
        )  # names with a dot are passed over


@kind("exports", 0.7)
def exports(box: Box) -> None:
    """Bad places, damaged runs, missing packages: refused before the slow part, and nothing is left behind."""
    rng, run = box.rng, box.base / "done"
    out, must, missing = "export", "fail", {}
    changes: list[str] = ["--format", rng.choice(("onnx", "pt2", "timm"))]
    how = rng.choice(("place", "damage", "package", "option", "option", "full"))
    if how == "place":
        (box.folder / "full").mkdir()
        (box.folder / "full" / "mine").write_text("mine")
        (box.folder / "file").write_text("mine")
        os.symlink("loop", box.folder / "loop")
        out = rng.choice(("full", "file", "file/x", "/dev/null", "/proc/x", "loop", "loop/x", "x" * 300, ".", ""))
    elif how == "damage":
        run = box.copy("done")
        damage(box, rng.choice(files_of(run / "classifier")))
        changes, must = ["--format", "timm"], ""
    elif how == "package":
        changes = ["--format", "onnx"]
        missing = {rng.choice(("onnx", "onnxscript", "onnxruntime")): None}
    elif how == "option":
        name = rng.choice(("--format", "--precision", "--opset", "--weights"))
        changes += [name, rng.choice([text for text in TEXTS if "\0" not in text and text not in ("none", "None")])]
        must = "" if name == "--weights" else "fail"
        changes = ["--format", "timm", *changes[2:]] if name == "--weights" else changes
    else:
        changes, must = ["--format", "timm"], ""
    with mock.patch.dict(sys.modules, missing):
        result = box.run(
            "export", run, "--out", out, *changes, must=must or None, file_size=20_000 if how == "full" else None
        )
    left = [path for path in box.folder.rglob("*") if ".partial" in path.name]
    box.expect(not left, f"left behind: {left}")
    box.expect(result.ok or not (box.folder / "export").exists(), "a refused export left its folder")
    mine = [path.read_text() for path in (box.folder / "file", box.folder / "full" / "mine") if path.exists()]
    box.expect(all(text == "mine" for text in mine), "somebody's file was overwritten")
