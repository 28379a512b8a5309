"""The choice of a solver on held-out labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from finessl.frozen import solvers
from finessl.frozen.choose import (
    FAST,
    Candidate,
    Pile,
    assign_folds,
    better,
    choose_solver,
    decide,
    representatives,
    wilson,
)
from finessl.frozen.solvers import Solution, calibrate

Clouds = tuple[np.ndarray, np.ndarray]


def pile_of(clouds: Clouds) -> tuple[Pile, np.ndarray]:
    rows, truth = clouds
    return Pile(solvers.prepare(rows, solvers.feature_centre(rows))), truth


def labels(truth: np.ndarray, per_class: int) -> torch.Tensor:
    y = np.full(len(truth), -1)
    for c in range(4):
        y[np.flatnonzero(truth == c)[:per_class]] = c
    return torch.from_numpy(y)


def nothing() -> Solution:
    return Solution(torch.zeros(2, 2), torch.zeros(2))


def candidate(name: str, right: list[int] | None) -> Candidate:
    return Candidate(name, nothing(), None if right is None else np.array(right, bool))


def test_a_large_set_is_represented_by_its_labels_and_a_sample() -> None:
    labeled = np.zeros(1000, bool)
    labeled[[5, 500, 999]] = True
    assert representatives(labeled, 1000).tolist() == list(range(1000))
    kept = representatives(labeled, 100)
    assert len(kept) == 100 and (np.diff(kept) > 0).all() and {5, 500, 999} <= set(kept.tolist())
    assert kept.tolist() != representatives(labeled, 100, seed=1).tolist()
    assert representatives(labeled, 2).tolist() == [5, 500, 999]  # no label is left out


def test_every_solver_is_tried_and_held_out(clouds: Clouds) -> None:
    pile, truth = pile_of(clouds)
    choice = choose_solver(pile, labels(truth, 4), 4)
    assert [c.solver for c in choice.candidates] == ["means", "ridge", "propagation", "em", "ensemble"]
    assert all(c.right is not None and len(c.right) == 16 for c in choice.candidates)
    assert all(c.held_out is not None and c.held_out > 0.6 for c in choice.candidates)
    found = choice.chosen.solution.logits(pile.x).argmax(1).numpy()
    assert (found == truth).mean() > 0.9


def test_ensemble_shares_the_solutions_of_its_members(clouds: Clouds) -> None:
    """In every fold: as if it was solved alone."""
    pile, truth = pile_of(clouds)
    y = labels(truth, 3)
    found = choose_solver(pile, y, 4).candidates[-1]
    assert_close(found.solution.weight, pile.solve("ensemble", y, 4).weight)
    known, right = torch.nonzero(y >= 0).flatten(), []
    for rank in range(3):
        hidden = known.view(4, 3)[:, rank]
        rest = y.clone()
        rest[hidden] = -1
        right.append(pile.solve("ensemble", rest, 4).logits(pile.x[hidden]).argmax(1) == y[hidden])
    assert found.right is not None and found.right.tolist() == torch.stack(right, 1).flatten().tolist()


def test_fast_default_leaves_the_ensemble_out(clouds: Clouds) -> None:
    pile, truth = pile_of(clouds)
    choice = choose_solver(pile, labels(truth, 1), 4, default=FAST)
    assert [c.solver for c in choice.candidates] == ["means", "ridge", "propagation", "em"]
    assert choice.chosen.solver == "propagation"


def test_held_out_labels_are_not_seen(clouds: Clouds) -> None:
    """Labels at random: held out, no solver can be right more often than chance allows."""
    pile, truth = pile_of(clouds)
    y = torch.full((len(truth),), -1)
    rng = np.random.default_rng(0)
    y[torch.from_numpy(rng.permutation(120)[:40])] = torch.from_numpy(np.repeat(np.arange(4), 10))
    for found in choose_solver(pile, y, 4).candidates:
        assert found.held_out is not None and found.held_out < 0.55


def test_one_label_per_class_takes_the_default_and_says_so(clouds: Clouds) -> None:
    pile, truth = pile_of(clouds)
    choice = choose_solver(pile, labels(truth, 1), 4)
    assert choice.chosen.solver == "ensemble" and choice.chosen.held_out is None
    assert "nothing can be held out" in choice.reason


def test_few_images_fall_back_to_ridge_and_say_so(clouds: Clouds) -> None:
    rows, truth = clouds
    few = np.concatenate([np.flatnonzero(truth == c)[:9] for c in range(4)])
    pile, part = pile_of((rows[few], truth[few]))
    choice = choose_solver(pile, labels(part, 3), 4)
    assert choice.chosen.solver == "ridge"
    assert [c.solver for c in choice.candidates] == ["means", "ridge"]
    assert "fewer than 10 images per class" in choice.reason


def test_a_class_with_one_label_stays_in_training(clouds: Clouds) -> None:
    pile, truth = pile_of(clouds)
    y = labels(truth, 3)
    y[torch.from_numpy(np.flatnonzero(truth == 3)[1:3])] = -1
    choice = choose_solver(pile, y, 4)
    assert all(c.right is not None and len(c.right) == 9 for c in choice.candidates)


def test_default_stays_unless_another_is_clearly_better() -> None:
    default = candidate("ensemble", [1, 1, 0, 0, 0, 0, 0, 1])
    little, much = candidate("ridge", [1, 1, 1, 1, 1, 1, 0, 1]), candidate("means", [1] * 8)
    assert decide([little, default], True).chosen is default  # 4 : 0, not more than 2√4
    found = decide([little, default, much], True)  # 5 : 0
    assert found.chosen is much and "better on the held-out labels" in found.reason


def test_one_deviation_suffices_for_what_is_no_solver_and_against_a_single_solver() -> None:
    right = [1, 1, 1, 1, 1, 1, 0, 1]
    default, other = candidate("ensemble", [1, 1, 0, 0, 0, 0, 0, 1]), candidate("zero-shot", right)
    assert decide([default, other], True).chosen is other
    single, other = candidate("propagation", [1, 1, 0, 0, 0, 0, 0, 1]), candidate("ridge", right)
    assert decide([single, other], True, FAST).chosen is other


def test_better_counts_the_images_on_which_they_differ() -> None:
    assert better(np.array([1, 1, 1, 1, 0], bool), np.array([1, 0, 0, 0, 0], bool))  # 3 : 0, 3 > √3
    assert not better(np.array([1, 1, 0], bool), np.array([1, 0, 0], bool))  # 1 : 0
    assert not better(np.array([1, 1, 1, 1, 0], bool), np.array([1, 0, 0, 0, 0], bool), 2.0)  # 3 : 0, 3 < 2√3
    assert not better(np.array([1, 1, 1, 0, 0], bool), np.array([0, 0, 0, 1, 1], bool))  # 3 : 2


def test_folds_hold_every_class() -> None:
    found = assign_folds(np.array([0, 0, 0, 1, 1, 1, 2, 0]), 3)
    assert found is not None
    assert found.tolist() == [0, 1, 2, 0, 1, 2, -1, 0]
    assert assign_folds(np.array([0, 1, 2]), 3) is None


def test_calibrated_confidence_is_the_accuracy(clouds: Clouds) -> None:
    pile, truth = pile_of(clouds)
    solution = pile.solve("ridge", labels(truth, 4), 4)
    for wanted in (0.4, 0.8, 0.95):
        found = calibrate(solution, pile.x, wanted).logits(pile.x).softmax(1).amax(1).mean()
        assert float(found) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(
    ("right", "count", "interval"),
    [(0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (81, 263, (0.2553, 0.3662))],  # Newcombe 1998, table I
)
def test_wilson(right: int, count: int, interval: tuple[float, float]) -> None:
    assert wilson(right, count) == pytest.approx(interval, abs=1e-4)
