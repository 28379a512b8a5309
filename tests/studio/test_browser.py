"""The studio as its user sees it: Chromium, the keyboard, and a server that may die."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from browser import go, labels_in, studio, write_images  # noqa: E402

with contextlib.suppress(ImportError):  # the fixture says what to do
    from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.browser]
TRAINING = 300_000  # milliseconds until a test gives up; a loaded machine trains slowly
FOLDERS = ("frog", "ship", "truck")
NAMES = ("frog", "<img src=//example.org onerror=alert(1)>", "truck & <b>bus</b>")  # hostile names are only names


def key_of(name: str) -> str:
    return str(FOLDERS.index(name.split("-")[0]) + 1)


def shown(page: Any) -> str:
    """The file name below the large image."""
    caption = page.locator(".picture figcaption").first
    expect(caption).to_have_text(re.compile("-"))
    return caption.inner_text()


def label_next(page: Any) -> str:
    name = shown(page)
    page.keyboard.press(key_of(name))
    expect(page.locator(".picture figcaption").first).not_to_have_text(name)
    return name


def name_classes(page: Any) -> None:
    expect(page.get_by_role("heading", name="Classes")).to_be_visible()
    for number, name in enumerate(NAMES, 1):
        page.keyboard.type(name)
        page.keyboard.press("Enter")
        expect(page.locator(".class-name")).to_have_text(list(NAMES[:number]))


def label(page: Any) -> None:
    page.keyboard.press("Enter")
    names = [label_next(page) for _ in range(15)]
    expect(page.locator("#labels")).to_have_text("15 labels")
    page.keyboard.press("u")  # the last one comes back
    expect(page.locator("#labels")).to_have_text("14 labels")
    expect(page.locator(".picture figcaption")).to_have_text(names[-1])
    label_next(page)
    expect(page.locator("#labels")).to_have_text("15 labels")
    assert page.evaluate("performance.getEntriesByName('next-image').length") > 5  # measured
    expect(page.locator(".guess.first")).to_be_visible()  # suggestions have come


def sort(page: Any) -> int:
    """Accept the right images of what is in view; how many labels there are then."""
    go(page, "Sort")
    expect(page.locator(".cell img").first).to_be_visible()
    for _ in range(3):
        page.keyboard.press("+")  # few are in view: what was not seen is not accepted, and the training is short
    expect(page.locator(".zoomer input")).to_have_value("5")
    for cell in page.locator(".cell").all():
        if not (cell.get_attribute("title") or "").startswith(FOLDERS[0]):
            cell.click()
    accept = page.get_by_role("button", name=re.compile("^Accept"))
    count = int(re.search(r"Accept (\d+)", accept.inner_text())[1])  # type: ignore[index]
    page.keyboard.press("Enter")
    expect(page.locator("#labels")).to_have_text(f"{15 + count} labels")
    return 15 + count


def start_training(page: Any) -> None:
    go(page, "Train")
    page.get_by_label("Time budget").select_option("steps")
    page.get_by_label("Steps").fill("30")
    page.get_by_role("button", name="Start training").click()
    expect(page.get_by_role("heading", name="Training", exact=True)).to_be_visible()


def review(page: Any) -> None:
    go(page, "Review")
    for kind in page.locator(".tabs button").all():
        kind.click()
        expect(page.locator(".loading:visible")).to_have_count(0)
        if page.locator(".reason").is_visible():
            break
    left = int(page.locator(".tabs small").inner_text())
    page.keyboard.press("i")
    expect(page.locator(".tabs small")).to_have_text(str(left - 1))


def audit(page: Any) -> None:
    go(page, "Audit")
    expect(page.locator(".picture figcaption")).to_be_visible()
    expect(page.locator(".judgement")).to_have_count(0)  # nothing is predicted before the answer
    for _ in range(20):
        label_next(page)
    expect(page.locator(".audit-figure")).to_contain_text("from 20 audited images")
    expect(page.locator("#accuracy")).to_contain_text("audited")


def export(page: Any) -> Path:
    go(page, "Export")
    card = page.locator("[data-what=csv]")
    card.get_by_role("button", name="Write the table").click()
    return Path(card.locator(".result .path").inner_text())


def test_the_whole_story(page: Any, tmp_path: Path) -> None:
    data = write_images(tmp_path / "photos", FOLDERS, 16)
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    with studio(data) as server:
        page.goto(server.address)
        assert page.url == f"{server.origin}/"  # the token is gone from the address
        name_classes(page)
        label(page)
        total = sort(page)
        start_training(page)
        review(page)  # while it trains
        audit(page)
        table = export(page)
        page.goto("about:blank")
    assert not complaints
    assert all(url.startswith((server.origin, "about:")) for url in asked)
    found = labels_in(table)
    assert len(found) == total
    assert all(NAMES[FOLDERS.index(path.split("-")[0])] == name for path, name in found.items())

    with studio(data) as server:  # closed and opened again, and the training has gone on
        page.goto(server.address)
        expect(page.locator("#labels")).to_have_text(f"{total} labels")
        expect(page.locator(".classes li:not(:last-child) .class-name")).to_have_text(list(NAMES))
        go(page, "Audit")
        expect(page.locator(".figure")).to_be_visible()
        expect(page.locator("#accuracy")).to_contain_text("audited")
        expect(page.locator(".audit-figure")).to_contain_text("from 20 audited images")
        go(page, "Train")
        expect(page.get_by_role("heading", name="Trained")).to_be_visible(timeout=TRAINING)
        expect(page.locator(".chart").first).to_be_visible()
        expect(page.get_by_label("Progress")).to_have_attribute("value", "30")


def test_labels_survive_the_death_of_the_server(page: Any, tmp_path: Path) -> None:
    """Killed twice while labels are on their way: what was answered is on the disk, the rest waits in the page."""
    data = write_images(tmp_path / "photos", FOLDERS, 20)
    dice = random.Random(0)
    given: dict[str, str] = {}
    with studio(data) as server:
        page.goto(server.address)
        name_classes(page)
        page.keyboard.press("Enter")
        label_and_kill(page, server, given, dice)
    port = server.port
    with studio(data) as server:
        assert server.port == port  # so that the page finds it again
        sign_in_again(page, server, given)
        label_and_kill(page, server, given, dice)
    with studio(data) as server:
        sign_in_again(page, server, given)
    lines = (data.with_name("photos.finessl") / "labels.jsonl").read_text().splitlines()
    assert {event["image"]: event["to"] for event in map(json.loads, lines) if "image" in event} == given


def label_and_kill(page: Any, server: Any, given: dict[str, str], dice: random.Random) -> None:
    for _ in range(dice.randrange(4, 9)):
        name = label_next(page)
        given[name] = NAMES[int(key_of(name)) - 1]
    page.wait_for_timeout(dice.choice([0, 5, 20]))
    server.close(signal.SIGKILL)
    expect(page.locator("#notice")).to_contain_text("does not answer")
    if page.locator(".picture").is_visible():  # labeling goes on without the server, as long as images are prepared
        name = shown(page)
        page.keyboard.press(key_of(name))
        given[name] = NAMES[int(key_of(name)) - 1]


def sign_in_again(page: Any, server: Any, given: dict[str, str]) -> None:
    """Another tab opens the new address; the page that stayed open sends what it has kept."""
    other = page.context.new_page()
    other.goto(server.address)
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#labels")).to_have_text(f"{len(given)} labels")
    other.close()
