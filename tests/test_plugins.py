"""Plug-ins: things from outside the package work in every verb, and a stranger's run directory runs no code."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import finessl
from finessl.cli import app
from finessl.data.sources import SOURCES
from finessl.data.splits import SPLITS
from finessl.data.views import STRONG, WEAK
from finessl.errors import FinesslError
from finessl.methods import METHODS
from finessl.models.heads import HEADS
from finessl.models.tuning import TUNINGS
from finessl.recipe import Recipe
from finessl.registry import plugins
from finessl.runs.directory import RunDirectory

SHORT = ("--steps", "2", "--backbone", "embedded", "--set", "train.batch_size=4", "--set", "data.strong_views=1")
REGISTRIES = (METHODS, TUNINGS, HEADS, SOURCES, SPLITS, WEAK, STRONG)
TUNING = """
from finessl.models.tuning import TUNINGS
from finessl.models.tuning.linear import Linear

class Mine(Linear):
    name = "mine"
    def __init__(self, *, size: int = 3) -> None: ...

TUNINGS.register("mine", Mine, "a tuning of my own")
open(__file__ + ".ran", "a").write("x")
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a plug-in registers is gone after the test."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("my_", "mine")):
            del sys.modules[name]


def call(*words: Any) -> None:
    app([str(word) for word in words], standalone_mode=False)


def in_a_new_process() -> None:
    """As if this process had not imported the plug-ins yet."""
    for name in [name for name in sys.modules if name.startswith(("my_", "mine"))]:
        del sys.modules[name]
    for registry in REGISTRIES:
        for name in ("mine", "relative-threshold"):
            registry.entries.pop(name, None)


def example() -> str:
    page = Path(__file__).parents[1] / "docs" / "methods.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    return code


def test_the_documented_method_runs_in_the_cells_of_a_grid(shapes: Path, tmp_path: Path) -> None:
    file = tmp_path / "my_method.py"
    file.write_text(example(), encoding="utf-8")
    call("compare", shapes, "--methods", "relative-threshold", "-n", "2", "--plugin", file, "--out", tmp_path / "grid",
         *SHORT, "--format", "json", "--device", "cpu")  # fmt: skip
    runs = sorted((tmp_path / "grid").glob("method=*"))
    assert [RunDirectory(run).finished() for run in runs] == [True]
    recorded = RunDirectory(runs[0]).recipe()
    assert recorded.method.name == "relative-threshold"
    assert recorded.plugins == (f"{file}#sha256={plugins.sha256(file)}",)
    assert finessl.load(runs[0], device="cpu").classes  # a method is not needed for prediction


def test_a_plugged_tuning_from_training_to_prediction(shapes: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(TUNING)
    image = next(shapes.rglob("*.png"))
    call(
        "train",
        shapes,
        "--plugin",
        file,
        "--tuning",
        "mine",
        "--set",
        "tuning.size=4",
        "--out",
        run,
        "-n",
        "2",
        *SHORT,
        "-q",
    )
    assert 'tuning": {' in (run / "classifier" / "classifier.json").read_text()
    call("predict", run, image, "--plugin", file, "--out", tmp_path / "p.csv")
    call("list", "tunings", "--options", "--plugin", file)

    in_a_new_process()
    (tmp_path / "mine.py.ran").unlink()
    for words in (["predict", run, image], ["evaluate", run], ["report", run, "--out", tmp_path / "report.html"]):
        try:
            call(*words)
        except FinesslError as error:
            assert re.search("unknown tuning 'mine'.*--plugin", str(error))
    with pytest.raises(FinesslError, match="unknown tuning 'mine'.*--plugin"):
        finessl.load(run, device="cpu")
    assert not (tmp_path / "mine.py.ran").exists()  # nothing that the run names was imported
    assert finessl.load(run, device="cpu", plugins=[str(file)]).classes


def test_resume_imports_what_the_recipe_records_if_it_is_unchanged(shapes: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(TUNING)
    fields = {"data.source": str(shapes), "tuning.name": "mine", "model.backbone": "embedded", "train.steps": 2,
              "split.labels_per_class": 2, "train.batch_size": 4, "plugins": [str(file)]}  # fmt: skip
    RunDirectory(run).open(Recipe.read(None, fields))
    in_a_new_process()
    file.write_text(TUNING + "# changed\n")
    with pytest.raises(FinesslError, match=r"mine.py has changed since the run began"):
        call("resume", run, "--device", "cpu", "-q")
    in_a_new_process()
    moved = tmp_path / "moved" / "mine.py"
    moved.parent.mkdir()
    moved.write_text(TUNING)
    file.unlink()
    with pytest.raises(FinesslError, match="mine.py cannot be read"):
        call("resume", run, "--device", "cpu", "-q")
    call("resume", run, "--plugin", moved, "--device", "cpu", "-q")
    assert RunDirectory(run).finished()
    # the place of the file is no part of the run
    assert Recipe.read(None, {**fields, "plugins": [str(moved)]}).differences(RunDirectory(run).recipe()) == {}


def test_code_inside_a_run_directory_is_not_run(shapes: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(TUNING)
    fields = {"data.source": str(shapes), "tuning.name": "mine", "plugins": [str(file)]}
    recipe = Recipe.read(None, fields)
    in_a_new_process()
    (tmp_path / "mine.py.ran").unlink()
    run.mkdir()
    evil = Path(shutil.move(file, run / "mine.py"))
    recipe = recipe.model_copy(update={"plugins": (f"{evil}#sha256={plugins.sha256(evil)}",)})
    (run / "recipe.toml").write_text(recipe.toml())
    with pytest.raises(FinesslError, match="inside the run directory"):
        call("resume", run)
    assert not (run / "mine.py.ran").exists()


def test_a_module_and_an_entry_point_are_plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(TUNING)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe.read(None, {"plugins": ["mine"], "tuning.name": "mine"})
    assert recipe.plugins == ("mine",) and 'plugins = [\n    "mine",\n]' in recipe.toml()

    in_a_new_process()
    entry = EntryPoint("mine", "mine", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == plugins.GROUP else [])
    plugins.load_installed.cache_clear()
    assert Recipe.read(None, {"tuning.name": "mine"}).plugins == ()
    plugins.load_installed.cache_clear()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("my_broken.py", "1 / 0", "fails when it is imported: ZeroDivisionError"),
        ("my_broken.py", "def", "fails when it is imported: SyntaxError"),
        ("json.py", "", "has the name of another module, 'json'"),
        ("my.no_such_module", None, "cannot be imported"),
        ("my_gone.py", None, "cannot be read"),
    ],
)
def test_plug_ins_that_cannot_be_imported(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    assert json
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(FinesslError, match=message):
        Recipe.read(None, {"plugins": [str(tmp_path / name) if name.endswith(".py") else name]})


def test_a_plugged_source_is_opened_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from finessl.data.sources import SOURCES\n"
        "from finessl.data.sources.sample import open_sample\n"
        "def open_mine(root, *, size: int = 3): return open_sample()\n"
        'SOURCES.register("mine", open_mine, "the sample, under my name")\n'
    )
    recipe = Recipe.read(
        None, {"plugins": [str(tmp_path / "mine.py")], "data.source": "mine", "source.size": "4"}, source=True
    )
    assert recipe.source.options == {"size": 4} and recipe.identity()["data.source"] == "mine"
    with pytest.raises(FinesslError, match="dataset 'mine' has no option 'sise'; did you mean size"):
        Recipe.read(None, {"data.source": "mine", "source.sise": 4})
