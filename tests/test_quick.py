"""`finessl quick`: a run that predict, evaluate and report take as any other."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import finessl
from finessl.errors import FinesslError
from finessl.frozen import choose
from finessl.models.backbones import candidate_backbones
from finessl.training import quick as quick_run

from .conftest import run_verb

FROZEN = ("--backbone", "embedded", "--precision", "fp32")


@pytest.fixture(scope="module")
def run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "quick"
    run_verb("quick", shapes, "-n", 4, *FROZEN, "--out", out, "-q")
    return out


def test_table_fits_80_columns(shapes: Path) -> None:
    text = run_verb("quick", shapes, "-n", 4, "--backbone", "embedded")
    assert "label propagation" in text and "held-out" in text and "test" in text
    assert max(map(len, text.splitlines())) <= 80


def test_run_is_an_ordinary_run(run: Path, shapes: Path) -> None:
    meta = json.loads((run / "meta.json").read_text())
    assert meta["finished"] and meta["labeled"] == 12 and meta["test"] == 24
    assert {row["solver"] for row in meta["candidates"]} == {
        "means", "ridge", "propagation", "em", "ensemble",
    }  # fmt: skip
    measured = json.loads(run_verb("evaluate", run, "--json"))
    assert measured["accuracy"] == pytest.approx(meta["accuracy"], abs=0.05)  # kept features are float16: one of 24
    assert measured["accuracy"] > 0.6


def test_classifier_answers_as_the_solution(run: Path, shapes: Path) -> None:
    """Through the images, without the other images: the logits that were solved."""
    with np.load(run / "predictions.npz") as saved:
        expected, index = saved["logits"], saved["index"]
    files = sorted((shapes / "test").rglob("*.png"))
    classifier = finessl.load(run)
    found = classifier.predict_proba(files)
    wanted = np.exp(expected - expected.max(1, keepdims=True))
    wanted /= wanted.sum(1, keepdims=True)
    assert len(index) == len(files)
    assert np.abs(found - wanted).max() < 0.05  # kept features are float16


def test_predict_and_report(run: Path, shapes: Path, tmp_path: Path) -> None:
    run_verb("predict", run, shapes / "test" / "down", "--out", tmp_path / "out.csv")
    with open(tmp_path / "out.csv", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 8
    page = tmp_path / "report.html"
    run_verb("report", run, "--out", page)
    text = page.read_text(encoding="utf-8")
    assert "of 24 test images" in text
    assert "the accuracy that fine-tuning has to beat" in text and "--method supervised" not in text


def test_again_leaves_the_finished_run(run: Path, shapes: Path) -> None:
    before = (run / "meta.json").read_bytes()
    run_verb("quick", shapes, "-n", 4, *FROZEN, "--out", run, "-q")
    assert (run / "meta.json").read_bytes() == before


def test_resume_leaves_it(run: Path) -> None:
    before = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    assert "is finished: nothing to do" in run_verb("resume", run)
    assert before == {file: file.read_bytes() for file in run.iterdir() if file.is_file()}


def test_counts_are_those_of_training(shapes: Path) -> None:
    """Labeled images are not counted as unlabeled ones."""
    images = len(list((shapes / "train").rglob("*.png")))
    classes = len(list((shapes / "train").iterdir()))
    said = run_verb("quick", shapes, "-n", 4, "--backbone", "embedded")
    assert f"{4 * classes} labeled, {images - 4 * classes} unlabeled" in said


def test_table_with_columns_of_other_names(shapes: Path, tmp_path: Path) -> None:
    shutil.copytree(shapes / "train", tmp_path / "new")
    files = sorted((tmp_path / "new").rglob("*.png"))
    rows = [f"{file.relative_to(tmp_path)};{file.parent.name}" for file in files]
    (tmp_path / "new.csv").write_text("\n".join(["file;kind", *rows]))
    columns = ("--path-column", "file", "--label-column", "kind")
    said = run_verb("quick", tmp_path / "new.csv", *columns, "-n", 4, "--backbone", "embedded")
    assert f"12 labeled, {len(files) - 12} unlabeled" in said


def test_other_labels_in_the_same_place_are_refused(run: Path, shapes: Path) -> None:
    with pytest.raises(FinesslError, match="another recipe|other data"):
        run_verb("quick", shapes, "-n", 5, *FROZEN, "--out", run, "-q")


def test_without_test_images_and_with_a_broken_one(shapes: Path, tmp_path: Path) -> None:
    data = tmp_path / "photos"
    for name in ("across", "down"):
        shutil.copytree(shapes / "train" / name, data / name)
    (data / "down" / "broken.png").write_bytes(b"no image")
    text = run_verb("quick", data, "-n", 3, "--backbone", "embedded", "--out", tmp_path / "run")
    assert "left out" in text
    assert "broken.png" in (tmp_path / "run" / "skipped.csv").read_text()
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["accuracy"] is None
    run_verb("report", tmp_path / "run", "--no-images")


def test_large_set_is_sampled_and_says_so(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "LARGEST", 40)
    found = json.loads(run_verb("quick", shapes, "-n", 4, "--backbone", "embedded", "--json"))
    assert found["notes"][0].startswith("40 of the 72 images")
    assert max(row["test"] for row in found["candidates"]) > 0.6


def test_no_labels_points_to_select(shapes: Path, tmp_path: Path) -> None:
    data = tmp_path / "photos"
    shutil.copytree(shapes / "train" / "down", data)
    with pytest.raises(FinesslError, match="finessl select"):
        run_verb("quick", data, "--backbone", "embedded")


def test_one_class_is_one_sentence(shapes: Path, tmp_path: Path) -> None:
    shutil.copytree(shapes / "train" / "down", tmp_path / "photos" / "labeled" / "down")
    with pytest.raises(FinesslError, match="two classes"):
        run_verb("quick", tmp_path / "photos", "--backbone", "embedded")


def test_run_of_another_method_is_not_overwritten(shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(Path(__file__).parent / "assets" / "old-runs" / "finished" / "recipe.toml", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(FinesslError, match="another recipe"):
        run_verb("quick", shapes, "-n", 4, "--backbone", "embedded", "--out", tmp_path / "run")


def test_backbones_are_compared_and_the_choice_is_explained(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same backbone under two names: equal, so the first stays."""
    made = quick_run.create_backbone
    monkeypatch.setattr(quick_run, "create_backbone", lambda name, **options: made("embedded", **options))
    found = json.loads(run_verb("quick", shapes, "-n", 4, "--backbone", "one,two", "--json", "-q"))
    assert {row["backbone"] for row in found["candidates"]} == {"one", "two"}
    assert [row["backbone"] for row in found["candidates"] if row["chosen"]] == ["one"]
    assert "Backbone one" in found["reason"] and "two" in found["reason"]


