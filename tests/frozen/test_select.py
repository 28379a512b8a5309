"""Which images to label: the greedy choice against a slow one, and the list as a source of labels."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finessl.cli import app
from finessl.cli.select import check_target, takes_labels
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.frozen import select
from finessl.frozen.select import Picker, herd, select_images, unit

from ..conftest import run_verb

Clouds = tuple[np.ndarray, np.ndarray]


def slow_herding(x: np.ndarray, count: int, labeled: list[int], u: np.ndarray) -> list[int]:
    """Every gain is computed at every pick."""
    k = np.exp(-((x[:, None] - x[None]) ** 2).sum(2))
    chosen: list[int] = []
    for _ in range(count):
        covered = k[labeled + chosen].max(0) if labeled + chosen else np.zeros(len(x))
        gains = (np.maximum(k - covered, 0) * u).sum(1)
        gains[labeled + chosen] = -1
        chosen.append(int(gains.argmax()))
    return chosen


@pytest.mark.parametrize("labeled", [[], [3, 60, 110]])
def test_lazy_herding_is_greedy_herding(clouds: Clouds, labeled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "FRESH", 5)
    monkeypatch.setattr(select, "DUPLICATE", 2.0)
    x = unit(clouds[0]).double()
    u = np.random.default_rng(1).uniform(0.1, 1, len(x))
    picker = Picker(x, torch.tensor(labeled, dtype=torch.int64))
    herd(picker, 25, torch.from_numpy(u), seed=0)
    assert picker.chosen == slow_herding(x.numpy(), 25, labeled, u)


def test_any_prefix_is_the_shorter_list(clouds: Clouds) -> None:
    rows = clouds[0].astype(np.float16)
    long, short = select_images(rows, 20).chosen, select_images(rows, 7).chosen
    assert long[:7].tolist() == short.tolist()


def test_herding_covers_the_classes_sooner_than_chance(clouds: Clouds) -> None:
    rows, truth = clouds
    assert set(truth[select_images(rows.astype(np.float16), 4).chosen]) == {0, 1, 2, 3}


@pytest.mark.parametrize("strategy", select.STRATEGIES)
def test_labeled_broken_and_duplicate_images_are_left_out(clouds: Clouds, strategy: Any) -> None:
    rows, truth = clouds
    rows = np.concatenate([rows, rows[:40]])  # forty images twice
    usable, labels = np.ones(160, bool), np.full(160, -1)
    usable[50:60] = False
    labels[[0, 70]] = truth[[0, 70]]
    found = select_images(
        rows.astype(np.float16), 200, usable=usable, labels=labels, classes=4, strategy=strategy, seed=1
    )
    assert len(set(found.chosen.tolist())) == len(found.chosen)
    assert not {0, 70, 120, *range(50, 60)} & set(found.chosen.tolist())  # 120 is a copy of 0, which is labeled
    assert not any(i in found.chosen and i + 120 in found.chosen for i in range(40))
    assert found.duplicates >= 40


def test_suggestions_follow_the_labels(clouds: Clouds) -> None:
    rows, truth = clouds
    labels = np.full(120, -1)
    for c in range(4):
        labels[np.flatnonzero(truth == c)[:3]] = c
    found = select_images(rows.astype(np.float16), 10, labels=labels, classes=4)
    assert (found.suggested == truth).mean() > 0.85
    assert (select_images(rows.astype(np.float16), 10).suggested == -1).all()


@pytest.mark.parametrize("strategy", select.STRATEGIES)
def test_large_set_is_sampled(clouds: Clouds, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, truth = clouds
    labels = np.where(np.isin(np.arange(120), [0, 119]), truth, -1)
    monkeypatch.setattr(select, "LARGEST", 60)
    found = select_images(rows.astype(np.float16), 10, labels=labels, classes=4, strategy=strategy)
    assert len(found.chosen) == 10 and not {0, 119} & set(found.chosen.tolist())
    assert (found.suggested >= 0).sum() == 60 and (found.suggested[found.chosen] >= 0).all()


def test_uncertain_images_count_more() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.05, 0.05], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(select.uncertainty(p), torch.tensor([1.0, 0.15, 0.0]))


# ---- the command ----------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def pile(shapes: Path, tmp_path: Path) -> Path:
    """Unlabeled photos, one of them broken; the name tells the class."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("across", "down"):
        for file in sorted((shapes / "train" / name).iterdir()):
            shutil.copy(file, folder / f"{name}-{file.name}")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def test_list_filled_in_is_a_source_of_labels(pile: Path, tmp_path: Path) -> None:
    out = tmp_path / "to-label.csv"
    text = run_verb("select", pile, "-k", 6, "--backbone", "embedded", "--out", out)
    assert "1 image cannot be read" in text and "finessl quick" in text
    rows = rows_of(out)
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert all(row["label"] == row["suggested"] == "" for row in rows)
    out.write_text("path,label\n" + "".join(f"{row['path']},{row['path'].partition('-')[0]}\n" for row in rows))
    dataset = open_dataset(pile, labels=str(out))
    assert dataset.classes == ["across", "down"] and dataset.given is not None and dataset.given.sum() == 6
    with pytest.raises(FinesslError, match="holds 6 labels"):  # never overwritten
        run_verb("select", pile, "-k", 6, "--backbone", "embedded", "--out", out)

    more = tmp_path / "more.csv"
    run_verb("select", pile, "-k", 4, "--backbone", "embedded", "--labels", out, "--out", more)
    assert not {row["path"] for row in rows} & {row["path"] for row in rows_of(more)}
    assert {row["suggested"] for row in rows_of(more)} <= {"across", "down"}
    run_verb("quick", pile, "--labels", out, "--backbone", "embedded", "--out", tmp_path / "run", "-q")
    assert f'labels = "{out}"' in (tmp_path / "run" / "recipe.toml").read_text()
    run_verb("report", tmp_path / "run", "--no-images")


