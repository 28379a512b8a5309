"""A run killed at any moment and started again ends exactly like one that was never interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.runs import checkpoint
from finessl.runs.directory import RunDirectory
from finessl.training.loop import Settings, train

from .conftest import TINY, train_until

FIELDS = {**TINY, "tuning.length": 3, "train.steps": 12, "train.epoch_steps": 5}
SETTINGS = Settings(device="cpu", log_every=3, checkpoint_seconds=0.0, quiet=True)


def recipe(data: Path, **changes: object) -> Recipe:
    return Recipe.read(None, {**FIELDS, "data.source": str(data), **changes})


def result(run: Path) -> tuple[dict[str, bytes], bytes]:
    tensors = load_file(run / "classifier" / "classifier.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, (run / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    train(recipe(shapes), out, SETTINGS)
    return out


# Kills itself (SIGKILL: no handler, no flush) at a chosen place of a chosen step.
KILLER = """
import os, signal, sys
from pathlib import Path
import finessl.runs.checkpoint as checkpoint, finessl.training.loop as loop
from finessl.recipe import Recipe
from finessl.training.loop import Settings, train

place, when, source, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
saves = 0
original_save, original_torch_save, original_replace = checkpoint.save, checkpoint.torch.save, os.replace

def torch_save(state, path):
    original_torch_save(state, path)
    if place == "within" and state["step"] >= when:  # the state file is cut short, the folder not yet renamed
        os.truncate(path, os.path.getsize(path) // 2)
        die()

def save(folder, step, trained, state):
    if place == "before" and step >= when:
        die()
    path = original_save(folder, step, trained, state)
    if place == "after" and step >= when:
        die()
    return path

checkpoint.torch.save, checkpoint.save = torch_save, save
train(Recipe.read(None, eval(sys.argv[5])), out, Settings(device="cpu", log_every=3, checkpoint_seconds=0.0, quiet=True))
"""


@pytest.mark.parametrize(("place", "when"), [("before", 1), ("within", 4), ("after", 7), ("within", 12)])
def test_killed_run_ends_as_the_whole_one(shapes: Path, whole: Path, tmp_path: Path, place: str, when: int) -> None:
    out = tmp_path / "run"
    fields = {**FIELDS, "data.source": str(shapes)}
    killed = subprocess.run(
        [sys.executable, "-c", KILLER, place, str(when), str(shapes), str(out), repr(fields)], capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not RunDirectory(out).finished()
    meta = train(recipe(shapes), out, SETTINGS)
    assert meta["finished"]
    assert result(out) == result(whole)


def test_killed_from_outside(shapes: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fields = {**FIELDS, "data.source": str(shapes)}
    process = subprocess.Popen([sys.executable, "-c", KILLER, "never", "0", str(shapes), str(out), repr(fields)])
    deadline = time.monotonic() + 120
    while not list((out / "checkpoints").glob("step-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    train(recipe(shapes), out, SETTINGS)
    assert result(out) == result(whole)


def test_a_damaged_checkpoint_is_passed_over(shapes: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_until(8, recipe(shapes), out, SETTINGS)
    steps = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert steps == ["step-00000007", "step-00000008"]
    broken = out / "checkpoints" / "step-00000008" / "trained.safetensors"
    os.truncate(broken, broken.stat().st_size - 10)
    found = checkpoint.newest(out / "checkpoints")
    assert found is not None and found[1]["step"] == 7
    train(recipe(shapes), out, SETTINGS)
    assert result(out) == result(whole)


def test_patches_are_dropped_as_before_after_a_resume(shapes: Path, tmp_path: Path) -> None:
    changed = recipe(
        shapes,
        **{"train.patch_dropout": 0.5, "train.patch_dropout_until": 0.7, "train.steps": 6, "train.epoch_steps": 3},
    )
    train(changed, tmp_path / "whole", SETTINGS)
    train_until(3, changed, tmp_path / "stopped", SETTINGS)
    train(changed, tmp_path / "stopped", SETTINGS)
    assert result(tmp_path / "stopped") == result(tmp_path / "whole")
    train(recipe(shapes, **{"train.steps": 6, "train.epoch_steps": 3}), tmp_path / "without", SETTINGS)
    always = changed.with_fields({"train.patch_dropout_until": 1.0})
    train(always, tmp_path / "always", SETTINGS)
    assert len({str(result(tmp_path / name)[0]) for name in ("whole", "without", "always")}) == 3


def test_finished_run_is_left_alone(shapes: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert train(recipe(shapes), whole, SETTINGS)["finished"]
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_another_recipe_is_refused(shapes: Path, whole: Path) -> None:
    with pytest.raises(FinesslError, match=r"train.lr: 0.03 there, 0.5 now"):
        train(recipe(shapes, **{"train.lr": 0.5}), whole, SETTINGS)


def test_interrupt_saves_and_resumes(shapes: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fields = {**FIELDS, "data.source": str(shapes)}
    code = KILLER.replace("checkpoint_seconds=0.0", "checkpoint_seconds=1e9").replace(
        "checkpoint.torch.save, checkpoint.save = torch_save, save",
        "original_step = loop.TrainingStep.__call__\n"
        "def step(self, number, views):\n"
        "    if number == 5: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return original_step(self, number, views)\n"
        "loop.TrainingStep.__call__ = step",
    )
    done = subprocess.run([sys.executable, "-c", code, "never", "0", "", str(out), repr(fields)], capture_output=True)
    assert b"stopped at step 6 of 12" in done.stderr
    train(recipe(shapes), out, SETTINGS)
    assert result(out) == result(whole)


def test_not_finite_loss_keeps_the_checkpoint(shapes: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(FinesslError, match="stopped being a finite number"):
        train(recipe(shapes, **{"train.lr": 1e30, "head.name": "linear"}), out, SETTINGS)
    assert not RunDirectory(out).finished()
    found = checkpoint.newest(out / "checkpoints")
    assert found is None or all(tensor.isfinite().all() for tensor in found[0].values())
