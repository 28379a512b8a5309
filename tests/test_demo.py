"""The demo: unlabeled images help, by more than chance could; and a person sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from finessl.cli import app
from finessl.recipe import Recipe
from finessl.training.loop import Settings, train

QUIET = Settings(device="cpu", eval_every=0, quiet=True)


@pytest.mark.long
def test_finessl_is_ahead_of_supervised(tmp_path: Path) -> None:
    """A third of the demo's steps, three labeled sets. Which images are labeled moves the gain by several points, so it is
    their mean that must be clear of zero."""
    gains = []
    for seed in range(3):
        accuracy = {}
        for method in ("supervised", "finessl"):
            fields = {"method.name": method, "train.steps": 100, "data.strong_views": 1, "seed": seed}
            out = tmp_path / f"{method}-{seed}"
            accuracy[method] = train(Recipe.read("demo", fields), out, QUIET)["accuracy"]
        assert accuracy["finessl"] > 0.58
        gains.append(accuracy["finessl"] - accuracy["supervised"])
    assert np.mean(gains) > 0.02, gains


@pytest.mark.long
def test_demo_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "cache"))
    read = Recipe.read.__func__  # type: ignore[attr-defined]

    def short(cls: type[Recipe], file: object = None, overrides: dict | None = None) -> Recipe:
        return read(cls, file, {**(overrides or {}), "train.steps": 4, "train.epoch_steps": 2})

    monkeypatch.setattr(Recipe, "read", classmethod(short))
    app(["demo", "--out", str(tmp_path / "demo"), "--device", "cpu"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "from frozen features (finessl quick): 6" in text  # per cent
    assert "supervised" in text and "finessl" in text and "demo.png" in text and "report.html" in text
    picture = np.asarray(Image.open(tmp_path / "demo" / "demo.png").convert("L"))
    assert picture.shape[0] > 500 and picture.std() > 10, "a picture with something in it"
    app(["demo", "--out", str(tmp_path / "demo"), "--device", "cpu"], standalone_mode=False)  # finished runs are kept
    assert "nothing to do" in capsys.readouterr().err.replace("\n", " ")
