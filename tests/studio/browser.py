"""A studio in a process of its own, and a real browser that looks at it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

import finessl
from finessl.bench.running import Running

SAMPLE = Path(finessl.__file__).parent / "assets" / "sample" / "train"


def write_images(folder: Path, classes: tuple[str, ...], count: int) -> Path:
    """Sample images as CLASS-NUMBER.png, so that a test knows what it sees."""
    folder.mkdir()
    for name in classes:
        pixels = np.asarray(Image.open(SAMPLE / f"{name}.webp").convert("RGB")).reshape(-1, 32, 32, 3)
        for number in range(count):
            Image.fromarray(pixels[number]).save(folder / f"{name}-{number:02}.png")
    return folder


def studio(data: Path, port: int = 0) -> Running:
    return Running(data, "--port", str(port), "--device", "cpu")
