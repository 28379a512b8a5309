"""finessl predict: every form of output, whole or not at all; files that cannot be read are named."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import finessl
from finessl.cli import app
from finessl.errors import FinesslError
from finessl.inference import output
from finessl.inference import predict as prediction
from finessl.inference.output import csv_lines, write_rows
from finessl.inference.predict import Predictions

Capture = pytest.CaptureFixture[str]


def as_csv(found: Predictions, excel: bool = False) -> bytes:
    return b"".join(csv_lines(found.columns, found.rows, excel))


def predict(*words: str | Path) -> None:
    app(["predict", *map(str, words), "--device", "cpu"], standalone_mode=False)


@pytest.fixture
def photos(shapes: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(3):
        shutil.copy(shapes / "test" / "down" / f"0{i}.png", folder / f"{i}.png")
    return folder


def test_forms_by_suffix(tiny_run: Path, photos: Path, tmp_path: Path, capsys: Capture) -> None:
    from pyarrow import parquet

    for suffix in (".csv", ".json", ".jsonl", ".parquet"):
        predict(tiny_run, photos, "--top", "2", "--out", tmp_path / "new" / f"out{suffix}")
    assert capsys.readouterr().out.splitlines()[0].endswith("out.csv: 3 predictions")
    listed = json.loads((tmp_path / "new" / "out.json").read_text())
    assert list(listed[0]) == ["path", "label", "confidence", "label2", "confidence2"]
    assert [row["path"] for row in listed] == [str(photos / f"{i}.png") for i in range(3)]
    assert listed == [json.loads(line) for line in (tmp_path / "new" / "out.jsonl").read_text().splitlines()]
    assert listed == parquet.read_table(tmp_path / "new" / "out.parquet").to_pylist()
    with open(tmp_path / "new" / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == [row["label"] for row in listed]
    assert float(rows[0]["confidence"]) == pytest.approx(listed[0]["confidence"], abs=1e-4)
    with pytest.raises(FinesslError, match="use .csv, .json, .jsonl, .parquet"):
        predict(tiny_run, photos, "--out", tmp_path / "out.xlsx")


def test_parquet_without_pyarrow(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FinesslError, match=r"pip install 'finessl\[tables\]'"):
        output.check_output(tmp_path / "out.parquet")


def test_top_is_capped_at_the_number_of_classes(tiny_run: Path, photos: Path, capsys: Capture) -> None:
    predict(tiny_run, photos, "--top", "99")
    header, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert header == ["path", "label", "confidence", "label2", "confidence2", "label3", "confidence3"]
    assert all(len(row) == 7 for row in rows) and {*rows[0][1::2]} == {"across", "diagonal", "down"}


def test_csv_for_excel(tmp_path: Path) -> None:
    """A byte order mark, and no text that a spreadsheet would take for a formula. Without the option: as it is."""
    found = Predictions(["path", "label", "confidence"], [["=1+1.jpg", "@Müll", 0.5], ["-x.jpg", "a", 1.0]])
    plain = as_csv(found).decode("utf-8")
    assert plain == "path,label,confidence\r\n=1+1.jpg,@Müll,0.5000\r\n-x.jpg,a,1.0000\r\n"
    excel = as_csv(found, excel=True)
    assert excel.startswith(b"\xef\xbb\xbf")
    assert list(csv.reader(excel.decode("utf-8-sig").splitlines()))[1:] == [
        ["'=1+1.jpg", "'@Müll", "0.5000"],
        ["'-x.jpg", "a", "1.0000"],
    ]


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """The file is valid UTF-8 in every form; JSON gives the name back exactly."""
    name = os.fsdecode(b"caf\xe9.jpg")
    found = Predictions(["path", "label", "confidence"], [[name, "a", 0.5]])
    for suffix in (".csv", ".json", ".jsonl", ".parquet"):
        write_rows(tmp_path / f"out{suffix}", found.columns, found.rows)
    assert r"caf\udce9.jpg" in (tmp_path / "out.csv").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))[0]["path"] == name


def test_broken_files_are_named_and_all_broken_is_an_error(tiny_run: Path, photos: Path, capsys: Capture) -> None:
    (photos / "cut.jpg").write_bytes(b"not a picture")
    predict(tiny_run, photos)
    printed = capsys.readouterr()
    assert "cut.jpg: not an image" in printed.err and len(printed.out.splitlines()) == 4
    with pytest.raises(FinesslError, match="nothing was predicted: 1 image cannot be used: .*cut.jpg"):
        predict(tiny_run, photos / "cut.jpg")
    with pytest.raises(FinesslError, match="there is no such file or folder"):
        predict(tiny_run, photos / "gone.jpg")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads every folder")
def test_unreadable_folders_are_named(tiny_run: Path, photos: Path, capsys: Capture) -> None:
    (photos / "locked").mkdir(mode=0)
    predict(tiny_run, photos)
    assert "locked: the folder cannot be read: Permission denied" in capsys.readouterr().err


def test_unreadable_folders_are_noted(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for root too: what os.walk cannot list is kept."""

    def walk(folder: Path, onerror: object) -> list:
        onerror(PermissionError(13, "Permission denied", f"{folder}/locked"))  # type: ignore[operator]
        return [(str(folder), [], ["0.png"])]

    monkeypatch.setattr(os, "walk", walk)
    files, broken = prediction.find_files([photos])
    assert files == [photos / "0.png"]
    assert broken == [(f"{photos}/locked", "the folder cannot be read: Permission denied")]


