"""The examples run as their docstrings say, here with a few images and steps."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

from finessl.cli import app
from finessl.methods import METHODS, create
from finessl.methods.base import Batch, HeadOutputs, Outputs, Task

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_docstring_names_the_command(path: Path) -> None:
    docstring = path.read_text(encoding="utf-8").split('"""')[1]
    assert f"examples/{path.name}" in docstring and "Prints " in docstring


def test_own_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "own_images.py", "--steps", "2", "--images", "6", "--out", str(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in lines[:3]] == ["40 images", "20 images", "10 images"]
    assert lines[3].startswith("accuracy on 10 test images: ")
    assert len([line for line in lines if line.endswith("%)")]) == 10
    assert "finessl" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_arrays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "arrays.py", "--steps", "2", "--images", "6")
    text = capsys.readouterr().out
    assert text.startswith("40 labeled and 20 unlabeled images, 60 test images\nsupervised: ")
    assert "finessl: " in text and "precision" in text and "airplane" in text


def test_own_method(monkeypatch: pytest.MonkeyPatch, shapes: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(METHODS, "entries", dict(METHODS.entries))
    monkeypatch.setitem(sys.modules, "own_method", None)  # removes what the plug-in leaves
    del sys.modules["own_method"]
    small = [
        "-n",
        "4",
        "--backbone",
        "embedded",
        "--tuning",
        "linear",
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--device",
        "cpu",
        "-q",
    ]
    own = [
        "--plugin",
        str(EXAMPLES / "own_method.py"),
        *["--method", "entropy", "--set", "method.unlabeled_weight=0.5"],
    ]
    app(["train", str(shapes), "--out", str(tmp_path / "run"), *small, *own], standalone_mode=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any("loss_unlabeled" in line for line in lines) and (tmp_path / "run" / "classifier").is_dir()

    method = create("entropy", Task(classes=4, unlabeled=10, steps=2), {"unlabeled_weight": 0.5})
    even = HeadOutputs(torch.zeros(3, 4))  # entropy log 4 for each image
    result = method(Outputs(even, even), Batch(torch.tensor([0, 1, 2])))
    assert float(result.loss) == pytest.approx(1.5 * math.log(4))
