"""Run directories that the first version wrote (tests/assets/old-runs) can still be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import finessl
from finessl.analysis.runs import read_runs
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.runs.directory import RunDirectory
from finessl.training.loop import Settings, train

OLD = Path(__file__).parents[1] / "assets" / "old-runs"
QUICK = Settings(device="cpu", log_every=2, checkpoint_seconds=0.0, quiet=True)


def test_classifier_of_an_old_run_loads() -> None:
    classifier = finessl.load(OLD / "finished", device="cpu")
    dataset, recorded = open_dataset("sample"), np.load(OLD / "finished" / "predictions.npz")
    assert dataset.test is not None
    images = [dataset.test.read(i) for i in range(20)]
    assert classifier.predict(images) == [classifier.classes[k] for k in recorded["logits"][:20].argmax(1)]


def test_old_run_is_read_for_the_report() -> None:
    finished, unfinished = read_runs([OLD / "finished", OLD / "unfinished"])
    assert finished.accuracy == pytest.approx(finished.meta["accuracy"]) and not finished.missing
    assert finished.unlabeled is not None and finished.features is not None
    assert not unfinished.finished and unfinished.rows
    assert not open_dataset("sample").changes(finished.meta["data_fingerprint"])


def test_old_run_resumes_to_the_same_end(tmp_path: Path) -> None:
    run = Path(shutil.copytree(OLD / "unfinished", tmp_path / "run"))
    meta = train(RunDirectory(run).recipe(), run, QUICK)
    assert meta["accuracy"] == pytest.approx(RunDirectory(OLD / "finished").meta()["accuracy"], abs=0.02)
    steps = [row["step"] for row in RunDirectory(run).metrics() if row["kind"] == "train"]
    assert steps == [2, 4, 6]


def test_old_run_of_other_data_is_refused(tmp_path: Path) -> None:
    run = Path(shutil.copytree(OLD / "unfinished", tmp_path / "run"))
    split = json.loads((run / "split.json").read_text())
    (run / "split.json").write_text(json.dumps({**split, "fingerprint": "0" * 32}))
    with pytest.raises(FinesslError, match=r"split\.json does not belong to sample: .*the images, their order"):
        train(RunDirectory(run).recipe(), run, QUICK)