def test_table_of_paths(tiny_run: Path, photos: Path, capsys: Capture) -> None:
    (photos / "table.csv").write_text("path,label\n0.png,down\n2.png,\n")
    predict(tiny_run, photos / "table.csv")
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["path"] for row in rows] == [str(photos / "0.png"), str(photos / "2.png")]
    (photos / "table.csv").write_text("file,label\n0.png,down\n")
    with pytest.raises(FinesslError, match="no column 'path' with the image files; it has file, label"):
        predict(tiny_run, photos / "table.csv")


def test_output_that_cannot_be_written(tiny_run: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(FinesslError, match="folder.csv is a folder; name a file"):
        predict(tiny_run, photos, "--out", tmp_path / "folder.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(FinesslError, match="cannot write"):
        predict(tiny_run, photos, "--out", tmp_path / "file" / "out.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(FinesslError, match="a device or a pipe"):
        predict(tiny_run, photos, "--out", tmp_path / "pipe.csv")
    assert (tmp_path / "pipe.csv").is_fifo()  # not replaced
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.csv", "photos", "pipe.csv"]


def test_no_output_is_an_input_or_another_output(tiny_run: Path, photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "mine.parquet"
    write_rows(table, ["path"], [[str(path)] for path in photos.iterdir()])
    before = table.read_bytes()
    for words, message in (
        (["--out", str(table)], "is one of the inputs"),
        (["--embeddings", str(tmp_path / "x" / ".." / "mine.parquet")], "is one of the inputs"),
        (["--out", str(tmp_path / "a.parquet"), "--embeddings", str(tmp_path / "a.parquet")], "is --out"),
        (["--address", "auto"], "need --out DIR"),
        (["--address", "auto", "--out", str(tmp_path / "parts")], "--engine ray"),
    ):
        with pytest.raises(FinesslError, match=message):
            app(["predict", str(tiny_run), str(table), *words], standalone_mode=False)
    assert table.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["mine.parquet", "photos"]


def test_full_disk_leaves_nothing_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FinesslError, match="No space left on device") as caught:
        write_rows(tmp_path / "out.csv", ["path"], [["a"]])
    assert "checkpoint" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_full_standard_output() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "finessl", "list", "methods"], stdout=full, stderr=-1, text=True)
    assert done.returncode == 1 and done.stderr == "finessl: the output cannot be written: No space left on device.\n"


def test_a_folder_given_to_the_classifier(tiny_run: Path, photos: Path) -> None:
    import finessl

    classifier = finessl.load(tiny_run, device="cpu")
    with pytest.raises(FinesslError, match="photos is a folder; pass its files"):
        classifier.predict(photos)
    (photos / "cut.jpg").write_bytes(b"not a picture")
    with pytest.raises(FinesslError, match="cut.jpg: not an image"):
        classifier.predict([photos / "0.png", photos / "cut.jpg"])


def test_abstention_leaves_the_label_empty() -> None:
    def made() -> Predictions:
        confidences = [0.9, 0.5, 0.7, 0.7]
        return Predictions(["path", "label", "confidence"], [[f"{i}", "a", c] for i, c in enumerate(confidences)])

    found = made()
    assert prediction.abstain(found, min_confidence=0.7) == 3
    assert found.columns[-1] == "guess" and [row[1] for row in found.rows] == ["a", None, "a", "a"]
    assert [row[-1] for row in found.rows] == ["a"] * 4
    assert as_csv(found).splitlines()[2] == b"1,,0.5000,a"
    found = made()
    assert prediction.abstain(found, coverage=0.5) == 2, "ties do not raise the coverage"
    assert [row[1] for row in found.rows] == ["a", None, "a", None]
    assert prediction.abstain(made(), min_confidence=0.8, coverage=1.0) == 1
    assert prediction.abstain(made(), coverage=0.0) == 0


def test_unsure_images_are_sorted_apart(tiny_run: Path, photos: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "sorted"
    command = (tiny_run, photos, "--coverage", "0.34", "--sort-into", target, "--out", tmp_path / "out.json")
    predict(*command)
    listed = json.loads((tmp_path / "out.json").read_text())
    places = {path.name: path.parent.name for path in target.rglob("*.png")}
    assert places == {Path(row["path"]).name: row["label"] or "unsure" for row in listed}
    assert sorted(places.values()).count("unsure") == 1 and "labeled 2 of 3 images" in capsys.readouterr().err
    predict(*command)
    assert "0 images added" in capsys.readouterr().err, "the same command again adds nothing"
    assert len(list(target.rglob("*.png"))) == 3
    with pytest.raises(FinesslError, match="is inside"):
        predict(tiny_run, photos, "--sort-into", photos / "sorted")
    with pytest.raises(FinesslError, match="add --sort-into"):
        predict(tiny_run, photos, "--link")


def test_embeddings_belong_to_the_rows(tiny_run: Path, photos: Path, tmp_path: Path, capsys: Capture) -> None:
    from pyarrow import parquet

    (photos / "broken.png").write_bytes(b"not a picture")
    predict(tiny_run, photos, "--embeddings", tmp_path / "e.npz", "--out", tmp_path / "out.json")
    predict(tiny_run, photos, "--embeddings", tmp_path / "e.parquet")
    arrays = np.load(tmp_path / "e.npz")
    assert arrays["path"].tolist() == [row["path"] for row in json.loads((tmp_path / "out.json").read_text())]
    wanted = finessl.load(tiny_run, device="cpu").embed([photos / f"{i}.png" for i in range(3)])
    np.testing.assert_allclose(arrays["embedding"], wanted, rtol=1e-3, atol=1e-3)
    table = parquet.read_table(tmp_path / "e.parquet").to_pydict()
    np.testing.assert_array_equal(np.array(table["embedding"], np.float32), arrays["embedding"])
    with pytest.raises(FinesslError, match="use .npz, .parquet"):
        predict(tiny_run, photos, "--embeddings", tmp_path / "e.csv")
