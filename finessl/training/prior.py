"""What frozen features say of the unlabeled images, as a prior on their pseudo-labels: `--set train.prior=1`.

Label propagation over the features of the untouched backbone (frozen/) gives soft labels z. In the weak views of step t,

    logits + λ_t log((1 − ε) z + ε/C),   λ_t = max(1 − t / (prior · steps), 0)

take the place of the logits, so that the pseudo-labels of the first steps follow z and those of the last the network.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from finessl.frozen.choose import Pile, representatives
from finessl.frozen.features import FrozenEncoder, encode_images
from finessl.frozen.solvers import BLOCK, Distiller, feature_centre, prepare, propagate, shares
from finessl.methods.base import HeadOutputs
from finessl.runs.inputs import open_backbone
from finessl.runtime.callbacks import Progress

if TYPE_CHECKING:
    from finessl.training.experiment import Experiment

FLOOR = 0.1  # ε: no class is excluded


class Prior:
    """log z of the unlabeled images, with its present weight (a tensor on the device, which a captured step reads)."""

    def __init__(self, soft: Tensor, share: float, steps: int) -> None:
        self.log = ((1 - FLOOR) * soft + FLOOR / soft.shape[1]).log()
        self.weight = torch.ones((), device=soft.device)
        self.steps = share * steps

    def before_step(self, step: int) -> None:
        self.weight.fill_(max(1 - step / self.steps, 0.0))

    def apply(self, weak: HeadOutputs, index: Tensor) -> HeadOutputs:
        """index: [m] positions in the unlabeled set."""
        change = self.weight * self.log[index]
        return weak._replace(logits=weak.logits + change, aux=None if weak.aux is None else weak.aux + change)


def frozen_prior(experiment: Experiment, precision: str, progress: Progress) -> Prior | None:
    """The prior that the recipe asks for. Features come from the cache where they are kept."""
    recipe, split, device = experiment.recipe, experiment.split, experiment.device
    if not recipe.train.prior or experiment.method.weak is None:
        return None
    encoder = FrozenEncoder(open_backbone(recipe), device, "fp32" if precision == "fp32" else "bf16")
    features = encode_images(
        experiment.dataset.train, encoder, progress=lambda done, total: progress("encoding images", done, total)
    )
    pile = np.union1d(split.labeled, split.unlabeled)
    y = np.full(len(pile), -1)
    y[np.searchsorted(pile, split.labeled)] = experiment.labels
    soft = soft_labels(features.rows[pile], y, len(split.classes), device)
    wanted = torch.from_numpy(np.searchsorted(pile, split.unlabeled)).to(device)
    return Prior(soft[wanted], recipe.train.prior, recipe.train.steps)


def soft_labels(rows: np.ndarray, y: np.ndarray, classes: int, device: torch.device) -> Tensor:
    """z [n, C]: propagated labels; in a large set those of a sample, and for the others a linear fit of them.

    rows: features [n, d].   y: labels [n], −1: none.
    """
    kept = representatives(y >= 0)
    centre = feature_centre(rows[kept]).to(device)
    x = prepare(rows[kept], centre)
    propagated = propagate(Pile(x).graph, torch.from_numpy(y[kept]).to(device), classes)
    if len(kept) == len(rows):
        return propagated
    fit = replace(Distiller(x).fit(propagated), scale=1.0)
    parts = [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
    soft = torch.cat([shares(fit.logits(prepare(part, centre)).clamp_min(0)) for part in parts])
    soft[torch.from_numpy(kept).to(device)] = propagated
    return soft
