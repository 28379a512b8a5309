"""finessl paper: which runs a table needs, what is missing, and our values next to the paper's."""

from __future__ import annotations

import csv
import json
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from finessl.cli import app
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.methods import METHODS
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runs.records import write_record
from finessl.runtime.files import write_arrays
from finessl.sweeps.engines import run_cells
from finessl.sweeps.paper import needs
from finessl.sweeps.paper.contents import Value, read_table
from finessl.sweeps.paper.grid import Grid, identity, make_grid, read_scale, select
from finessl.sweeps.paper.needs import Places, kinds, lacking, locate, named_places
from finessl.sweeps.paper.report import gains, tabulate, within


def shown(table: str, out: Path, only: list[str], seeds: int = 3, **options: object) -> Grid:
    return make_grid(read_table(table), out, only=only, seeds=seeds, train=False, **options)  # type: ignore[arg-type]


def finish(run: RunDirectory, recipe: Recipe, **figures: float | str) -> None:
    run.open(recipe)
    run.write_meta({"finished": True, "steps": recipe.train.steps, "seconds": 300.0, **figures})


# ---- --only ---------------------------------------------------------------------------------------------------------


def places(table: str, *only: str) -> list[tuple[str, str]]:
    return [(row.name, column.title) for row, column in select(read_table(table), only)]


def test_only_takes_words_of_one_kind_as_alternatives_and_of_several_as_conditions() -> None:
    assert len(places("main")) == 72
    assert len(places("main", "cifar100")) == len(places("main", "CIFAR-100")) == 24
    assert places("main", "cifar100", "N4", "supervised", "FineSSL") == [
        ("Supervised", "CIFAR-100, N4"),
        ("FineSSL", "CIFAR-100, N4"),
    ]
    assert len(places("main", "N4", "N25", "cifar100")) == 16
    assert places("ablations", "finessl", "N4") == [("FineSSL", "CIFAR-100, N4")]  # the row, not the method of all rows
    assert places("ablations", "w/o BMS", "N4") == [("w/o BMS", "CIFAR-100, N4")]
    assert [row for row, _ in places("lp-fft", "finessl", "N4")] == [
        "FineSSL w/ LP", "FineSSL w/ FFT", "FineSSL w/ LP-FT", "FineSSL w/ FFT†",
    ]  # fmt: skip
    assert [row for row, _ in places("lp-fft", "lp-ft", "N4")] == ["FixMatch w/ LP-FT", "FineSSL w/ LP-FT"]
    assert [column for _, column in places("semi-aves", "finessl", "in+out")] == ["Semi-Aves, in+out"]
    with pytest.raises(FinesslError, match="--only N5: main has no such part"):
        places("main", "N5")
    with pytest.raises(FinesslError, match="--only food101,N25: main has each of these, but no place with all"):
        places("main", "food101", "N25")


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_tables_share_runs_of_the_same_recipe_wherever_they_lie(tmp_path: Path) -> None:
    (entry,) = shown("main", tmp_path, ["cifar100", "N4", "finessl"], 2).entries
    elsewhere = RunDirectory(tmp_path / "by-hand" / "run")
    tree = entry.cells[1].recipe.tree()
    tree["data"]["root"], tree["model"]["weights"] = "/data", "/weights"  # paths do not make another run
    tree["split"] = {"name": "per-class", "labels_per_class": 4}  # which is what auto means
    finish(elsewhere, Recipe.from_tree(tree), accuracy=0.8)
    for table, words in (
        ("main", ["N4", "finessl", "cifar100"]),
        ("peft", ["vptdeep", "N4"]),
        ("ablations", ["finessl", "N4"]),
    ):
        (entry,) = shown(table, tmp_path, words, 2).entries
        first, second = entry.cells
        assert second.run.path == elsewhere.path and second.run.finished()
        assert first.run.path == tmp_path / table / f"CIFAR-100,N4,{entry.row.name},steps=15000,seed=0"


