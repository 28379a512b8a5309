"""The pictures of docs/studio.md: a studio on sample images, labeled by their true classes, photographed screen by screen.

    python tools/studio_screenshots.py docs                                     # light, 1280 pixels wide
    python tools/studio_screenshots.py shots --all --scheme dark --width 400    # what a phone shows at night

Needs the extra `browser` and Chromium, as make test-browser does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import expect

from finessl.bench.browser import SIZE, chromium

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "studio"))
from browser import go, studio, write_images  # noqa: E402

CLASSES = ("airplane", "bird", "frog", "horse", "ship", "truck")
SORTED = 1  # class of the wall
LABELS, AUDITED, STEPS = 36, 30, 50
WAIT = 600_000  # milliseconds
MORE = ("empty", "plan", "pairs", "keys")  # only with --all
LARGEST = 195_000  # bytes of a picture


class Camera:
    def __init__(self, page: Any, folder: Path, suffix: str, width: int, all: bool) -> None:
        self.page, self.folder, self.suffix, self.width, self.all = page, folder, suffix, width, all

    def shoot(self, name: str, pause: int = 700) -> None:
        if name in MORE and not self.all:
            return
        self.page.set_viewport_size({"width": self.width, "height": 800})
        self.page.wait_for_timeout(pause)
        path = self.folder / f"studio-{name}{self.suffix}.png"
        self.page.screenshot(path=path)
        if self.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            print(f"{name} is wider than the window")
        picture = Image.open(path).convert("RGB")
        picture.save(path, optimize=True)
        if path.stat().st_size > LARGEST:
            with_palette(picture).save(path, optimize=True)
        self.page.set_viewport_size({"width": 1280, "height": 800})


def with_palette(picture: Image.Image, exact: int = 112) -> Image.Image:
    """256 colours: those of the page as they are, the rest for the photos."""
    often = sorted(picture.getcolors(1 << 24), reverse=True)[:exact]
    colours = [channel for _, colour in often for channel in colour]
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours + picture.quantize(256 - exact).getpalette()[: 3 * (256 - exact)])
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


def answer(page: Any, count: int) -> None:
    """Press the key of the true class, as a person would."""
    caption = page.locator(".picture figcaption").first
    for _ in range(count):
        expect(caption).not_to_have_text("")
        name = caption.inner_text()
        page.keyboard.press(str(CLASSES.index(name.split("-")[0]) + 1))
        expect(caption).not_to_have_text(name)


def story(camera: Camera, address: str) -> None:
    page = camera.page
    page.goto(address)
    camera.shoot("empty")
    expect(page.locator("input:focus")).to_be_visible()
    for name in CLASSES:
        page.keyboard.type(name)
        page.keyboard.press("Enter")
        expect(page.locator(".class-name").last).to_have_text(name)
    camera.shoot("start", 2000)
    page.keyboard.press("Enter")
    answer(page, LABELS)
    expect(page.locator(".guess.first")).to_be_visible()
    camera.shoot("label", 3000)
    go(page, "Train")
    camera.shoot("plan")
    page.get_by_label("Time budget").select_option("steps")
    page.get_by_label("Steps").fill(str(STEPS))
    page.get_by_role("button", name="Start training").click()
    go(page, "Sort")
    page.keyboard.press(str(SORTED + 1))
    expect(page.locator("h1")).to_contain_text(CLASSES[SORTED])
    page.wait_for_timeout(2500)
    for cell in page.locator(".cell").all():
        inside = (cell.bounding_box() or {"y": 1e9})["y"] < 650
        if inside and not (cell.get_attribute("title") or "").startswith(CLASSES[SORTED]):
            cell.click()
    camera.shoot("sort", 1500)
    page.keyboard.press("Enter")
    go(page, "Review")
    camera.shoot("review", 4500)  # the message of the wall has gone
    page.get_by_role("button", name="Confused pairs").click()
    camera.shoot("pairs", 2500)
    go(page, "Audit")
    answer(page, AUDITED)
    camera.shoot("audit")
    go(page, "Train")
    expect(page.get_by_role("heading", name="Trained")).to_be_visible()
    camera.shoot("train", 2000)
    go(page, "Export")
    camera.shoot("export")
    page.keyboard.press("?")
    camera.shoot("keys")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--all", action="store_true", help=f"also {', '.join(MORE)}")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    suffix = "" if arguments.scheme == "light" else "-dark"
    suffix += "" if arguments.width == 1280 else f"-{arguments.width}"
    with tempfile.TemporaryDirectory() as temporary, chromium() as browser:
        data = write_images(Path(temporary) / "vehicles-and-animals", CLASSES, 100)
        page = browser.new_page(viewport=SIZE, color_scheme=arguments.scheme)
        page.set_default_timeout(WAIT)
        expect.set_options(timeout=WAIT)
        with studio(data) as server:
            story(Camera(page, arguments.folder, suffix, arguments.width, arguments.all), server.address)


if __name__ == "__main__":
    main()