def test_joined_backbones_are_an_ordinary_run(shapes: Path, tmp_path: Path) -> None:
    """New images are encoded by both parts; export refuses timm's format and says why."""
    out = tmp_path / "run"
    backbone = ("--backbone", "embedded+wide-resnet-28-2", "--precision", "fp32")
    run_verb("quick", shapes, "-n", 4, *backbone, "--out", out, "-q")
    measured = json.loads(run_verb("evaluate", out, "--json"))
    with np.load(out / "predictions.npz") as saved:
        accuracy = float((saved["logits"].argmax(1) == saved["labels"]).mean())
    assert measured["accuracy"] == pytest.approx(accuracy, abs=0.05)
    assert finessl.load(out).embed(shapes / "test" / "down" / "00.png").shape == (1, finessl.load(out).network.dim)
    with pytest.raises(FinesslError, match="--format onnx or pt2"):
        run_verb("export", out, "--format", "timm", "--out", tmp_path / "timm")


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finessl.models.backbones.in_cache", lambda name: name in ("clip-vit-b16", "embedded"))
    assert candidate_backbones("auto", {}) == [("clip-vit-b16", None), ("embedded", None)]
    assert candidate_backbones("auto", {"dinov2-vit-s14": "f", "mine": "g"}) == [
        ("mine", "g"),
        ("dinov2-vit-s14", "f"),
        ("clip-vit-b16", None),
        ("embedded", None),
    ]
    with pytest.raises(FinesslError, match="does not name"):
        candidate_backbones("embedded", {"clip-vit-b16": "f"})
    with pytest.raises(FinesslError, match="names no backbone"):
        candidate_backbones(" , ", {})


@pytest.mark.parametrize("text", ["file", "=file", "name="])
def test_weights_need_a_name(shapes: Path, text: str) -> None:
    with pytest.raises(FinesslError, match="NAME=FILE"):
        run_verb("quick", shapes, "-n", 4, "--backbone", "embedded", "--weights", text)


def test_unreachable_hub_is_one_sentence(shapes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("finessl.models.backbones.unreachable", lambda *words: "no network")
    with pytest.raises(FinesslError, match="could not be downloaded"):
        run_verb("quick", shapes, "-n", 4, "--backbone", "dinov2-vit-s14")


def test_zero_shot_from_text_features(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text features that are the classes' own mean features: zero-shot is tried, and held out for every label."""
    from finessl.models.aliases import BACKBONES, Alias

    monkeypatch.setitem(BACKBONES, "embedded", Alias(None, "", text=("tower", "tag")))
    rng = np.random.default_rng(0)
    np.save(tmp_path / "text.npy", rng.normal(size=(3, 192)).astype(np.float32))
    words = ("quick", shapes, "-n", 4, "--backbone", "embedded", "--json", "-q")
    found = json.loads(run_verb(*words, "--text-features", tmp_path / "text.npy"))
    (row,) = [row for row in found["candidates"] if row["solver"] == "zero-shot"]
    assert row["labels"] == 12 and row["held_out"] is not None
    without = json.loads(run_verb(*words))
    assert any("zero-shot is left out" in note for note in without["notes"])
