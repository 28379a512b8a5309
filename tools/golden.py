"""Compare what two revisions compute, byte for byte.

    python tools/golden.py record before.json     # at the first revision
    python tools/golden.py check before.json      # at the second one; exit status 1 where anything differs

Trains each method for 20 steps on the sample set, three tuning strategies, a run that is stopped and resumed, and writes
a report, all through the command line, so that the tool survives any move of modules. Recorded are SHA-256 digests of
the metrics, of each tensor of the classifier and of the test logits, and of the report's text without times and paths.
Equal bytes are expected on one machine with one version of PyTorch only.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

METHODS = (
    "finessl", "supervised", "pseudo-label", "fixmatch", "flexmatch", "freematch", "softmatch", "debiaspl",
    "fpl", "ifpl", "grip",
)  # fmt: skip
TUNINGS = ("vpt-deep", "adaptformer", "ssf")
# Explicit, so that a default that changes on purpose does not show up as a difference.
COMMON = ("--recipe", "demo", "--steps", "20", "--precision", "fp32", "--device", "cpu", "--seed", "0",
          "--batch-size", "4", "--mu", "1", "--eval-every", "0", "--set", "train.epoch_steps=10", "--quiet")  # fmt: skip


def finessl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "finessl", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=True)


def environment() -> Mapping[str, str]:
    """One thread: sums are then added in one order."""
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def fingerprint(run: Path) -> dict[str, str]:
    """Digests of everything that a run computed."""
    found = {"metrics": digest(run.joinpath("metrics.jsonl").read_bytes())}
    for name, tensor in sorted(load_file(run / "classifier" / "classifier.safetensors").items()):
        found[f"classifier: {name}"] = digest(np.ascontiguousarray(tensor).tobytes())
    with np.load(run / "predictions.npz") as arrays:
        found["test logits"] = digest(np.ascontiguousarray(arrays["logits"]).tobytes())
    return found


def report_text(page: Path) -> str:
    """Words and numbers of a report, without markup, durations, digests and dates."""
    text = re.sub(r"<(style|script|svg)\b.*?</\1>", " ", page.read_text(encoding="utf-8"), flags=re.S)
    text = html.unescape(re.sub(r"<[^>]*>", " ", text))
    text = re.sub(r"\d+(\.\d+)? ?(s|seconds|min|minutes)\b|\b[0-9a-f]{7,64}\b\+?|\d{4}-\d\d-\d\d\S*", "#", text)
    return re.sub(r"#( #)+", "#", re.sub(r"\s+", " ", text))  # 65 s, 1 min 5 s


def interrupted(folder: Path) -> None:
    """Train, stop after some steps by a signal, go on with the same command."""
    command = [sys.executable, "-m", "finessl", "train", "sample", "--out", "resumed", "--method", "finessl", *COMMON]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.DEVNULL)
    metrics = folder / "resumed" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while process.poll() is None and not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.wait()
    subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True)


def collect(folder: Path) -> dict[str, dict[str, str]]:
    found = {}
    for method in METHODS:
        finessl("train", "sample", "--out", method, "--method", method, *COMMON, cwd=folder)
        found[f"method {method}"] = fingerprint(folder / method)
        print(f"method {method}", flush=True)
    for tuning in TUNINGS:
        finessl("train", "sample", "--out", tuning, "--tuning", tuning, *COMMON, cwd=folder)
        found[f"tuning {tuning}"] = fingerprint(folder / tuning)
        print(f"tuning {tuning}", flush=True)
    interrupted(folder)
    found["stopped and resumed"] = fingerprint(folder / "resumed")
    finessl("report", "supervised", "finessl", "--out", "report.html", cwd=folder)
    found["report"] = {"text": digest(report_text(folder / "report.html").encode())}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = collect(folder)
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{len(found)} runs recorded in {arguments.file}")
        return
    before = json.loads(arguments.file.read_text(encoding="utf-8"))
    different = [
        f"{run}: {name}"
        for run in sorted(before.keys() | found.keys())
        for name in sorted(before.get(run, {}).keys() | found.get(run, {}).keys())
        if before.get(run, {}).get(name) != found.get(run, {}).get(name)
    ]
    for line in different:
        print(f"differs: {line}")
    total = sum(len(values) for values in before.values())
    print(f"{total - len(different)} of {total} digests of {len(before)} runs are equal")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
