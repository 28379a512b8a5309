"""Predictions in parts, killed and resumed: python tools/check_predict.py [--images 100000] [--work DIR]

Writes generated images into tar shards, predicts them once without interruption and once with three kills (SIGKILL) by
another number of processes, and compares the two folders byte by byte. Prints how the memory of the first grows.
"""

from __future__ import annotations

import argparse
import filecmp
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import timm
from PIL import Image
from safetensors.torch import save_file

import finessl
from finessl.data.sources import open_dataset

SHARD = 500  # images
BACKBONE = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)  # small: the files are the point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--work", type=Path, help="an empty folder to work in")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="finessl-predict-"))
    work.mkdir(parents=True, exist_ok=True)
    shards = max(options.images // SHARD, 4)
    broken = write_shards(work / "shards", shards)
    run = make_run(work)

    def start(out: str, jobs: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "finessl", "predict", str(run), str(work / "shards"), "--device", "cpu"]
        return subprocess.Popen([*command, "--out", str(work / out), "--jobs", str(jobs)])

    whole, memory = start("whole", 1), []
    while whole.poll() is None:
        memory.append((len(parts(work / "whole")), resident(whole.pid)))
        time.sleep(0.5)
    working = [(count, size) for count, size in memory if count > 0 and size > 0]
    early = max(size for count, size in working if count <= shards // 4 or count == working[0][0])
    print(f"memory: {early:.0f} MB in the first quarter, {max(size for _, size in working):.0f} MB at most")
    for kill in (1, 2, 3):
        process = start("killed", 2)
        while process.poll() is None and len(parts(work / "killed")) < kill * shards // 4:
            time.sleep(0.02)
        process.kill()
        process.wait()
        print(f"killed with {len(parts(work / 'killed'))} of {shards} parts")
    assert start("killed", 2).wait() == 0 and whole.returncode == 0
    same = filecmp.dircmp(work / "whole", work / "killed")
    names = sorted(path.name for path in (work / "whole").iterdir())
    _, different, unreadable = filecmp.cmpfiles(work / "whole", work / "killed", names, shallow=False)
    finished = json.loads((work / "whole" / "predictions.json").read_text())["finished"]
    print(f"{finished}, {broken} broken images written; {len(names)} files, {len(different)} different")
    sys.exit(bool(different or unreadable or same.left_only or same.right_only or finished["broken"] != broken))


def parts(folder: Path) -> list[Path]:
    return list(folder.glob("part-*.parquet"))


def resident(process: int) -> float:
    """Megabytes of memory that a process has now."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def write_shards(folder: Path, shards: int) -> int:
    """Varied sample images as JPEG; every fifth shard has a broken one."""
    folder.mkdir()
    sample, rng = open_dataset("sample"), np.random.default_rng(0)
    for number in range(shards):
        with tarfile.open(folder / f"{number:04d}.tar", "w") as tar:
            for i in range(SHARD):
                image = sample.train.read(int(rng.integers(len(sample.train)))).astype(np.int16) + rng.integers(
                    -40, 40, 3
                )
                encoded = io.BytesIO()
                Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=80)
                content = encoded.getvalue()[: 100 if number % 5 == 0 and i == 7 else None]
                info = tarfile.TarInfo(f"{i:05d}.jpg")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return len(range(0, shards, 5))


def make_run(work: Path) -> Path:
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
