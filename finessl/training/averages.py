"""Means of a run's statistics between two lines of metrics, without a step that waits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from finessl.methods.base import Result


class Averages:
    """Added up on the device. `send` starts their way to the host and `take` waits for them; the step that is launched
    in between keeps the device busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []
        self.totals: Tensor | None = None
        self.count = 0
        self.under_way: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def add(self, result: Result) -> None:
        statistics = {"loss": result.loss, **result.statistics}
        values = torch.stack([value.float() for value in statistics.values()])
        if self.totals is None or list(statistics) != self.names:
            self.names, self.totals, self.count = list(statistics), torch.zeros_like(values), 0
        self.totals += values
        self.count += 1

    def send(self, step: int) -> None:
        """The means of what was added since the last time, as of `step`. Take them before more is added."""
        assert self.totals is not None and self.under_way is None
        means, gpu = self.totals / self.count, self.totals.is_cuda
        host = torch.empty_like(means, device="cpu", pin_memory=gpu).copy_(means, non_blocking=gpu)
        self.under_way = step, host, torch.cuda.current_stream(self.device).record_event() if gpu else None
        self.totals.zero_()
        self.count = 0

    def take(self) -> tuple[int, dict[str, float]] | None:
        """What was sent for, if anything was: the step, and the mean of each statistic."""
        if self.under_way is None:
            return None
        (step, host, arrived), self.under_way = self.under_way, None
        if arrived is not None:
            arrived.synchronize()
        return step, dict(zip(self.names, host.tolist(), strict=True))

    # ---- what a checkpoint keeps -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        totals = None if self.totals is None else self.totals.to("cpu", copy=True)
        return {"names": self.names, "totals": totals, "totalled": self.count}

    def load(self, state: dict[str, Any]) -> None:
        self.names, self.count, totals = state["names"], state["totalled"], state["totals"]
        self.totals = None if totals is None else totals.to(self.device)
