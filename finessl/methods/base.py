"""The interface of semi-supervised methods: an `nn.Module` that computes a loss from the logits of a batch.

A method declares the views that it needs and keeps its state in buffers. It knows nothing of files, loaders, devices or
processes: the loop passes the logits of the whole (global) batch. `forward` never synchronises with the device; values that
depend on the step number are set by `before_step`. To write one, see "How to add yours" in docs/methods.md.
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
    """Sizes that a method needs for its buffers and its schedule."""

    classes: int  # C
    unlabeled: int  # M, images in the unlabeled set
    steps: int  # T, training steps
    epoch_steps: int = 500  # steps per epoch, as the released code counts
    labeled: int = 0  # N, labeled images


class HeadOutputs(NamedTuple):
    """Logits of both heads for n images."""

    logits: Tensor  # [n, C], main head
    aux: Tensor | None = None  # [n, C], auxiliary head; None if the method has none

    def detach(self) -> HeadOutputs:
        return HeadOutputs(self.logits.detach(), None if self.aux is None else self.aux.detach())


@dataclass
class Outputs:
    """The model's outputs for one batch."""

    labeled: HeadOutputs  # [B]
    weak: HeadOutputs | None = None  # [m], without gradient unless Method.weak == "grad"
    strong: HeadOutputs | None = None  # [V·m], view-major: all m of view 1, then all m of view 2


@dataclass
class Batch:
    """Labels and positions of one batch."""

    labels: Tensor  # [B] int64 class ids, or [B, C] soft targets
    index: Tensor | None = None  # [m] int64 positions in the unlabeled set; repeated if it is smaller than the batch


@dataclass
class Result:
    """The loss of one step, and statistics for the log (detached 0-dim tensors)."""

    loss: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)
    pseudo: Tensor | None = None  # [m] pseudo-labels of this step
    weight: Tensor | None = None  # [m] weight of each in the loss


class Method(nn.Module):
    """Base of all methods. A subclass declares its options as keyword-only arguments with types and defaults."""

    weak: Literal["no_grad", "grad"] | None = "no_grad"  # weak view: without gradient, with, or not needed
    strong: bool = True  # strong views are needed
    aux: Literal["detached", "attached"] | None = None  # auxiliary head: its loss stops at the features or passes them
    labeled_in_unlabeled: bool = True  # default of the recipe's field: labeled images are also in the unlabeled set

    def __init__(self, task: Task) -> None:
        super().__init__()
        if task.classes < 2:
            raise FinesslError(f"a classifier needs at least 2 classes, the task has {task.classes}.")
        self.task = task

    @classmethod
    def canonical(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The same options in one spelling: equal for all options that give the same method."""
        return dict(options)

    @classmethod
    def uses_unlabeled(cls) -> bool:
        """Whether unlabeled images take part in training."""
        return cls.weak is not None or cls.strong

    def before_step(self, step: int) -> None:
        """The schedule (ramps, resets per epoch), called on the host before each 0-based step. Write values into buffers:
        a CUDA graph reads buffers, but keeps Python numbers as they were at capture."""

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        """The loss of one step."""
        raise NotImplementedError

    def phase(self, step: int) -> tuple[int, int]:
        """[first, last) step of the phase of `step`. The learning-rate schedule runs once per phase. A method has one phase
        unless it re-initialises the parameters during training (`refresh`)."""
        return 0, self.task.steps

    def refresh_at(self, step: int) -> bool:
        """Whether the method needs predictions for the whole unlabeled set before this step."""
        return False

    def refresh(self, probabilities: Tensor) -> bool:
        """Receive `probabilities` [M, C] of the unlabeled set. Returns whether to re-initialise the trained parameters."""
        return False

    def class_statistics(self) -> dict[str, Tensor]:
        """Name → [C] statistics of each class, for the diagnostics at an epoch's end: "pace" (class learning pace) and
        "margin", where the method has them. Nothing is learned from them."""
        return {}

    def pool(self) -> Tensor | None:
        """Positions of the unlabeled images to sample from; None: all."""
        return None


def needed(value: T | None, what: str) -> T:
    """`value`, or a FinesslError if the loop did not provide it.   what: its name in the message."""
    if value is None:
        raise FinesslError(f"the method needs the batch's {what}, which the training loop did not give.")
    return value
