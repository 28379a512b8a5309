"""finessl evaluate: the accuracy is measured on images that training did not use, and says what it leaves out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finessl.cli import app
from finessl.data.sources import open_dataset
from finessl.data.splits import Split
from finessl.errors import FinesslError

Capture = pytest.CaptureFixture[str]


def evaluate(capsys: Capture, *words: str | Path) -> dict[str, Any]:
    app(["evaluate", *map(str, words), "--device", "cpu", "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_own_test_images(tiny_run: Path, capsys: Capture) -> None:
    result = evaluate(capsys, tiny_run)
    assert result["accuracy"] == pytest.approx(json.loads((tiny_run / "meta.json").read_text())["accuracy"])
    assert result["images"] == 24 and [name for name, _, _ in result["classes"]] == ["across", "diagonal", "down"]
    assert result["notes"] == [] and result["left_out"] == 0
    low, high = result["interval"]
    assert 0 <= low < result["accuracy"] < high <= 1


def test_training_images_are_never_called_test_images(shapes: Path, tmp_path: Path, capsys: Capture) -> None:
    """A run on data without test images: there is nothing to measure on."""
    from .conftest import TINY

    shutil.copytree(shapes / "train", tmp_path / "photos")
    app(["train", str(tmp_path / "photos"), "--out", str(tmp_path / "run"), "-n", "4", *TINY], standalone_mode=False)
    with pytest.raises(FinesslError, match="photos has no test images.*not seen into test/CLASS/"):
        evaluate(capsys, tmp_path / "run")
    with pytest.raises(FinesslError, match="training used all 72 labeled images.*12 of them with their labels"):
        evaluate(capsys, tmp_path / "run", tmp_path / "photos")


def test_a_copy_of_the_training_images_is_recognised(
    tiny_run: Path, shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Renamed and moved: the content tells. New images among them are measured."""
    for name in ("across", "diagonal", "down"):
        (tmp_path / "copy" / name).mkdir(parents=True)
        for part in ("train", "test"):
            for file in (shapes / part / name).iterdir():
                shutil.copy(file, tmp_path / "copy" / name / f"renamed-{part}-{file.name}")
    result = evaluate(capsys, tiny_run, tmp_path / "copy")
    assert result["images"] == 24 and result["left_out"] == 72
    assert result["notes"] == ["72 labeled images were not measured: training used them."]
    assert result["accuracy"] == pytest.approx(evaluate(capsys, tiny_run)["accuracy"])


def test_unlabeled_training_images_are_measured_on_request(tiny_run: Path, shapes: Path, capsys: Capture) -> None:
    """An audit of the unlabeled images: their labels were not trained on. Labeled ones are left out all the same."""
    result = evaluate(capsys, tiny_run, shapes / "train", "--include-unlabeled")
    assert result["images"] == 60 and result["left_out"] == 12
    assert "Training used 60 of the 60 images without their labels" in result["notes"][1]
    split = Split.load(tiny_run / "split.json", open_dataset(shapes))
    counts = np.array([count for _, count, _ in result["classes"]])
    assert counts.tolist() == (24 - np.bincount(split.labels(open_dataset(shapes))[split.labeled])).tolist()


def test_leaked_test_images_are_counted(tiny_run: Path, shapes: Path, tmp_path: Path, capsys: Capture) -> None:
    """A test image that is also a training image overstates the accuracy of a run's own test set."""
    from .conftest import TINY

    photos = tmp_path / "my photos"
    shutil.copytree(shapes, photos)
    shutil.copy(photos / "train/down/00.png", photos / "test/down/00.png")
    app(["train", str(photos), "--out", str(tmp_path / "run"), "-n", "4", *TINY], standalone_mode=False)
    (note,) = evaluate(capsys, tmp_path / "run")["notes"]
    assert note.startswith("1 of these test images is also in the training data")
    assert f"finessl inspect '{photos}'" in note  # a command that a shell takes


def test_table_with_columns_of_other_names(tiny_run: Path, shapes: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(shapes / "test", tmp_path / "new")
    files = sorted((tmp_path / "new").rglob("*.png"))
    rows = [f"{file.relative_to(tmp_path)};{file.parent.name}" for file in files]
    (tmp_path / "new.csv").write_text("\n".join(["file;kind", *rows]))
    app(["evaluate", str(tiny_run), str(tmp_path / "new.csv"), "--path-column", "file", "--label-column", "kind",
         "--json"], standalone_mode=False)  # fmt: skip
    assert json.loads(capsys.readouterr().out)["images"] == len(files)


def test_data_that_is_gone_is_said(tiny_run: Path, shapes: Path, tmp_path: Path, capsys: Capture) -> None:
    """Where the training images are not there to compare with, the accuracy carries that remark."""
    shutil.copytree(tiny_run, tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(shapes), str(tmp_path / "gone")))
    result = evaluate(capsys, tmp_path / "run", shapes / "test")
    assert result["images"] == 24 and "It was not checked whether training used" in result["notes"][0]
    result = evaluate(capsys, tiny_run / "classifier", shapes / "test")  # the classifier folder finds its run
    assert result["images"] == 24 and result["notes"] == []


def test_unreadable_images_are_counted_and_named(tiny_run: Path, shapes: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(shapes / "test", tmp_path / "new")
    (tmp_path / "new" / "down" / "00.png").write_bytes(b"")
    app(["evaluate", str(tiny_run), str(tmp_path / "new"), "--device", "cpu"], standalone_mode=False)
    printed = capsys.readouterr()
    assert "skipped down/00.png: empty file (0 bytes)" in printed.err
    assert "of 23 test images (95 % interval" in printed.out and "1 image could not be read" in printed.out
    for file in (tmp_path / "new").rglob("*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(FinesslError, match="no image of .* could be measured: 24 images cannot be used"):
        evaluate(capsys, tiny_run, tmp_path / "new")


def test_other_classes_are_refused(tiny_run: Path, shapes: Path, tmp_path: Path, capsys: Capture) -> None:
    for name in ("ash", "birch"):
        shutil.copytree(shapes / "test" / "down", tmp_path / name)
    with pytest.raises(FinesslError, match="no labeled image of the classifier's classes.*Its classes are ash, birch"):
        evaluate(capsys, tiny_run, tmp_path)
