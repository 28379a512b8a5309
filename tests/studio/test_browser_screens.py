"""Each screen of the studio in Chromium, on one studio: what the story does not touch."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finessl.bench.running import Running
from finessl.errors import FinesslError

sys.path.insert(0, str(Path(__file__).parent))
from browser import go, labels_in, studio, write_images  # noqa: E402

with contextlib.suppress(ImportError):  # the fixture `browser` says what to do
    from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.browser]
CLASSES = ("frog", "ship", "truck")
EACH, LABELED = 16, 4  # images of each class; of which labeled
LOADED = """(source) => {
  const images = [...document.querySelectorAll('.cell img')];
  return images.length > 20 && images.every((image) => image.naturalWidth && image.alt && image.src.includes(source));
}"""
SCREENS = ("Start", "Label", "Sort", "Train", "Review", "Audit", "Export")


@pytest.fixture(scope="module")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A studio with four labels of each class, whose suggestions are there."""
    data = write_images(tmp_path_factory.mktemp("screens") / "the photos", CLASSES, EACH)
    with studio(data) as running:
        for name in CLASSES:
            running.ask("/api/classes", {"add": name})
        images = {item["name"]: item["id"] for item in running.ask("/api/grid?limit=1000")["items"]}
        for number, name in enumerate(CLASSES):
            for k in range(LABELED):
                body = {"image": images[f"{name}-{k:02}.png"], "class": number, "source": "queue"}
                answer = running.ask("/api/label", body)
        running.wait_for_suggestions(answer["events"], 120)
        yield running


@pytest.fixture
def opened(page: Any, server: Running) -> Any:
    page.goto(server.address)
    expect(page.locator("#labels")).to_contain_text("labels")
    return page


def total(page: Any) -> int:
    """Images on the wall."""
    heading = page.locator("h1 small")
    expect(heading).to_have_text(re.compile(r"\d+ image"))
    return int(heading.inner_text().split()[0])


def count(running: Running) -> int:
    return int(running.ask("/api/state")["labels"])


def marked(page: Any, number: int) -> None:
    expect(page.locator(".cell.marked")).to_have_count(number)


