"""Small data and small backbones for the tests: real formats, seconds to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; make test-gpu runs it there"))


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINESSL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def run_verb(*words: Any) -> str:
    """The output of a command, which must succeed."""
    from typer.testing import CliRunner

    from finessl.cli import app

    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def write_photos(
    root: Path,
    counts: dict[str, int],
    classes: Sequence[str],
    pixels: Callable[[int], np.ndarray],
    name: str = "{}.png",
) -> Path:
    """root/<part>/<class>/0.png …   counts: images per class of each part.   pixels: an image of the k-th class."""
    for part, count in counts.items():
        for k, label in enumerate(classes):
            (root / part / label).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(pixels(k)).save(root / part / label / name.format(i))
    return root


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder train/<class>/*.png, test/<class>/*.png that a tiny network learns in seconds: coloured stripes."""
    root, rng = tmp_path_factory.mktemp("shapes"), np.random.default_rng(0)
    classes = ("across", "diagonal", "down")
    return write_photos(root, {"train": 24, "test": 8}, classes, lambda k: stripes(rng, k), "{:02d}.png")


def stripes(rng: np.random.Generator, kind: int, size: int = 32) -> np.ndarray:
    y, x = np.mgrid[:size, :size]
    along = (y, x + y, x)[kind]
    wave = np.sin(along * rng.uniform(0.6, 0.9) + rng.uniform(0, 6))[..., None]
    image = 128 + 90 * wave * rng.uniform(0.5, 1.0, 3) + rng.normal(0, 15, (size, size, 3))
    return image.clip(0, 255).astype(np.uint8)


TINY = [
    "--backbone", "vit_tiny_patch16_224", "--set", "model.pretrained=false", "--image-size", "32", "--steps", "3",
    "--batch-size", "4", "--set", "tuning.length=2", "--device", "cpu", "--precision", "fp32", "-q",
]  # fmt: skip


@pytest.fixture(scope="session")
def tiny_run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on `shapes`: three classes, 12 labeled and 60 other training images, 24 test images."""
    from finessl.cli import app

    out = tmp_path_factory.mktemp("tiny") / "run"
    app(["train", str(shapes), "--out", str(out), "-n", "4", *TINY], standalone_mode=False)
    return out
