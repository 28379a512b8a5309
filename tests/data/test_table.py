"""CSV tables of images."""

from __future__ import annotations

from pathlib import Path

import pytest

from finessl.data.sources import open_dataset
from finessl.errors import FinesslError


@pytest.fixture
def table(tmp_path: Path, make):
    """Writes a table beside ten images 0.png … 9.png."""
    for number in range(10):
        make.write(tmp_path / f"{number}.png", number)

    def write(text: str, name: str = "images.csv") -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def test_labels_some_empty(table, make) -> None:
    data = open_dataset(table("path,label\n3.png,dog\n1.png,\n0.png,cat\n2.png,\n"))
    assert data.name == "images" and data.classes == ["cat", "dog"]
    assert [data.train.key(i) for i in range(4)] == ["3.png", "1.png", "0.png", "2.png"]
    assert data.train_labels.tolist() == [1, -1, 0, -1]
    assert data.given is not None and data.given.tolist() == [True, False, True, False]
    assert (data.train.read(1) == make.picture(1)).all()


def test_all_labeled_is_for_a_split_to_hide(table) -> None:
    assert open_dataset(table("path,label\n3.png,dog\n0.png,cat\n")).given is None


def test_ragged_rows(table) -> None:
    """A comma left out, one too many, a blank line."""
    data = open_dataset(table("path,label,note\n0.png,a\n\n1.png\n2.png,b,x,y\n"))
    assert data.train_labels.tolist() == [0, -1, 1]


def test_split_column(table) -> None:
    data = open_dataset(
        table("path,label,split\n0.png,a,train\n1.png,b,train\n2.png,,train\n3.png,b,test\n4.png,a,val\n")
    )
    assert data.train_labels.tolist() == [0, 1, -1]
    assert data.test_labels is not None and data.test_labels.tolist() == [1, 0]


@pytest.mark.parametrize("text", ["\ufeffPath; Label\n0.png; ä\n1.png; b\n", "path\tlabel\r\n0.png\tä\r\n1.png\tb\r\n"])
def test_spreadsheet_habits(table, text: str) -> None:
    """Byte-order mark, semicolons or tabs, capitals, spaces, CRLF."""
    data = open_dataset(table(text))
    assert data.classes == ["b", "ä"] and data.train_labels.tolist() == [1, 0]


def test_paths_are_relative_to_the_table(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    make.write(tmp_path / "set" / "deep" / "a.png", 1)
    make.write(tmp_path / "b.png", 2)
    (tmp_path / "set" / "t.csv").write_text(f"path,label\ndeep/a.png,x\n{tmp_path / 'b.png'},y\n")
    monkeypatch.chdir(tmp_path)
    data = open_dataset("set/t.csv")
    assert (data.train.read(0) == make.picture(1)).all() and (data.train.read(1) == make.picture(2)).all()


@pytest.mark.parametrize(
    "text, message",
    [
        ("path,name\n0.png,a\n", "no column 'label'; it has path, name"),
        ("label\na\n", "no column 'path'"),
        ("path,label\n", "no rows"),
        ("", "no column 'path'; it has none"),
        ("path,label\n0.png,a\n,b\n", "path is empty in rows 2"),
        ("path,label\n0.png,a\n./0.png,b\n1.png,b\n", "1 paths more than once: 0.png"),
        ("path,label\n0.png,a\nx.png,b\ny.png,b\n1.png,b\n", "2 of 4 files that are not there: x.png, y.png"),
        ("path,label\n0.png,a\n1.png,a\n", "two classes or more.*'a'"),
        ("path,label\n0.png,\n1.png,\n", "two classes or more.*none"),
        ("path,label,split\n0.png,a,train\n1.png,b,train\n2.png,c,test\n", "unknown to the training data: c"),
        ("path,label,split\n0.png,a,train\n1.png,b,train\n2.png,,test\n", "1 test images have no label"),
        ("path,label,split\n0.png,a,tain\n1.png,b,train\n", "train or test, not tain"),
        ("path,label,split\n0.png,a,test\n1.png,b,test\n", "no training images"),
    ],
)
def test_bad_tables(table, text: str, message: str) -> None:
    with pytest.raises(FinesslError, match=message):
        open_dataset(table(text))


def test_not_a_text_file(table, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00path")
    with pytest.raises(FinesslError, match="cannot be read as a CSV"):
        open_dataset(tmp_path / "x.csv")
