"""Exponential moving average (EMA) of the trained parameters: `--set train.ema=0.999`.

The average is what a run evaluates and exports; training goes on from the parameters themselves. At step t

    average += w_t · (parameter − average),   w_t = max(1 − decay, 9 / (10 + t))

so that the average of a short run forgets the initial parameters: the decay is at most (1 + t) / (10 + t), as in
TensorFlow's ExponentialMovingAverage with num_updates. w_t is a tensor on the device: a captured step reads it. Not
torch's AveragedModel: that copies the frozen backbone too, and a captured forward pass reads parameters at fixed
addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Ema:
    """The average of `parameters`, which stay at their addresses.

    decay: share of the average that a late step keeps.
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.average = [p.detach().clone() for p in self.parameters]
        self.weight = torch.ones((), device=self.parameters[0].device)

    def before_step(self, step: int) -> None:
        self.weight.fill_(max(1 - self.decay, 9 / (10 + step)))

    @torch.no_grad()
    def update(self) -> None:
        change = torch._foreach_sub([p.detach() for p in self.parameters], self.average)
        torch._foreach_mul_(change, self.weight)
        torch._foreach_add_(self.average, change)

    def restart(self) -> None:
        """From the parameters as they are: they were re-initialised."""
        self.load_state_dict(self.parameters)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange parameters and average, in place."""
        for parameter, average in zip(self.parameters, self.average, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The network computes with the average inside this context."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    # ---- checkpoint -------------------------------------------------------------------------------------------------

    def state_dict(self) -> list[Tensor]:
        return self.average

    @torch.no_grad()
    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        for average, saved in zip(self.average, state, strict=True):
            average.copy_(saved)
