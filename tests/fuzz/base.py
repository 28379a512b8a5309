"""What the cases start from: a small data set, a finished run, an unfinished one, and a Ghostscript that tells on us."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
from PIL import Image

from fuzz.harness import Box
from fuzz.processes import start_fork, wait

CLASSES = ("ant", "bee", "cow")
# timm's smallest network with random weights: a training takes a fraction of a second.
SMALL = (
    "--backbone", "test_vit", "--set", "model.pretrained=false", "--image-size", "32", "--batch-size", "2",
    "--device", "cpu",
)  # fmt: skip
FROZEN = ("--backbone", "embedded", "--device", "cpu")  # of quick and select
FAST = (*SMALL, "--tuning", "linear", "--method", "supervised", "--steps", "2")
# A run that is long enough to be stopped in its middle.
LONG = (
    *SMALL, "--tuning", "vpt-deep", "--method", "finessl", "--steps", "10", "--checkpoint-seconds", "0",
    "--set", "train.epoch_steps=4",
)  # fmt: skip


def picture(rng: np.random.Generator, label: int, size: int = 20) -> np.ndarray:
    """Noise in the class's colour."""
    image = rng.integers(0, 80, (size, size, 3), dtype=np.uint8)
    image[..., label % 3] += 150
    return image


def make_photos(
    folder: Path, classes: tuple[str, ...] = CLASSES, labeled: int = 2, unlabeled: int = 6, test: int = 2
) -> Path:
    """labeled/CLASS, unlabeled and test/CLASS."""
    rng = np.random.default_rng(0)
    for part, count in (("labeled", labeled), ("test", test)):
        for k, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                Image.fromarray(picture(rng, k)).save(folder / part / name / f"{i}.png")
    (folder / "unlabeled").mkdir(exist_ok=True)
    for i in range(unlabeled):
        Image.fromarray(picture(rng, i)).save(folder / "unlabeled" / f"{i}.png")
    return folder


def prepare(base: Path) -> bool:
    base.mkdir()
    photos = make_photos(base / "photos")
    (base / "bin").mkdir()
    ghostscript = base / "bin" / "gs"
    ghostscript.write_text('#!/bin/sh\ntouch "$FUZZ_CANARY"\n')
    ghostscript.chmod(0o755)
    os.environ["FINESSL_CACHE"] = str(base / "cache")
    box = Box(base, base, random.Random(0))
    # Runs name their data by a path that copies of them can reach.
    box.run("train", photos, "--out", base / "done", *FAST, must="work")
    box.run("train", photos, "--out", base / "whole", *LONG, must="work")
    unfinished(box, photos, base / "half")
    pile = make_photos(base / "pile", unlabeled=40)
    box.run("quick", pile, "--out", base / "quick", *FROZEN, must="work")
    (base / "quick.txt").write_text(box.run("quick", photos, "--json", *FROZEN, must="work").out)
    folders = [photos / name for name in ("unlabeled", "labeled")]
    box.run("predict", base / "quick", *folders, "--out", base / "parts", "--jobs", "1", "--device", "cpu", must="work")
    for name, verb in (("predict", "predict"), ("evaluate", "evaluate")):
        more = [photos / "unlabeled"] if verb == "predict" else ["--json"]
        (base / f"{name}.txt").write_text(box.run(verb, base / "done", *more, "--device", "cpu", must="work").out)
    for path in base.glob("command-*"):
        path.unlink()
    return True


def unfinished(box: Box, photos: Path, out: Path) -> None:
    """A run that was killed between its checkpoints."""
    for _ in range(20):
        pid = start_fork(
            ["train", str(photos), "--out", str(out), *LONG], box.base, "utf-8", box.base / "o", box.base / "e", None
        )
        deadline = time.monotonic() + 30
        while len(list((out / "checkpoints").glob("step-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        os.killpg(pid, signal.SIGKILL)
        wait(pid, 10)
        if not (out / "classifier").exists():
            return
        shutil.rmtree(out)
    raise RuntimeError("no run could be stopped in its middle")
