"""What every semi-supervised method is: an `nn.Module` that turns a batch's logits into a loss.

A method says which views it needs, keeps its state in buffers and knows nothing of files, loaders, devices or
processes: the loop hands it the logits of the whole (global) batch. `forward` never waits for the device; what depends
on the step number is set by `before_step` on the host. To write one, see "How to add yours" in docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor, nn

from finessl.errors import FinesslError

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """The sizes a method may need to make its buffers and its schedule."""

    classes: int  # C
    unlabeled: int  # M, images in the unlabeled set
    steps: int  # T, steps in all
    epoch_steps: int = 500  # steps the released code calls an epoch
    labeled: int = 0  # N, labeled images


class HeadOutputs(NamedTuple):
    """What the model says of a group of images."""

    logits: Tensor  # [n, C], main head
    aux: Tensor | None = None  # [n, C], auxiliary head (None when the method asks for none)


@dataclass
class Outputs:
    """The model's answers on one batch."""

    labeled: HeadOutputs  # [B]
    weak: HeadOutputs | None = None  # [m], without gradient unless Method.weak == "grad"
    strong: HeadOutputs | None = None  # [V·m], view-major: all m of view 1, then all m of view 2


@dataclass
class Batch:
    """What else is known of the batch."""

    labels: Tensor  # [B] int64 class ids, or [B, C] soft targets
    index: Tensor | None = None  # [m] int64 positions in the unlabeled set; may repeat when the set is tiny


@dataclass
class Result:
    """The loss of one step, and what is worth knowing about it (statistics: detached 0-dim tensors)."""

    loss: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)
    pseudo: Tensor | None = None  # [m] pseudo-labels of this step
    weight: Tensor | None = None  # [m] the weight each of them got


class Method(nn.Module):
    """Base of all methods; a subclass declares its options as keyword-only, typed, with defaults."""

    weak: Literal["no_grad", "grad"] | None = "no_grad"  # is the weak view needed, and does it train?
    strong: bool = True  # are strong views needed?
    aux: Literal["detached", "attached"] | None = None  # is an auxiliary head wanted, and what features does it see?
    labeled_in_unlabeled: bool = True  # are the labeled images also among the unlabeled ones, unless the recipe says?

    def __init__(self, task: Task) -> None:
        super().__init__()
        if task.classes < 2:
            raise FinesslError(f"a classifier needs at least 2 classes, the task has {task.classes}.")
        self.task = task

    @classmethod
    def canonical(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The same options in one spelling: equal for all options that give the same method."""
        return dict(options)

    def before_step(self, step: int) -> None:
        """Host-side schedule, called before the forward of each 0-based step: ramps, resets per epoch. Write it into
        buffers: a captured step reads those, and never again an attribute that is a Python number."""

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        raise NotImplementedError

    def phase(self, step: int) -> tuple[int, int]:
        """[first, last) step of the training that `step` belongs to, over which the learning rate runs its course.
        One phase, the whole run, unless the method re-initialises the network on the way (see `refresh`)."""
        return 0, self.task.steps

    def refresh_at(self, step: int) -> bool:
        """Does the method want predictions for the whole unlabeled set before this step?"""
        return False

    def refresh(self, probabilities: Tensor) -> bool:
        """Take these predictions [M, C]; True when the trained parameters must be initialised again."""
        return False

    def class_statistics(self) -> dict[str, Tensor]:
        """Name → [C] statistics of each class, for the diagnostics at an epoch's end: "pace" (class learning pace) and
        "margin", where the method has them. Nothing is learned from them."""
        return {}

    def pool(self) -> Tensor | None:
        """Positions of the unlabeled images to draw from (None: all of them)."""
        return None


def needed(value: T | None, what: str) -> T:
    """`value`, which the method declared that it needs."""
    if value is None:
        raise FinesslError(f"the method needs the batch's {what}, which the training loop did not give.")
    return value
