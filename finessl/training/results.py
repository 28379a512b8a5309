"""What a finished run writes: the classifier, its predictions, a sample of the unlabeled images, meta.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finessl.data.splits import Split
from finessl.recipe import Recipe
from finessl.runs.directory import RESUMES, RunDirectory
from finessl.runtime.device import describe_device
from finessl.runtime.files import write_arrays, writing
from finessl.runtime.machine import git_revision
from finessl.runtime.phases import Phases
from finessl.runtime.version import versions
from finessl.training.diagnostics import evaluate_unlabeled
from finessl.training.evaluator import Evaluator


@dataclass(frozen=True)
class Results:
    """What the loop knows at its end."""

    accuracy: float | None
    test_logits: Tensor | None  # None: the process was killed after the last checkpoint, or there are no test images
    seconds: float
    processes: int
    fingerprint: str  # of the data
    phases: Phases


def write_results(run: RunDirectory, evaluator: Evaluator, results: Results) -> dict[str, Any]:
    """Write everything; meta.json, which marks the run as finished, comes last. Returns its content."""
    experiment = evaluator.experiment
    recipe, test_logits = experiment.recipe, results.test_logits
    if experiment.test_store is not None and test_logits is None:
        test_logits = evaluator.test_logits()
    if evaluator.ema is not None:
        evaluator.ema.swap()  # for good: nothing is trained after this
    experiment.write_classifier(run.classifier)
    if test_logits is not None:
        arrays = {"logits": test_logits.numpy(), "labels": experiment.test_labels, "index": experiment.test_index}
        with writing(run.path, RESUMES):
            write_arrays(run.path / "predictions.npz", arrays)
    evaluate_unlabeled(run.path, evaluator)
    meta = run_meta(
        recipe, experiment.split, len(experiment.test_index), experiment.network.count(), experiment.device,
        recent=run.recent(recipe.train.epoch_steps), precision=evaluator.precision, accuracy=results.accuracy,
        seconds=results.seconds, fingerprint=results.fingerprint, weights_sha256=experiment.weights_sha256,
        processes=results.processes,
    )  # fmt: skip
    results.phases.end("results")
    meta["phases"] = results.phases.seconds
    run.write_meta(meta)
    return meta


def run_meta(
    recipe: Recipe,
    split: Split,
    test: int,
    parameters: tuple[int, int],
    device: torch.device,
    *,
    precision: str,
    accuracy: float | None,
    seconds: float,
    fingerprint: str,
    weights_sha256: str,
    processes: int = 1,
    recent: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """meta.json.   test: images.   parameters: trained ones, all.   recent: means over the last epoch."""
    return {
        "finished": True,
        "accuracy": accuracy,
        **(recent or {}),
        "steps": recipe.train.steps,
        "seconds": round(seconds, 1),
        "classes": len(split.classes),
        "labeled": len(split.labeled),
        "unlabeled": len(split.unlabeled),
        "test": test,
        "trained_parameters": parameters[0],
        "parameters": parameters[1],
        "data_fingerprint": fingerprint,
        "weights_sha256": weights_sha256,
        "device": describe_device(device),
        "precision": precision,
        "processes": processes,
        "versions": versions(),
        "revision": git_revision(),
    }
