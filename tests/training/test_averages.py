"""Means between two lines of metrics."""

from __future__ import annotations

import pytest
import torch

from finessl.methods.base import Result
from finessl.training.averages import Averages

CPU = torch.device("cpu")


def result(loss: float, **statistics: float) -> Result:
    return Result(torch.tensor(loss), {name: torch.tensor(value) for name, value in statistics.items()})


def test_means_since_the_last_time() -> None:
    averages = Averages(CPU)
    assert averages.take() is None
    for loss, used in ((1.0, 0.5), (2.0, 0.25)):
        averages.add(result(loss, used=used))
    averages.send(2)
    assert averages.take() == (2, {"loss": 1.5, "used": 0.375}) and averages.take() is None
    averages.add(result(7.0, used=1.0))
    averages.send(3)
    assert averages.take() == (3, {"loss": 7.0, "used": 1.0})


def test_other_statistics_start_over() -> None:
    averages = Averages(CPU)
    averages.add(result(1.0, used=0.5))
    averages.add(result(3.0, margin=2.0))
    averages.send(2)
    assert averages.take() == (2, {"loss": 3.0, "margin": 2.0})


def test_what_was_sent_for_must_be_taken() -> None:
    averages = Averages(CPU)
    averages.add(result(1.0))
    averages.send(1)
    averages.add(result(2.0))
    with pytest.raises(AssertionError):
        averages.send(2)


def test_a_checkpoint_in_between_changes_nothing() -> None:
    averages, resumed = Averages(CPU), Averages(CPU)
    averages.add(result(1.0, used=0.5))
    resumed.load_state_dict(averages.state_dict())
    for one in (averages, resumed):
        one.add(result(4.0, used=0.0))
        one.send(2)
    assert averages.take() == resumed.take() == (2, {"loss": 2.5, "used": 0.25})
