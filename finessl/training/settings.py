"""How a run is carried out, and what is refused before it starts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finessl.errors import FinesslError
from finessl.models.aliases import alias_of
from finessl.recipe import Recipe, TrainRecipe
from finessl.runs.directory import RunDirectory
from finessl.runtime.files import writing

if TYPE_CHECKING:
    from finessl.training.experiment import Experiment

EVALUATIONS = 10  # per run
FIRST_STEPS = 5  # of a process: on a GPU these compile and capture


@dataclass(frozen=True)
class Settings:
    """How a run is carried out. `device` and `compile` change the result within rounding, the others not at all.

    compile: torch.compile and CUDA graphs. None: CUDA graphs on a GPU from 200 steps on, with hand-written kernels where there
    are any and torch.compile elsewhere.
    """

    device: str = "auto"
    compile: bool | None = None
    log_every: int | None = None  # steps per line of metrics.jsonl; None: 20, fewer in a short run
    eval_every: int | None = None  # steps between evaluations; None: see `evaluation_interval`; 0: only at the end
    checkpoint_seconds: float = 120.0
    cache_dir: Path | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.checkpoint_seconds < math.inf:
            raise FinesslError(f"--checkpoint-seconds {self.checkpoint_seconds:g} should be a number of at least 0.")
        if self.eval_every is not None and self.eval_every < 0:
            raise FinesslError(f"--eval-every {self.eval_every} should be at least 0.")
        if self.log_every is not None and self.log_every < 1:
            raise FinesslError(f"log_every = {self.log_every} should be at least 1.")


def intervals(settings: Settings, experiment: Experiment) -> tuple[int, int, int]:
    """Steps between two lines of metrics, between two lines of diagnostics, and between evaluations (0: only at the end)."""
    train, eval_every = experiment.recipe.train, settings.eval_every
    if eval_every is None:
        eval_every = evaluation_interval(train, experiment.images_per_step, len(experiment.test_index))
    return settings.log_every or min(20, max(1, train.steps // 50)), diagnostics_interval(train), eval_every


def diagnostics_interval(train: TrainRecipe) -> int:
    """Steps between two lines of diagnostics: an epoch, or a tenth of a run of fewer than ten epochs."""
    return min(train.epoch_steps, math.ceil(train.steps / EVALUATIONS))


def evaluation_interval(train: TrainRecipe, images_per_step: int, test_images: int) -> int:
    """Steps between evaluations, a multiple of `diagnostics_interval`: ten in a run, and fewer in a run of under ten
    epochs, where evaluations process at most half as many images as training does."""
    affordable = EVALUATIONS
    if train.steps < 10 * train.epoch_steps:
        affordable = train.steps * images_per_step // (2 * max(test_images, 1))
    interval = diagnostics_interval(train)
    lines = math.ceil(train.steps / interval)
    return interval * math.ceil(lines / min(max(affordable, 1), EVALUATIONS))


def check_out(run: RunDirectory, recipe: Recipe) -> None:
    """Refuse places where no run directory can be made."""
    with writing(run.path):
        if run.path.exists() and not run.path.is_dir():
            raise FinesslError(f"--out {run.path} is a file; name a folder.")
        source = Path(recipe.data.root or "", recipe.data.source).expanduser()
        if not (run.path.is_dir() and source.is_dir()):
            return
        if run.path.samefile(source):
            raise FinesslError(
                f"--out {run.path} is the data itself; name a folder of its own, {run.path / 'run'} say."
            )
        inside = run.path.resolve().is_relative_to(source.resolve())  # a run's folder is no part of the data
        if inside and not run.recipe_file.exists() and any(run.path.iterdir()):
            raise FinesslError(f"--out {run.path} is a folder of the data; name a new folder, {run.path / 'run'} say.")


def check_step_fits(recipe: Recipe, device: torch.device) -> None:
    """Refuse a step whose images alone are more than the device's memory."""
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**40
    needed = recipe.step_bytes(recipe.data.image_size or alias_of(recipe.model.backbone).image_size)
    needed //= int(os.environ.get("WORLD_SIZE", "1"))
    if needed > memory:
        raise FinesslError(
            f"the images of one step take {needed:,} bytes, and {device} has {memory:,}: make train.batch_size "
            f"({recipe.train.batch_size:,}), train.mu ({recipe.train.mu:,}), data.strong_views "
            f"({recipe.data.strong_views}) or data.image_size smaller."
        )
