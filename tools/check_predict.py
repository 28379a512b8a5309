"""Predictions in parts, at scale.

python tools/check_predict.py [--images 100000] [--work DIR]     killed and resumed
python tools/check_predict.py --scaling [--work DIR]             two processes against one; needs two idle cores

The first writes generated images into tar shards, predicts them once without interruption and once with three kills
(SIGKILL) by another number of processes, compares the two folders byte by byte, and prints the memory of the first in
each quarter of its work. The second measures images per second of one process on one core, of one process on all cores (it
decodes while it computes) and of two processes, where decoding is the limit (photos, a small network) and where the encoder
is (small images, the embedded backbone).
"""

from __future__ import annotations

import argparse
import filecmp
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import timm
from PIL import Image
from safetensors.torch import save_file

import finessl
from finessl.bench.scale import write_originals
from finessl.data.sources import open_dataset
from finessl.runtime.machine import usable_cores

SHARD = 500  # images
BACKBONE = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)  # small: the files are the point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--work", type=Path, help="an empty folder to work in")
    parser.add_argument("--scaling", action="store_true", help="measure one process against two")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="finessl-predict-"))
    work.mkdir(parents=True, exist_ok=True)
    if options.scaling:
        measure_scaling(work)
    else:
        kill_and_resume(work, options.images)


def start(run: Path, shards: Path, out: Path, jobs: int, cores: int | None = None) -> subprocess.Popen[bytes]:
    """cores: how many the process may use; all by default."""
    command = [sys.executable, "-m", "finessl", "predict", str(run), str(shards), "--device", "cpu"]
    own = None if cores is None else sorted(os.sched_getaffinity(0))[:cores]
    confine = None if own is None else partial(os.sched_setaffinity, 0, own)
    return subprocess.Popen([*command, "--out", str(out), "--jobs", str(jobs)], preexec_fn=confine)


# ---- killed and resumed ---------------------------------------------------------------------------------------------


def kill_and_resume(work: Path, images: int) -> None:
    shards = max(images // SHARD, 4)
    broken = write_shards(work / "shards", shards)
    run = make_run(work)
    begin = partial(start, run, work / "shards")
    begun, whole, memory = time.monotonic(), begin(work / "whole", 1), []
    while whole.poll() is None:
        memory.append((len(parts(work / "whole")), resident(whole.pid)))
        time.sleep(0.5)
    print(f"{shards * SHARD:,} images by one process: {time.monotonic() - begun:.0f} s, load {os.getloadavg()[0]:.1f}")
    quarters = [[size for count, size in memory if size and count and count * 4 // shards == q] for q in range(4)]
    shown = [f"{max(sizes):.0f}" if sizes else "–" for sizes in quarters]
    print(f"largest memory in each quarter: {', '.join(shown)} MB", flush=True)
    for kill in (1, 2, 3):
        process = begin(work / "killed", 2)
        while process.poll() is None and len(parts(work / "killed")) < kill * shards // 4:
            time.sleep(0.02)
        process.kill()
        process.wait()
        print(f"killed with {len(parts(work / 'killed'))} of {shards} parts", flush=True)
    assert begin(work / "killed", 2).wait() == 0 and whole.returncode == 0
    same = filecmp.dircmp(work / "whole", work / "killed")
    names = sorted(path.name for path in (work / "whole").iterdir())
    _, different, unreadable = filecmp.cmpfiles(work / "whole", work / "killed", names, shallow=False)
    finished = json.loads((work / "whole" / "predictions.json").read_text())["finished"]
    print(f"{finished}, {broken} broken images written; {len(names)} files, {len(different)} different")
    sys.exit(bool(different or unreadable or same.left_only or same.right_only or finished["broken"] != broken))


# ---- one process and two --------------------------------------------------------------------------------------------


def measure_scaling(work: Path) -> None:
    """Rates from the times at which parts appear, without the start of the processes."""
    photos = [path.read_bytes() for path in write_originals(work / "originals", 64)]
    small = [jpeg(image) for image in sample_images(64)]
    settings = dict(backbone="embedded", tuning="lora", steps=2, labels_per_class=2, batch_size=4)
    embedded = work / "embedded"
    finessl.train("sample", out=str(embedded), device="cpu", quiet=True, **settings)
    cases = {"decoding": (make_run(work), photos, 200), "the encoder": (embedded, small, 100)}
    for limit, (run, contents, size) in cases.items():
        shards = work / limit.split()[-1]
        shards.mkdir()
        for number in range(24):
            write_tar(shards / f"{number:04d}.tar", (contents[i % len(contents)] for i in range(size)))
        rates = []
        for jobs, cores in ((1, 1), (1, None), (2, None)):
            out = work / f"{shards.name}-{jobs}-{cores or 'all'}"
            assert start(run, shards, out, jobs, cores).wait() == 0
            times = sorted(path.stat().st_mtime for path in parts(out))[2 * jobs - 1 :]
            rates.append(size * (len(times) - 1) / (times[-1] - times[0]))
        print(
            f"limit {limit}: {rates[0]:.0f} images/s by one process on one core, {rates[1]:.0f} on {usable_cores()}; "
            f"{rates[2]:.0f} by two processes: {rates[2] / rates[0]:.2f} and {rates[2] / rates[1]:.2f} times "
            f"(load {os.getloadavg()[0]:.1f})",
            flush=True,
        )


def parts(folder: Path) -> list[Path]:
    return list(folder.glob("part-*.parquet"))


def resident(process: int) -> float:
    """Megabytes of memory that a process has now."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def sample_images(count: int) -> Iterator[np.ndarray]:
    """Varied sample images."""
    sample, rng = open_dataset("sample"), np.random.default_rng(0)
    for _ in range(count):
        image = sample.train.read(int(rng.integers(len(sample.train)))).astype(np.int16)
        yield (image + rng.integers(-40, 40, 3)).clip(0, 255).astype(np.uint8)


def jpeg(image: np.ndarray) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(image).save(encoded, "JPEG", quality=80)
    return encoded.getvalue()


def write_tar(path: Path, contents: Iterable[bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for i, content in enumerate(contents):
            info = tarfile.TarInfo(f"{i:05d}.jpg")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_shards(folder: Path, shards: int) -> int:
    """Varied sample images as JPEG; every fifth shard has a broken one."""
    folder.mkdir()
    for number, images in enumerate(batched(sample_images(shards * SHARD), SHARD)):
        cut = 7 if number % 5 == 0 else -1
        write_tar(folder / f"{number:04d}.tar", (jpeg(x)[: 100 if i == cut else None] for i, x in enumerate(images)))
    return len(range(0, shards, 5))


def batched(images: Iterator[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    while some := list(islice(images, size)):
        yield some


def make_run(work: Path) -> Path:
    """A finished run of a network so small that files are the limit."""
    folder = work / "backbone"
    folder.mkdir()
    save_file(
        timm.create_model("vit_tiny_patch16_224", num_classes=0, **BACKBONE).state_dict(), folder / "model.safetensors"
    )
    config = {
        "num_classes": 0,
        "input_size": [3, 32, 32],
        "fixed_input_size": True,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    about = {"architecture": "vit_tiny_patch16_224", "num_classes": 0, "model_args": BACKBONE, "pretrained_cfg": config}
    (folder / "config.json").write_text(json.dumps(about))
    settings = dict(backbone=f"local-dir:{folder}", tuning="lora", steps=2, labels_per_class=2, batch_size=4)
    finessl.train("sample", out=str(work / "run"), device="cpu", quiet=True, **settings)
    return work / "run"


if __name__ == "__main__":
    main()