def test_another_run_in_a_runs_place_is_neither_shown_nor_taken(tmp_path: Path) -> None:
    words = ["cifar100", "N4", "finessl"]
    (cell,) = shown("main", tmp_path, words, 1).cells
    finish(cell.run, Recipe.read("released", {"train.lr": 0.5}), accuracy=0.5)
    assert tabulate(shown("main", tmp_path, words, 1)).rows[0][2] == "–"
    (again,) = make_grid(read_table("main"), tmp_path, only=words, seeds=1).cells
    with pytest.raises(FinesslError, match="holds a run of another recipe"):
        run_cells([again], engine="print", log=lambda line: None)
    cell.run.recipe_file.write_text("[train]\nflux = 1\n")  # of another version: not readable
    assert tabulate(shown("main", tmp_path, words, 1)).rows[0][2] == "–"


def test_places_of_one_table_share_runs(tmp_path: Path) -> None:
    grid = shown("time", tmp_path, ["FineSSL (VPT)"], 1)
    assert len(grid.entries) == 3 and len({cell.run.path for cell in grid.cells}) == 1


def test_scale_and_settings_make_other_runs(tmp_path: Path) -> None:
    words = ["cifar100", "N4", "finessl"]
    (usual,) = shown("main", tmp_path, words, 1).cells
    (short,) = shown("main", tmp_path, words, 1, scale=Fraction(1, 3)).cells
    (slow,) = shown("main", tmp_path, words, 1, changes={"train.lr": 0.01}).cells
    assert (usual.recipe.train.steps, short.recipe.train.steps) == (15000, 5000)
    assert slow.recipe.train.lr == 0.01
    assert len({cell.run.path for cell in (usual, short, slow)}) == 3
    assert len({identity(cell.recipe) for cell in (usual, short, slow)}) == 3
    assert read_scale("0.1") == Fraction(1, 10) and read_scale("1/3") == Fraction(1, 3)
    for text in ("0", "-1", "half", "1/0"):
        with pytest.raises(FinesslError, match="--scale"):
            read_scale(text)


# ---- our values next to the paper's ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "paper", "answer"),
    [(80.68, "80.44 ± 0.24", True), (80.69, "80.44 ± 0.24", False), (80.20, "80.44 ± 0.24", True),
     (80.19, "80.44 ± 0.24", False), (80.44, "80.44", None), (80.0, "", None)],
)  # fmt: skip
def test_within_spread(ours: float, paper: str, answer: bool | None) -> None:
    assert within(ours, Value.read(paper)) is answer


def test_the_table_has_our_mean_the_difference_and_the_verdict(tmp_path: Path) -> None:
    words = ["cifar100", "N4", "supervised", "finessl"]
    supervised, finessl = shown("main", tmp_path, words).entries
    for cell, accuracy in zip(finessl.cells, (0.8040, 0.8060), strict=False):  # two of three seeds
        finish(cell.run, cell.recipe, accuracy=accuracy)
    table = tabulate(shown("main", tmp_path, words))
    assert table.rows == [
        ["CIFAR-100, N4", "Supervised", "–", "64.18 ± 0.33", "–", "–", "0/3"],
        ["CIFAR-100, N4", "FineSSL", "80.50 ± 0.14", "80.44 ± 0.24", "+0.06", "yes", "2/3"],
    ]
    assert "NOT THE PAPER'S SETTING" not in table.caption
    record = table.records[1]
    assert record["ours"] == pytest.approx(80.5) and record["difference"] == pytest.approx(0.06)
    assert record["within_spread"] is True and record["paper_std"] == 0.24

    short = tabulate(shown("main", tmp_path, words, scale=Fraction(1, 3), changes={"train.lr": 0.01}))
    assert "NOT THE PAPER'S SETTING: 1/3 of the paper's steps, train.lr = 0.01" in short.caption
    assert short.rows[1][2] == "–"


