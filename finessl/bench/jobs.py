"""`finessl bench jobs`: wall time of several runs one after another, and at the same time on one device.

Each way is one `finessl compare` from command to exit. A run before them, which is not counted, leaves compiled kernels and
decoded images for all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from finessl.bench.accuracy import CACHES
from finessl.errors import FinesslError
from finessl.runs.directory import RunDirectory
from finessl.runtime.mps import CONTROL

WARMUP, IN_TURN = "a run before, not counted", "one after another"


@dataclass(frozen=True)
class Way:
    """The runs in one of the ways."""

    name: str
    seconds: float  # from command to exit
    phases: dict[str, float]  # seconds of a run, means
    messages: list[str]  # of finessl compare about MPS


def bench_jobs(data: str, options: Sequence[str], runs: int, work: Path) -> Iterator[Way]:
    """data: as `finessl compare` takes it.   options: of `finessl compare`.   runs: number of seeds.   work: empty folder."""
    ways = {
        WARMUP: ["--seeds", "1"],
        IN_TURN: ["--seeds", str(runs)],
        f"{runs} at a time": ["--seeds", str(runs), "--jobs", str(runs), "--no-mps"],
    }
    if shutil.which(CONTROL):
        ways[f"{runs} at a time, by MPS"] = ["--seeds", str(runs), "--jobs", str(runs), "--mps"]
    caches = {name: str(work / "caches" / folder) for name, folder in CACHES.items()}
    for number, (name, more) in enumerate(ways.items()):
        out = work / str(number)
        begun = time.perf_counter()
        ended = subprocess.run(
            [sys.executable, "-m", "finessl", "compare", data, *options, *more, "--out", str(out)],
            env=os.environ | caches, capture_output=True, text=True,
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        if ended.returncode:
            raise FinesslError(f"finessl compare ended with status {ended.returncode}: {ended.stderr.strip()}")
        metas = [RunDirectory(path.parent).meta() for path in sorted(out.glob("*/meta.json"))]
        phases = {phase: mean(meta["phases"].get(phase, 0.0) for meta in metas) for phase in metas[0]["phases"]}
        yield Way(name, seconds, phases, [line for line in ended.stderr.splitlines() if "MPS" in line])
