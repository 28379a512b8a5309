"""Grids: cells, axes, engines that skip, retry and report, and tables of the seeds' figures."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finessl.cli import app
from finessl.errors import FinesslError
from finessl.recipe import Recipe, recipe_folder
from finessl.runs.directory import RunDirectory
from finessl.sweeps import compare
from finessl.sweeps.engines import cell_command, run_cells
from finessl.sweeps.engines.local import environment, run_local
from finessl.sweeps.table import Tabulated, render

TINY = [
    "--set", "model.pretrained=false", "--set", "model.backbone=vit_tiny_patch16_224", "--set", "data.image_size=32",
    "--set", "tuning.length=2", "--set", "train.batch_size=4", "--steps", "3", "-n", "4", "--device", "cpu",
]  # fmt: skip

SAMPLE = {"data.source": "sample"}


def finish(cell: compare.Cell, **figures: float) -> None:
    cell.run.open(cell.recipe)
    cell.run.write_meta({"finished": True, "accuracy": 0.5, "seconds": 1.0, "steps": 3, **figures})


# ---- cells ----------------------------------------------------------------------------------------------------------


def test_cells_are_the_product_of_the_axes(tmp_path: Path) -> None:
    base = Recipe.read("released")
    cells = compare.make_cells(base, {"method.name": ["finessl", "fixmatch"], "seed": [0, 1, 2]}, tmp_path)
    assert [cell.name for cell in cells] == [
        "method=finessl,seed=0", "method=finessl,seed=1", "method=finessl,seed=2",
        "method=fixmatch,seed=0", "method=fixmatch,seed=1", "method=fixmatch,seed=2",
    ]  # fmt: skip
    assert cells[0].recipe.method.options["alpha"] == 8.0
    assert cells[3].recipe.method.options == {}  # FineSSL's options are not FixMatch's
    assert [cell.recipe.seed for cell in cells] == [0, 1, 2, 0, 1, 2]
    assert cells[4].group == ("fixmatch",)


def test_the_mistakes_of_all_cells_are_reported_once(tmp_path: Path) -> None:
    axes = {"method.name": ["fixmach", "softmach"], "tuning.name": ["lora", "lorra"]}
    with pytest.raises(FinesslError) as caught:
        compare.make_cells(Recipe(), axes, tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and all(any(f"unknown {what}" in line for line in lines) for what in (
        "method 'fixmach'; did you mean fixmatch", "method 'softmach'", "tuning 'lorra'"
    ))  # fmt: skip


def test_an_axis_may_be_an_option_of_the_method_that_another_axis_names(tmp_path: Path) -> None:
    axes = {"method.threshold": [0.7, 0.95], "method.name": ["fixmatch"], "train.lr": [0.1], "seed": [0]}
    cells = compare.make_cells(Recipe.read("released"), axes, tmp_path)
    assert [cell.recipe.method.options for cell in cells] == [{"threshold": 0.7}, {"threshold": 0.95}]
    assert cells[0].recipe.train.lr == 0.1
    assert cells[0].name == "threshold=0.7,method=fixmatch,lr=0.1,seed=0"


def test_strategies_that_do_not_fit_the_backbone_are_left_out_aloud(tmp_path: Path) -> None:
    base = Recipe.read(None, {"model.backbone": "vit_tiny_patch16_224", "data.image_size": 32})
    axes = {"model.backbone": ["vit_tiny_patch16_224", "wide-resnet-28-2"], "tuning.name": ["lora", "bn"], "seed": [0]}
    said: list[str] = []
    cells = compare.without_misfits(compare.make_cells(base, axes, tmp_path), said.append)
    assert [cell.group for cell in cells] == [("vit_tiny_patch16_224", "lora"), ("wide-resnet-28-2", "bn")]
    assert len(said) == 2
    assert said[0].startswith("left out: bn with vit_tiny") and said[1].startswith("left out: lora with wide-resnet")


# ---- figures --------------------------------------------------------------------------------------------------------


def test_rows_are_means_over_finished_seeds(tmp_path: Path) -> None:
    cells = compare.make_cells(Recipe(), {"method.name": ["finessl", "supervised"], "seed": [0, 1, 2]}, tmp_path)
    finish(cells[0], accuracy=0.7, confidence=0.9)
    finish(cells[1], accuracy=0.8, confidence=0.7)
    finish(cells[3], accuracy=0.6)
    rows = compare.summarise(cells)
    assert [(row.group, row.finished, row.wanted) for row in rows] == [(("finessl",), 2, 3), (("supervised",), 1, 3)]
    assert rows[0].show("accuracy") == "75.00% ± 7.07%"  # the sample's deviation: 0.1/√2
    assert rows[1].show("accuracy") == "60.00%" and rows[1].show("confidence") == "–"

    table = compare.tabulate(rows, ["method"], "caption")
    with open(compare.save_summary(table, tmp_path), newline="") as file:
        first, second = csv.DictReader(file)
    assert first["method"] == "finessl" and float(first["accuracy"]) == pytest.approx(0.75)
    assert float(first["accuracy_std"]) == pytest.approx(0.1 / 2**0.5)
    assert float(first["confidence"]) == pytest.approx(0.8)
    assert second["accuracy_std"] == "" and second["finished"] == "1"


def test_confidences_and_pseudo_labels_are_means_over_the_last_epoch(tmp_path: Path) -> None:
    recipe = Recipe.read(None, {"train.epoch_steps": 40})
    (cell,) = compare.make_cells(recipe, {"seed": [0]}, tmp_path)
    finish(cell, confidence=0.9, pseudo_accuracy=0.9)
    values = {20: 0.1, 40: 0.2, 60: 0.5, 80: 0.7}  # the last 40 steps have two lines
    lines = [
        {"kind": "train", "step": s, "loss": 1.0, "confidence": v, "pseudo_accuracy": v} for s, v in values.items()
    ]
    del lines[3]["pseudo_accuracy"]  # no image of known class in those steps
    rows = [*lines, {"kind": "test", "step": 80, "accuracy": 0.5}]
    cell.run.metrics_file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert cell.run.recent(40) == pytest.approx({"confidence": 0.6, "pseudo_accuracy": 0.5})
    (row,) = compare.summarise([cell])
    assert row.figures["confidence"] == [pytest.approx(0.6)] and row.figures["accuracy"] == [0.5]


def test_every_format_holds_the_figures() -> None:
    table = Tabulated("50 % of α", ["m_1", "x"], [["a & b", "1.0 ± 0.5"]], [{"m": "a & b", "x": 1.0}], 1, notes=["hm"])
    assert render(table, "markdown") == "**50 % of α**\n\n| m_1 | x |\n| :-- | --: |\n| a & b | 1.0 ± 0.5 |\n\n- hm"
    assert render(table, "csv") == "m,x\na & b,1.0"
    assert json.loads(render(table, "json")) == {
        "caption": "50 % of α",
        "rows": [{"m": "a & b", "x": 1.0}],
        "notes": ["hm"],
    }
    latex = render(table, "latex").splitlines()
    assert r"\caption{50 \% of $\alpha$}" in latex and r"\begin{tabular}{@{}lr@{}}" in latex
    assert r"m\_1 & x \\" in latex and r"a \& b & 1.0 $\pm$ 0.5 \\" in latex


# ---- engines --------------------------------------------------------------------------------------------------------

# Stands in for `finessl resume`: marks the try in tries.txt, fails as often as fail.txt says, then finishes.
STUB = """
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
tries = run / "tries.txt"
count = len(tries.read_text()) if tries.exists() else 0
tries.write_text("x" * (count + 1))
fail = run / "fail.txt"
if fail.exists() and count < int(fail.read_text()):
    sys.exit(f"finessl: no luck at try {count + 1}")
