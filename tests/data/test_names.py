"""Names whose bytes are not UTF-8, as archives of other systems leave them: they work from inspect to report."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from finessl.cli import app
from finessl.data.dataset import readable
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.recipe import read_toml


@pytest.fixture
def odd(tmp_path: Path, make) -> Path:
    """phötos/ with labeled/, unlabeled/dü/ and test/, in Latin-1."""
    root = tmp_path / os.fsdecode(b"ph\xf6tos")
    for part, count in (("labeled/a", 3), ("labeled/b", 3), (os.fsdecode(b"unlabeled/d\xfc"), 4), ("test/a", 2)):
        for i in range(count):
            make.write(root / part / os.fsdecode(b"%d\xe4.png" % i), i, 32, 32)
    (root / os.fsdecode(b"unlabeled/br\xf6ken.png")).write_bytes(b"junk")
    return root


def test_inspect_split_train_predict_report(odd: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out.csv"
    for command in (
        ["inspect", odd],
        ["split", odd, "--out", tmp_path / "split.json"],
        ["train", odd, "--backbone", "embedded", "--tuning", "linear", "--steps", 1, "--batch-size", 2, "--out", run],
        ["predict", run, odd / "test", "--out", out],
        ["report", run],
    ):
        app(list(map(str, command)), standalone_mode=False)
    assert r"br\xf6ken.png" in (run / "skipped.csv").read_text(encoding="utf-8")
    assert read_toml(run / "recipe.toml")["data"]["source"] == str(odd)
    assert (run / "report.html").read_text(encoding="utf-8") and out.read_bytes().count(b"\n") == 3


def test_class_names_that_are_no_text_are_refused(odd: Path, make) -> None:
    make.write(odd / os.fsdecode(b"labeled/c\xff") / "0.png", 9)
    with pytest.raises(FinesslError, match=r"a class name is not valid UTF-8: c\\xff\. Rename its folder or label"):
        open_dataset(odd)


def test_readable() -> None:
    assert readable("Tür") == "Tür" and readable("a\udcffb") == r"a\xffb" and readable("\ud800") == r"\ud800"


def test_unreadable_folder_is_named(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refuse(path: Path):  # type: ignore[no-untyped-def]
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(FinesslError, match="cannot read the folder .*labeled/b: Permission denied"):
        open_dataset(odd)