def test_time_is_per_step_and_for_the_papers_number_of_steps(tmp_path: Path) -> None:
    grid = shown("time", tmp_path, ["FineSSL (VPT)"], 1, scale=Fraction(1, 10))
    finish(grid.cells[0].run, grid.cells[0].recipe, accuracy=0.1)  # 300 s for 1,500 steps
    rows = tabulate(shown("time", tmp_path, ["FineSSL (VPT)"], 1, scale=Fraction(1, 10))).rows
    assert [row[2:5] for row in rows] == [
        ["0.2000", "0.642", "−0.4420"], ["15000", "30 × 500", "+0"], ["3000.0", "9630.0", "−6630.0"],
    ]  # fmt: skip


def test_confidence_is_the_auxiliary_heads_where_there_is_one(tmp_path: Path) -> None:
    grid = shown("figure-2", tmp_path, ["N4", "fixmatch", "finessl"], 1)
    for cell, figures in zip(
        grid.cells, ({"confidence": 0.9}, {"confidence": 0.8, "confidence_aux": 0.4}), strict=True
    ):
        finish(cell.run, cell.recipe, accuracy=0.5, **figures)
    assert [row[2] for row in tabulate(shown("figure-2", tmp_path, ["N4", "fixmatch", "finessl"], 1)).rows] == [
        "90.00",
        "40.00",
    ]


def test_settings_are_those_of_the_base_recipe(tmp_path: Path) -> None:
    table = tabulate(shown("settings", tmp_path, []))
    assert table.rows[1] == ["learning rate", "train.lr", "0.03", "0.03", "yes"]
    assert {row[4] for row in table.rows} == {"yes", "–"}  # numbers agree; words cannot be compared


# ---- what is lacking ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, config: object) -> None:
        raise FinesslError("no hub")

    monkeypatch.setattr("finessl.models.backbones._check_hub", fail)
    for function in (needs.data_lacks, needs.weights_lack, needs.text_lacks, needs.tower_lacks):
        function.cache_clear()


def test_what_lacks_data_or_weights_is_listed_and_the_rest_runs(no_hub: None, shapes: Path, tmp_path: Path) -> None:
    shutil.copytree(shapes, tmp_path / "data" / "cifar100")  # class folders are one of its forms
    weights = tmp_path / "clip.safetensors"
    weights.touch()
    places = Places({"": str(tmp_path / "data")}, {"": str(weights)})
    grid = make_grid(read_table("peft"), tmp_path / "runs", seeds=2, places=places)
    assert len(grid.cells) == 4 * 3 * 2  # CIFAR-100's columns
    assert {cell.recipe.data.root for cell in grid.cells} == {str(tmp_path / "data" / "cifar100")}
    assert {cell.recipe.model.weights for cell in grid.cells} == {str(weights)}
    (reason,) = {reason.partition(": put")[0] for reason in grid.missing()}
    assert reason == f"data semi-aves: {tmp_path / 'data'} holds no semi-aves"
    assert any(
        note.startswith("lacking: data semi-aves") and "[8 places: VPT (Semi" in note for note in tabulate(grid).notes
    )

    resnet = make_grid(read_table("resnet"), tmp_path / "runs", only=["N4"], seeds=1, places=places)
    assert resnet.cells == []  # the file given without a name is CLIP ViT-B/16's
    assert list(resnet.missing()) == ["weights of clip-rn50: the hub cannot be reached; give --weights clip-rn50=FILE"]


def test_finished_runs_are_shown_without_their_data(no_hub: None, tmp_path: Path) -> None:
    words = ["cifar100", "N4", "finessl"]
    (cell,) = shown("main", tmp_path, words, 1).cells
    finish(cell.run, cell.recipe, accuracy=0.8)
    grid = make_grid(read_table("main"), tmp_path, only=words, seeds=1)
    assert grid.missing() == {} and [cell.run.finished() for cell in grid.cells] == [True]


