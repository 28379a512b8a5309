"""Two processes do what one does on the same global batch; a run may change their number on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finessl.recipe import Recipe
from finessl.training.loop import Settings, train

FIELDS = {
    "model.backbone": "vit_tiny_patch16_224",
    "model.pretrained": False,
    "data.image_size": 32,
    "split.labels_per_class": 4,
    "train.batch_size": 4,
    "train.mu": 2,
    "train.lr": 0.01,
    "train.epoch_steps": 4,
}

# Six steps in float64; writes parameters, method state and losses of the first process.
STEPS = """
import sys, torch
from finessl.recipe import Recipe
from finessl.training.distributed import processes
from finessl.training.experiment import prepare
from finessl.training.step import TrainingStep, make_optimizer

fields, out = eval(sys.argv[1]), sys.argv[2]
recipe, device = Recipe.read(None, fields), torch.device("cpu")
with processes("cpu") as team:
    experiment = prepare(recipe, None, device)
    network, method = experiment.network.double().train(), experiment.method.double()
    step = TrainingStep(network, method, make_optimizer(network, recipe.train, device), recipe.train, device, "fp32", team)
    loader, losses = experiment.loader(team), []
    for number in range(6):
        views = loader.load(number)
        views.trained = views.trained.double()
        views.weak = None if views.weak is None else views.weak.double()
        losses.append(step(number, views).loss.detach())
    if team.first:
        torch.save({"trained": network.trained_tensors(), "method": method.state_dict(), "losses": torch.stack(losses)}, out)
"""


def torchrun(processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize("method", ["finessl", "freematch"])
def test_two_processes_are_one(shapes: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    fields = {**FIELDS, "data.source": str(shapes), "method.name": method}
    answers = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}.pt"
        done = torchrun(processes, str(script), repr(fields), str(out))
        assert done.returncode == 0, done.stderr[-3000:]
        answers.append(torch.load(out, weights_only=True))
    one, two = answers
    torch.testing.assert_close(two["losses"], one["losses"], rtol=1e-9, atol=1e-12)
    for part in ("trained", "method"):
        assert one[part].keys() == two[part].keys() and one[part]
        for name, value in one[part].items():
            torch.testing.assert_close(two[part][name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_resume_with_another_number_of_processes(shapes: Path, tmp_path: Path) -> None:
    """6 steps alone, then 6 more by two processes: as 12 steps alone, up to float32 rounding."""
    recipe = Recipe.read(None, {**FIELDS, "data.source": str(shapes), "train.steps": 12, "train.precision": "fp32"})
    settings = Settings(device="cpu", log_every=3, checkpoint_seconds=0.0, quiet=True)
    train(recipe, tmp_path / "alone", settings)

    from finessl.training import checkpoint

    class Stop(Exception):
        pass

    original = checkpoint.save

    def save(folder: Path, step: int, trained: dict, state: dict) -> Path:
        path = original(folder, step, trained, state)
        if step == 6:
            raise Stop
        return path

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(checkpoint, "save", save)
        train(recipe, tmp_path / "shared", settings)
    done = torchrun(2, "-m", "finessl", "resume", str(tmp_path / "shared"), "--device", "cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming at step 6 of 12" in done.stdout + done.stderr
    alone, shared = (
        load_file(tmp_path / name / "classifier" / "classifier.safetensors") for name in ("alone", "shared")
    )
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_lost_process_ends_the_run_with_a_good_checkpoint(shapes: Path, tmp_path: Path) -> None:
    script = tmp_path / "lose.py"
    script.write_text(
        "import os, signal, sys\n"
        "import finessl.training.loop as loop\n"
        "from finessl.cli import main\n"
        "original = loop.TrainingStep.__call__\n"
        "def step(self, number, views):\n"
        "    if number == 8 and self.processes.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return original(self, number, views)\n"
        "loop.TrainingStep.__call__ = step\n"
        "main()\n"
    )
    run = tmp_path / "run"
    settings = [item for name, value in FIELDS.items() for item in ("--set", f"{name}={str(value).lower()}")]
    done = torchrun(
        2, str(script), "train", str(shapes), "--out", str(run), "--device", "cpu", "--steps", "12",
        "--checkpoint-seconds", "0", *settings,
    )  # fmt: skip
    assert done.returncode != 0
    assert "lost another process of this run" in done.stderr
    from finessl.training import checkpoint

    found = checkpoint.newest(run / "checkpoints")
    assert found is not None and 1 <= found[1]["step"] <= 8
    finished = subprocess.run(
        [sys.executable, "-m", "finessl", "resume", str(run), "--device", "cpu", "-q"], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr


def test_uneven_batches_are_refused() -> None:
    from finessl.errors import FinesslError
    from finessl.training.distributed import Processes

    with pytest.raises(FinesslError, match="multiple of the number of processes"):
        Processes(0, 3).rows(32)
