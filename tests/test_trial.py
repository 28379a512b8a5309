"""A new user's first commands on a messy folder of photos, and what they say."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from finessl.cli import app

from .messy import make_messy_folder

Capture = pytest.CaptureFixture[str]
BROKEN = {"cut off.jpg", "empty.png", "text.png"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_messy_folder(tmp_path_factory.mktemp("trial") / "Müll Fotos 2026")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    out = folder.parent / "run"
    words = [
        "train",
        folder,
        "--out",
        out,
        "--backbone",
        "embedded",
        "--steps",
        "6",
        "--batch-size",
        "8",
        "--device",
        "cpu",
    ]
    app([str(word) for word in words], standalone_mode=False)
    return out


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def said(capsys: Capture, *words: str | Path) -> tuple[str, str]:
    """Standard output and error of a command, in single spaces."""
    capsys.readouterr()
    app([str(word) for word in words], standalone_mode=False)
    out, err = capsys.readouterr()
    return " ".join(out.split()), " ".join(err.split())


def test_inspect(folder: Path, capsys: Capture) -> None:
    out, _ = said(capsys, "inspect", folder, "--most", "20")
    assert "Müll Fotos 2026: 4 classes, 21 labeled" in out
    assert all(name in out for name in BROKEN) and "0 bytes" in out
    assert "Copy of frog_001.jpeg" in out and "frog_002 edited.jpg" in out
    assert "from the test set.jpg" in out and "again.jpeg" in out  # leaks
    assert "contradiction.jpeg ([paper])" in out


def test_train_says_what_it_leaves_out(trained: Path) -> None:
    with open(trained / "skipped.csv", newline="", encoding="utf-8") as file:
        skipped = {Path(row["image"]).name for row in csv.DictReader(file)}
    assert skipped >= BROKEN
    meta = json.loads((trained / "meta.json").read_text(encoding="utf-8"))
    assert (meta["labeled"], meta["test"]) == (21, 24)


def test_predict(folder: Path, trained: Path, tmp_path: Path, capsys: Capture) -> None:
    out, err = said(capsys, "predict", trained, folder / "unlabeled", "--out", tmp_path / "new.json", "--top", "9")
    rows = json.loads((tmp_path / "new.json").read_text(encoding="utf-8"))
    assert out == f"{tmp_path / 'new.json'}: {len(rows)} predictions"
    assert "cut off.jpg: broken" in err and "empty.png: empty file (0 bytes)" in err
    names = {Path(row["path"]).name for row in rows}
    assert {"=1+1.jpg", "-rf.jpg", "[bold]x.jpg", "Ümläut 日本 🙂.jpg", "turned 6.jpg", "sixteen bits.png"} <= names
    assert not names & {"._frog_001.jpeg", "film.mp4", "notes.txt"}
    assert {rows[0][f"label{k}"] for k in ("", 2, 3, 4)} == {"glass", "Müll & Rest", "[paper]", "metal $x$"}


def test_evaluate(folder: Path, trained: Path, capsys: Capture) -> None:
    out, err = said(capsys, "evaluate", trained)
    assert "of 24 test images (95 % interval" in out and "1 image could not be read and is not counted" in out
    assert "text.png: not an image" in err and "nan" not in out
    assert "2 of these test images are also in the training data" in out
    assert all(name in out for name in ("[paper]", "metal $x$", "Müll & Rest"))
    out, _ = said(capsys, "evaluate", trained, folder / "test")
    assert "of 22 test images" in out and "2 labeled images were not measured: training used them." in out


def test_report(trained: Path, capsys: Capture) -> None:
    out, _ = said(capsys, "report", trained)
    assert out == f"report: {trained / 'report.html'}"
    page = (trained / "report.html").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    assert "2 of 24 test images are also trained on" in page or "2 of 25 test images are also trained on" in page
    assert "of 24 test images are classified correctly" in page
    assert "Not known yet whether the unlabeled images helped" in page


def test_doctor_and_version(capsys: Capture) -> None:
    assert "embedded backbone inside the package" in said(capsys, "doctor")[0]
    assert said(capsys, "--version")[0].startswith("finessl ")
