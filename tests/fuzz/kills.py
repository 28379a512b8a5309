"""kill -9 at random moments, Ctrl-C and SIGTERM at any: what was begun ends as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from finessl.methods import METHODS
from fuzz.base import FAST, SMALL
from fuzz.harness import Box, kind
from fuzz.processes import NOT_BEGUN
from fuzz.runs import compare_runs

COMMON = (*SMALL, "--checkpoint-seconds", "0", "--set", "train.epoch_steps=4")
WAYS = {
    "vpt-deep": ("--tuning", "vpt-deep", "--steps", "10"),
    "lora": ("--tuning", "lora", "--steps", "10"),
    "cached": ("--tuning", "linear", "--cache-features", "2", "--steps", "60"),
    "adamw": ("--tuning", "vpt-shallow", "--steps", "10", "--set", "train.optimizer=adamw", "--lr", "0.001"),
    "class-mean": ("--tuning", "adaptformer", "--steps", "10", "--head-init", "class-mean"),
    "full": ("--tuning", "full", "--steps", "6"),
    "lp-ft": ("--tuning", "lp-ft", "--steps", "6"),
}  # fmt: skip


def reference(box: Box, name: str, command: list[object]) -> tuple[Path, float]:
    """The same run without a kill, and the seconds it took; made once per kind of run."""
    kept = box.base / "references" / name
    if not kept.exists():
        draft = box.folder / "whole"
        started = time.monotonic()
        box.run(*command, "--out", draft, must="work")
        (draft / "seconds").write_text(str(time.monotonic() - started))
        kept.parent.mkdir(exist_ok=True)
        try:
            os.rename(draft, kept)
        except OSError:  # another case was faster
            shutil.rmtree(draft)
    return kept, float((kept / "seconds").read_text())


@kind("kills", 4)
def kills(box: Box) -> None:
    rng = box.rng
    method, way = rng.choice(METHODS.names()), rng.choice(sorted(WAYS))
    command = ["train", box.base / "photos", "--method", method, *COMMON, *WAYS[way]]
    whole, seconds = reference(box, f"{method}-{way}", command)
    out = box.folder / "run"
    for _ in range(rng.randint(1, 4)):
        sent = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        box.run(*command, "--out", out, interrupt=(sent, rng.uniform(0, 1.1 * seconds)))
    box.run(*command, "--out", out, must="work")
    compare_runs(box, out, whole, f"after kills, {method} with {way}")
    box.refused = False


@kind("signals", 3)
def signals(box: Box) -> None:
    """Ctrl-C or SIGTERM while a verb works: one line and status 130 (or 143), or it was faster."""
    rng = box.rng
    photos = box.base / "photos"
    command = rng.choice((
        ["inspect", photos], ["split", photos], ["predict", box.base / "done", photos, "--device", "cpu"],
        ["evaluate", box.base / "done", "--device", "cpu"], ["report", box.base / "done", "--out",
        box.folder / "r.html"],
        ["train", photos, "--out", box.folder / "run", *FAST], ["list"],
    ))  # fmt: skip
    interrupted(
        box, command, rng.choice((signal.SIGINT, signal.SIGINT, signal.SIGTERM)), rng.uniform(0, 0.5), fresh=False
    )


@kind("first-moments", 1)
def first_moments(box: Box) -> None:
    """The same in a new Python, most of all in its first tenths of a second, while it imports."""
    rng = box.rng
    photos = box.base / "photos"
    command = rng.choice(
        (["inspect", photos], ["train", photos, "--out", box.folder / "run", *FAST], ["list"], ["--help"], ["doctor"])
    )
    interrupted(box, command, signal.SIGINT, rng.choice((rng.uniform(0.05, 0.3), rng.uniform(0, 4))), fresh=True)


def interrupted(box: Box, command: list[object], sent: int, seconds: float, fresh: bool) -> None:
    result = box.run(*command, interrupt=(sent, seconds), fresh=fresh)
    if result.rc <= 0 or result.rc == NOT_BEGUN or "Traceback" in result.err:  # it was faster, or had not begun
        return
    box.expect(
        sent != signal.SIGINT or result.rc == 130 or "stopped at step" in result.err,
        f"status {result.rc} after Ctrl-C: {result.err}",
    )
    said = [line.startswith("finessl: ") for line in result.err.strip().splitlines()]
    box.expect(sum(said) == 1 and said[-1], f"not one last line after a signal: {result.err}")


@kind("grids", 0.1)
def grids(box: Box) -> None:
    """`compare --jobs 2` killed in the middle, then to its end: each cell as in a grid without a kill."""
    settings = ("model.pretrained=false", "data.image_size=32", "train.batch_size=2", "tuning.length=2")
    command: list[object] = [
        "compare",
        box.base / "photos",
        "--methods",
        "supervised,fixmatch",
        "--backbone",
        "test_vit",
    ]
    command += ["--steps", "8", "--jobs", "2", "--device", "cpu", "--format", "csv"]
    command += [part for setting in settings for part in ("--set", setting)]
    whole, seconds = reference(box, "grid", command)
    out = box.folder / "grid"
    box.run(*command, "--out", out, interrupt=(signal.SIGKILL, box.rng.uniform(0.3, 1) * seconds))
    box.run(*command, "--out", out, must="work")
    for cell in sorted(path.parent.relative_to(whole) for path in whole.rglob("recipe.toml")):
        compare_runs(box, out / cell, whole / cell, f"in cell {cell} after a kill of the grid")
    box.refused = False
