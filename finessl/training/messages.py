"""What a training run prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from finessl.data.dataset import left_out
from finessl.errors import FinesslError, Stopped
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runtime.fp8 import Fp8Linear
from finessl.training.experiment import Experiment


def announcement(
    experiment: Experiment, run: RunDirectory, optimizer: torch.optim.Optimizer, precision: str, step: int
) -> Iterator[str]:
    """Lines about the data, the model and the step that the run starts from."""
    recipe, split, dataset = experiment.recipe, experiment.split, experiment.dataset
    yield from (*dataset.notes, *left_out(dataset.excluded))
    if dataset.given is not None and split.kind != "given":
        all_labels = int((dataset.given & (dataset.train_labels >= 0)).sum())
        if all_labels > len(split.labeled):
            yield (
                f"{all_labels - len(split.labeled):,} of the {all_labels:,} labels that the data gives are not used: "
                f"the split {split.kind} was asked for"
            )
    if dataset.excluded:
        yield f"all files that are left out: {run.path / 'skipped.csv'}"
    both = len(np.intersect1d(split.labeled, split.unlabeled))
    test = f"{len(experiment.test_index):,} test images" if len(experiment.test_index) else "no test images"
    yield (
        f"{dataset.name}: {len(split.classes)} classes, {len(split.labeled):,} labeled and "
        f"{len(split.unlabeled) - both:,} unlabeled training images, {test}"
        + ("; labeled images are also used without their labels" if both else "")
    )
    trainable, total = experiment.network.count()
    rounded = any(isinstance(module, Fp8Linear) for module in experiment.network.modules())
    yield (
        f"{recipe.model.backbone} at {experiment.image_size} px with {recipe.tuning.name}: "
        f"{trainable:,} of {total:,} parameters are trained, on {experiment.device} in {precision}"
        + (" (no frozen layer can be rounded: as bf16)" if precision == "fp8" and not rounded else "")
    )
    rates = {group["name"]: group["initial_lr"] for group in optimizer.param_groups}
    if len(set(rates.values())) > 1:
        yield f"learning rate {rates['heads']:g} for the heads, {rates['backbone']:g} inside the backbone"
    if step:
        yield f"resuming at step {step} of {recipe.train.steps}"


def progress_note(statistics: Mapping[str, float], at_step: int, accuracy: float | None, images_per_s: float) -> str:
    """Speed, test accuracy, loss and use of pseudo-labels. `at_step`: the step of the loss, where that is printed."""
    parts = [f"{images_per_s:,.0f} images/s"]
    if accuracy is not None:
        parts.append(f"test {accuracy:.2%}")
    if "loss" in statistics:
        parts.append(f"loss {statistics['loss']:.3f}" + (f" at step {at_step:,}" if at_step else ""))
    if "used" in statistics:
        parts.append(f"pseudo-labels {statistics['used']:.0%}")
    return "  ".join(parts)


def not_finite(run: RunDirectory, recipe: Recipe, step: int) -> FinesslError:
    """The loss is NaN or infinite."""
    kept = sorted(run.checkpoints.glob("step-*"))
    where = f"The checkpoint before it, {kept[-1].name}, is kept." if kept else "No checkpoint had been written yet."
    return FinesslError(
        f"the loss stopped being a finite number before step {step}. {where} Try a smaller --lr (now "
        f"{recipe.train.lr}), --set train.clip_norm=1, --set train.warmup=100 or --precision fp32, "
        "with another --out."
    )


def stopped(step: int, steps: int, signal: int) -> Stopped:
    return Stopped(f"stopped at step {step} of {steps}; the same command resumes there.", signal)


def out_of_memory_remedy(recipe: Recipe) -> str:
    train, data = recipe.train, recipe.data
    return (
        f"With another --out, try a smaller --batch-size (now {train.batch_size}), --mu (now {train.mu}), --strong-views "
        f"(now {data.strong_views}) or --image-size, --precision bf16, or a smaller --backbone."
    )
