"""FPL, IFPL and GRIP: who gets a pseudo-label, and when."""

from __future__ import annotations

import methods_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods_cases import draw, run, task

from finessl.methods import create
from finessl.methods.self_training import SelfTraining, leaderboard


def test_leaderboard_by_hand() -> None:
    probabilities = np.array(
        [
            [0.9, 0.1, 0.0],
            [0.8, 0.2, 0.0],  # beaten in class 0 by images 0 and 3: goes on to class 1, which has room
            [0.1, 0.7, 0.2],
            [0.85, 0.05, 0.1],
            [0.6, 0.15, 0.25],  # beaten in class 0: class 2 has room
            [0.75, 0.05, 0.2],  # beaten in class 0: class 2 has room for it too
            [0.7, 0.12, 0.18],  # beaten in class 0, in class 2 by 4 and 5 and in class 1 by 2 and 1: nowhere
        ]
    )
    assert leaderboard(probabilities, 2).tolist() == [0, 1, 1, 0, 2, 2, -1]
    assert leaderboard(probabilities, 7).tolist() == probabilities.argmax(1).tolist()


def test_leaderboard_pushes_a_weaker_image_out() -> None:
    """Image 1 loses class 0 to image 0 and takes class 1 from image 2, which goes on to class 2."""
    probabilities = np.array([[0.9, 0.1, 0.0], [0.5, 0.45, 0.05], [0.28, 0.4, 0.32]])
    assert leaderboard(probabilities, 1).tolist() == [0, 1, 2]
    assert leaderboard(probabilities[[2, 0, 1]], 1).tolist() == [2, 0, 1]


def test_leaderboard_is_the_greedy_assignment() -> None:
    for seed in range(300):
        rng = np.random.default_rng(seed)
        images, classes, shots = rng.integers(1, 40), rng.integers(2, 7), rng.integers(1, 5)
        probabilities = rng.dirichlet(np.ones(classes), images)
        labels = leaderboard(probabilities, shots)
        assert labels.tolist() == reference.greedy_leaderboard(probabilities, shots)
        held = np.bincount(labels[labels >= 0], minlength=classes)
        assert held.max() <= shots and held.sum() == min(images, shots * classes)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), images=st.integers(1, 20), shots=st.integers(1, 6))
def test_leaderboard_with_ties_ends_and_is_balanced(seed: int, images: int, shots: int) -> None:
    probabilities = np.random.default_rng(seed).integers(0, 3, (images, 4)) / 4.0
    labels = leaderboard(probabilities, shots)
    held = np.bincount(labels[labels >= 0], minlength=4)
    assert held.max() <= shots
    assert labels.tolist() == leaderboard(probabilities.copy(), shots).tolist()


def test_leaderboard_is_fast_enough_for_many_images() -> None:
    probabilities = np.random.default_rng(0).dirichlet(np.full(50, 0.2), 20_000).astype(np.float32)
    labels = leaderboard(probabilities, 16)
    assert (np.bincount(labels[labels >= 0]) == 16).all()


def test_one_phase_of_warm_up_then_one_for_each_iteration() -> None:
    method = create("ifpl", task(steps=100), {"iterations": 3})
    starts = [step for step in range(100) if method.refresh_at(step)]
    assert starts == [10, 40, 70]
    assert [method.phase(step) for step in (0, 9, 10, 39, 40, 70, 99)] == [
        (0, 10), (0, 10), (10, 40), (10, 40), (40, 70), (70, 100), (70, 100)
    ]  # fmt: skip
    fpl = create("fpl", task(steps=100), {"warmup": 0.0})
    assert [step for step in range(100) if fpl.refresh_at(step)] == [0] and fpl.phase(50) == (0, 100)


def test_fewer_steps_than_iterations() -> None:
    for steps in (1, 2, 3, 7):
        method = create("grip", task(steps=steps))
        starts = [step for step in range(steps) if method.refresh_at(step)]
        assert len(starts) == method.iterations >= 1
        assert all(first <= step < last for step in range(steps) for first, last in [method.phase(step)])


def test_other_methods_have_one_phase_and_never_refresh() -> None:
    method = create("finessl", task(steps=50))
    assert method.phase(20) == (0, 50) and not any(method.refresh_at(step) for step in range(50))
    assert method.pool() is None and method.refresh(torch.zeros(30, 5)) is False


def test_number_of_pseudo_labels_per_class() -> None:
    """CIFAR-100's numbers: M = 50,000, C = 100."""
    cifar = task(classes=100, unlabeled=50_000, steps=15_000, labeled=400)
    fpl, ifpl, grip = (create(name, cifar) for name in ("fpl", "ifpl", "grip"))
    assert isinstance(fpl, SelfTraining) and isinstance(ifpl, SelfTraining) and isinstance(grip, SelfTraining)
    assert fpl.shots(1) == 16 and [ifpl.shots(i) for i in (1, 10)] == [16, 16]
    assert [grip.shots(i) for i in (1, 2, 9, 10)] == [50, 100, 450, 500]
    assert (fpl.iterations, ifpl.iterations, grip.iterations) == (1, 10, 10)
    tiny = create("grip", task(classes=10, unlabeled=30))
    assert tiny.shots(1) == 1 and tiny.shots(10) == 3


def test_pool_and_pseudo_labels_follow_the_predictions() -> None:
    method = create("fpl", task(classes=2, unlabeled=6, labeled=4), {"shots": 1})
    assert method.pool() is None
    before = run(method, draw(0, classes=2, images=6))
    assert before.statistics["used"] == 0 and before.statistics["loss_unlabeled"] == 0
    confident = torch.tensor([0.6, 0.9, 0.7, 0.2, 0.3, 0.1])
    assert method.refresh(torch.stack([confident, 1 - confident], 1)) is True
    assert method.pool().tolist() == [1, 5]  # type: ignore[union-attr]
    assert method.pseudo.tolist() == [-1, 0, -1, -1, -1, 1]
    assert float(method.ratio) == 0.5  # two pseudo-labels, four labels


@pytest.mark.parametrize(("name", "warmup", "renewed"), [
    ("fpl", 0.0, [False]), ("fpl", 0.1, [True]), ("ifpl", 0.0, [False, True, True]), ("grip", 0.1, [True, True, True]),
])  # fmt: skip
def test_parameters_start_anew_unless_nothing_was_trained(name: str, warmup: float, renewed: list[bool]) -> None:
    method = create(name, task(), {"warmup": warmup})
    rng = np.random.default_rng(0)
    assert [method.refresh(torch.tensor(rng.dirichlet(np.ones(5), 30))) for _ in renewed] == renewed


def test_grip_grows() -> None:
    method = create("grip", task(classes=3, unlabeled=60, steps=40))
    rng, sizes = np.random.default_rng(0), []
    for step in range(40):
        if method.refresh_at(step):
            method.refresh(torch.tensor(rng.dirichlet(np.ones(3), 60)))
            sizes.append(len(method.pool()))  # type: ignore[arg-type]
    assert sizes == [6 * i for i in range(1, 11)]
    assert float(method.ratio) == pytest.approx(12 / 60)
