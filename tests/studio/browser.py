"""A studio in a process of its own, and a real browser that looks at it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import finessl

NAMES = ("chromium", "chromium-browser", "google-chrome")
SAMPLE = Path(finessl.__file__).parent / "assets" / "sample" / "train"
NO_PLAYWRIGHT = "Tests in a browser need Playwright: make test-browser."
NO_CHROMIUM = f"Tests in a browser need Chromium: install {', '.join(NAMES)}, or set PLAYWRIGHT_CHROMIUM to its path."


def find_chromium() -> str:
    """Path of a Chromium: PLAYWRIGHT_CHROMIUM, the system's, or the one that `playwright install chromium` fetched."""
    sync_api = pytest.importorskip("playwright.sync_api", reason=NO_PLAYWRIGHT)
    named = [os.environ.get("PLAYWRIGHT_CHROMIUM", ""), *NAMES]
    found = next((path for name in named if name and (path := shutil.which(name))), None)
    if found:
        return found
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    if not Path(own).exists():
        pytest.skip(NO_CHROMIUM)
    return own


def write_images(folder: Path, classes: tuple[str, ...], count: int) -> Path:
    """Sample images as CLASS-NUMBER.png, so that a test knows what it sees."""
    folder.mkdir()
    for name in classes:
        pixels = np.asarray(Image.open(SAMPLE / f"{name}.webp").convert("RGB")).reshape(-1, 32, 32, 3)
        for number in range(count):
            Image.fromarray(pixels[number]).save(folder / f"{name}-{number:02}.png")
    return folder


class Studio:
    """`finessl studio` on a folder."""

    def __init__(self, data: Path, port: int = 0) -> None:
        command = [sys.executable, "-m", "finessl", "studio", str(data), "--no-browser", "--backbone", "embedded"]
        self.process = subprocess.Popen(
            [*command, "--port", str(port), "--device", "cpu"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if found := re.search(r"(http://\S+?)/auth\?token=\S+", line):
                self.address, self.origin = found[0], found[1]
                break
        else:
            raise AssertionError(f"The studio did not start: {''.join(said)}")
        self.port = int(self.origin.rsplit(":", 1)[1])

    def end(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.communicate(timeout=30)


@contextmanager
def studio(data: Path, port: int = 0) -> Iterator[Studio]:
    running = Studio(data, port)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.end()