def test_finished_runs_count_for_the_data_that_they_saw(no_hub: None, shapes: Path, tmp_path: Path) -> None:
    weights, again = tmp_path / "clip.safetensors", tmp_path / "again.safetensors"
    weights.touch()
    again.touch()
    for name in ("here", "moved", "other"):
        shutil.copytree(shapes, tmp_path / name)
    next((tmp_path / "other" / "train").rglob("*.png")).unlink()

    def planned(root: str, file: Path) -> Grid:
        at = Places({"": str(tmp_path / root)}, {"": str(file)})
        return make_grid(read_table("main"), tmp_path / "runs", only=["cifar100", "N4", "finessl"], seeds=1, places=at)

    (cell,) = planned("here", weights).cells
    seen = open_dataset("cifar100", root=tmp_path / "here").fingerprint()
    finish(cell.run, cell.recipe, accuracy=0.8, data_fingerprint=seen)
    grid = planned("moved", weights)  # the same images
    assert [cell.run.finished() for cell in grid.cells] == [True]
    assert [cell.recipe.data.root for cell in grid.cells] == [str(tmp_path / "here")]
    assert not any("taken to be" in note for note in tabulate(grid).notes)
    with pytest.raises(FinesslError, match=r"trained on other images, labels .*\(.*here\) than .*other holds"):
        planned("other", weights)
    note = f"finished with the weights {weights}, taken to be those of {again}"
    assert note in tabulate(planned("here", again)).notes


def test_needs_of_scratch_text_and_missing_files(no_hub: None, tmp_path: Path) -> None:
    scratch = Recipe.read(None, {"data.source": "sample", "model.backbone": "wide-resnet-28-2"})
    assert lacking(scratch) == []
    gone = locate(Recipe.read(None, {"data.source": "sample"}), Places(weights={"clip-vit-b16": str(tmp_path / "no")}))
    assert lacking(gone) == [f"weights of clip-vit-b16: there is no file {tmp_path / 'no'}"]
    text = Recipe.read(None, {"data.source": "sample", "model.backbone": "embedded", "head.init": "text"})
    assert lacking(locate(text, Places(text_features=str(tmp_path / "t.npy")))) == [
        f"class-name features: there is no file {tmp_path / 't.npy'}"
    ]
    assert named_places(["A", "cifar100=B"], "--root", ["cifar100"]) == {"": "A", "cifar100": "B"}
    with pytest.raises(FinesslError, match="--root cifar=B: unknown name 'cifar'; did you mean cifar100"):
        named_places(["cifar=B"], "--root", ["cifar100"])


def test_needs_of_joined_backbones(no_hub: None, tmp_path: Path) -> None:
    """A file without a name is of the paper's backbone, also where it is a part."""
    (tmp_path / "clip.pt").touch()
    table = read_table("backbones")
    recipe = table.recipe(table.rows[0], table.columns[1])
    clip, dino = str(tmp_path / "clip.pt"), str(tmp_path / "dino.pt")
    found = locate(recipe, Places({"": str(tmp_path)}, {"": clip, "dinov2-vit-s14": dino}))
    assert found.model.weights == f"dinov2-vit-s14={dino},clip-vit-b16={clip}"
    assert lacking(found)[1:] == [f"weights of dinov2-vit-s14: there is no file {dino}"]
    alone = locate(recipe, Places({"": str(tmp_path)}, {"": clip}))
    assert alone.model.weights == f"clip-vit-b16={clip}"
    (lack,) = lacking(alone)[1:]
    assert lack.startswith("weights of dinov2-vit-s14: the hub cannot be reached")
    assert kinds(recipe) == ["cifar100", "dinov2-vit-s14", "clip-vit-b16"]


