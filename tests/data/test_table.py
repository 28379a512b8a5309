"""CSV tables of images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from finessl.api import make_recipe
from finessl.data.decoding import ImageError
from finessl.data.sources import open_dataset
from finessl.data.sources.table import read_rows
from finessl.errors import FinesslError
from finessl.inference.predict import find_files
from finessl.recipe import Recipe


@pytest.fixture
def table(tmp_path: Path, make):
    """Writes a table next to ten images 0.png … 9.png."""
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
        ("", "images.csv is empty"),
        ("path,label\n0.png,a\n,b\n", "path is empty in rows 2"),
        ("path,label\n0.png,a\n./0.png,b\n1.png,b\n", "1 paths more than once: 0.png"),
        (
            "path,label\n0.png,a\nx.png,b\ny.png,b\n1.png,b\n",
            "2 of 4 files that are not there: x.png, y.png",
        ),
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


@pytest.mark.parametrize(
    "data, message",
    [
        (b"\xff\xfe\x00path", "neither UTF-8 nor utf-16"),
        ("path,label\n0.png,a\n".encode("utf-16-le"), "is no text, or UTF-16 without its byte-order mark"),
        (b"path,label\n0.png,\x81\xff\n", "neither UTF-8 nor cp1252"),
        (b"path,label\n0.png,a\n1\0.png,b\n", "NUL character in rows 2"),
        (b"path,label,Path\n0.png,a,1.png\n", "more than one column path"),
        (b"", "x.csv is empty: it should hold a header and rows"),
        (b'path,label\n0.png,a\n"' + b"1" * 200_000 + b'",b\n', "cannot be read as a CSV table: field larger"),
    ],
)
def test_bytes_that_are_no_table(table, tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.csv").write_bytes(data)
    with pytest.raises(FinesslError, match=message):
        open_dataset(tmp_path / "x.csv")


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_tables_as_excel_saves_them(tmp_path: Path, make, encoding: str) -> None:
    make.write(tmp_path / "Tür.png", 1)
    make.write(tmp_path / "b.png", 2)
    (tmp_path / "x.csv").write_bytes("path;label\r\nTür.png;Müll\r\nb.png;Glas\r\n".encode(encoding))
    data = open_dataset(tmp_path / "x.csv")
    assert data.classes == ["Glas", "Müll"] and (data.train.read(0) == make.picture(1)).all()
    assert len(data.notes) == 1 and f"x.csv is not UTF-8 and was read as {encoding}" in data.notes[0]


def test_columns_of_other_names(table, tmp_path: Path) -> None:
    path = table("Filename,path,Class\n0.png,x,a\n1.png,x,b\n2.png,x,\n")
    data = open_dataset(path, path_column="filename", label_column="Class ")
    assert data.classes == ["a", "b"] and data.train_labels.tolist() == [0, 1, -1]
    with pytest.raises(
        FinesslError, match="no column 'file'; it has filename, path, class. Name the column with --path"
    ):
        open_dataset(path, path_column="file")
    (tmp_path / "test").mkdir()
    folder = open_dataset(tmp_path, labels=str(path), path_column="filename", label_column="class")
    assert folder.train_labels.tolist() == [0, 1] + [-1] * 8
    with_test = open_dataset(
        path, path_column="filename", label_column="class", test=table("Filename,Class\n3.png,b\n", "t.csv")
    )
    assert with_test.test_labels is not None and with_test.test_labels.tolist() == [1]


def test_columns_on_the_command_line(table, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from finessl.cli import app

    path = table("file,kind\n0.png,a\n1.png,b\n2.png,\n3.png,\n")
    columns = ["--path-column", "file", "--label-column", "kind"]
    app(["inspect", str(path), *columns], standalone_mode=False)
    assert "2 labeled and 2 unlabeled training images" in capfd.readouterr().out
    app(["split", str(path), *columns, "--out", str(tmp_path / "split.json")], standalone_mode=False)
    assert (tmp_path / "split.json").exists()
    recipe = make_recipe(None, {"path_column": "file", "label_column": "kind"}, {"data.source": str(path)})
    assert Recipe.read(write_recipe(recipe, tmp_path)).source.options == {"path_column": "file", "label_column": "kind"}


def write_recipe(recipe: Recipe, folder: Path) -> Path:
    (folder / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    return folder / "recipe.toml"


@pytest.mark.parametrize("how", ["absolute", "link"])
def test_one_file_named_in_two_ways(table, tmp_path: Path, how: str) -> None:
    other = tmp_path / "0.png"
    if how == "link":
        other = tmp_path / "link.png"
        other.symlink_to(tmp_path / "0.png")
    with pytest.raises(FinesslError, match=r"names one file in several ways: 0\.png = .*png\. Keep one row"):
        open_dataset(table(f"path,label\n0.png,a\n{other},b\n1.png,b\n"))


def test_hard_links_are_files_of_their_own(table, tmp_path: Path) -> None:
    (tmp_path / "copy.png").hardlink_to(tmp_path / "0.png")
    assert len(open_dataset(table("path,label\n0.png,a\ncopy.png,b\n")).train) == 2


def test_a_pipe_is_no_table_and_no_image(table, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    data = open_dataset(table("path,label\n0.png,a\npipe.png,b\n"))
    with pytest.raises(ImageError, match="not a regular file"):
        data.train.read(1)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(FinesslError, match="no such folder or file"):
        open_dataset(tmp_path / "pipe.csv")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(FinesslError, match="not a regular file"):
        find_files([tmp_path / "pipe.txt"])


def test_a_pipe_is_no_parquet_table(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(FinesslError, match="not a regular file"):
        read_rows(tmp_path / "pipe.parquet")


def test_parquet_tables_that_no_one_can_use(tmp_path: Path, make) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    make.write(tmp_path / "0.png")
    far = pyarrow.array([2**62], pyarrow.timestamp("us"))
    for names, columns, message in (
        (["path", "Path", "label"], [["0.png"], ["0.png"], ["a"]], "more than one column path"),
        (["path", "label"], [["0.png"], far], "cannot be read as a Parquet table"),
        (["path", "label"], [["0\0.png"], ["a"]], "NUL character in rows 1"),
        (["file", "class"], [["0.png"], ["a"]], "no column 'path'; it has file, class"),
    ):
        parquet.write_table(
            pyarrow.Table.from_arrays([pyarrow.array(c) for c in columns], names), tmp_path / "t.parquet"
        )
        with pytest.raises(FinesslError, match=message):
            open_dataset(tmp_path / "t.parquet")
