"""Whole runs on a GPU: resume, signals, several processes, photos of many sizes, too little memory."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from finessl.data.pixel_store import PixelStore
from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.training.cuda_graph import CudaGraphForward
from finessl.training.loop import Settings, train

from .conftest import TINY, train_until

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FIELDS = {**TINY, "train.steps": 24, "train.epoch_steps": 8, "train.mu": 2}


@pytest.fixture(scope="module")
def many_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of many sizes, which a store keeps ragged."""
    root, rng = tmp_path_factory.mktemp("sizes"), np.random.default_rng(0)
    for part, count in (("train", 16), ("test", 4)):
        for level, name in ((60, "dark"), (180, "light")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                size = (int(rng.integers(24, 90)), int(rng.integers(24, 90)), 3)
                Image.fromarray(rng.integers(level - 40, level + 40, size, np.uint8)).save(
                    root / part / name / f"{i}.png"
                )
    return root


def recipe(data: Path, **changes: Any) -> Recipe:
    return Recipe.read(None, {**FIELDS, "data.source": str(data), **changes})


def settings(**changes: Any) -> Settings:
    return Settings(**{"device": DEVICE, "log_every": 4, "checkpoint_seconds": 0.0, "quiet": True, **changes})


def largest_difference(first: Path, second: Path) -> float:
    """Of any number in two classifiers."""
    one, other = (load_file(run / "classifier" / "classifier.safetensors") for run in (first, second))
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.parametrize("compile", [False, True, None])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_ends_as_the_whole_one(
    shapes: Path, tmp_path: Path, precision: str, compile: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager: byte by byte. Captured: the steps before the capture run eagerly, with the same kernels. None: hand-written
    kernels, in bf16."""
    torch._dynamo.reset()
    monkeypatch.setattr("finessl.training.cuda_graph.MIN_COMPILED_STEPS", 1)
    own = recipe(shapes, **{"train.precision": precision})
    train(own, tmp_path / "whole", settings(compile=compile))
    train_until(10, own, tmp_path / "resumed", settings(compile=compile))
    train(own, tmp_path / "resumed", settings(compile=compile))
    assert largest_difference(tmp_path / "whole", tmp_path / "resumed") == 0


@pytest.mark.parametrize("data", ["shapes", "many_sizes"])
def test_a_compiled_run_is_close_to_an_eager_one(
    data: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 32 weak views in a step, so that the evaluation is a CUDA graph too."""
    torch._dynamo.reset()
    own = recipe(
        request.getfixturevalue(data), **{"train.precision": "fp32", "split.labels_per_class": 2, "train.mu": 8}
    )
    batches, capture = [], CudaGraphForward.capture

    def capture_and_note(self: CudaGraphForward, images: torch.Tensor) -> None:
        batches.append(len(images))
        capture(self, images)

    monkeypatch.setattr(CudaGraphForward, "capture", capture_and_note)
    eager, compiled = (train(own, tmp_path / str(how), settings(compile=how)) for how in (False, True))
    assert set(batches) == {32}
    assert largest_difference(tmp_path / "False", tmp_path / "True") < 1e-3
    assert abs(eager["accuracy"] - compiled["accuracy"]) <= 1 / 8 + 1e-9  # one of the eight test images of many sizes


def test_images_that_do_not_fit_on_the_gpu_train_as_those_that_do(
    many_sizes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = recipe(many_sizes, **{"train.precision": "fp32", "split.labels_per_class": 2})
    train(own, tmp_path / "on the GPU", settings(compile=False))
    monkeypatch.setattr(PixelStore, "to_device", lambda store, device: store)
    train(own, tmp_path / "in memory", settings(compile=False))
    assert largest_difference(tmp_path / "on the GPU", tmp_path / "in memory") == 0


def test_a_signal_stops_a_run_with_a_checkpoint(shapes: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "finessl", "train", str(shapes), "--out", str(tmp_path / "run"), "-n", "4", "--device", DEVICE,
        "--backbone", "vit_tiny_patch16_224", "--set", "model.pretrained=false", "--image-size", "32", "--steps", "100000",
        "--batch-size", "4", "--no-compile",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in output, output
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")), output


def test_two_processes_share_a_gpu(shapes: Path, tmp_path: Path) -> None:
    own = recipe(shapes, **{"train.precision": "fp32", "train.steps": 6})
    train(own, tmp_path / "one", settings(compile=False))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "recipe.toml").write_bytes((tmp_path / "one" / "recipe.toml").read_bytes())
    ended = subprocess.run(
        [*launcher, "-m", "finessl", "resume", str(tmp_path / "two"), "--device", DEVICE, "--no-compile"],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "two" / "meta.json").read_text())["processes"] == 2
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-4


def test_too_little_memory_is_a_sentence(shapes: Path, tmp_path: Path) -> None:
    """The device's memory is limited to what is in use and a little more: other processes on it do not matter."""
    gc.collect()
    torch.cuda.empty_cache()  # what earlier tests have left to be used again
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 64e6) / total))
    try:
        with pytest.raises(FinesslError, match="too little memory .*--batch-size"):
            train(recipe(shapes, **{"train.batch_size": 12, "train.mu": 5, "data.image_size": 224}), tmp_path / "run",
                  settings(compile=False))  # fmt: skip
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
