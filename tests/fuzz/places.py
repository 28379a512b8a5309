"""Places to write to: files, folders, nowhere, full and forbidden disks, the data itself."""

from __future__ import annotations

import os

from fuzz.base import FAST, LONG
from fuzz.harness import Box, kind
from fuzz.runs import compare_runs


def hostile_place(box: Box) -> str:
    """A path that is hard or impossible to write to."""
    folder, rng = box.folder, box.rng
    how = rng.choice(
        (
            "file",
            "folder",
            "under file",
            "nowhere",
            "device",
            "forbidden",
            "loop",
            "long",
            "deep",
            "data",
            "empty",
            "dot",
            "fine",
        )
    )
    if how == "file":
        (folder / "file").write_text("mine")
    elif how == "folder":
        (folder / "here" / "x.html").mkdir(parents=True, exist_ok=True)
    elif how == "under file":
        (folder / "file").write_text("mine")
        return str(folder / "file" / "x.csv")
    elif how == "loop" and not (folder / "loop").is_symlink():
        os.symlink("loop", folder / "loop")
    return {
        "file": str(folder / "file"), "folder": str(folder / "here"), "nowhere": str(folder / "no" / "where" / "x.csv"),
        "device": rng.choice(("/dev/full", "/dev/null", "/dev/full/x")), "forbidden": rng.choice(("/proc/x",
        "/sys/x.csv", "/proc/self/x.html")),
        "loop": str(folder / "loop" / "x"), "long": str(folder / ("x" * 300)),
        "deep": str(folder.joinpath(*["deep"] * 60, "x.csv")),
        "data": str(box.folder / "photos" / "out"), "empty": "", "dot": ".", "fine": str(folder / "fine.csv"),
    }[how]  # fmt: skip


@kind("places", 6)
def places(box: Box) -> None:
    rng = box.rng
    photos = box.copy("photos")
    place = hostile_place(box)
    verb = rng.choice(("train", "predict", "predict", "split", "report", "figure", "picture"))
    if verb == "train":
        result = box.run("train", photos, "--out", place, *FAST)
        box.expect(not result.ok or (box.folder / place / "classifier").is_dir(), f"nothing was written to {place}")
        return
    if verb == "predict":
        place += rng.choice(("", "", ".json", ".parquet", ".xyz"))
        result = box.run("predict", box.base / "done", photos / "unlabeled", "--out", place, "--device", "cpu")
    elif verb == "split":
        result = box.run("split", photos, "--out", place)
    elif verb == "picture":
        result = box.run("split", photos, "--picture", place + rng.choice(("", ".png", ".xyz")))
        return
    elif verb == "report":
        result = box.run("report", box.base / "done", "--out", place)
    else:
        result = box.run("figure", "confidence", box.base / "done", "--out", place)
    written = box.folder / place
    box.expect(not result.ok or os.path.lexists(written), f"nothing was written to {place!r}")
    box.expect(not (box.folder / "file").is_dir(), "a file was replaced by a folder")
    left = [p for p in box.folder.rglob("*") if "partial" in p.name or p.name.endswith(".part")]
    box.expect(not left, f"left behind: {left}")


@kind("data-places", 3)
def data_places(box: Box) -> None:
    """Training from inside the data, twice, and data that is not what it seems."""
    photos = box.copy("photos")
    how = box.rng.choice(("dot", "inside", "slash", "nothing", "file", "device", "gone", "empty"))
    if how in ("dot", "inside"):
        out = [] if how == "dot" else ["--out", photos / box.rng.choice(("run", "unlabeled/run", "labeled/run"))]
        for _ in range(2):
            box.run("train", "." if how == "dot" else photos, *out, *FAST, cwd=photos, must="work")
    elif how == "slash":
        for name in ("photos", "photos/", "./photos"):
            box.run("train", name, "--out", "run", *FAST, must="work")
    else:
        (box.folder / "void").mkdir()
        data = {
            "nothing": "gone",
            "file": "photos/unlabeled/0.png",
            "device": "/dev/null",
            "gone": "",
            "empty": "void",
        }[how]
        verb = box.rng.choice(("inspect", "split", "train", "evaluate"))
        box.run(
            verb,
            *([box.base / "done"] if verb == "evaluate" else []),
            data,
            *(FAST if verb == "train" else []),
            must="fail",
        )


@kind("full-disks", 5)
def full_disks(box: Box) -> None:
    """Files that cannot grow: a sentence, and with space again the same result as without the trouble."""
    out = box.folder / "run"
    size = box.rng.choice((4096, 8192, 20_000, 60_000, 100_000, 200_000))  # more than a sentence on stderr
    photos = box.base / "photos"
    verb = box.rng.choice(("train", "train", "train", "predict", "report", "split"))
    if verb == "train":
        box.run("train", photos, "--out", out, *LONG, file_size=size)
        box.run("train", photos, "--out", out, *LONG, must="work")
        compare_runs(box, out, box.base / "whole", f"after files could not grow over {size} bytes")
        return
    target = box.folder / ("out.csv" if verb == "predict" else "out.html")
    more = {
        "predict": [box.base / "done", photos / "unlabeled", "--device", "cpu"],
        "report": [box.base / "done"],
        "split": [photos],
    }[verb]
    result = box.run(verb, *more, "--out", target, file_size=size)
    if not result.ok:
        box.expect(not target.exists() or target.stat().st_size == 0 or verb == "split", "a cut file was left in place")
        box.run(verb, *more, "--out", target, must="work")
