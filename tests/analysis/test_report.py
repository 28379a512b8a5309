"""The report: what it says, what it never does, and that a real browser shows it."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from markupsafe import Markup
from PIL import Image
from typer.testing import CliRunner

from finessl.analysis import report
from finessl.analysis.report import write_report
from finessl.cli import app

from .conftest import diagnostics

Maker = Callable[..., Path]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Page(HTMLParser):
    """Tags, text and addresses of a document; fails on tags that do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.pieces: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []
        self.text = " ".join(" ".join(self.pieces).replace("\xa0", " ").split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")], "an event handler"
        if tag not in ("img", "meta", "br", "col"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name.endswith("href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "title"):
            self.pieces.append(data)


def test_every_value_is_escaped_and_per_cent_signs_stay_with_their_number() -> None:
    environment = report.template().environment
    text = environment.from_string("<p title='{{ x }}'>{{ x }}{{ svg }}</p>{{ x|e }}").render(
        x="<b> 5 % \"'&", svg=Markup("<svg/>")
    )
    escaped, bound = "&lt;b&gt; 5 % &#34;&#39;&amp;", "&lt;b&gt; 5\xa0% &#34;&#39;&amp;"
    assert text == f"<p title='{bound}'>{bound}<svg/></p>{escaped}"


def test_verdict_comes_first_and_says_whether_unlabeled_images_helped(make_run: Maker) -> None:
    paths = [make_run("sup", method="supervised", right=4, rows=[]), make_run("ours", right=15)]
    path = write_report(paths)
    assert path == paths[0].parent / "report.html"
    page = Page(path)
    assert "83.3 % of 18 test images are classified correctly" in page.text  # 15 of 18
    assert "expect between 60.8 and 94.2 %" in page.text  # Wilson
    assert re.search(r"The unlabeled images helped: \+61.1 points .* interval \+\d", page.text)
    assert page.text.index("83.3 %") < page.text.index("Side by side") < page.text.index("Recipe and provenance")
    assert "finessl, next to supervised" in page.text


def test_no_gain_and_no_baseline_are_said(make_run: Maker) -> None:
    one, same = make_run("sup", method="supervised", rows=[]), make_run("ours")
    assert "cannot tell whether the unlabeled images helped" in Page(write_report([one, same])).text
    assert "Train once more with --method supervised" in Page(write_report([same])).text
    assert "the accuracy that unlabeled images have to beat" in Page(write_report([one])).text


def test_warnings(make_run: Maker) -> None:
    folder = make_run(
        right=0, rows=[diagnostics(10, [10, 0, 0])]
    )  # every answer is wrong, all pseudo-labels in one class
    page = Page(write_report([folder]))
    assert "Overconfident" in page.text
    assert "Biased towards some classes" in page.text
    assert "<b>birch&co got 2.5 times its true share" in page.text  # 10/10 against 4/10
    assert "Few pseudo-labels are used" in page.text and "40 % of a batch's" in page.text
    arrays = dict(np.load(folder / "predictions.npz"))
    arrays["logits"] = np.tile([3.0, 0.0, 0.0], (18, 1))
    np.savez(folder / "predictions.npz", **arrays)
    page = Page(write_report([folder]))
    assert "2 classes are never predicted" in page.text and "No test image is called ash, cedar" in page.text


def test_calibration_is_praised_only_where_the_test_images_suffice(make_run: Maker) -> None:
    """Confidence 0.8 and accuracy 5/6: 18 images cannot tell, 1,800 can."""
    folder = make_run()
    arrays = dict(np.load(folder / "predictions.npz"))
    for repeats, title in ((1, "Calibration not known"), (100, "Confidence means what it says")):
        logits = np.log(np.full((18, 3), 0.1))
        labels = np.arange(18) % 3
        logits[np.arange(18), np.where(np.arange(18) < 15, labels, (labels + 1) % 3)] = np.log(0.8)
        arrays["logits"], arrays["labels"] = np.tile(logits, (repeats, 1)), np.tile(labels, repeats)
        arrays["index"] = np.arange(18 * repeats)
        np.savez(folder / "predictions.npz", **arrays)
        assert title in Page(write_report([folder], images=False)).text


def test_novel_images_and_their_auroc(make_run: Maker) -> None:
    row = diagnostics(10, [4, 3, 3])
    row["weight"]["novel"] = [0] * 20 + [5] + [0] * 19 + [5] + [0] * 59  # bins 20 and 40; known: 6 in 60, 4 in 20
    row["mean"]["weight"]["novel"] = 0.3
    page = Page(write_report([make_run(rows=[row])]))
    # 6 · 10 + 4 · 5/2 of 10 · 10 pairs
    assert "50 % of the unlabeled images are of classes that the classifier does not have" in page.text
    assert "AUROC of 0.70" in page.text


def test_a_leak_is_found(make_run: Maker, own_photos: Path) -> None:
    shutil.copy(own_photos / "train" / "ash" / "0.png", own_photos / "test" / "ash" / "0.png")
    folder = make_run(source=own_photos)
    assert (
        "1 of 18 test images is also trained on (test/ash/0.png): accuracy is overstated"
        in Page(write_report([folder])).text
    )
    assert "No leak" in Page(write_report([make_run("clean")])).text


def test_without_test_labels_it_asks_for_an_audit(make_run: Maker) -> None:
    """No number without a measurement: neither a range nor a confidence replaces the accuracy."""
    folder = make_run(tested=False)
    page = Page(write_report([folder]))
    assert "not measured accuracy: no test image has a label" in page.text
    assert f"finessl audit {folder} -k 100" in page.text and f"finessl evaluate {folder} FOLDER" in page.text
    assert "50 images give it to ±13 points, 100 images give it to ±10 points, 400 images give it to ±5" in page.text
    assert not re.search(r"[Cc]autious|[Hh]opeful|estimated|\d–\d+ %", page.text)


def test_an_unfinished_run_is_reported_as_far_as_it_goes(make_run: Maker) -> None:
    folder = make_run(finished=False)
    page = Page(write_report([folder]))
    assert "Not finished" in page.text and "step 10 of 15,000" in page.text
    assert "50.0 % of the test images were right at step 10 of 15,000; the run has not finished" in page.text
    assert "Pseudo-labels over classes" in page.text and "Most frequent mistakes" not in page.text
    (folder / "checkpoints" / "step-00000018").mkdir(parents=True)
    page = Page(write_report([folder]))
    assert "stopped, or still runs, at step 18 of 15,000" in page.text  # the checkpoint is newer than the metrics


def test_an_unfinished_run_does_not_deny_its_test_images(make_run: Maker) -> None:
    page = Page(write_report([make_run(finished=False, tested=False)]))
    assert "unknown accuracy: the run has not finished; it came to step 10 of 15,000" in page.text
    assert "no test" not in page.text.split("Recipe and provenance")[0]


def test_no_claim_between_runs_that_differ_in_more_than_the_method(make_run: Maker) -> None:
    ours = make_run("ours", right=18)
    for name, changes, said in (
        ("labels", {"labels": 1}, "other labeled images, split.labels_per_class (1 there, 4 here)"),
        ("steps", {"fields": {"train.steps": 5}}, "train.steps (5 there, 15000 here)"),
        ("seed", {"fields": {"seed": 3}}, "seed (3 there, 0 here)"),
    ):
        other = make_run(name, method="supervised", right=2, rows=[], **changes)
        text = Page(write_report([other, ours])).text
        assert "The unlabeled images helped" not in text, name
        assert f"differs in more than the method: {said}." in text, name
    fair = make_run("fair", method="supervised", right=2, rows=[])
    text = Page(write_report([fair, other, ours])).text
    assert "The unlabeled images helped" in text  # the fair one is found among others


def test_method_options_and_places_do_not_forbid_the_comparison(make_run: Maker, photos: Path) -> None:
    ours = make_run("ours", right=18, fields={"method.alpha": 4.0, "data.source": f"{photos}/"})
    fair = make_run("fair", method="supervised", right=2, rows=[])
    assert "The unlabeled images helped" in Page(write_report([fair, ours])).text


def test_runs_on_other_data_are_marked(make_run: Maker, own_photos: Path) -> None:
    (own_photos / "train" / "ash" / "0.png").unlink()
    other = make_run("other", method="supervised", rows=[], source=own_photos)
    same = make_run("same", method="fixmatch", rows=[])
    page = Page(write_report([other, same, make_run("ours", right=18)]))
    assert page.text.count("not comparable: other data") == 1
    assert "differs in more than the method: other data" in page.text


def test_lost_or_changed_data_is_said(make_run: Maker, own_photos: Path) -> None:
    folder = make_run(source=own_photos)
    assert "img" in Page(write_report([folder])).tags
    (own_photos / "train" / "ash" / "0.png").unlink()
    page = Page(write_report([folder]))
    assert "has changed since the run" in page.text and "img" not in page.tags
    shutil.rmtree(own_photos)
    page = Page(write_report([folder]))
    assert "cannot be opened" in page.text and "img" not in page.tags
    assert "14 of 18" in page.text or "77.8 %" in page.text  # the rest is there


def test_class_names_are_shown_not_executed(make_run: Maker) -> None:
    folder, bad = make_run(), "<script>alert('x')</script>"
    content = json.loads((folder / "split.json").read_text())
    content["classes"][0] = bad
    (folder / "split.json").write_text(json.dumps(content))
    path = write_report([folder])
    page = Page(path)
    assert "script" not in page.tags
    assert bad in page.text
    assert "default-src 'none'" in path.read_text()


def test_galleries_show_the_images_they_name(make_run: Maker) -> None:
    path = write_report([make_run()])
    text = path.read_text(encoding="utf-8")
    assert all(title in text for title in ("Most confident, by class", "Least confident", "Confident but wrong"))
    surest = re.search(r'<h3><span>cedar</span>.*?<img src="data:image/jpeg;base64,([^"]+)" alt="([^"]+)"', text, re.S)
    assert surest is not None
    with Image.open(io.BytesIO(base64.b64decode(surest[1]))) as image:
        assert np.asarray(image).mean((0, 1)).argmax() == 2  # cedar's images are blue
        assert image.size == (30, 40)  # the whole image: the page crops it to a square
    assert surest[2].startswith("train/cedar/") and "99\xa0%" in surest[2] or "99 %" in surest[2]
    least = text[text.index("<h3>Least confident") :]
    assert re.search(r"<figcaption><b>.*?</b><span>40\xa0%", least)  # the least sure of them


def test_file_names_can_be_read_and_copied_and_images_enlarged(make_run: Maker) -> None:
    text = write_report([make_run()]).read_text(encoding="utf-8")
    least = text[text.index("<h3>Least confident") : text.index("<h3>Confident but wrong")]
    names = re.search(r"<pre>(.*?)</pre>", least, re.S)
    assert names is not None and len(names[1].splitlines()) == least.count("<img ") == 12
    assert all(re.search(rf'class="path">{re.escape(name)}<', least) for name in names[1].splitlines())
    places = re.findall(r'<figure id="([^"]+)"', least)
    assert [f"#{place}" in least for place in places] == [True] * 12  # each image links to itself, enlarged


def test_a_sample_of_the_unlabeled_images_is_called_one(make_run: Maker) -> None:
    folder = make_run()
    assert "Searched" not in Page(write_report([folder])).text
    with np.load(folder / "unlabeled.npz") as kept:
        arrays = {name: kept[name][:10] for name in kept.files}
    np.savez(folder / "unlabeled.npz", **arrays)
    (folder / "features.npz").unlink()
    assert "Searched: a sample of 10 of 24 unlabeled images" in Page(write_report([folder])).text


def test_charts_name_the_classes_and_show_whole_scales(make_run: Maker) -> None:
    text = write_report([make_run()]).read_text(encoding="utf-8")
    stairs = text[text.index("<strong>Pseudo-labels over classes") : text.index("<strong>Evenness")]
    assert all(name in stairs for name in ("ash", "cedar"))
    learned = text[text.index("<strong>Mean confidence") : text.index("<strong>Pseudo-labels used")]
    assert ">0 %<" in learned and ">100 %<" in learned
    assert 'class="charts in-3"' in text  # three charts fill a row


def test_nothing_outside_the_file_is_referred_to(make_run: Maker) -> None:
    path = write_report([make_run()])
    page = Page(path)
    assert page.addresses and all(address.startswith(("data:", "#")) for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import", path.read_text(encoding="utf-8"))
    assert {"script", "link", "iframe", "object"}.isdisjoint(page.tags)


def test_the_same_runs_give_the_same_file(make_run: Maker) -> None:
    folder = make_run()
    first = write_report([folder]).read_bytes()
    assert write_report([folder]).read_bytes() == first


def test_command_line(make_run: Maker, tmp_path: Path) -> None:
    run = CliRunner()
    folder = make_run()
    done = run.invoke(app, ["report", str(folder), "--out", str(tmp_path / "new" / "r.html"), "--no-images"])
    assert done.exit_code == 0, done.output
    assert "img" not in Page(tmp_path / "new" / "r.html").tags
    assert "pseudo-labels" in run.invoke(app, ["figure"]).output
    done = run.invoke(app, ["figure", "confusion", str(folder), "--out", str(tmp_path / "f")])
    assert done.exit_code == 0 and (tmp_path / "f" / "confusion.svg").exists()


def test_many_classes_are_folded_and_leaks_not_looked_for(make_run: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LEAK_LIMIT", 10)
    folder = make_run(rows=[])
    content = json.loads((folder / "split.json").read_text())
    content["classes"] += [f"more {k}" for k in range(40)]
    (folder / "split.json").write_text(json.dumps(content))
    arrays = dict(np.load(folder / "predictions.npz"))
    arrays["logits"] = np.pad(arrays["logits"], ((0, 0), (0, 40)), constant_values=-9.0)
    np.savez(folder / "predictions.npz", **arrays)
    page = Page(write_report([folder]))
    assert "23 more classes" in page.text and "Leaks: not looked for" in page.text


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder at an address of its own, whose requests a browser's log tells from the browser's own."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def browse(address: str, folder: Path, scheme: str = "light") -> tuple[np.ndarray, list[str], list[str]]:
    """What chromium shows of a page (pixels), its console, and the addresses that the page asked for."""
    assert CHROMIUM is not None
    picture, log = folder / "page.png", folder / "net.json"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--enable-logging=stderr",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--window-size=1280,2400",
        f"--screenshot={picture}", address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(folder)})
    assert done.returncode == 0 and picture.exists(), done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    origin = address.rpartition("/")[0]
    started = re.findall(r'"initiator":"([^"]*)".*?"url":"([^"]*)"', log.read_text(errors="replace"))
    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB")).astype(int), console, [url for who, url in started if who == origin]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the report in")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_without_error_or_request(make_run: Maker, tmp_path: Path, scheme: str) -> None:
    path = write_report([make_run("sup", method="supervised", right=4, rows=[]), make_run("ours")])
    with served(path.parent) as address:
        pixels, console, requests = browse(f"{address}/{path.name}", tmp_path, scheme)
    assert console == []
    assert [url for url in requests if not url.startswith("data:") and not url.endswith("favicon.ico")] == []
    corner = pixels[:5, :5].mean()
    assert corner > 245 if scheme == "light" else corner < 40
    blue = (0, 114, 178) if scheme == "light" else (86, 180, 233)  # the first run's colour
    assert (np.abs(pixels - blue).sum(2) < 12).sum() > 100


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the report in")
def test_the_browser_would_notice(tmp_path: Path) -> None:
    """A page that breaks the rules: without this, the test above could not fail."""
    (tmp_path / "bad.html").write_text("<img src='other.png'><script>console.error('oh')</script>")
    with served(tmp_path) as address:
        _, console, requests = browse(f"{address}/bad.html", tmp_path)
    assert len(console) >= 1 and f"{address}/other.png" in requests