def test_needs_of_text_prompts(no_hub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda name: True)
    weights, tower = tmp_path / "clip.pt", tmp_path / "tower.pt"
    weights.touch()
    recipe = Recipe.read("grip-coop", {"data.source": "sample"})
    here = {"clip-vit-b16": str(weights)}
    assert lacking(locate(recipe, Places(weights=here))) == [
        "text tower: the hub cannot be reached; give --text-weights FILE"
    ]
    found = locate(recipe, Places(weights=here, text_weights=str(tower)))
    assert identity(found) == identity(recipe)
    assert lacking(found) == [f"text tower: there is no file {tower}"]
    tower.touch()
    needs.tower_lacks.cache_clear()
    assert lacking(found) == [] and "text tower" in needs.kinds(found)
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    needs.tower_lacks.cache_clear()
    assert lacking(found) == ["text tower: pip install 'finessl[text]'"]
    needs.tower_lacks.cache_clear()


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*words: str) -> str:
    return CliRunner().invoke(app, ["paper", *words], catch_exceptions=False).stdout


def test_the_overview_has_every_table_and_what_it_lacks(no_hub: None) -> None:
    rows = {row["id"]: row for row in json.loads(run("--format", "json"))["rows"]}
    assert len(rows) == 28
    assert rows["main"]["values"]["FineSSL; CIFAR-100, N4"] == "80.44 ± 0.24"
    assert rows["lp-fft"]["needs"] == "cifar100, class-name features, clip-vit-b16"
    assert "data food101: give --root food101=DIR" in rows["main"]["lacks"]
    assert rows["settings"]["lacks"] == ""


def test_mistakes_are_named_before_anything_is_planned(no_hub: None, tmp_path: Path) -> None:
    words = ["main", "--only", "cifar100,N4,finessl", "--dry-run", "--out", str(tmp_path)]
    for setting, message in (
        ("method.gama=1", "no option 'gama'"),
        ("tuning.name=lorra", "did you mean lora"),
        ("model.backbone=embeded", "unknown backbone 'embeded'; did you mean embedded"),
        ("typo=1", "no section 'typo'.*Known: seed, data.*section.field=value"),
    ):
        with pytest.raises(FinesslError, match=message):
            run(*words, "--set", setting)
    with pytest.raises(FinesslError, match="--only takes parts of one table"):
        run("--only", "N4")
    with pytest.raises(FinesslError, match="nothing of imagenet could be run. Lacking: .*data imagenet: give --root"):
        run("imagenet", "--out", str(tmp_path))


def test_the_mistakes_of_all_cells_are_reported_once(no_hub: None, tmp_path: Path) -> None:
    words = ("main", "--only", "cifar100,N4", "--dry-run", "--out", str(tmp_path))
    with pytest.raises(FinesslError) as caught:
        run(*words, "--set", "method.unlabeled_weight=-1", "--set", "tuning.name=lorra")
    lines = str(caught.value).splitlines()
    assert len(set(lines)) == len(lines) and sum("unknown tuning 'lorra'" in line for line in lines) == 1
    for message in ("method fixmatch: unlabeled_weight = -1", "method 'finessl' has no option 'unlabeled_weight'"):
        assert any(message in line for line in lines)


def test_a_plug_in_takes_part_in_a_table(shapes: Path, tmp_path: Path) -> None:
    shutil.copytree(shapes, tmp_path / "cifar100")
    file = tmp_path / "paper_plugin.py"
    file.write_text(
        "from finessl.methods import METHODS\n"
        "METHODS.register('mine', 'finessl.methods.fixmatch:FixMatch', 'FixMatch by another name')\n"
    )
    try:
        run("main", "--only", "cifar100,N4,fixmatch", "--seeds", "1", "--root", str(tmp_path), "--out", str(tmp_path / "runs"),
            "--set", "model.backbone=embedded", "--set", "method.name=mine", "--plugin", str(file),
            "--engine", "print")  # fmt: skip
        (recipe,) = (tmp_path / "runs").rglob("recipe.toml")
        assert Recipe.restore(recipe).method.name == "mine"
        assert Recipe.restore(recipe).plugins[0].startswith(f"{file}#sha256=")  # so that finessl resume imports it
    finally:
        METHODS.entries.pop("mine", None)


