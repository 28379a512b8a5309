"""The training loop: `train(recipe, out)` makes or resumes a run directory.

finessl train DATA --out RUN
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finessl.data.dataset import Dataset, left_out
from finessl.data.loader import Prefetcher
from finessl.data.pixel_store import PixelStore
from finessl.data.sampler import DROPOUT, generator
from finessl.errors import FinesslError, Stopped
from finessl.inference.encode import accuracy, encode
from finessl.models.aliases import alias_of
from finessl.models.build import store_frozen
from finessl.recipe import Recipe, TrainRecipe
from finessl.registry import plugins
from finessl.runs import checkpoint
from finessl.runs.directory import RESUMES, RunDirectory
from finessl.runs.inputs import check_places
from finessl.runs.metrics_log import MetricsLog, holds_metrics
from finessl.runtime.compile import start_compilers
from finessl.runtime.device import describe_device, resolve_device
from finessl.runtime.distributed import Processes, processes
from finessl.runtime.files import write_arrays, writing
from finessl.runtime.fp8 import Fp8Linear
from finessl.runtime.machine import git_revision
from finessl.runtime.precision import DTYPES, resolve_precision
from finessl.runtime.progress import Display
from finessl.runtime.version import __version__
from finessl.training.averages import Averages
from finessl.training.cuda_graph import accelerate, answering, compiles
from finessl.training.diagnostics import Diagnostics, evaluate_unlabeled, hidden_truth
from finessl.training.experiment import Experiment, prepare
from finessl.training.feature_cache import CachedLoader
from finessl.training.step import TrainingStep, all_finite, lr_factor


@dataclass(frozen=True)
class Settings:
    """How a run is carried out. `device` and `compile` change the result within rounding, the rest not at all."""

    device: str = "auto"
    compile: bool | None = None  # and record the step (see acceleration.py); None: on a GPU, where the run repays it
    log_every: int | None = None  # steps per line of metrics.jsonl; None: 20, fewer in a short run
    eval_every: int | None = None  # steps between evaluations; None: see `evaluation_steps`; 0: only at the end
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


def train(
    recipe: Recipe, out: str | Path, settings: Settings | None = None, dataset: Dataset | None = None
) -> dict[str, Any]:
    """Run the recipe in directory `out` to its end, from wherever an earlier try stopped; returns meta.json's content."""
    settings = settings or Settings()
    run = RunDirectory(out)
    plugins.load(recipe.plugins, outside=run.path)
    recipe = recipe.checked(source=dataset is None and not run.finished())
    device = resolve_device(settings.device)
    check_step_fits(recipe, device)
    with (
        processes(str(device)) as team,
        Display(quiet=settings.quiet or not team.first) as display,
        contextlib.ExitStack() as held,
    ):
        team.first_does(lambda: check_out(run, recipe))
        if team.share(run.finished()):
            team.first_does(lambda: check_places(run, recipe, run.check(recipe), dataset))
            display.say(f"{run.path} is finished: nothing to do. Its figures are in {run.meta_file}.")
            return run.meta()
        team.first_does(lambda: held.enter_context(run.held(recipe)))
        return Training(recipe, run, settings, device, team, display, dataset).run_to_end()


def check_out(run: RunDirectory, recipe: Recipe) -> None:
    """Refuse places where no run directory can be made."""
    with writing(run.path):
        if run.path.exists() and not run.path.is_dir():
            raise FinesslError(f"--out {run.path} is a file; name a folder.")
        source = Path(recipe.data.root or "", recipe.data.source).expanduser()
        if run.path.is_dir() and source.is_dir() and run.path.samefile(source):
            raise FinesslError(
                f"--out {run.path} is the data itself; name a folder of its own, {run.path / 'run'} say."
            )


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


def recording_steps(train: TrainRecipe) -> int:
    """Steps between two records of the diagnostics: an epoch, or a tenth of a run of fewer than ten epochs."""
    return min(train.epoch_steps, math.ceil(train.steps / 10))


def evaluation_steps(train: TrainRecipe, most: int = 10) -> int:
    """Steps between evaluations, `most` of which are affordable (1 to 10): whole records, about ten in a run."""
    every = recording_steps(train)
    return every * math.ceil(math.ceil(train.steps / every) / most)


