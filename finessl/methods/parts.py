"""Parts that methods share: predictions, cross-entropy with margin, consistency loss, class learning pace, moving averages,
the entropy of the mean prediction.

Each computes in float32 or float64, never synchronises with the device, and costs O(batch · classes).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finessl.methods.base import Result


def full(logits: Tensor) -> Tensor:
    """Half-precision logits in float32; others unchanged."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


class Prediction(NamedTuple):
    """Prediction for a view, without gradient: p [n, C], max p [n] and argmax p [n]."""

    probabilities: Tensor
    confidence: Tensor
    label: Tensor


def predict(logits: Tensor) -> Prediction:
    """Of the logits [n, C]."""
    probabilities = full(logits.detach()).softmax(-1)
    confidence, label = probabilities.max(-1)
    return Prediction(probabilities, confidence, label)


def others(label: Tensor, classes: int) -> Tensor:
    """[n, C], False at the label: the classes other than the target."""
    return torch.arange(classes, device=label.device) != label[:, None]


def smooth(
    label: Tensor, classes: int, smoothing: float, form: Literal["c-1", "c"], dtype: torch.dtype | None = None
) -> Tensor:
    """Soft targets [n, C] of this dtype (None: the default).   classes: C.   smoothing: λ.   form: "c-1" puts 1 − λ on
    the label and λ/(C − 1) on each other class, "c" puts 1 − λ + λ/C and λ/C."""
    low = smoothing / (classes - 1) if form == "c-1" else smoothing / classes
    high = 1 - smoothing if form == "c-1" else 1 - smoothing + smoothing / classes
    other = others(label, classes).to(dtype or torch.get_default_dtype())
    return low * other + high * (1 - other)


def cross_entropy(logits: Tensor, target: Tensor, margin: Tensor | None = None) -> Tensor:
    """[n] losses. `target` holds class ids [n] or soft targets [n, C]; with a `margin` [C], balanced margin softmax.

    Eq. 3: H_m(y, z) = −log e^{z_y} / (e^{z_y} + Σ_{k≠y} e^{z_k + m_y}): the target's margin is added to the logits of
    all classes other than the target. Linear in a soft target, as the cross-entropy is: H_m(q, z) = Σ_k q_k H_m(k, z).
    """
    logits = full(logits)
    if target.ndim == 1:
        if margin is not None:
            logits = logits + margin[target][:, None] * others(target, logits.shape[-1])
        return F.cross_entropy(logits, target, reduction="none")
    losses = -logits.log_softmax(-1)
    if margin is not None:  # with p = softmax(z), e^{H_m(k, z)} = (p_k + e^{m_k} (1 − p_k)) / p_k
        losses = losses + torch.log1p(torch.expm1(margin) * (1 - logits.softmax(-1)))
    return (target.to(logits.dtype) * losses).sum(-1)


