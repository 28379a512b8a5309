"""`finessl bench tuning`: step time, memory and parameters of each tuning strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from finessl.bench.step import bench_step
from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.runtime.callbacks import Log


@dataclass(frozen=True)
class TuningCost:
    name: str
    trained: int
    step: float  # milliseconds
    memory: int  # bytes


def bench_tunings(
    recipe: Recipe, names: Sequence[str], device: torch.device, *, repeats: int, compile: bool | None, log: Log
) -> Iterator[TuningCost]:
    """One row per strategy, as soon as it is measured. Strategies that do not fit the backbone are logged and left out."""
    for name in names:
        one = recipe.with_fields({"tuning.name": name})
        try:
            result = bench_step(one, device, repeats=repeats, compile=compile)
        except FinesslError as error:
            log(f"{name}: left out: {error}")
            continue
        yield TuningCost(name, result.details["trained_parameters"], result.step, result.memory)
        torch._dynamo.reset()
