"""The shared pieces: the pace's memory, averages, views, margins and weights as properties (hypothesis)."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods_cases import draw, make, run, task, tensors

from finessl.methods import METHODS, create
from finessl.methods.base import Batch, Task
from finessl.methods.finessl import FineSSL
from finessl.methods.parts import (
    Average,
    MarginalEntropy,
    Pace,
    consistency,
    cross_entropy,
    last_of_each,
    mean_of_selected,
    predict,
)

quick = settings(max_examples=60, deadline=None)
shape = st.sampled_from(["ratio", "linear"])
paces = st.lists(st.integers(0, 500), min_size=2, max_size=12)
writes = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), min_size=1, max_size=12)


def columns(rows: list[tuple[int, int, bool]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index, label, confident = zip(*rows, strict=True)
    return torch.tensor(index), torch.tensor(label), torch.tensor(confident)


@quick
@given(batches=st.lists(writes, min_size=1, max_size=5), forget=st.booleans())
def test_pace_is_a_dictionary_written_in_order(batches: list[list[tuple[int, int, bool]]], forget: bool) -> None:
    pace, slow = Pace(7, 4), {}
    for rows in batches:
        pace.update(*columns(rows), forget=forget)
        for index, label, confident in rows:
            if confident:
                slow[index] = label
        if forget:  # an image's last occurrence alone decides
            slow = {i: k for i, k in slow.items() if {r[0]: r[2] for r in rows}.get(i, True)}
        assert pace.memory.tolist() == [slow.get(i, -1) for i in range(7)]
        assert pace.counts.tolist() == [Counter(slow.values())[k] for k in range(4)]
    pace.reset()
    assert set(pace.memory.tolist()) == {-1} and set(pace.counts.tolist()) == {0}


@quick
@given(writes)
def test_last_of_each(rows: list[tuple[int, int, bool]]) -> None:
    index, _, marked = columns(rows)
    last = {i: position for position, (i, _, mark) in enumerate(rows) if mark}
    assert last_of_each(index, marked).tolist() == [last.get(i) == position for position, (i, _, _) in enumerate(rows)]


def test_relative_pace() -> None:
    pace = Pace(20, 3)
    assert pace.relative(torch.float64).tolist() == [0, 0, 0]
    assert pace.relative(torch.float64, count_unselected=True).tolist() == [0, 0, 0]
    pace.update(torch.arange(6), torch.tensor([0, 0, 0, 0, 1, 1]), torch.ones(6, dtype=torch.bool))
    assert pace.relative(torch.float64).tolist() == [1, 0.5, 0]
    assert pace.relative(torch.float64, count_unselected=True).tolist() == [4 / 14, 2 / 14, 0]  # 14 never selected


def test_average() -> None:
    average = Average(torch.tensor(1.0, dtype=torch.float64), 0.75)
    assert average.update(torch.tensor(5.0)).item() == 0.75 + 1.25
    first = Average(torch.tensor(1.0, dtype=torch.float64), 0.75, from_first=True)
    kept = first.update(torch.tensor(5.0))
    assert first.update(torch.tensor(1.0)).item() == 4.0
    assert kept.item() == 5.0  # what was returned does not move with the state


def test_consistency_repeats_targets_for_each_view() -> None:
    strong = torch.randn(2, 3, 4, dtype=torch.float64)
    target, weight = torch.tensor([0, 3, 1]), torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    expected = sum(
        float(weight[j]) * -float(strong[v, j].log_softmax(0)[target[j]]) for v in range(2) for j in range(3)
    )
    assert consistency(strong.reshape(6, 4), target, weight).item() == pytest.approx(expected / 6)
    soft = torch.eye(4, dtype=torch.float64)[target]
    assert consistency(strong.reshape(6, 4), soft, weight).item() == pytest.approx(expected / 6)


def test_mean_of_selected() -> None:
    values = torch.tensor([1.0, 2.0, 6.0])
    assert mean_of_selected(values, torch.tensor([1.0, 0.0, 1.0])) == 3.5
    assert mean_of_selected(values, torch.zeros(3)) == 0


def test_predict_has_no_gradient_and_float32_at_least() -> None:
    for dtype, kept in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        p = predict(torch.randn(3, 4, dtype=dtype, requires_grad=True))
        assert p.probabilities.dtype == p.confidence.dtype == kept and not p.confidence.requires_grad


# ---- margins -------------------------------------------------------------------------------------------------------


def margins(counts: list[int], **options: Any) -> np.ndarray:
    method = FineSSL(Task(classes=len(counts), unlabeled=10, steps=1), **options)
    method.pace.counts.copy_(torch.tensor(counts))
    return method.margins(torch.float64).numpy()


@quick
@given(counts=paces, form=shape, alpha=st.floats(0, 20))
def test_margins_lie_between_zero_and_alpha(counts: list[int], form: Any, alpha: float) -> None:
    m = margins(counts, margin_shape=form, alpha=alpha)
    assert (m >= 0).all() and (m <= alpha * (1 + 1e-12)).all()
    assert m[int(np.argmax(counts))] == 0  # the fastest class has none
    assert (margins(counts, margin_shape="ratio") <= margins(counts, margin_shape="linear") + 1e-12).all()


@quick
@given(counts=paces, form=shape)
def test_margins_fall_as_pace_grows(counts: list[int], form: Any) -> None:
    m = margins(counts, margin_shape=form)
    assert all(m[i] >= m[j] for i in range(len(m)) for j in range(len(m)) if counts[i] <= counts[j])


@quick
@given(counts=paces, form=shape, data=st.data())
def test_margins_follow_a_permutation_of_classes(counts: list[int], form: Any, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(counts))))
    permuted = margins([counts[k] for k in order], margin_shape=form)
    np.testing.assert_allclose(permuted, margins(counts, margin_shape=form)[list(order)], rtol=1e-12)


@quick
@given(counts=paces, form=shape, factor=st.integers(2, 50), alpha=st.floats(0.1, 20))
def test_margins_depend_on_relative_pace_and_scale_with_alpha(
    counts: list[int], form: Any, factor: int, alpha: float
) -> None:
    one = margins(counts, margin_shape=form, alpha=1.0)
    np.testing.assert_allclose(margins([factor * c for c in counts], margin_shape=form, alpha=alpha), alpha * one)


logits = st.lists(st.floats(-20, 20), min_size=3, max_size=3)


@quick
@given(z=logits, shift=st.floats(-50, 50), m=st.lists(st.floats(0, 8), min_size=3, max_size=3), y=st.integers(0, 2))
def test_margin_loss_grows_with_the_margin_and_ignores_a_common_shift(
    z: list[float], shift: float, m: list[float], y: int
) -> None:
    at, label = torch.tensor([z], dtype=torch.float64), torch.tensor([y])
    margin = torch.tensor(m, dtype=torch.float64)
    loss = cross_entropy(at, label, margin)
    assert (loss >= cross_entropy(at, label) - 1e-12).all()
    assert (loss <= cross_entropy(at, label) + m[y] + 1e-12).all()
    torch.testing.assert_close(cross_entropy(at + shift, label, margin), loss, rtol=1e-9, atol=1e-9)
    onehot = torch.eye(3, dtype=torch.float64)[label]
    torch.testing.assert_close(cross_entropy(at, onehot, margin), loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(cross_entropy(at, onehot), cross_entropy(at, label))


# ---- weights, and all methods at once ------------------------------------------------------------------------------


@quick
@given(seed=st.integers(0, 10_000), classes=st.integers(2, 8), scale=st.floats(0.1, 30))
def test_finessl_weights_are_the_auxiliary_confidences(seed: int, classes: int, scale: float) -> None:
    case = draw(seed, classes=classes, scale=scale)
    weight = run(make("finessl", classes=classes), case).weight
    assert weight is not None and (weight >= 1 / classes - 1e-12).all() and (weight <= 1).all()


@quick
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 10), momentum=st.floats(0.1, 0.99))
def test_softmatch_weights_grow_with_confidence_up_to_one(seed: int, scale: float, momentum: float) -> None:
    method = create("softmatch", task(), {"momentum": momentum, "align": False})
    case = draw(seed, scale=scale)
    weight = run(method, case).weight
    confidence = predict(torch.tensor(case.w)).confidence
    assert weight is not None and (weight >= 0).all() and (weight <= 1).all()
    assert (weight[confidence.argsort()].diff() >= 0).all()
    assert (weight[confidence >= method.mean.value] == 1).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", METHODS.names())
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(5)), soft=st.booleans())
def test_names_of_the_classes_do_not_matter(name: str, seed: int, order: list[int], soft: bool) -> None:
    """Permute the classes everywhere: the same losses and weights, permuted pseudo-labels, over three steps."""
    one, other, back = make(name), make(name), np.argsort(order)
    if hasattr(other, "pseudo"):
        other.pseudo.copy_(torch.tensor(back)[one.pseudo.clamp_min(0)].where(one.pseudo >= 0, one.pseudo))
    for step in range(3):
        case, permuted = draw(seed + step, soft=soft), draw(seed + step, soft=soft)
        for field in ("x", "w", "s", "aux_x", "aux_w", "aux_s"):
            setattr(permuted, field, getattr(case, field)[..., order])
        permuted.y = case.y[:, order] if soft else back[case.y]
        a, b = run(one, case, step), run(other, permuted, step)
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-6, atol=1e-9)
        if a.weight is not None and a.pseudo is not None:
            torch.testing.assert_close(a.weight, b.weight, rtol=1e-6, atol=1e-9)
            assert (
                torch.tensor(back)[a.pseudo.clamp_min(0)].where(a.pseudo >= 0, a.pseudo).tolist() == b.pseudo.tolist()
            )  # type: ignore[union-attr] # noqa: E501


@pytest.mark.parametrize("name", METHODS.names())
def test_order_of_the_images_does_not_matter(name: str) -> None:
    """Whichever process an image came from, the loss and the state are the same (indices do not repeat here)."""
    case = draw(3, unlabeled=12)
    case.index = np.arange(12)
    one, other = make(name), make(name)
    outputs, batch = tensors(case, one)
    rng = np.random.default_rng(0)
    x, u = rng.permutation(4), rng.permutation(12)
    mixed = draw(3, unlabeled=12)
    mixed.x, mixed.aux_x, mixed.y = case.x[x], case.aux_x[x], case.y[x]
    mixed.w, mixed.aux_w, mixed.index = case.w[u], case.aux_w[u], case.index[u]
    mixed.s, mixed.aux_s = case.s[:, u], case.aux_s[:, u]
    first, second = one(outputs, batch), other(*tensors(mixed, other))
    torch.testing.assert_close(first.loss, second.loss, rtol=1e-12, atol=0)
    for key, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[key], rtol=1e-6, atol=0)
    assert isinstance(batch, Batch)


def test_marginal_entropy_by_hand() -> None:
    """A queue of four, three of them new: p̄ = ((1, 0) + (1, 0) + (1/2, 1/2) + (1/2, 1/2)) / 4 = (3/4, 1/4). With m = 3 strong
    views of p = (1/2, 1/2), dH/dz of each is (1/m) p₁ p₂ (log p̄₂ − log p̄₁) (1, −1)."""
    entropy = MarginalEntropy(4, 2)
    logits = torch.zeros(3, 2, requires_grad=True)
    found = entropy(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]]), logits.softmax(1))
    assert float(found) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    found.backward()
    slope = math.log(1 / 3) / 4 / 3
    torch.testing.assert_close(logits.grad, torch.tensor([[slope, -slope]]).expand(3, 2))
    entropy(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.ones(1, 2))  # in place of the two oldest
    assert entropy.kept.tolist() == [[0.0, 1.0], [1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    many = torch.eye(2).repeat(5, 1)  # more than the queue holds
    assert float(entropy(many, torch.ones(1, 2))) == pytest.approx(math.log(2))
    assert float(MarginalEntropy(2, 2)(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.ones(1, 2))) == 0.0