def over_views(values: Tensor, strong: Tensor) -> Tensor:
    """`values` [m] of the images, repeated for each strong view: [V·m], view-major."""
    return torch.cat([values] * (len(strong) // len(values)))


def consistency(strong: Tensor, target: Tensor, weight: Tensor, margin: Tensor | None = None) -> Tensor:
    """Mean over all images and views of weight · H_m(target, strong), including images of weight 0.   margin: m [C]."""
    return (over_views(weight, strong) * cross_entropy(strong, over_views(target, strong), margin)).mean()


def mean_of_selected(values: Tensor, selected: Tensor) -> Tensor:
    """Mean of the values whose mask `selected` is 1; 0 when there are none."""
    return (values * selected).sum() / selected.sum().clamp_min(1)


def result(
    loss: Tensor,
    labeled: Tensor,
    unlabeled: Tensor | None = None,
    prediction: Prediction | None = None,
    weight: Tensor | None = None,
    **more: Tensor,
) -> Result:
    """A `Result` with the statistics that all methods log.

    loss: of the step.   labeled, unlabeled: its parts, before their weights.   prediction, weight: of the weak views.
    more: further statistics by name.
    """
    statistics = {"loss_labeled": labeled}
    if unlabeled is not None:
        statistics["loss_unlabeled"] = unlabeled
    if weight is not None:
        statistics["used"] = (weight > 0).to(weight.dtype).mean()
    if prediction is not None:
        statistics["confidence"] = prediction.confidence.mean()
    statistics = {name: value.detach() for name, value in (statistics | more).items()}
    return Result(loss, statistics, None if prediction is None else prediction.label, weight)


class Average(nn.Module):
    """Exponential moving average v ← m·v + (1 − m)·x, where x is `new`.   start: initial v.   momentum: m.   from_first:
    the first x replaces `start`."""

    value: Tensor
    seen: Tensor

    def __init__(self, start: Tensor, momentum: float, *, from_first: bool = False) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("value", start)
        self.register_buffer("seen", torch.full((), 0.0 if from_first else 1.0))

    def update(self, new: Tensor) -> Tensor:
        keep = self.momentum * self.seen
        self.value.mul_(keep).add_((1 - keep) * new)
        self.seen.fill_(1.0)
        return self.value.clone()  # the next update must not change a returned value


class MarginalEntropy(nn.Module):
    """H(p̄) of the mean prediction p̄, which a loss may maximise so that no class is forgotten (TIM, Boudiaf et al. 2020).

    A batch has fewer images than there are classes. So p̄ is the mean of a queue of the last weak views, and its gradient is
    that of the batch's own mean: dH = −Σ_k (1 + log p̄(k)) dp̄_batch(k).   size: of the queue.   classes: C.
    """

    kept: Tensor
    place: Tensor

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.full((size, classes), 1 / classes))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, new: Tensor, trained: Tensor) -> Tensor:
        """new: [m, C] probabilities without gradient; they replace the oldest of the queue.   trained: [n, C], with
        gradient."""
        new = new[: len(self.kept)].to(self.kept.dtype)
        rows = (self.place + torch.arange(len(new), device=new.device)) % len(self.kept)
        self.kept.index_copy_(0, rows, new)
        self.place.add_(len(new)).remainder_(len(self.kept))
        batch = trained.mean(0)
        mean = self.kept.mean(0) + batch - batch.detach()
        return -(mean * mean.clamp_min(torch.finfo(mean.dtype).tiny).log()).sum()


class Pace(nn.Module):
    """Class learning pace (eq. 4): the last confident pseudo-label of each unlabeled image (−1: none yet), and the number of
    images per class, σ. FlexMatch's memory of selected labels is the same.   unlabeled, classes: M and C."""

    memory: Tensor
    counts: Tensor

    def __init__(self, unlabeled: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("memory", torch.full((unlabeled,), -1))
        self.register_buffer("counts", torch.zeros(classes, dtype=torch.int64))

    def reset(self) -> None:
        self.memory.fill_(-1)
        self.counts.zero_()

    def update(self, index: Tensor, label: Tensor, confident: Tensor, *, forget: bool = False) -> None:
        """Write the confident labels of a batch to the memory, and update σ. If an image occurs twice in the batch, its last
        write counts. All sums are of integers, so the result does not depend on the order in which a device adds.

        index: [m] positions in the unlabeled set.   label, confident: [m].   forget: images without confidence lose their
        label."""
        writes = last_of_each(index, torch.ones_like(confident) if forget else confident)
        old = self.memory[index]
        new = (label + 1) * confident - 1  # −1 without confidence
        self.memory.index_add_(0, index, writes * (new - old))
        self.counts.index_add_(0, new.clamp_min(0), (writes & (new >= 0)).long())
        self.counts.index_add_(0, old.clamp_min(0), -(writes & (old >= 0)).long())

    def relative(self, dtype: torch.dtype, *, count_unselected: bool = False) -> Tensor:
        """β(k) = σ(k) / max σ [C], of this dtype; 0 until an image is selected.   count_unselected: the number of images
        that were never selected takes part in the maximum (FlexMatch's −1 bucket)."""
        most = self.counts.max().clamp_min(1)
        if count_unselected:
            most = torch.maximum(most, len(self.memory) - self.counts.sum())
        return self.counts.to(dtype) / most


def last_of_each(index: Tensor, marked: Tensor) -> Tensor:
    """[n] mask of the last marked entry of each index. A sort, O(n log n)."""
    position = torch.arange(len(index), device=index.device)
    order = ((2 * index + marked) * len(index) + position).argsort()  # by index, then marked, then position
    ordered = index[order]
    last = torch.cat([ordered[1:] != ordered[:-1], marked.new_ones(1)])
    return torch.zeros_like(marked).scatter(0, order, last) & marked
