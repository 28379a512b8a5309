"""Time to accuracy: wall time of `finessl train` from command to exit, and where it goes.

The first run is cold: kernels, decoded images and features are kept in empty folders. Later runs find there what the first one
left, and are warm.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finessl.errors import FinesslError
from finessl.runs.directory import RunDirectory

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "FINESSL_CACHE": "finessl"}
OUTSIDE = "start and exit"  # of Python, with its imports: what no phase of the run counts


@dataclass(frozen=True)
class Attempt:
    """One run."""

    seed: int
    cold: bool
    accuracy: float  # of the last step, in %
    seconds: float  # from command to exit
    phases: dict[str, float]  # seconds


def time_to_accuracy(data: str, options: Sequence[str], seeds: int, work: Path) -> Iterator[Attempt]:
    """Train once per seed, one run after the other.

    data: as `finessl train` takes it.   options: of `finessl train`.   seeds: runs.   work: empty folder for runs and caches.
    """
    caches = {name: str(work / "caches" / folder) for name, folder in CACHES.items()}
    for seed in range(seeds):
        run = RunDirectory(work / f"seed={seed}")
        command = [sys.executable, "-m", "finessl", "train", data, *options]
        begun = time.perf_counter()
        ended = subprocess.run(
            [*command, "--seed", str(seed), "--out", str(run.path), "--quiet"],
            env=os.environ | caches, capture_output=True, text=True,
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        if ended.returncode:
            raise FinesslError(f"finessl train ended with status {ended.returncode}: {ended.stderr.strip()}")
        meta = run.meta()
        if meta["accuracy"] is None:
            raise FinesslError(f"{data} has no test images: there is no accuracy to reach.")
        phases = {OUTSIDE: seconds - sum(meta["phases"].values()), **meta["phases"]}
        yield Attempt(seed, seed == 0, 100 * meta["accuracy"], seconds, phases)