def test_a_table_is_trained_and_printed_next_to_the_papers(shapes: Path, tmp_path: Path) -> None:
    shutil.copytree(shapes, tmp_path / "cifar100")
    words = [
        "main", "--only", "cifar100,N4,fixmatch", "--seeds", "1", "--scale", "1/5000", "--root", str(tmp_path),
        "--set", "model.backbone=vit_tiny_patch16_224", "--set", "model.pretrained=false", "--set", "data.image_size=32",
        "--set", "train.batch_size=4", "--out", str(tmp_path / "runs"), "--device", "cpu",
    ]  # fmt: skip
    needs.weights_lack.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finessl.models.backbones._check_hub", lambda name, config: None)
        dry = run(*words, "--dry-run")
        assert "3 steps: " in dry and not (tmp_path / "runs").exists()
        (row,) = csv.DictReader(run(*words, "--format", "csv").splitlines())
    needs.weights_lack.cache_clear()
    assert (row["setting"], row["row"], row["paper"], row["finished"]) == ("CIFAR-100, N4", "FixMatch", "77.1", "1")
    assert float(row["difference"]) == pytest.approx(float(row["ours"]) - 77.1)
    assert (row["scale"], row["changes"].partition(";")[0]) == ("1/5000", "model.backbone = vit_tiny_patch16_224")
    alike = [*words[:1], "--only", "cifar100,N4", "--only", "fixmatch", *words[3:]]  # --only may be repeated
    (same,) = csv.DictReader(run(*alike, "--show", "--format", "csv").splitlines())
    assert same == row
    markdown = run(*words, "--show", "--format", "markdown")
    assert f"| CIFAR-100, N4 | FixMatch | {float(row['ours']):.2f} | 77.10 ± 1.04 |" in markdown
    assert r"77.10 $\pm$ 1.04" in run(*words, "--show", "--format", "latex")


# ---- ahead of the paper ---------------------------------------------------------------------------------------------


def test_rows_of_equal_compute_are_compared_image_by_image(tmp_path: Path) -> None:
    """Of the seeds that both have; runs without predictions do not count."""
    out, records = tmp_path / "runs", tmp_path / "records"
    grid = shown("best", out, ["N4"])
    rows = {entry.row.name: entry for entry in grid.entries}
    labels = np.zeros(400, dtype=np.int64)
    for name, seeds, right in (("VPT", (0, 1), 300), ("AdaptFormer", (1, 2), 340)):
        for seed in seeds:
            cell = rows[name].cells[seed]
            finish(cell.run, cell.recipe, accuracy=right / 400)
            logits = np.eye(2)[(np.arange(400) >= right).astype(int)]
            write_arrays(cell.run.path / "predictions.npz", {"logits": logits, "labels": labels})
    (sentence,) = gains(shown("best", out, ["N4"]))
    assert sentence.startswith("CIFAR-100, N4: AdaptFormer is +10.00 against VPT (95 %: +7.")
    assert sentence.endswith("paired bootstrap of 1 seed and 400 images)")
    assert sentence in tabulate(shown("best", out, ["N4"])).notes
    for entry in rows.values():  # records say the same
        for cell in entry.cells:
            if cell.run.finished():
                write_record(cell.run, records / cell.run.path.name)
    assert gains(shown("best", records, ["N4"])) == [sentence]
    other = {"logits": np.eye(2)[labels], "labels": 1 - labels}  # other images, or another order of them
    write_arrays(rows["VPT"].cells[1].run.path / "predictions.npz", other)
    assert gains(shown("best", out, ["N4"])) == []
    (rows["VPT"].cells[1].run.path / "predictions.npz").unlink()
    assert gains(shown("best", out, ["N4"])) == []
