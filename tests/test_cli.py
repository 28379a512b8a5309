"""The command line as a user calls it: every verb, and one clear sentence for every mistake."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import finessl
from finessl.cli import app
from finessl.cli.train import show_summary
from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory

from .conftest import TINY


def call(*words: str | Path) -> None:
    """In this process; a FinesslError comes through as it is."""
    app([str(word) for word in words], standalone_mode=False)


def own_data(root: Path, shapes: Path, *, labeled: int = 3) -> Path:
    """labeled/<class>/…, unlabeled/…, test/<class>/… made of the stripes."""
    for name in ("across", "diagonal", "down"):
        files = sorted((shapes / "train" / name).iterdir())
        (root / "labeled" / name).mkdir(parents=True)
        (root / "unlabeled").mkdir(exist_ok=True)
        for file in files[:labeled]:
            shutil.copy(file, root / "labeled" / name)
        for file in files[labeled:12]:
            shutil.copy(file, root / "unlabeled" / f"{name}-{file.name}")
        shutil.copytree(shapes / "test" / name, root / "test" / name)
    return root


def test_run_directory(tiny_run: Path) -> None:
    names = {path.name for path in tiny_run.iterdir()}
    assert {"recipe.toml", "split.json", "metrics.jsonl", "checkpoints", "classifier", "meta.json"} <= names
    meta = json.loads((tiny_run / "meta.json").read_text())
    assert meta["labeled"] == 12 and meta["unlabeled"] == 72 and meta["test"] == 24
    assert meta["versions"]["torch"] and meta["data_fingerprint"] and meta["seconds"] > 0
    size = sum(path.stat().st_size for path in (tiny_run / "classifier").iterdir())
    assert size < 200_000, "the classifier holds the trained parameters, not the backbone"


def test_own_folder(shapes: Path, tmp_path: Path) -> None:
    call("train", own_data(tmp_path / "data", shapes), "--out", tmp_path / "run", *TINY)
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    assert (meta["labeled"], meta["unlabeled"], meta["test"]) == (9, 36, 24)


def test_table(shapes: Path, tmp_path: Path) -> None:
    data = own_data(tmp_path / "data", shapes)
    with open(data / "table.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for path in sorted((data / "labeled").rglob("*.png")):
            writer.writerow([path.relative_to(data), path.parent.name])
        for path in sorted((data / "unlabeled").iterdir()):
            writer.writerow([path.relative_to(data), ""])
    call("train", data / "table.csv", "--out", tmp_path / "run", *TINY)
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    assert (meta["labeled"], meta["unlabeled"], meta["test"], meta["accuracy"]) == (9, 36, 0, None)


def odd_images(folder: Path) -> None:
    """Every flavour of image that is fine, and some that are not."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 30, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    picture.convert("L").save(folder / "grey.png")
    picture.convert("P").save(folder / "palette.png")
    picture.convert("CMYK").save(folder / "cmyk.jpg")
    picture.convert("RGBA").save(folder / "alpha.png")
    Image.fromarray(rng.integers(0, 65536, (40, 30), dtype=np.uint16)).save(folder / "sixteen.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(folder / "rotated.jpg", exif=exif)
    picture.save(folder / "whole.jpg")
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:300])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("no image")


