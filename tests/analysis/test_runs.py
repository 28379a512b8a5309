"""Reading run directories: whole ones, unfinished ones, damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from finessl.analysis.estimate import second_opinion
from finessl.analysis.findings import findings
from finessl.analysis.report import write_report
from finessl.analysis.runs import read_runs, run_labels
from finessl.errors import FinesslError
from finessl.recipe import Recipe

Maker = Callable[..., Path]


def test_a_finished_run(make_run: Maker) -> None:
    outcome = read_runs([make_run(right=12)])[0]
    assert outcome.finished and outcome.missing == []
    assert outcome.accuracy == pytest.approx(12 / 18)
    assert outcome.classes == ["<b>birch&co", "ash", "cedar"] and outcome.labels_per_class == 4
    assert outcome.pseudo_accuracy()[1].tolist() == [0.6, 0.8]
    assert outcome.histogram("confidence", "correct")[95] == 8  # type: ignore[index]
    assert outcome.histogram("confidence").sum() == 10  # type: ignore[union-attr]
    assert outcome.histogram("confidence", "novel") is None


def test_an_unfinished_run_says_where_it_is(make_run: Maker) -> None:
    outcome = read_runs([make_run(finished=False)])[0]
    assert not outcome.finished and outcome.test is None
    assert "step 10 of 15,000" in outcome.missing[0]
    assert outcome.accuracy == 0.5  # as last measured


@pytest.mark.parametrize("name", ["predictions.npz", "unlabeled.npz", "features.npz"])
def test_a_damaged_file_is_named(make_run: Maker, name: str) -> None:
    folder = make_run()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    outcome = read_runs([folder])[0]
    assert [text for text in outcome.missing if name in text]
    assert len(outcome.missing) == 1


def test_a_cut_line_of_metrics_is_passed_over(make_run: Maker) -> None:
    folder = make_run()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "diagnostics", "step": 15, "pse')
    assert len(read_runs([folder])[0].diagnostics) == 2


def test_a_folder_of_runs_stands_for_them(make_run: Maker) -> None:
    folder = make_run("b", method="fixmatch").parent
    make_run("a")
    assert [outcome.label for outcome in read_runs([folder])] == ["finessl", "fixmatch"]
    with pytest.raises(FinesslError, match="nor a folder of them"):
        read_runs([folder / "a" / "nothing"])


def test_labels_name_what_differs() -> None:
    def label(*changes: dict[str, object]) -> list[str]:
        return run_labels([Recipe.read(None, {"data.source": "x", **change}) for change in changes])

    assert label({}, {"method.name": "fixmatch"}) == ["finessl", "fixmatch"]
    assert label({}, {"seed": 1}) == ["finessl, seed 0", "finessl, seed 1"]
    assert label({"method.alpha": 2.0}, {"method.alpha": 4.5}) == ["finessl, alpha 2", "finessl, alpha 4.5"]
    assert label({"method.alpha": 2.0}, {"method.name": "fixmatch"}) == ["finessl", "fixmatch"]
    assert label({}, {"tuning.name": "lora"}) == ["finessl, vpt-deep", "finessl, lora"]
    assert label({}, {}) == ["finessl (1)", "finessl (2)"]


def test_probabilities_are_those_of_the_logits(make_run: Maker) -> None:
    test = read_runs([make_run()])[0].test
    assert test is not None
    by_hand = np.exp(test.logits[0]) / np.exp(test.logits[0]).sum()
    np.testing.assert_allclose(test.probabilities[0], by_hand, rtol=1e-6)
    assert test.confidence[0] == pytest.approx(by_hand.max())


def test_damaged_files_are_named_and_the_rest_is_read(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    files = {name: (folder / name).read_bytes() for name in ("split.json", "predictions.npz", "unlabeled.npz")}
    for name, whole in files.items():
        for content in (None, b"", b"[0, 10000000000000]", b"PK\x03\x04 cut", whole[: len(whole) // 2]):
            (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
            (outcome,) = read_runs([folder])
            assert name in " ".join(outcome.missing), (name, content)
            findings(outcome, second_opinion(outcome))
            (folder / name).write_bytes(whole)


def test_arrays_of_other_classes_are_not_taken(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    content = json.loads((folder / "split.json").read_text())
    content["classes"] = content["classes"][:2]
    (folder / "split.json").write_text(json.dumps(content))
    (outcome,) = read_runs([folder])
    assert outcome.test is None and outcome.unlabeled is None and outcome.features is None
    assert outcome.diagnostics == [] and "does not fit the run's classes" in outcome.missing[0]


def test_a_report_without_its_split_numbers_the_classes(make_run: Callable[..., Path]) -> None:
    folder = make_run(right=0)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "classes": 3}))
    (folder / "split.json").unlink()
    (outcome,) = read_runs([folder])
    assert outcome.classes == ["class 0", "class 1", "class 2"] and outcome.test is not None
    assert "split.json" in write_report([folder], images=False).read_text(encoding="utf-8")
