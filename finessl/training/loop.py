"""The training loop: `train(recipe, out)` makes or resumes a run directory.

`Training.run` reads top to bottom: views, step, log, evaluate, checkpoint. A run that is killed and started again resumes
bit-exactly: every random choice follows from the seed and the step number, and a checkpoint holds everything else that a
step depends on. What a finished run writes is in results.py, what a run prints in messages.py.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finessl.data.dataset import Dataset
from finessl.data.loader import Prefetcher
from finessl.inference.encode import accuracy
from finessl.models.build import store_frozen
from finessl.models.tuning import keeps_blocks_frozen
from finessl.recipe import Recipe
from finessl.registry import plugins
from finessl.runs import checkpoint
from finessl.runs.directory import RunDirectory
from finessl.runs.inputs import check_places
from finessl.runs.metrics_log import MetricsLog
from finessl.runtime.compile import start_compilers
from finessl.runtime.device import memory_errors, resolve_device
from finessl.runtime.distributed import Processes, processes
from finessl.runtime.phases import Phases
from finessl.runtime.precision import DTYPES, resolve_precision
from finessl.runtime.progress import Display
from finessl.runtime.signals import stop_requests
from finessl.training.averages import Averages
from finessl.training.cuda_graph import compile_and_capture, make_forward, should_compile
from finessl.training.diagnostics import Diagnostics, hidden_truth
from finessl.training.evaluator import Evaluator
from finessl.training.experiment import prepare
from finessl.training.feature_cache import CachedLoader
from finessl.training.known import known_labels
from finessl.training.messages import announcement, not_finite, out_of_memory_remedy, progress_note, stopped
from finessl.training.prior import frozen_prior
from finessl.training.results import Results, write_results
from finessl.training.settings import FIRST_STEPS, Settings, check_out, check_step_fits, intervals
from finessl.training.step import TrainingStep, all_finite, lr_factor


def train(
    recipe: Recipe, out: str | Path, settings: Settings | None = None, dataset: Dataset | None = None
) -> dict[str, Any]:
    """Run the recipe in directory `out` to its end, from its last checkpoint; returns the content of meta.json.

    settings: device, intervals and the like; None: the defaults.   dataset: images in memory, instead of the source that
    the recipe names.
    """
    settings, run = settings or Settings(), RunDirectory(out)
    plugins.load(recipe.plugins, outside=run.path)
    recipe = recipe.checked(source=dataset is None and not run.finished())
    check_step_fits(recipe, device := resolve_device(settings.device))
    with (
        processes(str(device)) as world,
        Display(quiet=settings.quiet or not world.first) as display,
        contextlib.ExitStack() as lock,
    ):
        world.on_first(lambda: check_out(run, recipe))
        if world.share(run.finished()):
            world.on_first(lambda: check_places(run, recipe, run.check(recipe), dataset))
            display.log(f"{run.path} is finished: nothing to do. Its figures are in {run.meta_file}.")
            return run.meta()
        world.on_first(lambda: lock.enter_context(run.held(recipe)))
        with memory_errors(device, out_of_memory_remedy(recipe)):
            return Training(recipe, run, settings, device, world, display, dataset).run()


class Training:
    """One run: its parts, and its state between two steps."""

    def __init__(
        self, recipe: Recipe, directory: RunDirectory, settings: Settings, device: torch.device, world: Processes,
        display: Display, dataset: Dataset | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.directory, self.settings = recipe, directory, settings
        self.world, self.display, self.phases = world, display, Phases()
        train, precision = recipe.train, resolve_precision(recipe.train.precision, device)
        compiles = device.type == "cuda" and should_compile(settings.compile, device, train.steps)
        by_hand = world.world_size == 1 and precision in ("bf16", "fp8") and keeps_blocks_frozen(recipe.tuning.name)
        compiles = compiles and (settings.compile is not None or not by_hand)
        compilers = start_compilers() if compiles else None
        self.experiment = experiment = prepare(
            recipe, directory, device, dataset=dataset, cache_dir=settings.cache_dir, progress=display.update,
            writes=world.first,
        )  # fmt: skip
        world.wait()
        if compilers is not None:
            compilers.join()
        network, self.optimizer = experiment.network, experiment.optimizer()
        eager = TrainingStep(network, experiment.method, self.optimizer, train, device, precision, world)
        eager.prior = frozen_prior(experiment, precision, display.update)
        eager.known = known_labels(experiment)
        self.training_step = compile_and_capture(eager, compile=settings.compile, steps=train.steps)
        self.evaluator = Evaluator(experiment, make_forward(self.training_step), precision, display.update, eager.ema)
        self.loader = experiment.loader(world, DTYPES[precision])
        self.prefetcher = Prefetcher(self.loader, train.steps)
        self.diagnostics = Diagnostics(experiment.method, hidden_truth(experiment.dataset, experiment.split), device)
        eager.observe = self.diagnostics.observe
        self.averages = Averages(device)  # of the statistics since the last line of metrics
        self.log_every, self.record_every, self.eval_every = intervals(settings, experiment)
        self.step, self.elapsed, self.metrics_size = 0, 0.0, 0  # elapsed: seconds spent in earlier processes
        self.latest: dict[str, float] = {}  # the last line of metrics
        self.latest_step = 0  # its step, once this process has written one
        self.accuracy: float | None = None
        self.test_logits: Tensor | None = None
        self.identity = experiment.identity()
        self.resume()
        world.on_first(lambda: directory.open(recipe))  # records new places of data and weights
        store_frozen(network.encoder, precision)  # after `resume`, which fills parameters in their own dtype
        if isinstance(self.loader, CachedLoader):
            self.loader.fill(network, train.cache_features, precision, display.update)
        self.phases.end("set-up")

    def run(self) -> dict[str, Any]:
        """The loop. Returns the content of meta.json."""
        train, experiment, settings = self.recipe.train, self.experiment, self.settings
        for line in announcement(experiment, self.directory, self.optimizer, self.evaluator.precision, self.step):
            self.display.log(line)
        self.log = MetricsLog(self.directory.metrics_file, self.metrics_size) if self.world.first else None
        self.started = saved = time.monotonic()
        first_step, shown = self.step, 0.0
        experiment.network.train()
        with stop_requests(self.world.world_size) as requested:
            while self.step < train.steps:
                self.refresh()
                views = self.prefetcher.get(self.step)
                experiment.seed_dropout(self.step, self.world.rank)
                experiment.tuning.before_step(self.step, train.steps)
                result = self.training_step(self.step, views)
                self.step += 1
                self.prefetcher.prepare(self.step)
                self.write_metrics()  # of an earlier step, while the device computes this one
                self.averages.add(result)

                last, now = self.step == train.steps, time.monotonic()
                if last or self.step % self.log_every == 0:
                    self.averages.send(self.step)
                if last or self.step % self.record_every == 0:
                    self.write_diagnostics()
                if last or (self.eval_every and self.step % self.eval_every == 0):
                    self.evaluate()
                if self.step == first_step + FIRST_STEPS:
                    self.phases.end("first steps")
                if now - shown > 0.2:
                    self.show((self.step - first_step) / (now - self.started))
                    shown = now
                if signal := self.world.stop_signal(requested(), self.step % self.log_every == 0):
                    self.save()
                    raise stopped(self.step, train.steps, signal) if self.world.first else SystemExit(128 + signal)
                if now - saved > settings.checkpoint_seconds and not last:
                    self.save()
                    saved = time.monotonic()
        self.save()
        self.world.wait()
        self.phases.end("training")
        if self.log is None:
            return {}
        self.log.close()
        seconds, data = self.elapsed + time.monotonic() - self.started, self.identity["data"]
        results = Results(self.accuracy, self.test_logits, seconds, self.world.world_size, data, self.phases)
        return write_results(self.directory, self.evaluator, results)

    # ---- step -------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Give a self-training method its predictions for all unlabeled images, when it asks for them."""
        experiment, method = self.experiment, self.experiment.method
        if not method.refresh_at(self.step):
            return
        logits = self.evaluator.logits(experiment.store, experiment.split.unlabeled)
        if method.refresh(logits.softmax(1)):
            experiment.network.reset()
            self.training_step.clear_optimizer()
        self.prefetcher.draw_from(method.pool())

    # ---- log --------------------------------------------------------------------------------------------------------

    def write_metrics(self) -> None:
        """Write the means that `averages` has sent, if any: the only wait of an ordinary step."""
        if (taken := self.averages.take()) is None:
            return
        step, row = taken
        if not math.isfinite(row["loss"]):
            raise not_finite(self.directory, self.recipe, self.step)
        self.latest, self.latest_step = row, step
        if self.log:
            factor = lr_factor(self.recipe.train, step - 1, self.experiment.method.phase(step - 1))
            self.log.write({"kind": "train", "step": step, "lr": self.recipe.train.lr * factor, **row})

    def write_diagnostics(self) -> None:
        self.write_metrics()
        if (line := self.diagnostics.take(self.step)) and self.log:
            self.log.write(line)

    def show(self, steps_per_s: float) -> None:
        speed, at_step = steps_per_s * self.experiment.images_per_step, 0 if self.display.live else self.latest_step
        note = progress_note(self.latest, at_step, self.accuracy, speed)
        self.display.update("training", self.step, self.recipe.train.steps, note)

    # ---- evaluate ---------------------------------------------------------------------------------------------------

    def evaluate(self) -> None:
        experiment = self.experiment
        self.write_metrics()
        if experiment.test_store is None or self.log is None:
            return
        self.test_logits = self.evaluator.test_logits()
        self.accuracy = accuracy(self.test_logits, experiment.test_labels)
        self.log.write({"kind": "test", "step": self.step, "accuracy": self.accuracy})
        if not self.display.live:
            self.display.log(f"step {self.step}: test accuracy {self.accuracy:.2%}")

    # ---- checkpoint -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        self.write_metrics()
        if self.log is None:
            return
        trainable = self.experiment.network.trainable_state_dict()
        if not all_finite(list(trainable.values())):
            raise not_finite(self.directory, self.recipe, self.step)
        state = {
            "step": self.step,
            "accuracy": self.accuracy,
            "latest": self.latest,
            **self.log.sync(),
            "elapsed": self.elapsed + time.monotonic() - self.started,
            "diagnostics": self.diagnostics.state_dict(),
            "identity": self.identity,
            **self.averages.state_dict(),
            **self.training_step.state_dict(),
        }
        checkpoint.save(self.directory.checkpoints, self.step, trainable, state)

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        if (found := checkpoint.newest_resumable(self.directory)) is None:
            return
        trainable, state = found
        self.experiment.check_resumable(self.directory, state.get("identity"))
        with checkpoint.fitting(self.directory, state["step"]):
            self.experiment.network.load_trainable_state_dict(trainable)
            self.training_step.load_state_dict(state)
            self.diagnostics.load_state_dict(state["diagnostics"])
            self.averages.load_state_dict(state)
        self.step, self.accuracy, self.elapsed = state["step"], state["accuracy"], state["elapsed"]
        self.latest, self.metrics_size = state["latest"], state["metrics_size"]
        self.prefetcher.draw_from(self.experiment.method.pool())
