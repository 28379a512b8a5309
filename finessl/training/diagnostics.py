"""What happened to the pseudo-labels. Recorded and saved, never used for training or for choosing a model.

While training, one line of metrics.jsonl per epoch, {"kind": "diagnostics", "step": …}, over the epoch's weak views:
    pseudo                                [C] pseudo-labels of each class
    truth, right                          [C] images of each class whose class is known, and those labeled rightly
    confidence, confidence_aux, weight    group → 100 equal bins of 0 … 1: max p of either head, the method's weight
    mean                                  the same three → group → mean
    pace, margin                          [C] class learning pace and margin at the epoch's end, where the method has them
Groups of images: correct, incorrect, novel (of a class the classifier does not have), unknown.

After training, RUN/unlabeled.npz (what the classifier says of a sample of the unlabeled images) and RUN/features.npz
(the features of the labeled images and of some unlabeled ones, from the pretrained backbone before tuning).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finessl.data.dataset import Dataset
from finessl.data.splits import Split
from finessl.frozen.features import FrozenEncoder, count_missing, encode_images
from finessl.inference.encode import encode
from finessl.methods.base import HeadOutputs, Method, Result
from finessl.models.backbones import create_backbone
from finessl.runs.directory import RESUMES
from finessl.runtime.files import write_arrays, writing
from finessl.training.evaluator import Evaluator

GROUPS = ("correct", "incorrect", "novel", "unknown")
BINS = 100
MILLION = 1_000_000  # sums are kept in millionths: integers add up to the same in any order, on any device
UNKNOWN, NOVEL = -1, -2
MAX_PREDICTED = 10_000  # unlabeled images that the classifier labels after training
MAX_ENCODED = 1_000  # unlabeled images that the untuned backbone encodes after training
MAX_LABELED = 50_000  # labeled images that it encodes: all, in a run with few labels
MIN_IMAGES = 64  # of either kind of unlabeled images, also in a short run
MAX_SHARE = 0.1  # of the images that training processed: what the classifier and the backbone process afterwards


def hidden_truth(dataset: Dataset, split: Split) -> np.ndarray:
    """[M] classes of the unlabeled images; UNKNOWN: nobody knows; NOVEL: known, and none of the classifier's.

    Images whose labels are trained on count as unknown: that the model repeats what it was told says nothing.
    """
    truth = split.labels(dataset)[split.unlabeled]
    truth[(truth < 0) & (dataset.train_labels[split.unlabeled] >= 0)] = NOVEL
    truth[np.isin(split.unlabeled, split.labeled)] = UNKNOWN
    return truth


class Diagnostics:
    """Observes the steps of a method: a few small operations on the device, no copy to the host. Adds to the step's
    statistics the share of pseudo-labels whose truth is known, and the share of correct ones."""

    def __init__(self, method: Method, truth: np.ndarray, device: torch.device) -> None:
        self.method = method
        self.truth = torch.from_numpy(truth).to(device)
        self.values = ("confidence", "confidence_aux", "weight") if method.aux else ("confidence", "weight")
        shape = (len(self.values), len(GROUPS))
        self.counts = torch.zeros(3, method.task.classes, dtype=torch.int64, device=device)  # pseudo, truth, right
        self.bins = torch.zeros(*shape, BINS, dtype=torch.int64, device=device)
        self.sums = torch.zeros(shape, dtype=torch.int64, device=device)
        self.rows = len(GROUPS) * torch.arange(len(self.values), device=device)[:, None]

    @torch.no_grad()
    def observe(self, weak: HeadOutputs | None, index: Tensor | None, result: Result) -> None:
        if result.pseudo is None or index is None:
            return
        pseudo, truth = result.pseudo, self.truth[index]
        given = pseudo >= 0  # self-training methods leave images without a pseudo-label
        known, right = given & (truth >= 0), given & (pseudo == truth)
        result.statistics |= {"pseudo_known": known.float().mean(), "pseudo_correct": right.float().mean()}
        if weak is None:
            return
        classes = self.counts.shape[1]
        slot = torch.cat([pseudo.clamp_min(0), classes + truth.clamp_min(0), 2 * classes + truth.clamp_min(0)])
        self.counts.view(-1).index_add_(0, slot, torch.cat([given, known, right]).long())

        weight = torch.ones_like(given, dtype=torch.float32) if result.weight is None else result.weight.float()
        heads = torch.stack([head for head in weak if head is not None])
        values = torch.cat([heads.float().softmax(-1).amax(-1), weight.clamp(0, 1)[None]])
        group = torch.where(truth == NOVEL, 2, torch.where(truth < 0, 3, 1 - right.long()))
        row = self.rows + group
        counted = given.long().expand_as(row)
        column = (values * BINS).long().clamp_(0, BINS - 1)
        self.bins.view(-1).index_add_(0, (row * BINS + column).view(-1), counted.reshape(-1))
        self.sums.view(-1).index_add_(0, row.view(-1), ((values * MILLION).round().long() * counted).view(-1))

    def take(self, step: int) -> dict[str, Any] | None:
        """The line for metrics.jsonl since the last call, or None when no pseudo-label was given."""
        counts, bins, sums = (tensor.numpy() for tensor in self.state_dict().values())
        for tensor in (self.counts, self.bins, self.sums):
            tensor.zero_()
        if not counts[0].any():
            return None
        line: dict[str, Any] = {"kind": "diagnostics", "step": step, "pseudo": counts[0].tolist(), "mean": {}}
        if counts[1].any():
            line |= {"truth": counts[1].tolist(), "right": counts[2].tolist()}
        for name, groups, totals in zip(self.values, bins, sums, strict=True):
            there = [(group, k) for k, group in enumerate(GROUPS) if groups[k].any()]
            line[name] = {group: groups[k].tolist() for group, k in there}
            line["mean"][name] = {group: round(totals[k] / MILLION / groups[k].sum(), 6) for group, k in there}
        for name, per_class in self.method.class_statistics().items():
            line[name] = [round(value, 4) for value in per_class.tolist()]
        return line

    def state_dict(self) -> dict[str, Tensor]:
        tensors = {"counts": self.counts, "bins": self.bins, "sums": self.sums}
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            getattr(self, name).copy_(tensor)


def evaluate_unlabeled(folder: Path, evaluator: Evaluator) -> None:
    """Write unlabeled.npz and, for a pretrained backbone, features.npz. Both process at most a share of the images that
    training has processed."""
    experiment = evaluator.experiment
    split, recipe = experiment.split, experiment.recipe
    others = np.flatnonzero(~np.isin(split.unlabeled, split.labeled))
    share = int(MAX_SHARE * recipe.train.steps * experiment.images_per_step)
    chosen = others[evenly(len(others), min(MAX_PREDICTED, max(MIN_IMAGES, share // 2)))]
    images = split.unlabeled[chosen]
    if len(chosen):
        main, *aux = evaluator.all_logits(experiment.store, images, "labeling unlabeled images")
        confidence, label = main.softmax(1).max(1)
        arrays = {
            "index": images,
            "label": label,
            "confidence": confidence,
            "truth": hidden_truth(experiment.dataset, split)[chosen],
        }
        if aux:
            arrays["confidence_aux"] = aux[0].softmax(1).amax(1)
        save(folder / "unlabeled.npz", arrays)
    if recipe.model.pretrained:
        some = images[evenly(len(images), min(MAX_ENCODED, max(MIN_IMAGES, share // 4)))]
        save(folder / "features.npz", untuned_features(evaluator, some))


def untuned_features(evaluator: Evaluator, unlabeled: np.ndarray) -> dict[str, Any]:
    """Features of the labeled images and of `unlabeled`, from the pretrained backbone before tuning: kept ones, where
    quick or the plan has encoded all of them."""
    experiment, model = evaluator.experiment, evaluator.experiment.recipe.model
    by_class = np.argsort(experiment.labels, kind="stable")
    chosen = by_class[evenly(len(by_class), MAX_LABELED)]
    labeled = experiment.split.labeled[chosen]
    backbone = create_backbone(model.backbone, weights=model.weights, image_size=experiment.image_size)
    encoder = FrozenEncoder(backbone, experiment.device, evaluator.precision)
    wanted = np.concatenate([labeled, unlabeled])
    images, progress = experiment.dataset.train.take(wanted), partial(evaluator.progress, "encoding without tuning")
    if not count_missing(images, encoder):
        rows = encode_images(images, encoder, progress=progress).rows
    else:  # from the decoded images; a run does not need a cache that it can write to
        features = encode(
            backbone.encoder,
            experiment.store,
            size=backbone.image_size,
            mean=backbone.mean,
            std=backbone.std,
            device=experiment.device,
            precision=evaluator.precision,
            indices=wanted,
            progress=progress,
        )
        rows = features.half().cpu().numpy()
    known, others = np.split(rows, [len(labeled)])
    return {
        "labeled": labeled,
        "labels": experiment.labels[chosen],
        "unlabeled": unlabeled,
        "labeled_features": known,
        "unlabeled_features": others,
    }


def evenly(count: int, most: int) -> np.ndarray:
    """All of `count` positions, or `most` of them at even distances."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).round().astype(np.int64)


def save(path: Path, arrays: dict[str, Any]) -> None:
    plain = {name: a.cpu().numpy() if isinstance(a, Tensor) else a for name, a in arrays.items()}
    with writing(path, RESUMES):
        write_arrays(path, plain)
