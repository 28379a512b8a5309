"""Small data and small backbones for the tests: real formats, seconds to train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; make test-gpu runs it there"))


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder train/<class>/*.png, test/<class>/*.png that a tiny network learns in seconds: coloured stripes."""
    root = tmp_path_factory.mktemp("shapes")
    rng = np.random.default_rng(0)
    for part, count in (("train", 24), ("test", 8)):
        for number, name in enumerate(("across", "diagonal", "down")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(stripes(rng, number)).save(folder / f"{i:02d}.png")
    return root


def stripes(rng: np.random.Generator, kind: int, size: int = 32) -> np.ndarray:
    y, x = np.mgrid[:size, :size]
    along = (y, x + y, x)[kind]
    wave = np.sin(along * rng.uniform(0.6, 0.9) + rng.uniform(0, 6))[..., None]
    image = 128 + 90 * wave * rng.uniform(0.5, 1.0, 3) + rng.normal(0, 15, (size, size, 3))
    return image.clip(0, 255).astype(np.uint8)


TINY = [
    "--backbone", "vit_tiny_patch16_224", "--set", "model.pretrained=false", "--image-size", "32", "--steps", "3",
    "--batch-size", "4", "--set", "tuning.length=2", "--device", "cpu", "-q",
]  # fmt: skip


@pytest.fixture(scope="session")
def tiny_run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on `shapes`: three classes, 12 labeled and 60 other training images, 24 test images."""
    from finessl.cli import app

    out = tmp_path_factory.mktemp("tiny") / "run"
    app(["train", str(shapes), "--out", str(out), "-n", "4", *TINY], standalone_mode=False)
    return out
