"""Predictions in parts: the same files for any number of workers and any number of interruptions."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finessl
from finessl.cli import app
from finessl.errors import FinesslError
from finessl.inference import output
from finessl.inference.bulk import Results, engines, finish, folder, parts, predict_bulk, worker
from finessl.inference.bulk.parts import Part, cut, open_part
from finessl.inference.predict import Predictions, abstain

from .conftest import MakeRun

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")


def make_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def shards(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of eight images; one image is broken, one is in a format that is not read."""
    folder = tmp_path_factory.mktemp("shards")
    for number, name in enumerate(("across", "diagonal", "down")):
        files = {f"{name}/{p.name}": p.read_bytes() for p in sorted((shapes / "test" / name).iterdir())}
        if number == 1:
            files["diagonal/99.png"] = b"not a picture"
        make_tar(folder / f"{number:04d}.tar", files)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows_in(folder: Path, *columns: str) -> list[dict[str, Any]]:
    """The rows of all parts."""
    return parquet.read_table(sorted(folder.glob("part-*.parquet")), columns=list(columns) or None).to_pylist()


@pytest.fixture(scope="module")
def whole(make_run: MakeRun, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bulk") / "out"
    totals = predict_bulk(make_run(), [shards], out, top=2, device="cpu", jobs=1)
    assert (totals.images, totals.broken, totals.parts) == (24, 1, 3)
    return out


def test_parts_hold_the_classifiers_answers(whole: Path, make_run: MakeRun, shapes: Path, shards: Path) -> None:
    rows = parquet.read_table(whole / "part-00000.parquet").to_pylist()
    assert list(rows[0]) == ["path", "label", "confidence", "label2", "confidence2", "error"]
    files = sorted((shapes / "test" / "across").iterdir())
    assert [row["path"] for row in rows] == [f"{shards}/0000.tar/across/{file.name}" for file in files]
    classifier = finessl.load(make_run(), device="cpu")
    assert [row["label"] for row in rows] == classifier.predict(files)
    np.testing.assert_allclose(
        [row["confidence"] for row in rows], classifier.predict_proba(files).max(1), rtol=1e-2, atol=1e-2
    )
    broken = [row for row in parquet.read_table(whole / "part-00001.parquet").to_pylist() if row["error"]]
    assert [(Path(row["path"]).name, row["label"], row["confidence"]) for row in broken] == [("99.png", None, None)]
    assert json.loads((whole / "predictions.json").read_text())["finished"] == {
        "images": 24,
        "labeled": 24,
        "broken": 1,
    }
    listed = list(csv.DictReader((whole / "skipped.csv").open(newline="")))
    assert [(row["source"], Path(row["image"]).name) for row in listed] == [(f"{shards}/0001.tar", "99.png")]
    assert "not an image" in listed[0]["reason"]


def test_missing_parts_are_made_again(whole: Path, make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "part-00001.parquet").unlink()
    (out / ".part-00002.parquet.partial").write_bytes(b"half")
    (out / "part-00002.parquet").unlink()
    kept = (out / "part-00000.parquet").stat().st_mtime_ns
    predict_bulk(make_run(), [shards], out, top=2, device="cpu", jobs=1)
    assert content(out) == content(whole) and (out / "part-00000.parquet").stat().st_mtime_ns == kept


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the workers in /proc")
def test_killed_with_two_processes_and_resumed_with_one(
    whole: Path, make_run: MakeRun, shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "finessl", "predict", str(make_run()), str(shards), "--out", str(out)]
    command += ["--top", "2", "--device", "cpu", "--jobs", "2"]
    process = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list(out.glob("part-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while (left := running_in(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == [], "the workers end with their parent"
    predict_bulk(make_run(), [shards], out, top=2, device="cpu", jobs=1)
    assert content(out) == content(whole)


def running_in(session: int) -> list[str]:
    """The processes of a session, without those that have ended and nobody has waited for."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, its = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its) == session and state != "Z":
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def test_every_part_is_carried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(engines, "run_part", lambda part, target: f"{part.source}: full" if target == "7" else None)
    settings = worker.Settings("", None, "cpu", "fp32", 1, None, None, False, "", 1)
    for count in (2, 4, 5, 23):
        tasks = [(number, Part("tar", "x"), str(number)) for number in range(count)]
        ended = dict(engines.run_local(settings, tasks, jobs=2))
        assert ended == {number: "x: full" if number == 7 else None for number in range(count)}


def test_inputs_are_cut_the_same_way(
    shards: Path, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_FILES", 10)
    found = cut([shards, shapes / "test"], part_bytes=20_000)
    assert [part.kind for part in found] == [*["tar"] * (len(found) - 3), "files", "files", "files"]
    assert [len(part.items) for part in found[-3:]] == [10, 10, 4]
    names = [open_part(part)[0].key(i) for part in found[:-3] for i in range(len(open_part(part)[0]))]
    assert len(names) == len(set(names)) == 25, "the pieces of a shard hold each image once"
    files = sorted((shapes / "test" / "down").iterdir())
    (tmp_path / "list.txt").write_text("\n".join(map(str, files)) + "\n\n")
    assert [path for path, _ in cut([tmp_path / "list.txt"])[0].items] == [str(file) for file in files]


def test_parquet_with_images(make_run: MakeRun, shapes: Path, tmp_path: Path) -> None:
    import pyarrow

    files = sorted((shapes / "test" / "down").iterdir())
    structs = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    structs[2] = {"bytes": None, "path": None}
    parquet.write_table(pyarrow.table({"image": structs}), tmp_path / "images.parquet", row_group_size=3)
    totals = predict_bulk(make_run(), [tmp_path / "images.parquet"], tmp_path / "out", device="cpu", jobs=1)
    assert (totals.images, totals.broken, totals.parts) == (7, 1, 3)
    rows = [
        row for path in sorted((tmp_path / "out").glob("*.parquet")) for row in parquet.read_table(path).to_pylist()
    ]
    assert [row["path"] for row in rows] == [f"{tmp_path}/images.parquet/{i}" for i in range(8)]
    wanted = finessl.load(make_run(), device="cpu").predict(files)
    assert [row["label"] for row in rows] == [*wanted[:2], None, *wanted[3:]]


def test_large_row_groups_are_cut(tmp_path: Path) -> None:
    """pyarrow and pandas write a million rows as one group."""
    import pyarrow

    values = [bytes([i % 256]) * 1000 for i in range(300)]
    values[7] = None
    for size in (1000, 130):
        file = tmp_path / f"{size}.parquet"
        parquet.write_table(pyarrow.table({"id": range(300), "image": values}), file, row_group_size=size)
        found = [open_part(part)[0] for part in cut([file], part_bytes=50_000)]
        assert all(len(images) <= 50 for images in found)
        assert [value for images in found for value in images.contents] == values
        assert [images.key(i) for images in found for i in range(len(images))] == [f"{file}/{i}" for i in range(300)]


def test_a_piece_of_a_row_group_takes_little_memory(tmp_path: Path) -> None:
    import pyarrow

    file = tmp_path / "images.parquet"
    table = pyarrow.table({"image": [os.urandom(1 << 20) for _ in range(64)]})
    parquet.write_table(table, file, compression="none", write_batch_size=1)
    code = """if True:
        import sys, pyarrow
        from pathlib import Path
        from finessl.inference.bulk.parts import cut, open_part
        print(sum(len(open_part(part)[0]) for part in cut([Path(sys.argv[1])], part_bytes=8 << 20)))
        print(pyarrow.default_memory_pool().max_memory())
    """
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    rows, most = map(int, done.stdout.split())
    assert rows == 64 and most < 24 << 20


def test_a_folder_of_everything(shards: Path, shapes: Path, tmp_path: Path) -> None:
    """Tar files anywhere below a folder, and its images too."""
    (tmp_path / "more").mkdir()
    names = ("b/10.tar", "b/9.TAR", "a.tar", ".a.tar")
    (tmp_path / "b").mkdir()
    for name in names:
        shutil.copy(shards / "0000.tar", tmp_path / name)
    shutil.copy(next((shapes / "test" / "down").iterdir()), tmp_path / "b" / "photo.png")
    (tmp_path / "b" / "photo.cr2").write_bytes(b"raw")
    found = cut([tmp_path])
    assert [(part.kind, part.source) for part in found] == [
        *(("tar", str(tmp_path / name)) for name in ("a.tar", "b/9.TAR", "b/10.tar")),
        ("files", str(tmp_path)), ("unread", str(tmp_path)),
    ]  # fmt: skip
    assert [path for path, _ in found[3].items] == [str(tmp_path / "b" / "photo.png")]


def test_class_names_that_are_no_text(make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(make_run(), tmp_path / "run"))
    file = run / "classifier" / "classifier.json"
    description = {**json.loads(file.read_text(encoding="utf-8")), "classes": ["a\udcff", "b\udcff", "c\udcff"]}
    file.write_text(json.dumps(description))
    results = Results(table="json", sort_into=tmp_path / "sorted")
    totals = predict_bulk(run, [shards], tmp_path / "out", device="cpu", jobs=1, results=results)
    assert totals.added == 24
    listed = json.loads((tmp_path / "out" / "all.json").read_text())
    assert {row["label"] for row in listed if row["label"]} <= {"a\\udcff", "b\\udcff", "c\\udcff"}


def test_min_confidence_leaves_the_label_empty(make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    predict_bulk(make_run(), [shards / "0000.tar"], tmp_path / "out", min_confidence=1.0, device="cpu", jobs=1)
    rows = parquet.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    assert {row["label"] for row in rows} == {None} and all(row["guess"] for row in rows)


@pytest.fixture(scope="module")
def answered(make_run: MakeRun, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that `predict --out FILE` can be asked for, from shards."""
    out = tmp_path_factory.mktemp("answered")
    app(
        ["predict", str(make_run()), str(shards), "--out", str(out / "out"), "--coverage", "0.4", "--top", "2",
         "--sort-into", str(out / "sorted"), "--embeddings", str(out / "features.parquet"), "--table", "csv",
         "--jobs", "1", "--device", "cpu"],
        standalone_mode=False,
    )  # fmt: skip
    return out


def test_coverage_is_that_of_all_parts(answered: Path, make_run: MakeRun, shapes: Path) -> None:
    """The labels of `predict.abstain`, which has all images at once."""
    rows = rows_in(answered / "out")
    assert list(rows[0]) == [
        "path", "label", "confidence", "label2", "confidence2", "guess", "error", "embedding",
    ]  # fmt: skip
    read = [row for row in rows if row["error"] is None]
    found = Predictions(["path", "label", "confidence"], [[r["path"], r["guess"], r["confidence"]] for r in read])
    assert abstain(found, coverage=0.4) == 10
    assert [row["label"] for row in read] == [row[1] for row in found.rows]
    totals = json.loads((answered / "out" / "predictions.json").read_text())["finished"]
    assert totals == {"images": 24, "labeled": 10, "broken": 1}


@pytest.mark.parametrize(
    ("coverage", "min_confidence"), [(0.0, None), (0.5, None), (0.5, 0.7), (1.0, 0.7), (1.0, None), (0.34, None)]
)
def test_ties_are_kept_in_order(coverage: float, min_confidence: float | None, tmp_path: Path) -> None:
    settings = worker.Settings("", None, "cpu", "fp32", 1, min_confidence, coverage, False, "", 1)
    confidences = np.array([0.9, 0.5, 0.7, 0.7, 0.7, 0.3, 0.7, 1.0, 0.0])
    for number, some in enumerate(np.split(confidences, 3)):
        labels = np.where(some == 0.3, -1, 0).astype(np.int32)[:, None]  # one is broken
        errors: list[str | None] = ["broken" if c == 0.3 else None for c in some]
        answers = worker.Answers(labels, some[:, None], errors, None)
        keys = [str(c) for c in some]
        worker.write_table(worker.part_table(["a"], settings, keys, answers, []), folder.part_file(tmp_path, number))
    finish.apply_coverage(tmp_path, 3, coverage, min_confidence or 0.0)
    found = Predictions(["path", "label", "confidence"], [["", "a", c] for c in confidences if c != 0.3])
    abstain(found, min_confidence, coverage)
    rows = [row for row in rows_in(tmp_path) if row["confidence"] is not None]
    assert [row["label"] for row in rows] == [row[1] for row in found.rows]
    once = content(tmp_path)
    finish.apply_coverage(tmp_path, 3, coverage, min_confidence or 0.0)
    assert content(tmp_path) == once


def test_interrupted_coverage_goes_on(answered: Path, make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    """One part lost, one computed but not yet labeled: the same bytes at the end, features and table too."""
    out = Path(shutil.copytree(answered / "out", tmp_path / "out"))
    (out / "part-00000.parquet").unlink()
    table = folder.read_part(out / "part-00002.parquet")
    place = table.column_names.index("label")
    worker.write_table(table.set_column(place, "label", table["guess"]), out / "part-00002.parquet")
    predict_bulk(
        make_run(), [shards], out, top=2, coverage=0.4, device="cpu", jobs=1,
        results=Results(table="csv", embeddings=tmp_path / "features.parquet"),
    )  # fmt: skip
    assert content(out) == content(answered / "out")
    assert (tmp_path / "features.parquet").read_bytes() == (answered / "features.parquet").read_bytes()


def test_images_of_shards_are_sorted(answered: Path, shapes: Path, shards: Path) -> None:
    rows = {row["path"]: row for row in rows_in(answered / "out")}
    wanted = {}
    for path, row in rows.items():
        shard, name = path.removeprefix(f"{shards}/").split(".tar/")
        if row["error"] is None:
            wanted[f"{row['label'] or 'unsure'}/{shard}_{Path(name).name}"] = (shapes / "test" / name).read_bytes()
    placed = answered / "sorted"
    assert {str(p.relative_to(placed)): p.read_bytes() for p in placed.rglob("*.png")} == wanted


def test_embeddings_of_all_parts(answered: Path, make_run: MakeRun, shapes: Path) -> None:
    features = parquet.read_table(answered / "features.parquet").to_pydict()
    files = [shapes / "test" / path.split(".tar/")[1] for path in features["path"]]
    assert len(files) == 24
    wanted = finessl.load(make_run(), device="cpu").embed(files)
    np.testing.assert_allclose(np.array(features["embedding"], np.float32), wanted, rtol=0.05, atol=0.05)
    rows = rows_in(answered / "out")
    assert [row["path"] for row in rows if row["embedding"] is None] == [row["path"] for row in rows if row["error"]]


def test_one_table_of_all_parts(answered: Path, make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    parts_rows = rows_in(answered / "out", "path", "label", "guess", "error")
    with open(answered / "out" / "all.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [{name: row[name] or None for name in ("path", "label", "guess", "error")} for row in rows] == parts_rows
    out = Path(shutil.copytree(answered / "out", tmp_path / "out"))
    for form in ("json", "jsonl", "parquet"):
        rows_of = finish.all_rows(out, 3)
        output.write_rows(out / f"all.{form}", finish.all_columns(out), rows_of)
    listed = json.loads((out / "all.json").read_text())
    assert listed == [json.loads(line) for line in (out / "all.jsonl").read_text().splitlines()]
    assert listed == parquet.read_table(out / "all.parquet").to_pylist() and len(listed) == 25


def test_full_disk_at_the_end_keeps_the_parts(
    whole: Path, make_run: MakeRun, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    out = Path(shutil.copytree(whole, tmp_path / "out"))
    monkeypatch.setattr(output, "write_parquet", full)
    with pytest.raises(FinesslError, match="all.parquet: No space left on device"):
        predict_bulk(make_run(), [shards], out, top=2, device="cpu", jobs=1, results=Results(table="parquet"))
    assert content(out) == content(whole)


def test_other_settings_are_refused(whole: Path, make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match=r"other settings \(top\)"):
        predict_bulk(make_run(), [shards], whole, top=1, device="cpu")
    with pytest.raises(FinesslError, match=r"other settings \(inputs\)"):
        predict_bulk(make_run(), [shards / "0000.tar"], whole, top=2, device="cpu")
    with pytest.raises(FinesslError, match=r"other settings \(classifier"):
        predict_bulk(make_run("bitfit"), [shards], whole, top=2, device="cpu")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("")
    with pytest.raises(FinesslError, match="holds no predictions"):
        predict_bulk(make_run(), [shards], tmp_path / "mine", device="cpu")


def test_one_command_writes_to_a_folder(make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    with folder.alone(tmp_path / "out"), pytest.raises(FinesslError, match="another command is writing"):
        predict_bulk(make_run(), [shards], tmp_path / "out", device="cpu", jobs=1)
    assert list(tmp_path.iterdir()) == []


def test_a_cut_shard_fails_alone(make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(shards, data)
    with open(data / "0001.tar", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(FinesslError, match="1 of 3 parts failed: .*0001.tar"):
        predict_bulk(make_run(), [data], tmp_path / "out", device="cpu", jobs=1)
    assert sorted(path.name for path in (tmp_path / "out").glob("part-*")) == [
        "part-00000.parquet",
        "part-00002.parquet",
    ]
    shutil.copy(shards / "0001.tar", data / "0001.tar")
    assert predict_bulk(make_run(), [data], tmp_path / "out", device="cpu", jobs=1).images == 24


def test_unfinished_run_is_refused(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text("")
    with pytest.raises(FinesslError, match="not finished"):
        predict_bulk(tmp_path / "run", [shards], tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_nothing_readable_is_an_error(make_run: MakeRun, tmp_path: Path) -> None:
    make_tar(tmp_path / "bad.tar", {"a.png": b"no", "b.png": b""})
    with pytest.raises(FinesslError, match="nothing was predicted.*not an image"):
        predict_bulk(make_run(), [tmp_path / "bad.tar"], tmp_path / "out", device="cpu", jobs=1)


def test_full_disk_is_one_sentence(
    make_run: MakeRun, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "replacing", full)
    with pytest.raises(FinesslError, match="3 of 3 parts failed: .*No space left on device"):
        predict_bulk(make_run(), [shards], tmp_path / "out", device="cpu", jobs=1)


def test_command_line(make_run: MakeRun, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(make_run())
    app(
        ["predict", run, str(shards), "--out", str(tmp_path / "out"), "--jobs", "1", "--device", "cpu"],
        standalone_mode=False,
    )
    captured = capsys.readouterr()
    assert captured.out.endswith("out: 24 predictions in 3 parts\n") and "99.png" in captured.err
    assert f"{shards}/0001.tar: 1 image could not be read" in captured.err
    assert "1 image in 1 input could not be read" in captured.err
    for words, message in (
        (["--out", "x", "--excel"], "add --table csv"),
        (["--out", "x", "--table", "xlsx"], "choose csv, json, jsonl, parquet"),
        (["--out", "x.csv", "--table", "csv"], "need --out DIR"),
        (["--out", "x", "--sort-into", "y", "--link"], "can only be copied"),
        (["--out", "x.csv", "--jobs", "2"], "need --out DIR"),
        (["--out", "x.csv"], "need --out DIR"),
        (["--out", "x", "--engine", "spark"], "choose local or ray"),
    ):
        with pytest.raises(FinesslError, match=message):
            app(["predict", run, str(shards / "0000.tar"), *words, "--device", "cpu"], standalone_mode=False)


@pytest.mark.slow
def test_two_ray_actors_give_the_files_of_one_process(
    answered: Path, make_run: MakeRun, shards: Path, tmp_path: Path
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'finessl[ray]'")
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
    features = tmp_path / "features.parquet"
    try:
        predict_bulk(
            make_run(), [shards], tmp_path / "out", top=2, coverage=0.4, device="cpu", engine="ray", jobs=2,
            results=Results(table="csv", embeddings=features),
        )  # fmt: skip
    finally:
        ray.shutdown()
    assert content(tmp_path / "out") == content(answered / "out")
    assert features.read_bytes() == (answered / "features.parquet").read_bytes()


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "other"])
def test_damaged_parts_are_made_again(whole: Path, make_run: MakeRun, shards: Path, tmp_path: Path, how: str) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    part = out / "part-00001.parquet"
    data = part.read_bytes()
    place = data.index(b"99.png")  # in a page of the column path
    part.write_bytes(
        {
            "cut": data[:-20],
            "empty": b"",
            "flipped": data[:place] + b"8" + data[place + 1 :],
            "other": (whole / "predictions.json").read_bytes(),
        }[how]
    )
    predict_bulk(make_run(), [shards], out, top=2, device="cpu", jobs=1)
    assert content(out) == content(whole)


def test_no_pipe_is_read_as_a_part(whole: Path, make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / "part-00001.parquet").unlink()
    os.mkfifo(out / "part-00001.parquet")
    with pytest.raises(FinesslError, match="a device or a pipe"):
        predict_bulk(make_run(), [shards], out, top=2, device="cpu", jobs=1)


@pytest.mark.parametrize("place", [".", "/"])
def test_a_place_without_a_name_is_refused(
    make_run: MakeRun, shards: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    (tmp_path / "mine").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FinesslError, match="choose another --out|name a new folder"):
        predict_bulk(run, [shards], Path(place), device="cpu", jobs=1)


def test_text_in_the_image_column_names_no_file(shapes: Path, tmp_path: Path) -> None:
    """A table of a stranger decides nothing about which files are read, also where its first value is empty."""
    import pyarrow

    file = next((shapes / "test" / "across").iterdir())
    parquet.write_table(pyarrow.table({"image": ["", str(file)]}), tmp_path / "images.parquet")
    with pytest.raises(FinesslError, match="should hold the bytes"):
        parts.read_rows(tmp_path / "images.parquet", 0, 2)
