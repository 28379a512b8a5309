"""Records of finished runs, and the tool that keeps them."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runs.records import read_answers, without_folders, write_record
from finessl.runtime.files import write_arrays

TOOL = Path(__file__).resolve().parent.parent / "tools" / "record_runs.py"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A finished run with 10,000 test images of 300 classes."""
    run = RunDirectory(tmp_path / "runs" / "main" / "one")
    run.open(Recipe.read(None, {"data.source": "sample"}))
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 300, 10_000)
    logits = rng.standard_normal((10_000, 300), dtype=np.float32) + 3 * np.eye(300, dtype=np.float32)[labels]
    write_arrays(run.path / "predictions.npz", {"logits": logits, "labels": labels, "index": np.arange(10_000)})
    accuracy = float((logits.argmax(1) == labels).mean())
    run.write_meta({"finished": True, "accuracy": accuracy, "steps": 2, "seconds": 1.0, "revision": None})
    return run


def test_record_answers_as_the_run(run: RunDirectory, tmp_path: Path) -> None:
    folder = tmp_path / "records" / "one"
    write_record(run, folder, "0123abc")
    assert sorted(file.name for file in folder.iterdir()) == ["answers.npz", "meta.json", "recipe.toml"]
    record = RunDirectory(folder)
    assert record.recipe().identity() == run.recipe().identity() and record.finished()
    assert record.meta() == {**run.meta(), "revision": "0123abc"}
    kept, original = read_answers(record), read_answers(run)
    assert kept is not None and original is not None
    for mine, its in zip(kept, original, strict=True):
        assert mine.dtype == np.uint16
        np.testing.assert_array_equal(mine, its)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 40_000
    write_record(record, tmp_path / "again")  # a record of a record is equal
    assert (tmp_path / "again" / "answers.npz").read_bytes() == (folder / "answers.npz").read_bytes()


def test_record_names_no_folders(tmp_path: Path) -> None:
    joined = "dinov2-vit-s14=/home/me/d.pt,clip-vit-b16=w/c.pt"
    fields = {"data.source": "cifar100", "data.root": "/home/me/data/", "model.weights": joined}
    recipe = without_folders(Recipe.read(None, fields, check=False))
    assert recipe.model.weights == "dinov2-vit-s14=d.pt,clip-vit-b16=c.pt"
    assert (recipe.data.source, recipe.data.root) == ("cifar100", "data/")
    own = without_folders(Recipe.read(None, {"data.source": "/home/me/photos", "model.weights": "c.pt"}, check=False))
    assert (own.data.source, own.model.weights, own.data.root) == ("photos", "c.pt", None)


def test_another_run_does_not_replace_a_record(run: RunDirectory, tmp_path: Path) -> None:
    folder = tmp_path / "records" / "one"
    write_record(run, folder)
    write_record(run, folder)
    run.write_meta({**run.meta(), "accuracy": 0.5})
    with pytest.raises(FinesslError, match="is the record of a run with another accuracy"):
        write_record(run, folder)
    assert RunDirectory(folder).meta()["accuracy"] != 0.5


@pytest.mark.skipif(not TOOL.exists(), reason="the tools are not part of an installed package")
def test_tool_records_what_has_finished(run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDirectory(tmp_path / "runs" / "main" / "two").open(run.recipe())
    record_runs = runpy.run_path(str(TOOL))["record_runs"]
    assert record_runs(tmp_path / "runs", tmp_path / "records") == 0
    assert capsys.readouterr().out.splitlines() == [f"{run.meta()['accuracy']:.2%}: main/one", "not finished: main/two"]
    assert [file.parent.name for file in (tmp_path / "records").rglob("recipe.toml")] == ["one"]
    run.write_meta({**run.meta(), "accuracy": 0.5})
    assert record_runs(tmp_path / "runs", tmp_path / "records") == 1
