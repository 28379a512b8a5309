"""The benchmarks run, and what they print adds up."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from finessl.bench import frozen
from finessl.bench.data import bench_data
from finessl.bench.photos import photo_sizes
from finessl.bench.profile import kind_of
from finessl.bench.scale import SizeCost, bench_scale, middle, ratios
from finessl.cli import app
from finessl.cli.bench.scale import show_features
from finessl.errors import FinesslError

SMALL = ["--backbone", "embedded", "--batch-size", "2", "--repeats", "1", "--device", "cpu", "--json"]


def output(capsys: pytest.CaptureFixture[str], *words: str) -> object:
    app([*words], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_step(capsys: pytest.CaptureFixture[str]) -> None:
    result = output(capsys, "bench", "step", *SMALL, "--precision", "fp32", "--profile")
    assert isinstance(result, dict)
    assert list(result["parts_ms"]) == [
        "data", "weak forward", "forward", "method", "diagnostics", "backward", "update",
    ]  # fmt: skip
    assert all(value > 0 for value in result["parts_ms"].values())
    assert result["images"] == 2 + 2 + 2 * 2 and result["share_of_floor"] > 0
    step, views = result["kinds_ms"]["step"], result["kinds_ms"]["views"]
    assert {"matrix products", "attention"} <= set(step) and "attention" not in views
    assert list(step.values()) == sorted(step.values(), reverse=True)
    # 9 blocks of width 192 on 65 tokens, MLP 384; prompts of 50; the last block for the class token alone
    blocks = 8 * (65 * 192 * 192 * 4 + 2 * 65 * 192 * 384 + 2 * 65 * (65 + 50) * 192)
    last = 2 * 65 * 192 * 192 + 2 * 192 * 192 + 2 * 192 * 384 + 2 * (65 + 50) * 192
    flops = 2 * (64 * 48 * 192 + blocks + last) * (2 + 2 * 6)
    assert result["floor_ms"] == pytest.approx(1000 * flops / (result["matmul_tflops"] * 1e12), rel=0.1)


def test_a_step_that_drops_patches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "step", *SMALL, "--tuning", "linear", "--set", "train.patch_dropout=0.75"]
    result = output(capsys, *words)
    assert isinstance(result, dict)
    macs = lambda patches: (  # noqa: E731
        8 * ((patches + 1) * 192 * 192 * 4 + 2 * (patches + 1) * 192 * 384 + 2 * (patches + 1) ** 2 * 192)
        + 2 * (patches + 1) * 192 * 192 + 2 * 192 * 192 + 2 * 192 * 384 + 2 * (patches + 1) * 192 + 64 * 48 * 192
    )  # fmt: skip
    flops = 2 * (2 * macs(64) + 6 * macs(16))
    assert result["floor_ms"] == pytest.approx(1000 * flops / (result["matmul_tflops"] * 1e12), rel=0.1)
    assert result["settings"] == {"train.patch_dropout": 0.75}


@pytest.mark.parametrize("setting", ["train.cache_features=2", "train.prior=1"])
def test_a_step_refuses_what_it_does_not_time(setting: str) -> None:
    with pytest.raises(FinesslError, match=f"leave out {setting.partition('=')[0]}"):
        app(["bench", "step", *SMALL, "--tuning", "linear", "--set", setting], standalone_mode=False)


def test_kernels_have_a_kind() -> None:
    assert kind_of("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN") == "matrix products"
    assert kind_of("aten::addmm") == "matrix products" and kind_of("aten::mm") == "matrix products"
    assert kind_of("cudnn_generated_fort_native_sdpa_sm90_flash_bprop") == "attention"
    assert kind_of("triton_poi_fused_mul_sigmoid_view_4") == "activation"
    assert kind_of("triton_per_fused__to_copy_add_native_layer_norm_3") == "norms and residuals"
    assert kind_of("Memset (Unknown)") == "copies and zeros" and kind_of("triton_poi_fused_add_view_5") == "other"


def test_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    rows = output(capsys, "bench", "tuning", *SMALL, "--tunings", "vpt-deep,linear")
    assert isinstance(rows, list) and [row["name"] for row in rows] == ["vpt-deep", "linear"]
    assert rows[0]["trained"] - rows[1]["trained"] == 9 * 50 * 192


def test_step_on_images_of_ones_own(capsys: pytest.CaptureFixture[str], shapes: Path, tmp_path: Path) -> None:
    """Images of two sizes are fetched one by one, not as an array."""
    own = shutil.copytree(shapes, tmp_path / "own")
    for path in (own / "train" / "down").iterdir():
        Image.open(path).resize((40, 48)).save(path)
    result = output(capsys, "bench", "step", "--data", str(own), *SMALL)
    assert isinstance(result, dict) and result["images"] == 8 and result["step_ms"] > 0
    assert result["trained_parameters"] == 9 * 50 * 192 + 2 * (3 * 192 + 1)  # prompts, heads of three classes


def test_tuning_that_does_not_fit_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    app(["bench", "tuning", *SMALL[:-1], "--tunings", "bn,linear"], standalone_mode=False)
    said = capsys.readouterr()
    assert "bn: left out" in said.err and "linear" in said.out


@pytest.mark.long
def test_accuracy(capsys: pytest.CaptureFixture[str], shapes: Path, tmp_path: Path) -> None:
    keep = tmp_path / "runs"
    words = ["bench", "accuracy", str(shapes), "--seeds", "2", "--target", "10", "--keep", str(keep)]
    train = ["--", "-n", "2", "--backbone", "embedded", "--steps", "6", "--batch-size", "2", "--device", "cpu"]
    app([*words, "--reference", "1000", *train], standalone_mode=False)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said[1:3]] == [["0", "cold"], ["1", "warm"]]
    for seed, line in enumerate(said[1:3]):
        meta = json.loads((keep / f"seed={seed}" / "meta.json").read_text())
        assert list(meta["phases"]) == ["set-up", "first steps", "training", "results"]
        assert f"{100 * meta['accuracy']:.2f}%" in line and f"set-up {meta['phases']['set-up']:.1f}" in line
        assert float(line.split()[3]) > sum(meta["phases"].values())  # imports are in no phase
    assert "the target of 10 % is" in said[-2] and said[-1].startswith("1,000 s are ")
    with pytest.raises(FinesslError, match="exists; name a new folder"):
        app([*words, *train], standalone_mode=False)


def test_accuracy_reports_a_failed_training(shapes: Path) -> None:
    with pytest.raises(FinesslError, match="ended with status 1: .*unknown tuning 'none-such'"):
        app(["bench", "accuracy", str(shapes), "--", "-n", "2", "--steps", "1", "--tuning", "none-such"],
            standalone_mode=False)  # fmt: skip


def test_augment(capsys: pytest.CaptureFixture[str]) -> None:
    rows = output(capsys, "bench", "augment", "--size", "32", "--batch", "4", "--device", "cpu", "--json")
    assert isinstance(rows, list) and [row["view"] for row in rows] == ["weak", "strong"]
    assert all(row["ours"] > 0 and row["pillow"] > 0 for row in rows)


def test_data(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--images", "12", "--size", "32", "--batch-size", "4", "--repeats", "1", "--device", "cpu")
    rows = output(capsys, "bench", "data", *few, "--json")
    assert isinstance(rows, list)
    by_part = {row["part"]: row for row in rows}
    assert list(by_part) == [
        "decode", "fetch from memory", "fetch from the map", "views of a step", "embedded backbone",
    ]  # fmt: skip
    assert all(row["rate"] > 0 for row in rows)
    assert by_part["fetch from the map"]["reference_rate"] == by_part["fetch from memory"]["rate"]
    assert by_part["embedded backbone"]["reference_rate"] == by_part["decode"]["rate"]
    for row in rows:
        if "ratio" in row:
            ratio = row["rate"] / row["reference_rate"]
            rounding = 6e-4 + ratio * (0.06 / row["rate"] + 0.06 / row["reference_rate"])  # to 0.001, and rates to 0.1
            assert abs(row["ratio"] - ratio) < rounding


def test_data_of_ones_own_leaves_out_what_is_broken(shapes: Path, tmp_path: Path) -> None:
    for name in ("across", "down"):
        folder = tmp_path / "own" / name
        folder.mkdir(parents=True)
        for number, path in enumerate(sorted((shapes / "train" / name).iterdir())[:3]):
            (folder / path.name).write_bytes(path.read_bytes() if number else b"no image")
    rows = bench_data(str(tmp_path / "own"), torch.device("cpu"), images=99, size=16, batch=2, repeats=1)
    assert all(row.rate > 0 for row in rows)


def test_steps_on_images_of_many_sizes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finessl.bench.photos.SIZES", 16)
    words = ["bench", "data", "--step", "--images", "30", "--size", "32", "--steps", "1", *SMALL]
    result = output(capsys, *words)
    assert isinstance(result, dict) and list(result["step_ms"]) == list(result["ratio"]) == ["one size", "many sizes"]
    assert result["images"] == 30 and 10 < result["sizes"] <= 16 and result["one_size"] == [37, 49]
    one, many = result["step_ms"].values()
    assert result["ratio"]["one size"] == 1 and result["ratio"]["many sizes"] == pytest.approx(many / one, rel=1e-3)
    app(words[:-1], standalone_mode=False)  # without --json
    table = capsys.readouterr().out
    assert "30 JPEGs of" in table and "\nmany sizes  " in table
    with pytest.raises(FinesslError, match="bench step --data photos"):
        app(["bench", "data", "photos", "--step"], standalone_mode=False)


def test_photos_are_upright_and_across() -> None:
    sides = photo_sizes(200)
    across = [width > height for width, height in sides]
    assert 50 < sum(across) < 150 and len(set(sides)) > 190
    assert all(280 <= min(side) <= 520 and max(side) <= 16 / 9 * min(side) for side in sides)


def test_jobs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a stand-in for finessl compare, which takes a known time."""
    commands: list[list[str]] = []
    now = 0.0

    def compare(command: list[str], env: dict[str, str], **more: object) -> object:
        nonlocal now
        commands.append(command[3:])
        seeds = int(command[command.index("--seeds") + 1])
        now += {"--no-mps": 4.0, "--mps": 2.0}.get(command[-3], 6.0)
        for seed in range(seeds):
            run = Path(command[-1]) / f"seed={seed}"
            run.mkdir(parents=True)
            (run / "meta.json").write_text(
                json.dumps({"finished": True, "phases": {"set-up": 1.0, "training": 1.0 + seed}})
            )
        return SimpleNamespace(returncode=0, stderr="NVIDIA MPS does not work here" if command[-3] == "--mps" else "")

    monkeypatch.setattr("finessl.bench.jobs.subprocess.run", compare)
    monkeypatch.setattr("finessl.bench.jobs.time.perf_counter", lambda: now)
    monkeypatch.setattr("finessl.bench.jobs.shutil.which", lambda name: name)
    words = ["bench", "jobs", "photos", "--keep", str(tmp_path / "kept"), "--json", "--", "--tunings", "lora"]
    result = output(capsys, *words)
    assert isinstance(result, dict) and result["ratio"] == {
        "one after another": 1.0, "3 at a time": 1.5, "3 at a time, by MPS": 3.0,
    }  # fmt: skip
    assert all(command[:4] == ["compare", "photos", "--tunings", "lora"] for command in commands)
    assert [way["phases"]["training"] for way in result["ways"]] == [1.0, 2.0, 2.0, 2.0]
    with pytest.raises(FinesslError, match="exists; name a new folder"):
        app(words, standalone_mode=False)
    words.remove("--json")
    words[4] += "2"
    app(words, standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[:6] == ["3", "at", "a", "time", "4.0", "1.50"]
    assert lines[-1] == "  NVIDIA MPS does not work here"


def test_jobs_report_a_failed_grid(shapes: Path) -> None:
    with pytest.raises(FinesslError, match="finessl compare ended with status 1: .*nothing to compare"):
        app(["bench", "jobs", str(shapes), "--", "-n", "2"], standalone_mode=False)


def test_data_needs_files() -> None:
    with pytest.raises(FinesslError, match="sample is an array"):
        bench_data("sample", torch.device("cpu"))


def test_scale(tmp_path: Path) -> None:
    labels: list[str] = []
    rows = bench_scale(
        [50, 101, 200], sample=20, repeats=1, seconds=0.0, folder=tmp_path,
        progress=lambda label, done, total: labels.append(label),
    )  # fmt: skip
    assert [row.images for row in rows] == [50, 101, 200]
    for row in rows:
        assert row.image == pytest.approx(1e6 * row.index / row.images)
        assert min(row.reopen, row.image_cpu, row.decode, row.decode_cpu, row.fetch) > 0
        assert row.memory >= 0  # a small set may fit in pages that the imports have freed
    assert set(labels) == {"writing the sets", "measuring", "removing the sets"}
    assert list(tmp_path.iterdir()) == []


def test_scale_of_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DIM", 8), ("CLASSES", 3), ("GROUPS", 2)):
        monkeypatch.setattr(frozen, name, value)
    monkeypatch.setattr(frozen, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count))
    rows = frozen.bench_features([60, 120], folder=tmp_path)
    assert [(row.what, row.images) for row in rows] == [("quick", 60), ("quick", 120), ("select", 60), ("select", 120)]
    for row in rows:
        assert row.image == pytest.approx(1e3 * row.cpu / row.images) and row.memory > 0
    assert all(row.accuracy > 0.4 for row in rows if row.accuracy is not None)
    assert list(tmp_path.iterdir()) == []
    show_features(rows)


