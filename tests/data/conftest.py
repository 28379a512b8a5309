"""Small image sets, written as people keep them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FINESSL_CACHE", str(folder))
    return folder


def picture(seed: int = 0, height: int = 8, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write(path: Path, seed: int = 0, height: int = 8, width: int = 8) -> Path:
    """A lossless image file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(seed, height, width)).save(path)
    return path


def class_folder(root: Path, counts: dict[str, int], seed: int = 0) -> Path:
    """<root>/<class>/<number>.png"""
    for name, count in counts.items():
        for number in range(count):
            write(root / name / f"{number}.png", seed := seed + 1)
    return root


def tar_bytes(
    members: dict[str, bytes], mode: Literal["w", "w:gz"] = "w:gz", format: int = tarfile.PAX_FORMAT
) -> bytes:
    """A tar file of these names and contents."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=format) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def make():  # type: ignore[no-untyped-def]
    """The functions above: test modules cannot import each other in importlib mode."""

    class Make:
        pass

    Make.picture, Make.write, Make.class_folder = staticmethod(picture), staticmethod(write), staticmethod(class_folder)  # type: ignore[attr-defined]
    return Make
