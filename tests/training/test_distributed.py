"""Two processes do what one does on the same global batch; a run may change their number on the way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finessl.recipe import Recipe
from finessl.training.loop import Settings, train

from .conftest import TINY, train_until

FIELDS = {**TINY, "train.mu": 2, "train.lr": 0.01, "train.epoch_steps": 4}

# For each recipe six steps in float64; writes parameters, method state and losses of the first process.
STEPS = """
import sys, torch
from finessl.recipe import Recipe
from finessl.runtime.distributed import processes
from finessl.training.experiment import prepare
from finessl.training.optimizers import make_optimizer
from finessl.training.step import TrainingStep

cases, out = eval(sys.argv[1]), sys.argv[2]
device, answers = torch.device("cpu"), {}
with processes("cpu") as team:
    for name, fields in cases.items():
        recipe = Recipe.read(None, fields)
        experiment = prepare(recipe, None, device)
        network, method = experiment.network.double().train(), experiment.method.double()
        optimizer = make_optimizer(network, recipe.train, device)
        step = TrainingStep(network, method, optimizer, recipe.train, device, "fp32", team)
        loader, losses = experiment.loader(team), []
        for number in range(6):
            views = loader.load(number)
            views.trained = views.trained.double()
            views.weak = None if views.weak is None else views.weak.double()
            losses.append(step(number, views).loss.detach())
        trained = network.trainable_state_dict()
        answers[name] = {"trained": trained, "method": method.state_dict(), "losses": torch.stack(losses)}
    if team.first:
        torch.save(answers, out)
"""
CASES = {
    "finessl": {"method.name": "finessl"},
    "freematch": {"method.name": "freematch"},
    # BatchNorm whose statistics move: plain, and with an activation inside (timm's BatchNormAct2d)
    "bn": {"method.name": "fixmatch", "model.backbone": "resnet10t", "tuning.name": "bn"},
    "bn with activation": {"method.name": "fixmatch", "model.backbone": "mobilenetv3_small_050", "tuning.name": "bn"},
}


def torchrun(processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment, timeout=300)


def start(processes: int, *command: str) -> list[tuple[int, str]]:
    """Status and standard error of each process, started as torchrun would start it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    errors = [process.communicate(timeout=300)[1] for process in started]
    return [(process.returncode, error) for process, error in zip(started, errors, strict=True)]


@pytest.fixture(scope="module")
def answers(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Of one process, of two."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "steps.py").write_text(STEPS)
    cases = {name: {**FIELDS, "data.source": str(shapes), **fields} for name, fields in CASES.items()}
    found = []
    for processes in (1, 2):
        ended = start(processes, str(folder / "steps.py"), repr(cases), str(folder / "out.pt"))
        assert [status for status, _ in ended] == [0] * processes, ended
        found.append(torch.load(folder / "out.pt", weights_only=True))
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(answers: list[dict[str, dict[str, Any]]], case: str) -> None:
    one, two = (answer[case] for answer in answers)
    assert one["trained"] and any("running_var" in name for name in one["trained"]) == case.startswith("bn")
    torch.testing.assert_close(two["losses"], one["losses"], rtol=1e-9, atol=1e-12)
    for part in ("trained", "method"):
        assert one[part].keys() == two[part].keys()
        for name, value in one[part].items():
            torch.testing.assert_close(two[part][name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.long
def test_resume_with_another_number_of_processes(shapes: Path, tmp_path: Path) -> None:
    """6 steps alone, then 6 more by two processes: as 12 steps alone, up to float32 rounding."""
    recipe = Recipe.read(None, {**FIELDS, "data.source": str(shapes), "train.steps": 12, "train.precision": "fp32"})
    settings = Settings(device="cpu", log_every=3, checkpoint_seconds=0.0, quiet=True)
    train(recipe, tmp_path / "alone", settings)
    train_until(6, recipe, tmp_path / "shared", settings)
    done = torchrun(2, "-m", "finessl", "resume", str(tmp_path / "shared"), "--device", "cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming at step 6 of 12" in done.stdout + done.stderr
    alone, shared = (
        load_file(tmp_path / name / "classifier" / "classifier.safetensors") for name in ("alone", "shared")
    )
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-3, atol=1e-4, msg=name)


def signalled(folder: Path, step: int, name: str) -> str:
    """finessl as a script, whose second process gets a signal before a step."""
    script = folder / "signalled.py"
    script.write_text(
        "import os, signal\n"
        "import finessl.training.loop as loop\n"
        "from finessl.__main__ import main\n"
        "original = loop.TrainingStep.__call__\n"
        "def step(self, number, views):\n"
        f"    if number == {step} and self.processes.rank == 1: os.kill(os.getpid(), signal.{name})\n"
        "    return original(self, number, views)\n"
        "loop.TrainingStep.__call__ = step\n"
        "main()\n"
    )
    return str(script)


def train_words(shapes: Path, run: Path) -> list[str]:
    settings = [item for name, value in FIELDS.items() for item in ("--set", f"{name}={str(value).lower()}")]
    return ["train", str(shapes), "--out", str(run), "--device", "cpu", "--steps", "12", *settings]


@pytest.mark.long
def test_a_lost_process_ends_the_run_with_a_good_checkpoint(shapes: Path, tmp_path: Path) -> None:
    run, script = tmp_path / "run", signalled(tmp_path, 8, "SIGKILL")
    done = torchrun(2, script, *train_words(shapes, run), "--checkpoint-seconds", "0")
    assert done.returncode != 0
    assert "lost another process of this run" in done.stderr
    from finessl.runs import checkpoint

    found = checkpoint.newest(run / "checkpoints")
    assert found is not None and 1 <= found[1]["step"] <= 8
    finished = subprocess.run(
        [sys.executable, "-m", "finessl", "resume", str(run), "--device", "cpu", "-q"], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr


def test_a_signal_to_one_process_stops_all_with_a_checkpoint(shapes: Path, tmp_path: Path) -> None:
    run, script = tmp_path / "run", signalled(tmp_path, 4, "SIGTERM")
    first, second = start(2, script, *train_words(shapes, run), "-q")
    assert first == (143, "finessl: stopped at step 5 of 12; the same command resumes there.\n")
    assert second[0] == 143 and "stopped" not in second[1]
    from finessl.runs import checkpoint

    found = checkpoint.newest(run / "checkpoints")
    assert found is not None and found[1]["step"] == 5


def test_a_refused_run_ends_all_processes_with_one_sentence(shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    ended = start(2, "-m", "finessl", "train", str(shapes), "--out", str(tmp_path / "run"), "--device", "cpu", "-q")
    sentence = f"finessl: --out {tmp_path / 'run'} is a file; name a folder.\n"
    assert ended[0] == (1, sentence) and ended[1][0] == 1 and sentence not in ended[1][1]


def test_uneven_batches_are_refused() -> None:
    from finessl.errors import FinesslError
    from finessl.runtime.distributed import Processes

    with pytest.raises(FinesslError, match="multiple of the number of processes"):
        Processes(0, 3).rows(32)