def test_class_folders_are_not_taken_as_labels(shapes: Path, tmp_path: Path) -> None:
    run_verb("select", shapes, "-k", 5, "--backbone", "embedded", "--out", tmp_path / "list.csv")
    rows = rows_of(tmp_path / "list.csv")
    assert len(rows) == 5 and all(row["path"].startswith("train/") for row in rows)  # test/ is no part of the pile


def test_unknown_strategy_and_foreign_file_are_one_sentence(pile: Path, tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="unknown strategy"):
        run_verb("select", pile, "--strategy", "best", "--backbone", "embedded", "--out", tmp_path / "list.csv")
    (tmp_path / "notes.csv").write_text("my notes\n")
    with pytest.raises(FinesslError, match="name another --out"):
        run_verb("select", pile, "--backbone", "embedded", "--out", tmp_path / "notes.csv")


def test_a_name_that_is_too_long_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="cannot write to"):
        check_target(tmp_path / ("x" * 300))


def test_nothing_left_to_choose_is_one_sentence(tmp_path: Path, shapes: Path) -> None:
    """Every image of labeled/ has its label: an empty list would say that there is something to do."""
    shutil.copytree(shapes / "train", tmp_path / "photos" / "labeled")
    with pytest.raises(FinesslError, match="is left to choose from"):
        app(["select", str(tmp_path / "photos"), "--backbone", "embedded", "--out", str(tmp_path / "list.csv")],
            standalone_mode=False)  # fmt: skip
    assert not (tmp_path / "list.csv").exists()


@pytest.mark.parametrize("verb", ["select", "probe"])
def test_columns_of_a_table_have_any_name(verb: str, shapes: Path, tmp_path: Path) -> None:
    files = sorted(shapes.rglob("*.png"))
    lines = [f"{path},{path.parent.name},{path.parent.parent.name}" for path in files]
    (tmp_path / "t.csv").write_text("\n".join(["file,kind,split", *lines]))
    words = [verb, str(tmp_path / "t.csv"), "--backbone", "embedded", "--device", "cpu"]
    words += ["-k", "2", "--out", str(tmp_path / "o.csv")] if verb == "select" else []
    app([*words, "--path-column", "file", "--label-column", "kind"], standalone_mode=False)
    with pytest.raises(FinesslError, match="path"):
        app(words, standalone_mode=False)


def test_labels_are_advised_only_where_they_are_taken(shapes: Path) -> None:
    assert takes_labels(str(shapes), None) and not takes_labels("sample", None)
