"""Batches are seeded permutations and a function of the step alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finessl.data.sampler import Sampler, generator


@given(size=st.integers(1, 60), batch=st.integers(1, 20), seed=st.integers(0, 9))
def test_an_epoch_is_a_permutation(size: int, batch: int, seed: int) -> None:
    sampler = Sampler(size, batch, seed, 0)
    epoch = np.concatenate([sampler.draw(step) for step in range(sampler.batches)])
    assert len(epoch) == batch * sampler.batches
    counts = np.bincount(epoch, minlength=size)
    if size >= batch:
        assert counts.max() == 1  # nothing twice
        assert size - counts.sum() < batch  # only a remainder is left out
    else:
        assert counts.min() >= batch // size and counts.max() <= -(-batch // size)


def test_any_step_without_the_steps_before() -> None:
    run = Sampler(50, 8, 1, 0)
    drawn = [run.draw(step) for step in range(40)]
    for step in (39, 3, 17):
        np.testing.assert_array_equal(Sampler(50, 8, 1, 0).draw(step), drawn[step])


def test_epochs_seeds_and_streams_differ() -> None:
    first = Sampler(100, 100, 0, 0)
    assert not np.array_equal(first.draw(0), first.draw(1))
    assert not np.array_equal(first.draw(0), Sampler(100, 100, 1, 0).draw(0))
    assert not np.array_equal(first.draw(0), Sampler(100, 100, 0, 1).draw(0))


def test_streams_are_independent() -> None:
    assert generator(0, 1, 2).random() != generator(0, 2, 1).random()


def test_nothing_to_draw_from() -> None:
    with pytest.raises(ValueError, match="from 0 items"):
        Sampler(0, 4, 0, 0)
