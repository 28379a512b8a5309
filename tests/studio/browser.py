"""A studio in a process of its own, and a real browser that looks at it."""

from __future__ import annotations

import csv
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import finessl
from finessl.bench.running import Running

with suppress(ImportError):  # the fixture `browser` says what to do
    from playwright.sync_api import expect

SAMPLE = Path(finessl.__file__).parent / "assets" / "sample" / "train"


def write_images(folder: Path, classes: tuple[str, ...], count: int) -> Path:
    """Sample images as CLASS-NUMBER.png, so that a test knows what it sees."""
    folder.mkdir()
    for name in classes:
        pixels = np.asarray(Image.open(SAMPLE / f"{name}.webp").convert("RGB")).reshape(-1, 32, 32, 3)
        for number in range(count):
            Image.fromarray(pixels[number]).save(folder / f"{name}-{number:02}.png")
    return folder


def labels_in(table: Path) -> dict[str, str]:
    with open(table, newline="") as file:
        return {row["path"]: row["label"] for row in csv.DictReader(file)}


def go(page: Any, screen: str) -> None:
    page.get_by_role("navigation", name="Screens").get_by_role("link", name=screen).click()
    expect(page.locator(f"body[data-screen={screen.lower()}]")).to_be_attached()


def studio(data: Path) -> Running:
    return Running(data, "--device", "cpu")