class Training:
    """The state of one run, between its steps."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        settings: Settings,
        device: torch.device,
        team: Processes,
        display: Display,
        dataset: Dataset | None = None,
    ) -> None:
        self.recipe, self.run, self.settings, self.device = recipe, run, settings, device
        self.team, self.display = team, display
        self.precision = resolve_precision(recipe.train.precision, device)
        if device.type == "cuda" and compiles(settings.compile, device, recipe.train.steps):
            start_compilers()
        self.experiment: Experiment = prepare(
            recipe,
            run,
            device,
            dataset=dataset,
            cache_dir=settings.cache_dir,
            progress=display.update,
            writes=team.first,
        )
        team.wait()
        network, method = self.experiment.network, self.experiment.method
        self.optimizer = self.experiment.optimizer()
        plain = TrainingStep(network, method, self.optimizer, recipe.train, device, self.precision, team)
        self.training_step = accelerate(plain, compile=settings.compile, steps=recipe.train.steps)
        self.answer, self.rows = answering(self.training_step, network)
        self.loader = self.experiment.loader(team, DTYPES[self.precision])
        self.prefetcher = Prefetcher(self.loader, recipe.train.steps)
        self.diagnostics = Diagnostics(method, hidden_truth(self.experiment.dataset, self.experiment.split), device)
        self.step = 0
        self.elapsed = 0.0  # seconds spent in earlier tries
        self.averages = Averages(device)  # since the last line of metrics
        self.latest: dict[str, float] = {}
        self.latest_step = 0
        self.log_every = settings.log_every or min(20, max(1, recipe.train.steps // 50))
        self.metrics_size = 0
        self.accuracy: float | None = None
        self.test_logits: Tensor | None = None
        self.identity = self.experiment.identity()
        self.resume()
        team.first_does(lambda: run.open(recipe))  # data or weights may be at another place than before
        store_frozen(network.encoder, self.precision)
        if isinstance(self.loader, CachedLoader):
            self.loader.fill(network, recipe.train.cache_features, self.precision, display.update)

    # ---- the run ----------------------------------------------------------------------------------------------------

    def run_to_end(self) -> dict[str, Any]:
        train, settings = self.recipe.train, self.settings
        self.announce()
        eval_every = self.evaluation_steps() if settings.eval_every is None else settings.eval_every
        record_every = recording_steps(train)
        self.log = MetricsLog(self.run.metrics_file, self.metrics_size) if self.team.first else None
        self.started = saved = time.monotonic()
        first_step, shown = self.step, 0.0
        self.experiment.network.train()
        with interruption(self.team.world) as interrupted:
            while self.step < train.steps:
                self.refresh()
                views = self.prefetcher.get(self.step)
                self.seed_dropout()
                self.experiment.tuning.before_step(self.step, train.steps)
                result = self.training_step(self.step, views)
                self.step += 1
                self.prefetcher.prepare(self.step)
                self.write_metrics()
                self.averages.add(result)

                # once in a while: a line of metrics, an evaluation, a checkpoint
                if self.step % self.log_every == 0 or self.step == train.steps:
                    self.averages.send(self.step)
                if self.step % record_every == 0 or self.step == train.steps:
                    self.write_diagnostics()
                if (eval_every and self.step % eval_every == 0) or self.step == train.steps:
                    self.evaluate()
                now = time.monotonic()
                if now - shown > 0.2:
                    speed = (self.step - first_step) / (now - self.started)
                    self.display.update("training", self.step, train.steps, self.note(speed))
                    shown = now
                if (asked := self.asked(interrupted())) is not None:
                    self.save()
                    if not self.team.first:
                        raise SystemExit(128 + asked)
                    raise Stopped(
                        f"stopped at step {self.step} of {train.steps}; the same command resumes there.", asked
                    )
                if now - saved > settings.checkpoint_seconds and self.step < train.steps:
                    self.save()
                    saved = time.monotonic()
        self.save()
        return self.finish()

    def evaluation_steps(self) -> int:
        """In a run of under ten epochs, evaluations process at most half as many images as training does."""
        train, tested = self.recipe.train, max(len(self.experiment.test_index), 1)
        short = train.steps < 10 * train.epoch_steps
        most = train.steps * self.experiment.images_per_step // (2 * tested) if short else 10
        return evaluation_steps(train, min(max(most, 1), 10))

    def asked(self, signal: int) -> int | None:
        """The signal that asked for a stop, in any process. On GPUs the processes agree only as often as they log,
        because the host waits for the device then."""
        if self.team.world > 1:
            if self.device.type != "cpu" and self.step % self.log_every:
                return None
            signal = self.team.highest(signal)
        return signal or None

    def announce(self) -> None:
        experiment = self.experiment
        trained, total = experiment.network.count()
        split, dataset = experiment.split, experiment.dataset
        test = f"{len(experiment.test_index):,} test images" if len(experiment.test_index) else "no test images"
        for line in (*dataset.notes, *left_out(dataset.excluded)):
            self.display.say(line)
        if dataset.given is not None and split.kind != "given":
            all_labels = int((dataset.given & (dataset.train_labels >= 0)).sum())
            if all_labels > len(split.labeled):
                self.display.say(
                    f"{all_labels - len(split.labeled):,} of the {all_labels:,} labels that the data gives are not used: "
                    f"the split {split.kind} was asked for"
                )
        if dataset.excluded:
            self.display.say(f"all files that are left out: {self.run.path / 'skipped.csv'}")
        both = len(np.intersect1d(split.labeled, split.unlabeled))
        self.display.say(
            f"{dataset.name}: {len(split.classes)} classes, {len(split.labeled):,} labeled and "
            f"{len(split.unlabeled) - both:,} unlabeled training images, {test}"
            + ("; labeled images are also used without their labels\n" if both else "\n")
            + f"{self.recipe.model.backbone} at {experiment.image_size} px with {self.recipe.tuning.name}: "
            f"{trained:,} of {total:,} parameters are trained, on {self.device} in {self.precision}"
            + self.note_rounding()
            + self.note_rates()
            + (f"\nresuming at step {self.step} of {self.recipe.train.steps}" if self.step else "")
        )

    def note_rounding(self) -> str:
        rounded = any(isinstance(module, Fp8Linear) for module in self.experiment.network.modules())
        return " (nothing frozen here can be rounded: as bf16)" if self.precision == "fp8" and not rounded else ""

    def note_rates(self) -> str:
        """The learning rates, where the backbone has one of its own."""
        rates = {group["name"]: group["full_lr"] for group in self.optimizer.param_groups}
        if len(set(rates.values())) < 2:
            return ""
        return f"\nlearning rate {rates['heads']:g} for the heads, {rates['backbone']:g} inside the backbone"

    def refresh(self) -> None:
        """Self-training methods look at all unlabeled images now and then, and may start the model afresh."""
        experiment, method = self.experiment, self.experiment.method
        if not method.refresh_at(self.step):
            return
        logits = self.predict(experiment.store, experiment.split.unlabeled)
        if method.refresh(logits.softmax(1)):
            experiment.network.reset()
            self.training_step.forget()
        self.use_pool()

    def use_pool(self) -> None:
        pool = self.experiment.method.pool()
        self.loader.draw_from(None if pool is None else pool.cpu().numpy())
        self.prefetcher.forget()

    def seed_dropout(self) -> None:
        if self.experiment.network.random:
            torch.manual_seed(int(generator(self.recipe.seed, DROPOUT, self.step).integers(2**62)) + self.team.rank)

    # ---- figures ----------------------------------------------------------------------------------------------------

    def write_metrics(self) -> None:
        """The means that were sent for, if any were (the one place of the loop that waits for the device)."""
        taken = self.averages.take()
        if taken is None:
            return
        step, row = taken
        if not math.isfinite(row["loss"]):
            raise self.not_finite()
        known, correct = row.pop("pseudo_known", 0.0), row.pop("pseudo_correct", 0.0)
        if known:
            row["pseudo_accuracy"] = correct / known
        self.latest, self.latest_step = row, step
        if self.log:
            phase = self.experiment.method.phase(step - 1)
            lr = self.recipe.train.lr * lr_factor(self.recipe.train, step - 1, phase)
            self.log.write({"kind": "train", "step": step, "lr": lr, **row})

    def write_diagnostics(self) -> None:
        self.write_metrics()
        line = self.diagnostics.take(self.step)
        if self.log and line:
            self.log.write(line)

    def predict(self, store: PixelStore, indices: np.ndarray | None = None, label: str = "evaluating") -> Tensor:
        """Logits of the main head for whole images, without augmentation."""
        experiment, network = self.experiment, self.experiment.network
        network.eval()
        logits = encode(
            lambda images: self.answer(images).logits,
            store,
            size=experiment.image_size,
            mean=experiment.mean,
            std=experiment.std,
            device=self.device,
            precision=self.precision,
            indices=indices,
            rows=self.rows,
            progress=lambda done, total: self.display.update(label, done, total),
        )
        network.train()
        return logits

    def evaluate(self) -> None:
        experiment = self.experiment
        self.write_metrics()
        if experiment.test_store is None or self.log is None:
            return
        self.test_logits = self.predict(experiment.test_store, experiment.test_index).cpu()
        self.accuracy = accuracy(self.test_logits, experiment.test_labels)
        self.log.write({"kind": "test", "step": self.step, "accuracy": self.accuracy})
        if not self.display.live:
            self.display.say(f"step {self.step}: test accuracy {self.accuracy:.2%}")

    def note(self, speed: float) -> str:
        parts = [f"{speed * self.experiment.images_per_step:,.0f} images/s"]
        if "loss" in self.latest:
            when = f" at step {self.latest_step:,}" if self.latest_step and not self.display.live else ""
            parts.append(f"loss {self.latest['loss']:.3f}{when}")
        if "used" in self.latest:
            parts.append(f"pseudo-labels used {self.latest['used']:.0%}")
        if self.accuracy is not None:
            parts.append(f"test {self.accuracy:.2%}")
        return "  ".join(parts)

    def not_finite(self) -> FinesslError:
        kept = sorted(self.run.checkpoints.glob("step-*"))
        where = (
            f"The checkpoint before it, {kept[-1].name}, is kept." if kept else "No checkpoint had been written yet."
        )
        return FinesslError(
            f"the loss stopped being a finite number before step {self.step}. {where} Try a smaller --lr (now "
            f"{self.recipe.train.lr}), --set train.clip_norm=1, --set train.warmup=100 or --precision fp32, "
            "with another --out."
        )

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(self) -> None:
        self.write_metrics()
        if self.log is None:
            return
        trained = self.experiment.network.trainable_state_dict()
        if not all_finite(list(trained.values())):
            raise self.not_finite()
        state = {
            "step": self.step,
            "accuracy": self.accuracy,
            "latest": self.latest,
            **self.log.sync(),
            "elapsed": self.elapsed + time.monotonic() - self.started,
            "diagnostics": self.diagnostics.state(),
            "identity": self.identity,
            **self.averages.state(),
            **self.training_step.state(),
        }
        checkpoint.save(self.run.checkpoints, self.step, trained, state)

    def resume(self) -> None:
        run, metrics = self.run, self.run.metrics_file
        found = checkpoint.newest(run.checkpoints, lambda state: holds_metrics(metrics, state))
        if found is None:
            if checkpoint.newest(run.checkpoints) is not None:
                raise FinesslError(
                    f"{metrics} is cut or changed: it lacks lines that were written before the checkpoint. "
                    f"Restore it, or remove {run.path} and train again."
                )
            return
        trained, state = found
        recorded = state.get("identity")  # older checkpoints have none
        if recorded and (changes := self.experiment.changes(recorded)):
            raise FinesslError(
                f"{run.path} cannot resume, because these have changed since its checkpoint: {', '.join(changes)}. "
                "Restore them, or train again with another --out."
            )
        drawn = not self.experiment.backbone.pretrained and self.experiment.tuning.name != "full"
        if not recorded and drawn and self.recipe.seed:
            raise FinesslError(
                f"{run.path} was begun by an older finessl, whose backbones without pretrained weights did not follow "
                "the seed. Train again with another --out."
            )
        try:
            self.experiment.network.load_trainable_state_dict(trained)
            self.training_step.load(state)
            self.diagnostics.load(state["diagnostics"])
            self.averages.load(state)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise FinesslError(
                f"the checkpoint of step {state['step']} in {run.path} does not fit its recipe and data "
                f"({str(error).splitlines()[0]}). Train again with another --out."
            ) from error
        self.step, self.accuracy, self.elapsed = state["step"], state["accuracy"], state["elapsed"]
        self.latest, self.metrics_size = state["latest"], state["metrics_size"]
        self.use_pool()

    def finish(self) -> dict[str, Any]:
        self.team.wait()
        if self.log is None:
            return {}
        self.log.close()
        experiment = self.experiment
        experiment.write_classifier(self.run.classifier)
        if experiment.test_store is not None:
            if self.test_logits is None:  # stopped between the last checkpoint and here
                self.test_logits = self.predict(experiment.test_store, experiment.test_index).cpu()
            arrays = {
                "logits": self.test_logits.numpy(),
                "labels": experiment.test_labels,
                "index": experiment.test_index,
            }
            with writing(self.run.path, RESUMES):
                write_arrays(self.run.path / "predictions.npz", arrays)
        evaluate_unlabeled(
            self.run.path, experiment, self.answer, self.rows, precision=self.precision, progress=self.display.update
        )
        trained, total = experiment.network.count()
        meta = {
            "finished": True,
            "accuracy": self.accuracy,
            **self.run.recent(self.recipe.train.epoch_steps),
            "steps": self.step,
            "seconds": round(self.elapsed + time.monotonic() - self.started, 1),
            "classes": len(experiment.split.classes),
            "labeled": len(experiment.split.labeled),
            "unlabeled": len(experiment.split.unlabeled),
            "test": len(experiment.test_index),
            "trained_parameters": trained,
            "parameters": total,
            "data_fingerprint": self.identity["data"],
            "weights_sha256": experiment.weights_sha256,
            "device": describe_device(self.device),
            "precision": self.precision,
            "processes": self.team.world,
            "versions": versions(),
            "revision": git_revision(),
        }
        self.run.write_meta(meta)
        return meta


@contextlib.contextmanager
def interruption(world: int) -> Iterator[Callable[[], int]]:
    """Ctrl-C and SIGTERM ask for a stop after the step: the number of the signal, or 0. A second Ctrl-C stops at once,
    but not under torchrun, which sends each process the signal that the terminal has sent already."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked and number == signal.SIGINT and world == 1:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the caller's own business
        before = {}
    try:
        yield lambda: asked[0] if asked else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def versions() -> dict[str, str]:
    import timm

    return {
        "finessl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
    }
