"""What a person at the studio sees, measured in Chromium: the first image, the next image after a key, the grid at speed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finessl.errors import FinesslError

NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1280, "height": 800}
PAUSE, SETTLED = 250, 5000  # milliseconds between two keys; until the last labels are followed by all computations
SHOWN = """async (selector) => {
  while (!document.querySelector(selector)?.naturalWidth) await new Promise(requestAnimationFrame);
  return performance.now();
}"""
SCROLL = """async ({seconds, rows}) => {
  const grid = document.querySelector('.grid'), box = grid.getBoundingClientRect(), frames = [];
  const blank = () => {
    const inView = [...grid.querySelectorAll('.cell')].filter((cell) => {
      const one = cell.getBoundingClientRect();
      return one.bottom > box.top && one.top < box.bottom;
    });
    const loaded = (image) => image?.complete && image.naturalWidth;
    return !inView.length || !inView.every((cell) => loaded(cell.querySelector('img')));
  };
  const side = grid.querySelector('.cell').getBoundingClientRect().height, begun = performance.now();
  const longest = {scroll: 0, jump: 0};
  let last = begun, since = null, after = 'scroll', jumps = 0;
  await new Promise((done) => {
    const frame = (now) => {
      frames.push(now - last);
      if (blank()) longest[after] = Math.max(longest[after], now - (since ??= last));
      else [since, after] = [null, 'scroll'];
      const jump = Math.floor((now - begun) / 1000);  // once a second to another place, as by the scroll bar
      if (jump > jumps) {
        grid.scrollTop = (grid.scrollHeight * (jumps = jump) * 0.618) % (grid.scrollHeight - 2 * box.height);
        after = 'jump';
      } else grid.scrollTop += rows * side * (now - last) / 1000;
      last = now;
      now - begun < 1000 * seconds ? requestAnimationFrame(frame) : done();
    };
    requestAnimationFrame(frame);
  });
  frames.sort((a, b) => a - b);
  const at = (share) => frames[Math.floor(frames.length * share)];
  return {scroll_blank_ms: longest.scroll, jump_blank_ms: longest.jump, frame_p50_ms: at(0.5), frame_p99_ms: at(0.99)};
}"""


def find_chromium() -> str:
    """Path of a Chromium: PLAYWRIGHT_CHROMIUM, the system's, or the one that `playwright install chromium` has fetched."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise FinesslError("A browser is driven by Playwright: pip install 'finessl[browser]'.") from error
    named = [os.environ.get("PLAYWRIGHT_CHROMIUM", ""), *NAMES]
    found = next((path for name in named if name and (path := shutil.which(name))), None)
    if found:
        return found
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    if not Path(own).exists():
        raise FinesslError(f"There is no Chromium: install {', '.join(NAMES)}, or set PLAYWRIGHT_CHROMIUM to its path.")
    return own


@contextmanager
def chromium() -> Iterator[Any]:
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def watch_page(address: str, origin: str, labels: int = 30, seconds: int = 10, rows: float = 6) -> dict[str, Any]:
    """Label and scroll in a browser.   rows: of the grid that go by per second."""
    with chromium() as browser:
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(60_000)
        page.goto(address)
        page.goto("about:blank")  # and as on any later day:
        page.goto(f"{origin}/#label")
        first = page.evaluate(SHOWN, ".picture img:not([hidden])")
        painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null")
        for _ in range(labels):
            page.wait_for_timeout(PAUSE)
            page.keyboard.press("1")
        page.wait_for_timeout(2 * PAUSE)
        keys = page.evaluate("performance.getEntriesByName('next-image').map((entry) => entry.duration / 1000)")
        page.goto(f"{origin}/#sort")
        page.locator("body[data-screen=sort]").wait_for()
        page.keyboard.press("0")
        page.locator("h1", has_text="All images").wait_for()
        page.evaluate(SHOWN, ".cell img")
        page.wait_for_timeout(SETTLED)
        scroll = page.evaluate(SCROLL, {"seconds": seconds, "rows": rows})
    return {"first_paint_ms": painted, "first_image_ms": first, "keys": keys, "scroll": scroll}
