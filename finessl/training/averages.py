"""Means of a run's statistics between two lines of metrics, without a step that waits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from finessl.methods.base import Result


class Averages:
    """Sums are kept on the device. `send` starts an asynchronous copy to the host and `take` waits for it: the step that
    is launched in between keeps the device busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []
        self.totals: Tensor | None = None
        self.count = 0
        self.pending: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def add(self, result: Result) -> None:
        statistics = {"loss": result.loss, **result.statistics}
        values = torch.stack([value.float() for value in statistics.values()])
        if self.totals is None or list(statistics) != self.names:
            self.names, self.totals, self.count = list(statistics), torch.zeros_like(values), 0
        self.totals += values
        self.count += 1

    def send(self, step: int) -> None:
        """Start to copy the means since the last call; `step` is recorded with them. Call `take` before the next `add`."""
        assert self.totals is not None and self.pending is None
        means, gpu = self.totals / self.count, self.totals.is_cuda
        host = torch.empty_like(means, device="cpu", pin_memory=gpu).copy_(means, non_blocking=gpu)
        self.pending = step, host, torch.cuda.current_stream(self.device).record_event() if gpu else None
        self.totals.zero_()
        self.count = 0

    def take(self) -> tuple[int, dict[str, float]] | None:
        """The step and the mean of each statistic that `send` copied, or None. Of the pseudo-labels whose truth is known,
        the share of correct ones."""
        if self.pending is None:
            return None
        (step, host, copied), self.pending = self.pending, None
        if copied is not None:
            copied.synchronize()
        row = dict(zip(self.names, host.tolist(), strict=True))
        known, correct = row.pop("pseudo_known", 0.0), row.pop("pseudo_correct", 0.0)
        return step, row | ({"pseudo_accuracy": correct / known} if known else {})

    # ---- checkpoint -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        totals = None if self.totals is None else self.totals.to("cpu", copy=True)
        return {"names": self.names, "totals": totals, "totalled": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.names, self.count, totals = state["names"], state["totalled"], state["totals"]
        self.totals = None if totals is None else totals.to(self.device)