def test_sort_by_mouse(opened: Any) -> None:
    """Click, shift-click, drag, zoom, look at one."""
    page = opened
    go(page, "Sort")
    page.keyboard.press("0")
    cells = page.locator(".cell")
    expect(page.locator("h1")).to_contain_text("All images")
    expect(cells.nth(11).locator("img")).to_be_visible()
    cells.nth(0).click()
    marked(page, 1)
    page.keyboard.down("Shift")
    cells.nth(4).click()
    page.keyboard.up("Shift")
    marked(page, 5)
    page.keyboard.press("Escape")
    marked(page, 0)
    first, last = cells.nth(1).bounding_box(), cells.nth(3).bounding_box()
    page.mouse.move(first["x"] + 10, first["y"] + 10)
    page.mouse.down()
    page.mouse.move(last["x"] + 20, last["y"] + 20, steps=5)
    page.mouse.up()
    marked(page, 3)
    expect(page.locator(".foot")).to_contain_text("3 images marked")
    page.keyboard.press("Escape")
    page.keyboard.press("+")
    expect(page.locator(".zoomer input")).to_have_value("3")
    assert cells.nth(0).bounding_box()["width"] > 1.2 * first["width"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("z")
    expect(page.locator("dialog img.large")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()


def test_a_wall_comes_in_few_requests(opened: Any) -> None:
    """Its thumbnails are packed in one answer; those that are not made yet come one by one."""
    page, asked = opened, []
    page.on("request", lambda request: asked.append(request.url))

    def open_wall(source: str) -> None:
        go(page, "Train")
        asked.clear()
        go(page, "Sort")
        page.keyboard.press("0")
        expect(page.locator("h1")).to_contain_text("All images")
        page.wait_for_function(LOADED, arg=source)

    open_wall("data:")
    assert sum("/api/thumbnails?" in url for url in asked) <= 4  # two walls: what is in view, and the rest
    page.route("**/api/thumbnails?*", lambda route: route.fulfill(json={"jpegs": [""] * 200}))
    page.route("**/thumb/*", lambda route: route.fulfill(status=422, json={"error": "it is broken."}))
    go(page, "Train")
    go(page, "Sort")
    expect(page.locator(".cell .unreadable").first).to_be_visible()
    page.unroute("**/thumb/*")
    open_wall("/thumb/")


def test_search_and_filters(opened: Any, server: Running) -> None:
    page = opened
    go(page, "Sort")
    page.keyboard.press("0")
    expect(page.locator("h1")).to_contain_text("All images")
    unlabeled = len(CLASSES) * (EACH - LABELED)
    expect(page.locator("h1 small")).to_have_text(f"{unlabeled} images")
    page.get_by_label("Search by file name").fill("SHIP-1")
    expect(page.locator("h1 small")).to_have_text("6 images")  # 10 … 15
    page.get_by_label("Search by file name").fill("no such name")
    expect(page.get_by_role("heading", name="No image fits the filters")).to_be_visible()
    page.get_by_label("Search by file name").fill("")
    expect(page.locator("h1 small")).to_have_text(f"{unlabeled} images")
    found = 0
    for confidence in ("0.9-1", "0.7-0.9", "0.5-0.7", "0-0.5"):
        with page.expect_response(re.compile(r"/api/grid.*max=")):
            page.get_by_label("Confidence").select_option(confidence)
        page.wait_for_timeout(100)
        found += total(page)
    assert found == unlabeled
    page.get_by_label("Confidence").select_option("")
    expect(page.get_by_label("Source of the label")).to_be_hidden()  # an unlabeled image has none
    page.get_by_label("Labeled or not").select_option("yes")
    expect(page.locator("h1 small")).to_have_text(f"{count(server)} images")
    page.get_by_label("Source of the label").select_option("queue")
    expect(page.locator("h1 small")).to_have_text(f"{count(server)} images")
    page.get_by_label("Source of the label").select_option("review")
    expect(page.get_by_role("heading", name="No image fits the filters")).to_be_visible()


def test_keys_of_label(opened: Any, server: Running) -> None:
    """Space takes the suggestion, X sets apart, a name is typed, arrows go back and on, Z zooms; U takes all back."""
    page = opened
    go(page, "Label")
    caption, before = page.locator(".picture figcaption"), count(server)
    expect(page.locator(".guess.first")).to_be_visible()
    first = caption.inner_text()
    page.keyboard.press("z")
    expect(page.locator(".picture.zoomed")).to_be_visible()
    assert page.evaluate("document.querySelector('.picture').scrollLeft") > 100  # the middle of the image
    page.keyboard.press("ArrowRight")
    expect(caption).not_to_have_text(first)
    page.keyboard.press("ArrowLeft")
    expect(caption).to_have_text(first)
    page.keyboard.press(" ")
    expect(page.locator("#labels")).to_have_text(f"{before + 1} labels")
    page.keyboard.press("x")
    expect(page.locator(".class-row.none .class-count")).to_have_text("1")
    page.keyboard.type("tru")
    page.keyboard.press("Enter")
    expect(page.locator("#labels")).to_have_text(f"{before + 2} labels")
    expect(page.locator(".classes li", has_text="truck").locator(".class-count")).to_have_text(str(LABELED + 1))
    for _ in range(3):
        page.keyboard.press("u")
    expect(page.locator("#labels")).to_have_text(f"{before} labels")
    expect(page.locator(".class-row.none .class-count")).to_have_text("0")
    expect(caption).to_have_text(first)


def test_one_image_is_shown_while_others_are_prepared(opened: Any) -> None:
    page = opened
    go(page, "Label")
    images = page.locator(".picture img")
    expect(images).to_have_count(4)
    expect(images.locator("visible=true")).to_have_count(1)


def test_without_the_server_labels_wait(opened: Any, server: Running) -> None:
    page, before = opened, count(server)
    go(page, "Label")
    expect(page.locator(".picture figcaption")).to_have_text(re.compile("-"))
    page.context.set_offline(True)
    page.keyboard.press("1")
    expect(page.locator("#notice")).to_contain_text(re.compile("start it again with “finessl studio '/.*the photos'”"))
    expect(page.locator("#notice")).to_contain_text("1 answer is kept in this page")
    assert count(server) == before
    page.context.set_offline(False)
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#labels")).to_have_text(f"{before + 1} labels")
    page.keyboard.press("u")
    expect(page.locator("#labels")).to_have_text(f"{before} labels")


def test_undo_says_what_it_takes_back(opened: Any) -> None:
    """The last action, on whichever screen it was."""
    page = opened
    go(page, "Audit")
    expect(page.locator(".picture figcaption")).to_have_text(re.compile("-"))
    page.keyboard.press("1")
    expect(page.locator(".audit-figure")).to_contain_text("answer so far")
    go(page, "Label")
    page.keyboard.press("u")
    expect(page.locator(".toast")).to_have_text("Undone: an answer of the audit.")


def test_two_tabs_agree(opened: Any, server: Running) -> None:
    page, before = opened, count(server)
    other = page.context.new_page()
    other.goto(server.origin)
    go(page, "Label")
    expect(page.locator(".picture figcaption")).to_have_text(re.compile("-"))
    page.keyboard.press("1")
    for one in (page, other):
        expect(one.locator("#labels")).to_have_text(f"{before + 1} labels")
    go(other, "Label")
    other.keyboard.press("u")
    for one in (page, other):
        expect(one.locator("#labels")).to_have_text(f"{before} labels")
    assert count(server) == before
    other.close()


def test_rename_split_and_merge(opened: Any, server: Running) -> None:
    page = opened
    go(page, "Sort")
    page.get_by_label("Rename, merge or split ship").click()
    page.get_by_label("New name").fill("boat")
    page.get_by_role("button", name="Rename", exact=True).click()
    expect(page.locator(".class-name")).to_contain_text(["frog", "boat", "truck"])
    page.get_by_label("Rename, merge or split boat").click()
    page.get_by_role("button", name=f"Show the {LABELED} labels").click()
    expect(page.locator("h1")).to_have_text(re.compile(f"boat.*{LABELED} images"))
    for number in range(2):
        page.locator(".cell").nth(number).click()
    page.keyboard.type("sail")  # a new class
    page.keyboard.press("Enter")
    sail = page.locator(".classes li", has_text="sail").locator(".class-count")
    expect(sail).to_have_text("2")
    expect(page.locator("h1")).to_have_text(re.compile(f"boat.*{LABELED - 2} images"))
    page.get_by_label("Rename, merge or split sail").click()
    page.get_by_label("Merge into").select_option("boat")
    page.get_by_role("button", name="Merge", exact=True).click()
    expect(page.locator(".class-name")).to_contain_text(["frog", "boat", "truck", "all images"])
    expect(page.locator(".classes li", has_text="boat").locator(".class-count")).to_have_text(str(LABELED))


def test_a_second_studio_is_refused(server: Running) -> None:
    with pytest.raises(FinesslError, match="is open in another studio"):
        Running(Path(server.ask("/api/state")["project"]["data"]))


def test_stop_and_resume(opened: Any) -> None:
    page = opened
    go(page, "Train")
    page.get_by_label("Time budget").select_option("steps")
    page.get_by_label("Steps").fill("300")  # a test that is killed leaves it running: not for long
    page.get_by_role("button", name="Start training").click()
    expect(page.locator(".train-progress")).to_contain_text(re.compile(r"step [1-9][\d,]* of 300"))
    page.keyboard.press("s")
    expect(page.get_by_role("heading", name="Stopped")).to_be_visible()
    expect(page.locator(".chart").first).to_be_visible()
    page.reload()  # the page may be closed
    expect(page.get_by_role("heading", name="Stopped")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Training", exact=True)).to_be_visible()
    page.keyboard.press("s")
    expect(page.get_by_role("heading", name="Stopped")).to_be_visible()


def test_exports(opened: Any, server: Running) -> None:
    page = opened
    go(page, "Export")
    written = {}
    for what in ("csv", "folders", "classifier", "report"):
        card = page.locator(f"[data-what={what}]")
        if what == "classifier":
            expect(card.get_by_text("1 format not possible")).to_be_visible()  # timm
            card.get_by_label("Format").select_option("pt2")
        card.locator(".actions button").click()
        expect(card.locator(".result .path").or_(page.locator(".toast[data-kind=problem]:visible"))).to_be_visible()
        written[what] = Path(card.locator(".result .path").inner_text())
        expect(card.locator(".command code")).to_contain_text("finessl ")
    found = labels_in(written["csv"])
    assert len(found) == count(server)
    assert {str(p.relative_to(written["folders"]).parent) for p in written["folders"].rglob("*.png")} == set(
        found.values()
    )
    assert list(written["classifier"].rglob("*.pt2"))
    assert "<html" in written["report"].read_text().lower()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone(browser: Any, server: Running, scheme: str) -> None:
    """No screen is wider than a phone, and text is readable in both schemes."""
    context = browser.new_context(viewport={"width": 400, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(server.address)
    for screen in SCREENS:
        go(page, screen)
        expect(page.locator("#main > *")).to_be_visible()
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, screen
        ink, paper = (
            sum(map(int, re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{name}"))[:3]))
            for name in ("color", "backgroundColor")
        )
        assert abs(ink - paper) > 450 and (paper < 150) == (scheme == "dark"), screen
    before = count(server)
    go(page, "Label")  # without a keyboard
    page.locator(".class-row", has_text="frog").click()
    expect(page.locator("#labels")).to_have_text(f"{before + 1} labels")
    expect(page.locator(".keycap").locator("visible=true")).to_have_count(0)
    page.get_by_role("button", name="undo").click()
    expect(page.locator("#labels")).to_have_text(f"{before} labels")
    context.close()