def test_broken_images_are_skipped_and_listed(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = own_data(tmp_path / "data", shapes)
    odd_images(data / "unlabeled")
    (data / "unlabeled" / "loop").symlink_to(data / "unlabeled")
    call("train", data, "--out", tmp_path / "run", *(word for word in TINY if word not in ("-q", "--quiet")))
    assert str(tmp_path / "run" / "skipped.csv") in capsys.readouterr().err.replace("\n", "")
    with open(tmp_path / "run" / "skipped.csv", newline="") as file:
        skipped = {Path(row["image"]).name: row["reason"] for row in csv.DictReader(file)}
    assert set(skipped) == {"cut.jpg", "empty.png", "text.png"} and "0 bytes" in skipped["empty.png"]
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["unlabeled"] == 36 + 7
    with pytest.raises(FinesslError, match="3 images cannot be used"):
        call("train", data, "--out", tmp_path / "strict", "--strict", *TINY)


def test_mistakes_in_the_data(shapes: Path, tmp_path: Path) -> None:
    def fails(message: str, data: object, *words: str) -> None:
        with pytest.raises(FinesslError, match=message):
            call("train", str(data), "--out", tmp_path / "run", *words, *TINY)

    (tmp_path / "empty").mkdir()
    fails("no images|no image|empty", tmp_path / "empty")
    fails("cifar100", "cifar-100")
    fails("no such|neither|not a", tmp_path / "nowhere")
    fails("labels_per_class|labels-per-class", shapes)  # all labels known: how many to keep?
    fails("across has 24 of 99", shapes, "-n", "99")
    one = tmp_path / "one" / "train" / "only"
    one.mkdir(parents=True)
    shutil.copy(shapes / "train" / "down" / "00.png", one)
    fails("two classes", tmp_path / "one", "-n", "1")
    data = own_data(tmp_path / "data", shapes)
    (data / "labeled" / "fourth").mkdir()
    fails("fourth", data)
    (data / "labeled" / "fourth").rmdir()
    (data / "test" / "other").mkdir()
    shutil.copy(shapes / "train" / "down" / "00.png", data / "test" / "other")
    fails("unknown to the training data: other", data)
    table = tmp_path / "table.csv"
    for text, message in (
        ("file,label\na.png,x\n", "no column 'path'"),
        ("path,label\nno.png,x\nno2.png,y\n", "no.png"),
        ("path,label\n", "no rows"),
    ):
        table.write_text(text)
        fails(message, table)


def test_mistakes_in_the_options(shapes: Path, tmp_path: Path) -> None:
    def fails(message: str, *words: str) -> None:
        with pytest.raises(FinesslError, match=message):
            call("train", shapes, "--out", tmp_path / "run", "-n", "2", *TINY, *words)

    fails("unknown method 'fixmach'; did you mean fixmatch", "--method", "fixmach")
    fails("unknown tuning 'lorra'", "--tuning", "lorra")
    fails("no option 'alfa'; did you mean alpha", "--set", "method.alfa=3")
    fails("unknown backbone", "--backbone", "vit_tinny_patch16_224")
    fails("no weights file at nowhere", "--weights", "nowhere.safetensors")
    fails("device 'cuda:99' cannot be used", "--device", "cuda:99")
    fails("train.steps = 0 should be an integer", "--steps", "0")
    for device in ("meta", "hpu", "privateuseone", "nonsense"):
        fails(f"device '{device}' cannot", "--device", device)
    for seconds in ("nan", "inf", "-1"):
        fails("checkpoint-seconds", "--checkpoint-seconds", seconds)
    fails("eval-every", "--eval-every", "-1")
    for value in ("2020-01-01", "{a=1}", "-1", "inf", "\x7f"):
        fails("alpha", "--set", f"method.alpha={value}")
    fails(r"images of one step take [\d,]+ bytes, and cpu has", "--batch-size", "80000", "--set", "data.image_size=512")
    fails("no option 'opps'; did you mean ops", "--set", "data.strong.opps=3")
    fails("the plug-in .*nowhere.py cannot be read", "--plugin", "nowhere.py")
    assert not (tmp_path / "run").exists()  # a refused command leaves nothing behind


def test_mistakes_are_found_before_an_image_is_read(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finessl.runs import inputs

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("the data was opened")

    monkeypatch.setattr(inputs, "open_dataset", never)
    monkeypatch.setattr(inputs, "create_backbone", never)
    with pytest.raises(FinesslError, match="did you mean rank(.|\n)*did you mean threshold"):
        call("train", shapes, "--out", tmp_path / "run", "-n", "2", *TINY, "--method", "fixmatch",
             "--set", "method.treshold=0.9", "--tuning", "lora", "--set", "tuning.rnk=3")  # fmt: skip
    with pytest.raises(FinesslError, match="did you mean threshold"):
        finessl.train(shapes, out=tmp_path / "run", method="fixmatch", settings={"method.treshold": 0.9})
    with pytest.raises(FinesslError, match="did you mean threshold"):
        call("compare", shapes, "--out", tmp_path / "run", "--methods", "fixmatch", "--set", "method.treshold=0.9")
    with pytest.raises(FinesslError, match="there is no such folder or file(.|\n)*did you mean fixmatch"):
        call("train", tmp_path / "nowhere", "--method", "fixmach")
    assert list(tmp_path.iterdir()) == []


def test_the_summary_of_a_supervised_run_names_no_unlabeled_images(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, line in (
        ("supervised", "used │ 12 labeled images"),
        ("finessl", "used with / without label │ 12 / 72 images"),
    ):
        run = RunDirectory(tmp_path / method)
        run.open(Recipe.read(None, {"method.name": method}))
        show_summary(run.path, RunDirectory(tiny_run).meta())
        assert line in " ".join(capsys.readouterr().out.split())


def test_unwritable_place(shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FinesslError, match="cannot write to"):
        call("train", shapes, "--out", tmp_path / "file" / "run", "-n", "2", *TINY)


def test_full_disk(shapes: Path, tmp_path: Path) -> None:
    """The checkpoint before stays whole, and the same command goes on from it."""
    import errno

    from finessl.runs import checkpoint

    original, saves = checkpoint.save_file, []

    def save_file(tensors: dict, path: Path) -> None:
        saves.append(path)
        if len(saves) == 3:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path)

    words = ["train", shapes, "--out", tmp_path / "run", "-n", "2", "--checkpoint-seconds", "0", *TINY, "--steps", "6"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_file", save_file)
        with pytest.raises(FinesslError, match="No space left on device. Free some space"):
            call(*words)
    found = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found is not None and found[1]["step"] == 2
    call(*words)
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["finished"]


def test_split_is_written_and_used(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("split", shapes, "-n", "2", "--seed", "5", "--out", tmp_path / "split.json")
    text = capsys.readouterr().out
    assert "across" in text and "also used without their labels" in text
    assert text.split("all")[1].split()[1::2][:3] == ["6", "66", "24"]  # labeled, without a label, test
    assert (tmp_path / "split.png").stat().st_size > 1000
    call("train", shapes, "--out", tmp_path / "run", "--split", tmp_path / "split.json", *TINY)
    written, used = (json.loads(p.read_text()) for p in (tmp_path / "split.json", tmp_path / "run" / "split.json"))
    assert written == used and written["seed"] == 5
    with pytest.raises(FinesslError, match="does not belong"):
        call("train", "sample", "--out", tmp_path / "other", "--split", tmp_path / "split.json", *TINY)


def test_inspect(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = own_data(tmp_path / "data", shapes)
    odd_images(data / "unlabeled")
    shutil.copy(data / "test" / "down" / "00.png", data / "unlabeled" / "leak.png")
    call("inspect", data)
    text = capsys.readouterr().out
    for finding in (
        "3 classes, 9 labeled",
        "3 broken",
        "1 test image is also in the training set",
        "leak.png",
    ):
        assert finding in text


def test_list_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    call("list", "--options")
    text = capsys.readouterr().out
    for name in (
        "finessl",
        "debiaspl",
        "adaptformer",
        "clip-vit-b16",
        "semi-aves",
        "long-tailed",
        "released",
        "alpha = 8.0",
    ):
        assert name in text
    with pytest.raises(FinesslError, match="did you mean methods"):
        call("list", "method")
    call("doctor")
    text = capsys.readouterr().out
    assert "torch" in text and "embedded backbone" in text and "absent" not in text


def test_heavy_imports_wait() -> None:
    """`import finessl` and --help import neither torch nor timm (which take seconds), nor the recipe's schema."""
    for code in ("import finessl", "from finessl.cli import app; app(['--help'], standalone_mode=False)"):
        names = "'torch', 'timm', 'matplotlib', 'PIL', 'pydantic'"
        probe = f"import sys; {code}; print(sorted(n for n in ({names}) if n in sys.modules))"
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
        assert done.stdout.strip().splitlines()[-1] == "[]", code


def test_mistake_without_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "finessl", "train", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.startswith("finessl: ") and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_refused_run_ends_in_order(shapes: Path, tmp_path: Path) -> None:
    """A thread reads the backbone at that time. Python's own end would abort the process in C++."""
    (tmp_path / "list.csv").write_text(f"path,label\n{next((shapes / 'test').rglob('*.png')).relative_to(shapes)},\n")
    words = ["train", str(shapes), "--labels", str(tmp_path / "list.csv"), "--steps", "3", "--backbone", "embedded"]
    command = [sys.executable, "-m", "finessl", *words, "--out", str(tmp_path / "run")]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1 and "no row has a label" in done.stderr and len(done.stderr.splitlines()) == 1, done


def test_files_of_weights_in_a_planned_run(shapes: Path, tmp_path: Path) -> None:
    for weights, message in (
        ("clip.safetensors", r"clip.safetensors: the plan chooses the backbone.*NAME=FILE"),
        ("dinov2-vit-s14=nowhere.safetensors", r"there is no file nowhere.safetensors"),
    ):
        with pytest.raises(FinesslError, match=message):
            call("train", shapes, "-n", "4", "--weights", weights, "--out", tmp_path / "run")


def test_a_run_is_named_after_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finessl.cli.train import default_out

    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path / "photos")
    assert default_out(".", "finessl", 0) == Path("runs/photos-finessl-s0")
    assert default_out("../photos/", "finessl", 0) == Path("runs/photos-finessl-s0")