(run / "meta.json").write_text(json.dumps({"finished": True, "accuracy": 0.25, "seconds": 1, "steps": 1}))
"""


def stub(cell: object, device: str) -> list[str]:
    return [sys.executable, "-c", STUB, str(cell.run.path)]  # type: ignore[attr-defined]


def grid(tmp_path: Path, seeds: int) -> list[compare.Cell]:
    return compare.make_cells(Recipe.read(None, SAMPLE), {"seed": list(range(seeds))}, tmp_path)


def test_finished_cells_are_skipped_failed_ones_tried_again_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_local, "__kwdefaults__", {**(run_local.__kwdefaults__ or {}), "command": stub})
    cells = grid(tmp_path, 4)
    finish(cells[0])
    for cell, failures in ((cells[2], 1), (cells[3], 9)):
        cell.run.open(cell.recipe)
        (cell.run.path / "fail.txt").write_text(str(failures))
    said: list[str] = []
    failed = run_cells([*cells, cells[1]], jobs=2, log=said.append)  # a run that occurs twice runs once

    assert failed == {"seed=3": "finessl: no luck at try 2"}
    tries = [path.read_text() if (path := cell.run.path / "tries.txt").exists() else "" for cell in cells]
    assert tries == ["", "x", "xx", "xx"]
    assert "1 of 4 cells are finished already" in said
    assert any("seed=2: failed, will be tried again: finessl: no luck at try 1" in line for line in said)
    assert any(line.endswith("seed=2: 25.00% in 1 s") for line in said)
    assert "no luck at try 2" in (cells[3].run.path / "error.log").read_text()
    assert not (cells[2].run.path / "error.log").exists()

    (cells[3].run.path / "fail.txt").unlink()  # the same command again tries what failed, and only that
    assert run_cells(cells, log=said.append) == {}
    assert "3 of 4 cells are finished already" in said
    assert (cells[3].run.path / "tries.txt").read_text() == "xxx"


def test_a_finished_run_of_another_recipe_is_not_taken_for_this_one(tmp_path: Path) -> None:
    (cell,) = grid(tmp_path, 1)
    finish(cell)
    (other,) = compare.make_cells(Recipe.read(None, {**SAMPLE, "train.lr": 0.5}), {"seed": [0]}, tmp_path)
    with pytest.raises(FinesslError, match="holds a run of another recipe:\n  train.lr: 0.03 there, 0.5 now"):
        run_cells([other], log=lambda line: None)


def test_a_cell_that_is_killed_is_named_as_such(tmp_path: Path) -> None:
    (cell,) = grid(tmp_path, 1)
    cell.run.open(cell.recipe)
    ended: list[tuple[str, str | None]] = []
    suicide = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    run_local(
        [cell],
        lambda job, error: ended.append((job.name, error)),
        print,
        retries=0,
        command=lambda job, device: suicide,
    )
    assert ended == [("seed=0", "killed by signal 9")]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_terminated_grid_leaves_no_cell_behind(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from finessl.sweeps import compare
from finessl.sweeps.engines.local import run_local
from finessl.recipe import Recipe
(cell,) = compare.make_cells(Recipe.read(None, {SAMPLE!r}), {{"seed": [0]}}, Path({str(tmp_path)!r}))
cell.run.open(cell.recipe)
sleep = "import os, pathlib, time; pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid())); time.sleep(60)"
run_local([cell], print, print, command=lambda job, device: [sys.executable, "-c", sleep])
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    wait_for(lambda: pid.exists() and bool(pid.read_text()))
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(120) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def wait_for(condition: object) -> None:
    end = time.monotonic() + 120
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_jobs_share_the_cores_and_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert environment(0, 3, "cpu")["OMP_NUM_THREADS"] == "2"  # 8 cores, 3 jobs
    assert environment(0, 3, "cuda")["TORCHINDUCTOR_COMPILE_THREADS"] == "2"
    assert [environment(slot, 3, "auto")["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["3", "5", "3"]
    assert environment(1, 3, "cpu")["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert environment(0, 1, "auto")["CUDA_VISIBLE_DEVICES"] == "3,5"  # one job may use them all
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert environment(0, 2, "cpu")["OMP_NUM_THREADS"] == "1"


def test_engine_print_gives_a_command_for_each_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = grid(tmp_path / "a b", 2)
    finish(cells[0])
    assert run_cells(cells, engine="print", device="cuda", log=lambda line: None) == {}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f"-m finessl resume '{cells[1].run.path}' --device cuda")
    assert cells[1].run.recipe_file.exists()  # the command needs nothing but the directory
    assert cell_command(cells[1], "cpu")[1:4] == ["-m", "finessl", "resume"]
    monkeypatch.chdir(tmp_path)
    (cell,) = grid(Path("here"), 1)
    assert cell_command(cell)[4] == str(tmp_path.resolve() / "here" / "seed=0")  # from any folder


def test_an_unknown_engine_is_named(tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="--engine raay; did you mean ray"):
        run_cells(grid(tmp_path, 1), engine="raay")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_compare_trains_a_grid_and_resumes_it(shapes: Path, tmp_path: Path) -> None:
    words = ["compare", str(shapes), "--methods", "supervised,finessl", "--out", str(tmp_path), *TINY]
    done = CliRunner().invoke(app, [*words, "--format", "json"], catch_exceptions=False)
    rows = json.loads(done.stdout)["rows"]
    assert [row["method"] for row in rows] == ["supervised", "finessl"]
    assert all(0 <= row["accuracy"] <= 1 and row["finished"] == 1 for row in rows)
    assert rows[0]["confidence"] is None and 0 < rows[1]["confidence"] <= 1
    assert (tmp_path / "summary.csv").exists()

    again = CliRunner().invoke(app, [*words, "--format", "csv"], catch_exceptions=False)
    assert "2 of 2 cells are finished already" in again.stderr
    assert float(next(csv.DictReader(again.stdout.splitlines()))["accuracy"]) == rows[0]["accuracy"]


def test_compare_says_what_is_missing(shapes: Path, tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="nothing to compare"):
        CliRunner().invoke(app, ["compare", str(shapes)], catch_exceptions=False)
    with pytest.raises(FinesslError, match="--format html: choose from table"):
        CliRunner().invoke(
            app, ["compare", str(shapes), "--methods", "all", "--format", "html"], catch_exceptions=False
        )
    words = ["compare", str(shapes), "--methods", "finessl", "--axis", "method.alhpa=1", "--retries", "0"]
    with pytest.raises(FinesslError, match="no option 'alhpa'; did you mean alpha"):
        CliRunner().invoke(app, [*words, "--out", str(tmp_path), *TINY], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []  # nothing was begun
    words = ["compare", str(shapes), "--methods", "finessl", "--retries", "0", "--out", str(tmp_path), *TINY]
    with pytest.raises(FinesslError, match="1 of 1 cells failed.*device 'cuba' cannot be used"):
        CliRunner().invoke(app, [*words, "--device", "cuba"], catch_exceptions=False)
    for axis in ("method.alpha", "method.alpha=", "method.alpha=,"):
        with pytest.raises(FinesslError, match=f"--axis {axis} should read FIELD=A,B"):
            CliRunner().invoke(app, [*words, "--axis", axis], catch_exceptions=False)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("method.name", "finesl", "unknown method 'finesl'; did you mean finessl"),
        ("method.gama", 1, "method 'finessl' has no option 'gama'; did you mean gamma"),
        ("method.alpha", "x", "alpha = 'x' should be a number"),
        ("tuning.name", "lorra", "unknown tuning 'lorra'; did you mean lora"),
        ("tuning.lenght", 1, "has no option 'lenght'; did you mean length"),
        ("head.name", "cosin", "unknown head 'cosin'; did you mean cosine"),
        ("head.skale", 1, "has no option 'skale'"),
        ("split.name", "per-clas", "unknown split 'per-clas'; did you mean per-class"),
        ("split.lables", 3, "split 'per-class' has no option 'lables'"),
        ("data.weak", "crop", "unknown .*'crop'"),
        ("model.backbone", "embeded", "unknown backbone 'embeded'; did you mean embedded"),
    ],
)
def test_a_grid_is_checked_before_it_starts(tmp_path: Path, field: str, value: object, message: str) -> None:
    split = {"data.source": "sample", "split.name": "per-class", "split.seed": 1}
    recipes = [Recipe.read("released", split), Recipe.read("released", {**split, field: value}, check=False)]
    cells = [compare.Cell({"seed": n}, recipe, RunDirectory(tmp_path / str(n))) for n, recipe in enumerate(recipes)]
    with pytest.raises(FinesslError, match=message):
        run_cells(cells, engine="print")
    assert list(tmp_path.iterdir()) == []


def test_choices_that_are_right_pass() -> None:
    for path in recipe_folder().glob("*.toml"):
        Recipe.read(path)
    Recipe.read("released", {"split.name": "mine.json", "head.init": "text", "head.text_features": "x"})
    Recipe.read("released", {"tuning.name": "vpt-deep+lora", "model.backbone": "hf-hub:a/b"})
