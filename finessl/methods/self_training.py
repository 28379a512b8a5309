"""Self-training on the K most confident images per class, the common part of FPL, IFPL and GRIP (Menghini et al., NeurIPS
2023, https://arxiv.org/abs/2306.01669).

    1. A teacher predicts the unlabeled set; the best K images of each class get a pseudo-label (`leaderboard`).
    2. A re-initialised student trains on    L = b · mean H(y, z_x) + mean H(pseudo-label, z_w).
    3. The student is the teacher of the next iteration.

The authors' first teacher is zero-shot CLIP. Without a text tower, the model first trains on labeled images only for a share
`warmup` of the steps: 0.1, about one of ten iterations. With text features as initial head weights, `warmup = 0` is the
original. The remaining steps are divided evenly among the iterations; each is a `phase`.

Sources disagree on the loss balance b: the authors' one-shot code (FPL) has |pseudo|/|labeled|, their iterative code (IFPL,
GRIP) the inverse. The default of `balance` is the method's own; "none" is b = 1.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from finessl.errors import FinesslError
from finessl.methods.base import Batch, Method, Outputs, Result, Task, needed
from finessl.methods.parts import cross_entropy, mean_of_selected, predict, result
from finessl.registry.options import Count, Probability

Balance = Literal["pseudo/labeled", "labeled/pseudo", "none"]


class SelfTraining(Method):
    """iterations: rounds of teacher and student.   warmup: share of the steps on labeled images only.   balance: b, the
    weight of the labeled loss, as a quotient of the numbers of images."""

    weak = "grad"
    strong = False
    labeled_in_unlabeled = False  # the authors remove labeled images from the unlabeled set
    pseudo: Tensor  # [M] pseudo-label of each unlabeled image, −1 for none
    ratio: Tensor  # b
    iteration: Tensor  # number of times that pseudo-labels were made

    def __init__(self, task: Task, *, iterations: Count, warmup: Probability, balance: Balance) -> None:
        super().__init__(task)
        if balance != "none" and task.labeled < 1:
            raise FinesslError(f"method option balance = {balance} needs Task.labeled, the number of labeled images.")
        start = min(round(warmup * task.steps), task.steps - 1)
        # at least one step for each iteration
        self.iterations = max(1, min(iterations, task.steps - start))
        self.starts = [start + i * (task.steps - start) // self.iterations for i in range(self.iterations)]
        self.balance = balance
        self.register_buffer("pseudo", torch.full((task.unlabeled,), -1))
        self.register_buffer("ratio", torch.ones(()))
        self.register_buffer("iteration", torch.zeros((), dtype=torch.int64))

    def shots(self, iteration: int) -> int:
        """K, the number of pseudo-labels per class in `iteration`, counted from 1."""
        raise NotImplementedError

    def phase(self, step: int) -> tuple[int, int]:
        edges = sorted({0, *self.starts, self.task.steps})
        first = max(edge for edge in edges[:-1] if edge <= step)
        return first, edges[edges.index(first) + 1]

    def refresh_at(self, step: int) -> bool:
        return step in self.starts

    def refresh(self, probabilities: Tensor) -> bool:
        self.iteration += 1
        labels = leaderboard(probabilities.detach().float().cpu().numpy(), self.shots(int(self.iteration)))
        self.pseudo.copy_(torch.from_numpy(labels))
        count = int((labels >= 0).sum())
        if self.balance == "pseudo/labeled":
            self.ratio.fill_(count / self.task.labeled)
        elif self.balance == "labeled/pseudo":
            self.ratio.fill_(self.task.labeled / count)
        return self.starts[0] > 0 or int(self.iteration) > 1  # at step 0 nothing was trained yet

    def pool(self) -> Tensor | None:
        return (self.pseudo >= 0).nonzero().squeeze(1) if int(self.iteration) else None

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        weak = needed(outputs.weak, "weak view")
        p = predict(weak.logits)
        pseudo = self.pseudo[needed(batch.index, "index")]
        weight = (pseudo >= 0).to(p.confidence.dtype)
        labeled = cross_entropy(outputs.labeled.logits, batch.labels).mean()
        unlabeled = mean_of_selected(cross_entropy(weak.logits, pseudo.clamp_min(0)), weight)
        loss = self.ratio * labeled + unlabeled
        return result(loss, labeled, unlabeled, p._replace(label=pseudo), weight)


def leaderboard(probabilities: np.ndarray, shots: int) -> np.ndarray:
    """Stable matching of images to classes with `shots` slots per class, independent of the image order.

    Gale and Shapley 1962: each image proposes to its most probable class; a class keeps its `shots` most probable proposals
    and rejects the others, which propose to their next class. (The authors pass over the images once, in order, and drop
    rejected ones.) Ties: the earlier class; the image that was matched first, then the earlier image.

    probabilities: [M, C].   Returns [M] pseudo-labels, −1 for none.
    """
    images, classes = probabilities.shape
    match = np.full(images, -1)
    bar = np.full(classes, -np.inf)  # probability that a proposal must exceed: the lowest match of a full class
    proposing = np.arange(images)
    while len(proposing):
        acceptable = np.where(probabilities[proposing] > bar, probabilities[proposing], -np.inf)
        choice = acceptable.argmax(1)
        accepted = acceptable[np.arange(len(proposing)), choice] > -np.inf  # bars only rise: rejection by all is final
        proposing, choice = proposing[accepted], choice[accepted]
        incumbent = np.flatnonzero(match >= 0)
        match[proposing] = choice
        matched = np.concatenate([incumbent, proposing])
        order = matched[np.lexsort((-probabilities[matched, match[matched]], match[matched]))]  # by class, best first
        rank = np.arange(len(order)) - np.searchsorted(match[order], match[order])
        last = order[rank == shots - 1]
        bar[match[last]] = probabilities[last, match[last]]
        proposing = np.sort(order[rank >= shots])
        match[proposing] = -1
    return match
