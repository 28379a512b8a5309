"""Self-training on the K most confident images per class: what FPL, IFPL and GRIP share (Menghini et al., NeurIPS 2023,
https://arxiv.org/abs/2306.01669).

    1. a teacher labels the unlabeled set; the best K images of each class get a pseudo-label (`leaderboard`)
    2. a student, initialised anew, trains on    L = b · mean H(y, z_x) + mean H(pseudo-label, z_w)
    3. the student is the next iteration's teacher

The first teacher was zero-shot CLIP. Without a text tower there is none, so the model first trains on labeled images
alone for a share `warmup` of the steps: 0.1, about as long as one of ten iterations. When the head starts from text
features, `warmup = 0` is the original. The remaining steps are divided evenly among the iterations; each is a `phase`.

Sources disagree on the loss balance b: the authors' one-shot path (FPL) has |pseudo|/|labeled|, their iterative path
(IFPL, GRIP) the inverse. `balance` is each method's own by default, and "none" is b = 1.
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
    weak = "grad"
    strong = False
    labeled_in_unlabeled = False  # the authors take labeled images out of the unlabeled set
    pseudo: Tensor  # [M] pseudo-label of each unlabeled image, −1 for none
    ratio: Tensor  # b
    iteration: Tensor  # pseudo-labels were made so many times

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
        """K, the pseudo-labels per class in this iteration (the first is 1)."""
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
    """[M] pseudo-labels, −1 for none: each class keeps its `shots` most probable images.

    An image asks for its most probable class; if that is full of better ones, for the next one that has room or a
    weaker entry, and so does an image that is pushed out. Whatever the order of the images, the result is the one where
    no image and class prefer each other to what they got. (The authors go through the images once, in order, and drop
    those pushed out.) Ties: the earlier class; the image that came to the class first, then the earlier image.
    """
    images, classes = probabilities.shape
    place = np.full(images, -1)
    bar = np.full(classes, -np.inf)  # what a newcomer must beat: the weakest entry of a full class
    asking = np.arange(images)
    while len(asking):
        open_to = np.where(probabilities[asking] > bar, probabilities[asking], -np.inf)
        choice = open_to.argmax(1)
        welcome = open_to[np.arange(len(asking)), choice] > -np.inf  # bars only rise: the others are out for good
        asking, choice = asking[welcome], choice[welcome]
        incumbent = np.flatnonzero(place >= 0)
        place[asking] = choice
        placed = np.concatenate([incumbent, asking])
        order = placed[np.lexsort((-probabilities[placed, place[placed]], place[placed]))]  # by class, best first
        rank = np.arange(len(order)) - np.searchsorted(place[order], place[order])
        last = order[rank == shots - 1]
        bar[place[last]] = probabilities[last, place[last]]
        asking = np.sort(order[rank >= shots])
        place[asking] = -1
    return place