def test_scale_takes_the_median_of_the_rounds() -> None:
    rounds = [SizeCost(10, *[float(value)] * 8) for value in (5, 1, 2)]
    small, large = middle(rounds), SizeCost(20, *[3.0] * 8)
    assert small == SizeCost(10, *[2.0] * 8)
    assert ratios([small, large]) == dict.fromkeys(("image", "image_cpu", "decode", "decode_cpu"), 1.5)


def test_scale_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(FinesslError, match="at least 20 images"):
        bench_scale([10, 100])
    with pytest.raises(FinesslError, match="separated by commas"):
        app(["bench", "scale", "--sizes", "10 100"], standalone_mode=False)
    with pytest.raises(FinesslError, match="known: images, features"):
        app(["bench", "scale", "--parts", "pixels"], standalone_mode=False)
    with pytest.raises(FinesslError, match="at least 800 images"):
        frozen.bench_features([100])


def test_predict(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--backbone", "embedded", "--batch-size", "4", "--images", "12", "--repeats", "1", "--device", "cpu")
    rows = output(capsys, "bench", "predict", *few, "--json")
    assert isinstance(rows, list)
    assert [row["part"] for row in rows] == ["encoder", "decoding alone", "folder of JPEGs"]
    assert all(row["rate"] > 0 for row in rows)
    for row in rows:
        assert row["ratio"] == pytest.approx(row["rate"] / row["reference_rate"], rel=0.05, abs=0.001)


def test_quick_measures_solvers_and_selection(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path))
    words = ["bench", "quick", str(shapes), "--backbone", "embedded", "--labels", "1,3", "--seeds", "2"]
    app(words, standalone_mode=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| graph",
        "| means",
        "| ridge",
        "| propagation",
        "| em",
        "| ensemble",
        "| chosen",
        "| select: herding",
        "| select: random",
    ]
    assert all("±" in line for line in lines[3:])
