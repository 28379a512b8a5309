"""Run directories: what is damaged, changed, locked or moved is named in a sentence, and never trained on in silence."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import finessl
import finessl.cli
from finessl.errors import FinesslError
from finessl.runs import checkpoint
from finessl.runs.directory import RunDirectory
from finessl.training.loop import train

from .conftest import QUICK, quick_recipe

Copy = Callable[[str], Path]


def result(run: Path) -> tuple[bytes, bytes]:
    return (run / "classifier" / "classifier.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes()


# ---- damage ---------------------------------------------------------------------------------------------------------

DAMAGE = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "not UTF-8": lambda content: b"\xff\xfe" + content,
    "a list": lambda content: b"[1, 2, 3]",
    "a number": lambda content: b"3",
    "nested": lambda content: b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["meta.json", "split.json", "classifier/classifier.json"])
def test_damaged_json_of_a_run_is_named(copy_of: Copy, made_photos: Path, file: str, damage: str) -> None:
    run = copy_of("stopped" if file == "split.json" else "finished")
    path = run / file
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(FinesslError, match=path.name.replace(".", r"\.")):
        if file.startswith("classifier"):
            finessl.load(run, device="cpu")
        else:
            train(quick_recipe(made_photos), run, QUICK)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("std", [0.0, 1.0, 1.0]),
        ("std", [float("nan"), 1.0, 1.0]),
        ("mean", [float("inf"), 1.0, 1.0]),
        ("mean", [0.5]),
        ("image_size", 10**9),
        ("image_size", 0),
        ("classes", []),
        ("classes", [1, 2]),
        ("tuning", {"name": "vpt-deep", "length": 10**12}),
        ("tuning", {}),
        ("head", None),
        ("aux", "elsewhere"),
        ("format", "1"),
    ],
)
def test_classifier_with_impossible_values_is_refused(copy_of: Copy, field: str, value: Any) -> None:
    file = copy_of("finished") / "classifier" / "classifier.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(FinesslError, match=rf"classifier\.json is damaged: {field}"):
        finessl.load(file.parent, device="cpu")


def test_classifier_without_a_field_is_refused(copy_of: Copy) -> None:
    file = copy_of("finished") / "classifier" / "classifier.json"
    whole = json.loads(file.read_text())
    for field in set(whole) - {"precision", "seed", "sha256", "weights_sha256"}:
        file.write_text(json.dumps({name: value for name, value in whole.items() if name != field}))
        with pytest.raises(FinesslError, match=rf"classifier\.json is damaged: {field}"):
            finessl.load(file.parent, device="cpu")


def test_damaged_parameters_of_a_classifier_are_refused(copy_of: Copy) -> None:
    run = copy_of("finished")
    file, description = run / "classifier" / "classifier.safetensors", run / "classifier" / "classifier.json"
    whole = file.read_bytes()
    for content in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-10], b"", b"\xff" * 100):
        file.write_bytes(content)
        with pytest.raises(FinesslError, match=r"classifier\.safetensors is damaged"):
            finessl.load(run, device="cpu")
    file.unlink()
    with pytest.raises(FinesslError, match=r"cannot read .*classifier\.safetensors"):
        finessl.load(run, device="cpu")
    file.write_bytes(whole)
    save_file({name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(file).items()}, file)
    facts = json.loads(description.read_text())
    description.write_text(json.dumps({**facts, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}))
    with pytest.raises(FinesslError, match="not finite"):
        finessl.load(run, device="cpu")


@pytest.mark.parametrize("runs", [[[0, 10**13]], [-1], [[3, 1]], [0, 0], [[0, 1, 2]], ["0"], [10**30], None])
def test_split_of_impossible_images_is_refused(copy_of: Copy, made_photos: Path, runs: Any) -> None:
    run = copy_of("stopped")
    content = json.loads((run / "split.json").read_text())
    (run / "split.json").write_text(json.dumps({**content, "labeled": runs}))
    with pytest.raises(FinesslError, match=r"split\.json"):
        train(quick_recipe(made_photos), run, QUICK)


@pytest.mark.parametrize(
    "manifest",
    ["[]", "3", '"text"', "null", "{}", "[" * 100_000, '{"../../x": {"bytes": 1, "sha256": ""}}', '{"state.pt": 1}'],
)
def test_damaged_manifest_falls_back_to_the_older_checkpoint(
    copy_of: Copy, made_runs: Path, made_photos: Path, manifest: str
) -> None:
    run = copy_of("stopped")
    (run / "checkpoints" / "step-00000004" / "manifest.json").write_text(manifest)
    found = checkpoint.newest(run / "checkpoints")
    assert found is not None and found[1]["step"] == 3


def test_forged_state_falls_back_to_the_older_checkpoint(copy_of: Copy, made_runs: Path, made_photos: Path) -> None:
    """The digests are right and the content is not: a resumed run equals an uninterrupted one all the same."""
    run = copy_of("stopped")
    folder = run / "checkpoints" / "step-00000004"
    torch.save({"step": "four"}, folder / "state.pt")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.pt"]["sha256"] = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    train(quick_recipe(made_photos), run, QUICK)
    assert result(run) == result(made_runs / "finished")


def test_checkpoint_that_does_not_fit_is_refused(copy_of: Copy, made_photos: Path) -> None:
    run = copy_of("stopped")
    for folder in (run / "checkpoints").iterdir():
        state = torch.load(folder / "state.pt", weights_only=True)
        torch.save({**state, "diagnostics": {"counts": torch.zeros(7)}}, folder / "state.pt")
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["state.pt"]["sha256"] = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FinesslError, match="the checkpoint of step 4 .* does not fit"):
        train(quick_recipe(made_photos), run, QUICK)


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "garbage", "one byte"])
def test_damaged_metrics_are_refused_on_resume(copy_of: Copy, made_photos: Path, damage: str) -> None:
    run = copy_of("stopped")
    file = run / "metrics.jsonl"
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        changed = {"empty": b"", "cut": whole[:20], "garbage": b"\xff" * len(whole), "one byte": b"[" + whole[1:]}
        file.write_bytes(changed[damage])
    with pytest.raises(FinesslError, match=r"metrics\.jsonl is cut or changed"):
        train(quick_recipe(made_photos), run, QUICK)


def test_metrics_without_their_last_lines_resume_from_the_older_checkpoint(
    copy_of: Copy, made_runs: Path, made_photos: Path
) -> None:
    run = copy_of("stopped")
    older = torch.load(run / "checkpoints" / "step-00000003" / "state.pt", weights_only=True)
    os.truncate(run / "metrics.jsonl", older["metrics_size"])
    train(quick_recipe(made_photos), run, QUICK)
    assert result(run) == result(made_runs / "finished")


def test_damaged_line_of_metrics_is_named(copy_of: Copy) -> None:
    run = RunDirectory(copy_of("finished"))
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    assert len(run.metrics()) == len(lines)
    run.metrics_file.write_bytes(b"".join(lines) + b'{"kind": "tr')  # cut by a crash
    assert len(run.metrics()) == len(lines)
    for damaged in (b"\xff\xfe\n", b"[1]\n", b'{"kind": "train"}\n', b"[" * 100_000 + b"\n"):
        run.metrics_file.write_bytes(lines[0] + damaged + lines[1])
        with pytest.raises(FinesslError, match=r"metrics\.jsonl is damaged: line 2"):
            run.metrics()


@pytest.mark.parametrize("name", ["finished", "stopped"])
def test_report_of_a_run_without_its_split(copy_of: Copy, name: str) -> None:
    from finessl.analysis.report import write_report

    run = copy_of(name)
    (run / "split.json").write_text("{")
    page = write_report([run]).read_text()
    assert "split.json is damaged" in page and "class 0" in page


# ---- disks ----------------------------------------------------------------------------------------------------------


def test_full_disk_in_a_checkpoint_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def no_space(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    def unexpected_position(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 11968 vs 11904")

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, failure in (("save_file", no_space), ("torch.save", unexpected_position), ("os.fsync", refused)):
        with monkeypatch.context() as patch, pytest.raises(FinesslError, match="cannot write to .*checkpoints"):
            patch.setattr(f"finessl.runs.checkpoint.{name}", failure)
            checkpoint.save(tmp_path / "checkpoints", 1, {"a": torch.zeros(2)}, {"step": 1})
        assert not list((tmp_path / "checkpoints").iterdir())
    with monkeypatch.context() as patch, pytest.raises(FinesslError, match="Free some space .* last checkpoint"):
        patch.setattr("finessl.runs.checkpoint.save_file", no_space)
        checkpoint.save(tmp_path / "checkpoints", 1, {"a": torch.zeros(2)}, {"step": 1})


def test_a_mistake_in_the_code_is_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finessl.runs.checkpoint.torch.save", lambda *_: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(RuntimeError, match="size of tensor"):
        checkpoint.save(tmp_path / "checkpoints", 1, {}, {})


# ---- what has changed between a kill and the resumption ----------------------------------------------------------------


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    assert len(first) == len(second)
    a.write_bytes(second)
    b.write_bytes(first)


def replace(path: Path) -> None:
    size = path.stat().st_size
    Image.fromarray(np.full((32, 32, 3), 7, np.uint8)).save(path)
    assert path.stat().st_size == size


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "replaced": (lambda photos: replace(photos / "train/dark/3.bmp"), "the content of training images"),
    "swapped": (
        lambda photos: swap(photos / "train/dark/0.bmp", photos / "train/light/0.bmp"),
        "the content of training",
    ),
    "added": (lambda photos: shutil.copy(photos / "train/dark/0.bmp", photos / "train/dark/9.bmp"), "the names, order"),
    "test replaced": (lambda photos: replace(photos / "test/dark/1.bmp"), "the test images or their labels"),
    "test removed": (lambda photos: (photos / "test/dark/1.bmp").unlink(), "the test images or their labels"),
    "test added": (
        lambda photos: shutil.copy(photos / "test/dark/1.bmp", photos / "test/light/9.bmp"),
        "the test images or their labels",
    ),
    "test classes swapped": (
        lambda photos: [
            (photos / "test/dark").rename(photos / "x"),
            (photos / "test/light").rename(photos / "test/dark"),
            (photos / "x").rename(photos / "test/light"),
        ],
        "the test images or their labels",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_is_refused_on_resume(copy_of: Copy, photos: Path, change: str) -> None:
    run = copy_of("stopped")
    action, message = CHANGES[change]
    action(photos)
    with pytest.raises(FinesslError, match=message):
        train(quick_recipe(photos), run, QUICK)


def test_image_that_became_unreadable_is_named_on_resume(copy_of: Copy, photos: Path) -> None:
    run = copy_of("stopped")
    (photos / "train/dark/3.bmp").write_bytes(b"BM" + b"\0" * ((photos / "train/dark/3.bmp").stat().st_size - 2))
    content = json.loads((run / "split.json").read_text())
    (run / "split.json").write_text(json.dumps({**content, "fingerprint": ""}))  # as in a copy without one
    with pytest.raises(FinesslError, match=r"can no longer be read: 1 image cannot be used: train/dark/3\.bmp"):
        train(quick_recipe(photos), run, QUICK)


def test_edited_split_is_refused_on_resume(copy_of: Copy, made_photos: Path) -> None:
    run = copy_of("stopped")
    content = json.loads((run / "split.json").read_text())
    (run / "split.json").write_text(json.dumps({**content, "labeled": [[0, 2], 9]}))
    with pytest.raises(FinesslError, match=r"these have changed since its checkpoint: split\.json"):
        train(quick_recipe(made_photos), run, QUICK)


# ---- where things are kept --------------------------------------------------------------------------------------------


def test_moved_data_resumes_and_is_recorded(
    copy_of: Copy, made_runs: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_of("stopped")
    monkeypatch.chdir(photos.parent)
    train(quick_recipe("photos/"), run, QUICK)
    assert result(run) == result(made_runs / "finished")
    assert RunDirectory(run).recipe().data.source == "photos/"
    assert train(quick_recipe("photos"), run, QUICK)["finished"]


def test_resume_takes_the_new_place_of_moved_data(copy_of: Copy, made_runs: Path, photos: Path, tmp_path: Path) -> None:
    run, moved = copy_of("stopped"), tmp_path / "moved"
    photos.rename(moved)
    finessl.cli.app(["resume", str(run), "--data", str(moved), "--device", "cpu", "-q"], standalone_mode=False)
    assert result(run)[0] == result(made_runs / "finished")[0]  # the classifier; metrics are logged more often there
    assert RunDirectory(run).recipe().data.source == str(moved)


def test_finished_run_of_other_data_is_not_taken_for_this_one(copy_of: Copy, photos: Path) -> None:
    run = copy_of("finished")
    assert train(quick_recipe(photos), run, QUICK)["finished"]
    replace(photos / "train/dark/3.bmp")
    with pytest.raises(FinesslError, match="a finished run of other data or weights"):
        train(quick_recipe(photos), run, QUICK)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files with weights for the embedded backbone."""
    folder = tmp_path_factory.mktemp("weights")
    tensors = load_file(Path(finessl.__file__).parent / "assets" / "embedded.safetensors")
    save_file(tensors, folder / "a.safetensors")
    name = next(name for name in tensors if name.endswith("qkv.weight"))
    save_file({**tensors, name: tensors[name] + 0.25}, folder / "b.safetensors")
    return folder / "a.safetensors", folder / "b.safetensors"


