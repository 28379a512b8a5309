"""`finessl audit`: a random sample, a person's answers, an accuracy with its interval."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finessl
from finessl.errors import FinesslError
from finessl.inference.audit import error_rate, estimate, read_audit
from finessl.inference.metrics import wilson

from .conftest import run_verb


@pytest.fixture(scope="module")
def finished(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without test images."""
    root = tmp_path_factory.mktemp("audited")
    shutil.copytree(shapes / "train", root / "photos")
    run_verb("quick", root / "photos", "-n", 3, "--backbone", "embedded", "--out", root / "run", "-q")
    return root / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def judge(run: Path, count: int, tmp_path: Path) -> Path:
    """Choose images and fill in the truth, which is the folder's name, but for every seventh."""
    out = tmp_path / f"audit-{count}.csv"
    run_verb("audit", run, "-k", count, "--out", out)
    with open(out, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == count and all(row["label"] == "" for row in rows)
    assert "predicted" not in rows[0]  # the classifier's answer would lead the person who judges
    with open(out, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("number", "path", "label"))
        for i, row in enumerate(rows):
            writer.writerow((row["number"], row["path"], "other" if i % 7 == 3 else row["path"].partition("/")[0]))
    return out


def test_audited_accuracy_is_that_of_the_classifier(run: Path, tmp_path: Path) -> None:
    answers = judge(run, 50, tmp_path)
    text = run_verb("audit", run, "--answers", answers)
    found = read_audit(run)
    assert found is not None and found["judged"] == 50
    classifier = finessl.load(run)
    right = sum(image["label"] == image["predicted"] for image in found["images"])
    assert found["right"] == right <= 43 and found["method"] == "ppi++"
    assert found["low"] <= found["accuracy"] <= found["high"]
    assert "audited accuracy" in text and "temperature" in text
    assert classifier.temperature == pytest.approx(found["temperature"])


def test_temperature_is_applied_and_the_answers_stay(run: Path, shapes: Path, tmp_path: Path) -> None:
    before = finessl.load(run)
    files = sorted((shapes / "test").rglob("*.png"))
    logits = before.logits(files)
    run_verb("audit", run, "--answers", judge(run, 50, tmp_path))
    after = finessl.load(run)
    assert after.temperature != 1.0
    scaled = np.exp(logits / after.temperature - (logits / after.temperature).max(1, keepdims=True))
    np.testing.assert_allclose(after.predict_proba(files), scaled / scaled.sum(1, keepdims=True), atol=1e-5)
    assert (after.predict_proba(files).argmax(1) == before.predict_proba(files).argmax(1)).all()


def test_few_answers_give_wilson_and_no_temperature(run: Path, tmp_path: Path) -> None:
    text = run_verb("audit", run, "--answers", judge(run, 12, tmp_path))
    found = read_audit(run)
    assert found is not None and found["method"] == "wilson" and "temperature" not in found
    assert (found["low"], found["high"]) == pytest.approx(wilson(found["right"], 12))
    assert "30 judged images" in text
    assert "temperature" not in json.loads((run / "classifier" / "classifier.json").read_text())


def test_report_says_that_the_figure_is_audited(run: Path, tmp_path: Path) -> None:
    run_verb("report", run, "--no-images", "--out", tmp_path / "before.html")
    assert "finessl audit" in (tmp_path / "before.html").read_text(encoding="utf-8")
    run_verb("audit", run, "--answers", judge(run, 12, tmp_path))
    run_verb("report", run, "--no-images", "--out", tmp_path / "after.html")
    page = (tmp_path / "after.html").read_text(encoding="utf-8")
    assert "(audited)" in page and "a person judged 12 unlabeled images" in page


def test_min_confidence_states_the_error_rate(run: Path, shapes: Path, tmp_path: Path) -> None:
    words = ("predict", run, shapes / "test" / "down", "--min-confidence", 0.4, "--out", tmp_path / "out.csv")
    assert "error rate: not known" in run_verb(*words)
    run_verb("audit", run, "--answers", judge(run, 50, tmp_path))
    assert "error rate of these labels" in run_verb(*words)
    audit = read_audit(run)
    assert audit is not None
    every = error_rate(audit, 0.0)
    assert every is not None and every[:2] == (50 - audit["right"], 50)
    assert error_rate(audit, 1.01) is None


def test_sample_is_seeded_and_leaves_labeled_images_out(run: Path, tmp_path: Path) -> None:
    names = []
    for seed in (0, 0, 1):
        out = tmp_path / f"{len(names)}.csv"
        run_verb("audit", run, "-k", 20, "--seed", seed, "--out", out)
        with open(out, encoding="utf-8", newline="") as file:
            names.append([row["path"] for row in csv.DictReader(file)])
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("case", ["nothing", "both", "empty", "foreign", "filled"])
def test_mistakes_are_one_sentence(run: Path, tmp_path: Path, case: str) -> None:
    answers = judge(run, 5, tmp_path)
    words: dict[str, tuple[Any, ...]] = {
        "nothing": (),
        "both": ("--out", tmp_path / "x.csv", "--answers", answers),
        "empty": ("--answers", tmp_path / "empty.csv"),
        "foreign": ("--answers", tmp_path / "foreign.csv"),
        "filled": ("--out", answers),
    }
    (tmp_path / "empty.csv").write_text("path,label\na.png,\n")
    (tmp_path / "foreign.csv").write_text("path,label\na.png,down\n")
    with pytest.raises(FinesslError) as error:
        run_verb("audit", run, *words[case])
    assert len(str(error.value).splitlines()) == 1


# ---- the estimate ---------------------------------------------------------------------------------------------------


def test_estimate_by_hand() -> None:
    """n = 40, half right; confidence 1 where right and 0 where wrong: λ = 1/(1 + n/N)."""
    right = np.arange(40) % 2 == 0
    others = np.tile([0.0, 1.0, 1.0], 40)  # N = 120, mean 2/3
    accuracy, interval, method = estimate(right, right.astype(float), others)
    share = 1 / (1 + 40 / 120)
    assert method == "ppi++"
    assert accuracy == pytest.approx(share * 2 / 3 + 0.5 - share * 0.5)
    residual, spread = right - share * right, others
    error = np.sqrt(residual.var(ddof=1) / 40 + share**2 * spread.var(ddof=1) / 120)
    assert interval == pytest.approx((accuracy - 1.959964 * error, accuracy + 1.959964 * error))


def test_estimate_covers_the_truth_and_gains_from_confidence() -> None:
    rng = np.random.default_rng(0)
    covered, widths, plain = 0, [], []
    for _ in range(300):
        c = rng.beta(4, 2, 2060)
        r = rng.random(2060) < c
        accuracy, interval, _ = estimate(r[:60], c[:60], c[60:])
        covered += interval.low <= 4 / 6 <= interval.high
        widths.append(interval.high - interval.low)
        simple = wilson(int(r[:60].sum()), 60)
        plain.append(simple.high - simple.low)
    assert 0.9 <= covered / 300 <= 0.99
    assert np.mean(widths) < np.mean(plain)


@pytest.mark.parametrize("right", [np.ones(50, bool), np.zeros(50, bool), np.arange(20) < 10])
def test_wilson_where_ppi_would_collapse_or_images_are_few(right: np.ndarray) -> None:
    accuracy, interval, method = estimate(right, np.full(len(right), 0.7), np.full(500, 0.7))
    assert method == "wilson" and interval == wilson(int(right.sum()), len(right))
    assert accuracy == right.mean()
