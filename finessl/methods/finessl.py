"""FineSSL (Gan & Wei, ICML 2024, https://arxiv.org/abs/2405.11756).

    σ(k) = images whose pseudo-label is k with max p ≥ ζ,   β(k) = σ(k) / max σ                                 (eq. 4)
    m(k) = α_t Δ(k),   α_t = α (max β − min β),   Δ = (1 − β)/(1 + β) as released, 1 − β in the paper           (eq. 5)
    H_m(y, z) = −log e^{z_y} / (e^{z_y} + Σ_{k≠y} e^{z_k + m(y)})                                               (eq. 3)
    ψ = γ max p',   p' = softmax(z'_w) of the auxiliary head                                                    (eq. 7)
    L = mean H_m(y, z_x) + mean ψ H_m(ŷ, z_s) + mean H(y, z'_x) + mean H(q̃, z'_s),   ŷ = argmax p               (eq. 8)
    q̃ = ŷ smoothed by λ; as released the last mean is over the images with max p ≥ `aux_threshold` only         (eq. 6)

The released code's loss differs from the paper's text in nine switches. `form` sets all of them; a switch that is given
wins over it, one that is "form" (the default) follows it. How the released code trains (it replays labeled batches, in
pure fp16) is not reproduced.

switch          form = "released"                                             | form = "paper"
margin_shape    "ratio": Δ = (1−β)/(1+β)                                      | "linear": 1 − β
pace_reset      "epoch": σ is cleared every `task.epoch_steps` steps          | "never"
pace_update     "after": margins come from the steps before this one          | "before": this batch counts already
pace_forget     False: an image that loses its confidence keeps its old label | True: σ loses it
pace_empty      "zero": no margin while nothing is selected                   | "one": margin α for every class. The
                paper's algorithm sets Δ = 1 there and leaves α_t open; with β = 0 it would be 0 for every Δ, so α
aux_threshold   0.7                                                           | None: all images
aux_reduction   "selected": mean over the images that pass it                 | "all": over the whole batch
aux_margin      False                                                         | True: H_m(q̃, z') = Σ_k q̃_k H_m(k, z')
smoothing_form  "c-1": 1 − λ on ŷ, λ/(C−1) elsewhere                          | "c": 1 − λ + λ/C on ŷ, λ/C elsewhere

`without` takes parts away, as in the paper's ablations: "bms" (no margin), "margin-in-labeled", "dynamic-alpha"
(α_t = α), "dls" (no auxiliary head; weights from the main head's confidence), "ls" (λ = 0), "detach" (the auxiliary
losses reach the features). `min_weight` drops weights under it (released: th_min = 0). `marginal_entropy` is ours:
L − μ H(p̄) with the mean prediction p̄ of the last 5 C weak views.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from finessl.methods.base import Batch, HeadOutputs, Method, Outputs, Result, Task, needed
from finessl.methods.parts import (
    MarginalEntropy,
    Pace,
    Prediction,
    consistency,
    cross_entropy,
    full,
    mean_of_selected,
    over_views,
    predict,
    result,
    smooth,
)
from finessl.registry.options import Probability, Weight

Ablation = Literal["bms", "margin-in-labeled", "dynamic-alpha", "dls", "ls", "detach"]

QUEUE = 5  # weak views that the marginal entropy is measured on, per class

Open = Literal["form"]  # of a switch: as the form has it


class Switches(NamedTuple):
    margin_shape: str
    pace_reset: str
    pace_update: str
    pace_forget: bool
    pace_empty: str
    aux_threshold: float | None
    aux_reduction: str
    aux_margin: bool
    smoothing_form: Literal["c-1", "c"]


FORMS = {
    "released": Switches("ratio", "epoch", "after", False, "zero", 0.7, "selected", False, "c-1"),
    "paper": Switches("linear", "never", "before", True, "one", None, "all", True, "c"),
}


def resolve(options: Mapping[str, Any]) -> Switches:
    """The switches of the form, and over them those that are given."""
    given = {name: options[name] for name in Switches._fields if options.get(name, "form") != "form"}
    return FORMS[options.get("form", "released")]._replace(**given)


class FineSSL(Method):
    """form: the released code's loss or the paper's, which sets the switches.   alpha: α, largest margin.   gamma: γ, weight of
    the unlabeled loss.   smoothing: λ of the auxiliary targets.   pace_threshold: ζ, least confidence that counts for σ.
    margin_shape: form of Δ.   pace_reset: when σ is cleared.   pace_update: σ counts this batch before or after its margins.
    pace_forget: σ loses an image that is no longer confident.   pace_empty: margin while nothing is selected.
    aux_threshold: least confidence of a target of the auxiliary head.   aux_reduction: images of its mean.
    aux_margin: its loss has the margin.   smoothing_form: classes that share λ, all others or all.
    min_weight: smaller weights are dropped.   marginal_entropy: weight of the entropy of the mean prediction, which is
    maximised: for classes that are about equally frequent.   without: parts to take away."""

    def __init__(
        self,
        task: Task,
        *,
        form: Literal["released", "paper"] = "released",
        alpha: Weight = 8.0,
        gamma: Weight = 3.0,
        smoothing: Probability = 0.5,
        pace_threshold: Probability = 0.7,
        margin_shape: Literal["ratio", "linear"] | Open = "form",
        pace_reset: Literal["epoch", "never"] | Open = "form",
        pace_update: Literal["after", "before"] | Open = "form",
        pace_forget: bool | Open = "form",
        pace_empty: Literal["zero", "one"] | Open = "form",
        aux_threshold: Probability | Open | None = "form",
        aux_reduction: Literal["selected", "all"] | Open = "form",
        aux_margin: bool | Open = "form",
        smoothing_form: Literal["c-1", "c"] | Open = "form",
        min_weight: Probability = 0.0,
        marginal_entropy: Weight = 0.0,
        without: tuple[Ablation, ...] = (),
    ) -> None:
        super().__init__(task)
        self.alpha = alpha
        self.gamma = gamma
        self.smoothing = 0.0 if "ls" in without else smoothing
        self.pace_threshold = pace_threshold
        self.switches = resolve(dict(
            form=form, margin_shape=margin_shape, pace_reset=pace_reset, pace_update=pace_update, pace_forget=pace_forget,
            pace_empty=pace_empty, aux_threshold=aux_threshold, aux_reduction=aux_reduction, aux_margin=aux_margin,
            smoothing_form=smoothing_form,
        ))  # fmt: skip
        self.min_weight = min_weight
        self.without = frozenset(without)
        self.aux = None if "dls" in without else "attached" if "detach" in without else "detached"
        self.pace = Pace(task.unlabeled, task.classes)
        self.marginal_entropy = marginal_entropy
        self.marginal = MarginalEntropy(QUEUE * task.classes, task.classes) if marginal_entropy else None

    @classmethod
    def canonical(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The form that agrees with more of the switches, and the other switches."""
        switches = resolve(options)._asdict()
        overrides = {
            form: {name: value for name, value in switches.items() if value != getattr(its, name)}
            for form, its in FORMS.items()
        }
        form = min(FORMS, key=lambda name: len(overrides[name]))
        others = {name: value for name, value in options.items() if name not in switches}
        return {**others, "form": form, **overrides[form]}

    def before_step(self, step: int) -> None:
        if self.switches.pace_reset == "epoch" and step % self.task.epoch_steps == 0:
            self.pace.reset()

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        x, weak, strong = outputs.labeled, needed(outputs.weak, "weak view"), needed(outputs.strong, "strong views")
        p = predict(weak.logits)  # ŷ and σ: the main head, weak view, no margin
        if self.switches.pace_update == "before":
            self.count(batch, p)
        margin = None if "bms" in self.without else self.margins(p.confidence.dtype)
        confidence = predict(needed(weak.aux, "auxiliary logits")).confidence if self.aux else p.confidence
        weight = confidence * (confidence >= self.min_weight)
        margin_labeled = None if "margin-in-labeled" in self.without else margin
        labeled = cross_entropy(x.logits, batch.labels, margin_labeled).mean()
        unlabeled = consistency(strong.logits, p.label, weight, margin)
        loss = labeled + self.gamma * unlabeled
        more = {} if margin is None else {"margin": margin.mean(), "margin_max": margin.max()}
        if self.aux:
            aux_labeled, aux_unlabeled = self.auxiliary(x, strong, batch.labels, p, margin)
            loss = loss + aux_labeled + aux_unlabeled
            more |= {
                "loss_aux_labeled": aux_labeled,
                "loss_aux_unlabeled": aux_unlabeled,
                "confidence_aux": confidence.mean(),
            }
        if self.marginal is not None:
            entropy = self.marginal(p.probabilities, full(strong.logits).softmax(1))
            loss = loss - self.marginal_entropy * entropy
            more["entropy_of_mean"] = entropy
        if self.switches.pace_update == "after":
            self.count(batch, p)
        return result(loss, labeled, unlabeled, p, weight, **more)

    def count(self, batch: Batch, p: Prediction) -> None:
        """Eq. 4: σ from the predictions of this batch."""
        confident = p.confidence >= self.pace_threshold
        self.pace.update(needed(batch.index, "index"), p.label, confident, forget=self.switches.pace_forget)

    def margins(self, dtype: torch.dtype) -> Tensor:
        """m(k) = α_t Δ(k), [C] (eq. 5)."""
        beta = self.pace.relative(dtype)
        delta = (1 - beta) / (1 + beta) if self.switches.margin_shape == "ratio" else 1 - beta
        margin = self.alpha * delta
        if "dynamic-alpha" not in self.without:
            margin = margin * (beta.max() - beta.min())
        empty = torch.full_like(margin, self.alpha if self.switches.pace_empty == "one" else 0.0)
        return torch.where(beta.max() > 0, margin, empty)

    def class_statistics(self) -> dict[str, Tensor]:
        return {"pace": self.pace.counts, "margin": self.margins(torch.float32)}

    def auxiliary(
        self, x: HeadOutputs, strong: HeadOutputs, labels: Tensor, p: Prediction, margin: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Decoupled label smoothing (eq. 6): the auxiliary head's losses on labeled and strong views."""
        labeled = cross_entropy(needed(x.aux, "auxiliary logits"), labels).mean()
        logits = needed(strong.aux, "auxiliary logits")
        target = smooth(p.label, self.task.classes, self.smoothing, self.switches.smoothing_form, p.confidence.dtype)
        losses = cross_entropy(logits, over_views(target, logits), margin if self.switches.aux_margin else None)
        selected = over_views((p.confidence >= (self.switches.aux_threshold or 0)).to(losses.dtype), logits)
        if self.switches.aux_reduction == "selected":
            return labeled, mean_of_selected(losses, selected)
        return labeled, (losses * selected).mean()