def test_weights_are_known_by_content(
    weights: tuple[Path, Path], made_photos: Path, made_runs: Path, tmp_path: Path
) -> None:
    from .conftest import train_until

    file = tmp_path / "w.safetensors"
    shutil.copy(weights[0], file)
    run = tmp_path / "run"
    train_until(4, quick_recipe(made_photos, **{"model.weights": str(file)}), run)
    shutil.copy(weights[1], file)
    with pytest.raises(FinesslError, match="these have changed since its checkpoint: the backbone's weights"):
        train(quick_recipe(made_photos, **{"model.weights": str(file)}), run, QUICK)
    torch.save(load_file(weights[0]), tmp_path / "moved.pt")  # another place, another format
    meta = train(quick_recipe(made_photos, **{"model.weights": str(tmp_path / "moved.pt")}), run, QUICK)
    assert meta["weights_sha256"] == RunDirectory(made_runs / "finished").meta()["weights_sha256"]
    assert result(run) == result(made_runs / "finished")
    finessl.load(run, weights=weights[0], device="cpu")
    with pytest.raises(FinesslError, match="not those that .* was trained with"):
        finessl.load(run, weights=weights[1], device="cpu")


# ---- one process at a time ----------------------------------------------------------------------------------------------


HOLD = """
import sys
from finessl.runs.directory import RunDirectory
with RunDirectory(sys.argv[1]).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("new", [False, True])
def test_second_process_is_told_who_trains_the_run(
    copy_of: Copy, made_photos: Path, made_runs: Path, tmp_path: Path, new: bool
) -> None:
    run = tmp_path / "run" if new else copy_of("stopped")
    run.mkdir(exist_ok=True)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        with pytest.raises(FinesslError, match=rf"trained by another process \(process {other.pid} on .*Wait for it"):
            train(quick_recipe(made_photos), run, QUICK)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    finally:
        other.kill()  # a crash: its lock goes with it, the file remains
        other.communicate()
    assert (run / ".lock").exists()
    train(quick_recipe(made_photos), run, QUICK)
    assert result(run) == result(made_runs / "finished")


# ---- refused commands leave nothing behind ----------------------------------------------------------------------------


def test_refused_run_leaves_nothing_behind(made_photos: Path, tmp_path: Path) -> None:
    for changes in ({"split.labels_per_class": 100}, {"method.threshold": "high"}, {"model.weights": "/nowhere.pt"}):
        with pytest.raises(FinesslError):
            train(quick_recipe(made_photos, **changes), tmp_path / "runs" / "one" / "run", QUICK)
        assert not list(tmp_path.iterdir()), changes
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(FinesslError):
        train(quick_recipe(made_photos, **{"split.labels_per_class": 100}), tmp_path / "mine", QUICK)
    assert {path.name for path in (tmp_path / "mine").iterdir()} <= {"notes.txt", ".lock"}


def test_runs_inside_the_data_are_no_class(photos: Path, made_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.move(photos / "train" / "dark", photos / "dark")
    shutil.move(photos / "train" / "light", photos / "light")
    (photos / "train").rmdir()
    monkeypatch.chdir(photos)
    for out in ("runs/one", "inside"):
        assert train(quick_recipe(".", **{"train.steps": 1}), Path(out), QUICK)["classes"] == 2
        Image.new("RGB", (8, 8)).save(Path(out) / "figure.png")
    assert finessl.data.sources.open_dataset(".").classes == ["dark", "light"]
    assert train(quick_recipe(".", **{"train.steps": 1}), Path("runs/one"), QUICK)["finished"]
    assert train(quick_recipe(photos, **{"train.steps": 1}), photos / "runs" / "two", QUICK)["classes"] == 2


def test_places_where_no_run_can_be_made(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, message in (
        (tmp_path / "file", "is a file; name a folder"),
        (tmp_path / "file" / "run", "A file is in its place"),
        (tmp_path / ("n" * 300), "File name too long"),
        (Path("/proc/run"), "cannot write to /proc/run"),
        (photos, "is the data itself"),
        (photos / "train", "is a folder of the data"),
    ):
        with pytest.raises(FinesslError, match=message):
            train(quick_recipe(photos), out, QUICK)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "photos"]
    assert sorted(path.name for path in photos.iterdir()) == ["test", "train"]
