"""Every solver against a slow implementation of its formula, and against values worked out by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from finessl.frozen import neighbours, solvers
from finessl.frozen.neighbours import Graph, build_graph, exact_neighbours, listed_neighbours

spec = importlib.util.spec_from_file_location("frozen_reference", Path(__file__).parent / "reference.py")
assert spec is not None and spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)

Clouds = tuple[np.ndarray, np.ndarray]


def some_labels(truth: np.ndarray, per_class: tuple[int, ...] = (4, 3, 2, 1)) -> np.ndarray:
    y = np.full(len(truth), -1)
    for c, count in enumerate(per_class):
        y[np.flatnonzero(truth == c)[:count]] = c
    return y


@pytest.fixture(scope="module")
def case(clouds: Clouds) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    rows, truth = clouds
    return solvers.prepare(rows, solvers.feature_centre(rows)), truth, some_labels(truth)


def test_prepared_features_are_centred_and_of_length_one(clouds: Clouds) -> None:
    rows, _ = clouds
    x = solvers.prepare(rows, solvers.feature_centre(rows, block=7), block=11)
    assert_close(x.double().numpy(), reference.prepared(rows), atol=1e-6, rtol=0)


def test_graph(case) -> None:  # type: ignore[no-untyped-def]
    x, _, _ = case
    graph, dense = build_graph(x, 5), reference.graph(x.double().numpy(), 5)
    assert_close(graph.multiply(torch.eye(len(x))).numpy(), dense.astype(np.float32), atol=1e-6, rtol=0)
    assert_close(graph.degrees.numpy(), dense.sum(1).astype(np.float32), atol=1e-5, rtol=0)


def test_class_means(case) -> None:  # type: ignore[no-untyped-def]
    x, _, y = case
    found = solvers.class_means(x, torch.from_numpy(y), 4)
    assert_close(found.weight.numpy(), reference.means(x.numpy(), y, 4), atol=1e-6, rtol=0)


@pytest.mark.parametrize("counts", [(4, 3, 2, 1), (20, 20, 10, 10)])  # fewer and more labels than dimensions
def test_ridge(case, counts: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    x, truth, _ = case
    y = some_labels(truth, counts)
    weight, bias = reference.ridge(x.double().numpy(), y, 4)
    found = solvers.ridge(x, torch.from_numpy(y), 4)
    assert_close(found.weight.double().numpy(), weight, atol=1e-6, rtol=0)
    assert_close(found.bias.double().numpy(), bias, atol=1e-6, rtol=0)


def test_propagation(case) -> None:  # type: ignore[no-untyped-def]
    x, _, y = case
    expected = reference.propagation(reference.graph(x.double().numpy(), 10), y, 4)
    assert_close(
        solvers.propagate(build_graph(x), torch.from_numpy(y), 4).double().numpy(), expected, atol=2e-3, rtol=0
    )


def test_em(case) -> None:  # type: ignore[no-untyped-def]
    x, _, y = case
    w = reference.graph(x.double().numpy(), 10)
    expected = reference.em(x.double().numpy(), w, y, 4, solvers.OUTER, solvers.INNER)
    assert_close(solvers.em(x, build_graph(x), torch.from_numpy(y), 4).double().numpy(), expected, atol=1e-4, rtol=0)


def test_distilled_labels_are_the_ridge_solution(case) -> None:  # type: ignore[no-untyped-def]
    x, _, y = case
    soft = solvers.propagate(build_graph(x), torch.from_numpy(y), 4)
    found = solvers.Distiller(x, penalty=0.1).fit(soft)
    a, t = x.double().numpy(), soft.double().numpy()
    a, t = a - a.mean(0), t - t.mean(0)
    gram = a.T @ a
    weight = np.linalg.solve(gram + 0.1 * np.trace(gram) / len(gram) * np.eye(len(gram)), a.T @ t)
    assert_close(found.weight.double().numpy(), weight.T, atol=1e-5, rtol=0)
    assert_close(found.logits(x).mean(0) / found.scale, soft.mean(0), atol=1e-5, rtol=0)


def test_ensemble(case) -> None:  # type: ignore[no-untyped-def]
    x, truth, _ = case
    y = torch.from_numpy(some_labels(truth, (5, 5, 4, 2)))  # 4 per class
    propagated = solvers.Distiller(x).fit(solvers.propagate(build_graph(x), y, 4))
    regressed = solvers.ridge(x, y, 4)
    pairs = [(one.weight.double().numpy(), one.bias.double().numpy()) for one in (propagated, regressed)]
    expected = reference.ensemble(x.double().numpy(), *pairs, 4.0)
    found = solvers.ensemble(propagated, regressed, x, 4.0).logits(x) / solvers.SCALE
    assert_close(found.double().numpy(), expected, atol=1e-3, rtol=0)  # deviations of n − 1 and of n
    assert (found.argmax(1).numpy() == expected.argmax(1)).all()


def centred(scores: torch.Tensor) -> np.ndarray:
    """Scores without each image's mean, which no answer depends on."""
    return (scores - scores.mean(1, keepdim=True)).double().numpy()


def test_discriminants_are_the_likelihoods_of_gaussian_classes(case) -> None:  # type: ignore[no-untyped-def]
    x, _, y = case
    soft = solvers.propagate(build_graph(x), torch.from_numpy(y), 4)
    found = solvers.Distiller(x).discriminants(soft).logits(x) / solvers.SCALE
    expected = reference.discriminants(x.double().numpy(), soft.double().numpy())
    assert_close(centred(found), expected, atol=1e-3, rtol=0)  # of scores up to 85


def test_refined_classifier(case) -> None:  # type: ignore[no-untyped-def]
    x, _, y = case
    graph, start = build_graph(x), solvers.ridge(x, torch.from_numpy(y), 4)
    found = solvers.refine(start, solvers.Distiller(x), graph, torch.from_numpy(y)).logits(x) / solvers.SCALE
    scores = (start.logits(x) / solvers.SCALE).double().numpy()
    expected = reference.refined(x.double().numpy(), reference.graph(x.double().numpy(), 10), y, scores)
    assert_close(centred(found), expected, atol=2e-3, rtol=0)  # deviations of n − 1 and of n


def test_a_class_without_a_label_is_no_answer(case) -> None:  # type: ignore[no-untyped-def]
    """The others are answered as if it did not exist."""
    x, _, y = case
    known = torch.from_numpy(y)
    graph, distiller = build_graph(x), solvers.Distiller(x)
    start = solvers.ridge(x, known, 4)
    wide = solvers.Solution(*(torch.stack([t[0], t[1], t.mean(0), t[2], t[3]]) for t in (start.weight, start.bias)))
    found = solvers.refine(wide, distiller, graph, known + (known >= 2))  # number 2 has no label
    assert not (found.logits(x).argmax(1) == 2).any()
    same = solvers.refine(start, distiller, graph, known)
    assert_close(found.weight[[0, 1, 3, 4]], same.weight)
    assert_close(found.bias[[0, 1, 3, 4]], same.bias)


# ---- by hand --------------------------------------------------------------------------------------------------------


def chain(*weights: float) -> Graph:
    """Images in a row, each joined to the next."""
    n = len(weights) + 1
    dense = torch.zeros(n, n)
    for i, weight in enumerate(weights):
        dense[i, i + 1] = dense[i + 1, i] = weight
    rows, columns = dense.nonzero(as_tuple=True)
    offsets = torch.zeros(n + 1, dtype=torch.int64)
    offsets[1:] = torch.bincount(rows, minlength=n).cumsum(0)
    return Graph(offsets, columns, dense[rows, columns], dense.sum(1))


def test_two_images_share_a_label_by_alpha() -> None:
    """(I − αS)⁻¹ of [[0, 1], [1, 0]] is [[1, α], [α, 1]] / (1 − α²)."""
    alpha = 0.95
    solved = solvers.solve_graph(chain(1.0), torch.tensor([[1.0], [0.0]]), alpha)
    assert_close(solved, torch.tensor([[1.0], [alpha]]) / (1 - alpha**2), atol=1e-4, rtol=1e-4)


def test_the_image_in_the_middle_takes_the_nearer_class() -> None:
    y = torch.tensor([0, -1, -1, 1])
    z = solvers.propagate(chain(1.0, 0.2, 1.0), y, 2)
    assert z[1].argmax() == 0 and z[2].argmax() == 1
    assert_close(z[1], z[2].flip(0))
    assert_close(z.sum(1), torch.ones(4))


def test_a_class_with_more_labels_does_not_win_by_their_number() -> None:
    """0 0 0 ? 1: the unlabeled image is joined equally to both classes."""
    graph = chain(0.0001, 0.0001, 1.0, 1.0)
    z = solvers.propagate(graph, torch.tensor([0, 0, 0, -1, 1]), 2)
    assert z[3, 1] > z[3, 0]


def test_an_image_that_no_label_reaches_is_undecided() -> None:
    graph = Graph(torch.tensor([0, 1, 2, 2]), torch.tensor([1, 0]), torch.ones(2), torch.tensor([1.0, 1.0, 0.0]))
    assert_close(solvers.propagate(graph, torch.tensor([0, -1, -1]), 2)[2], torch.tensor([0.5, 0.5]))


def test_class_means_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    found = solvers.class_means(x, torch.tensor([0, 0, 1]), 2)
    assert_close(found.weight, torch.tensor([[0.5**0.5, 0.5**0.5], [0.6, 0.8]]))


def test_ridge_by_hand() -> None:
    """Two labels at ±1 on a line: scatter 1, penalty 1, slope ½·½ for targets ±½, bias ½."""
    found = solvers.ridge(torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 1]), 2)
    assert_close(found.weight, torch.tensor([[0.25], [-0.25]]))
    assert_close(found.bias, torch.tensor([0.5, 0.5]))


def test_ensemble_by_hand() -> None:
    """Scores of two images: propagation [[1, 0], [1, 0]] has the class means 1 and 0, and no deviation from them."""
    x = torch.tensor([[1.0], [-1.0]])
    always_first = solvers.Solution(torch.tensor([[0.0], [0.0]]), torch.tensor([1.0, 0.0]))
    found = solvers.ensemble(always_first, always_first, x, 1)
    assert_close(found.logits(x), torch.full((2, 2), 0.5 * solvers.SCALE))  # no class is ahead
    propagated = solvers.Solution(torch.tensor([[0.1], [-0.1]]), torch.tensor([0.8, 0.2]))
    regressed = solvers.Solution(torch.tensor([[-3.0], [3.0]]), torch.tensor([0.0, 0.0]))
    one = solvers.ensemble(propagated, regressed, x, 1)  # ridge has no weight
    assert_close(one.weight, propagated.weight)
    assert_close(one.bias, torch.tensor([0.5, 0.5]))
    seven = solvers.ensemble(propagated, regressed, x, 7)  # v = 1, s₁/s₂ = 1/30: they cancel
    assert_close(seven.weight, torch.zeros(2, 1))
    many = solvers.ensemble(propagated, regressed, x, 19)  # v = 3: (0.1 − 3 · 0.1) / 4
    assert_close(many.weight, torch.tensor([[-0.05], [0.05]]))


def test_discriminants_by_hand() -> None:
    """Class 0 at 1 and 3, class 1 at −5: within (1 + 1 + 0)/3, and 0.3 of it more; the border is half-way, at −1.5."""
    x, z = torch.tensor([[1.0], [3.0], [-5.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = solvers.Distiller(x).discriminants(z)
    variance = 1.3 * 2 / 3
    assert_close(found.weight[0] - found.weight[1], torch.tensor([7.0 / variance]))
    assert_close(found.bias[0] - found.bias[1], torch.tensor(1.5 * 7.0 / variance))


def test_discriminants_of_classes_without_variance() -> None:
    """Copies of one image per class: what is left within the classes is rounding, which must not decide."""
    rows = torch.randn(10, 384, generator=torch.Generator().manual_seed(0)).repeat_interleave(200, 0)
    x, truth = solvers.prepare(rows, solvers.feature_centre(rows)), torch.arange(10).repeat_interleave(200)
    found = solvers.Distiller(x).discriminants(torch.nn.functional.one_hot(truth, 10).float())
    assert (found.logits(x).argmax(1) == truth).all()


def test_neighbours_decide_for_an_undecided_image() -> None:
    """0 ? 1 with weights 3 and 1: near = (¾, ¼), r = (½, ½) at first; then z and r move on."""
    y, z = torch.tensor([0, -1, 1]), torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    found = solvers.expect(z.clone(), torch.zeros(3, 2), chain(3.0, 1.0), y, weight=2.0)
    first = 1 / (1 + np.exp(-1.0))  # 2 · (¾ − ¼)
    share = ((1 + first) / 3 + 0.5) / 2
    second = 1 / (1 + np.exp(-1.0) * (1 - share) / share)
    assert_close(found[1].tolist(), [second, 1 - second])
    assert_close(found[[0, 2]], torch.eye(2))


def test_weighted_mean_is_in_units_of_the_first() -> None:
    """Scores ±1 and ±10; a constant that all classes share has no part in the deviations."""
    x = torch.tensor([[1.0], [-1.0]])
    first = solvers.Solution(torch.tensor([[1.0], [-1.0]]), torch.tensor([5.0, 5.0]))
    second = solvers.Solution(torch.tensor([[40.0], [20.0]]), torch.tensor([0.0, 0.0]))  # ±10 around 30 · x
    found = solvers.weighted_mean(first, second, x, 2.0)
    assert_close(found.weight, torch.tensor([[3.0], [1.0]]))  # (1 + 2 · 4)/3, (−1 + 2 · 2)/3
    assert_close(found.bias, torch.tensor([5.0, 5.0]) / 3)


# ---- large sets -----------------------------------------------------------------------------------------------------


def clustered() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(40, 16, generator=generator)
    x = centres.repeat_interleave(50, 0) + 0.3 * torch.randn(2000, 16, generator=generator)
    return torch.nn.functional.normalize(x, dim=1)


def test_order_of_a_large_graph_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = clustered(), torch.full((2000,), -1)
    y[::50] = torch.arange(40) % 5
    monkeypatch.setattr(neighbours, "MAX_EXACT", 1000)
    monkeypatch.setattr(neighbours, "PROBES", 10**6)  # all cells: exact
    large = build_graph(x)
    monkeypatch.setattr(neighbours, "MAX_EXACT", 2000)
    small = build_graph(x)
    assert large.order is not None and small.order is None and not torch.equal(large.order, torch.arange(2000))
    assert_close(solvers.propagate(large, y, 5), solvers.propagate(small, y, 5), atol=1e-4, rtol=0)
    assert_close(solvers.em(x, large, y, 5), solvers.em(x, small, y, 5), atol=1e-4, rtol=0)
    start, distiller = solvers.ridge(x, y, 5), solvers.Distiller(x)
    found = [solvers.refine(start, distiller, graph, y) for graph in (large, small)]
    assert_close(found[0].weight, found[1].weight, atol=1e-4, rtol=0)


def test_inverted_lists_find_the_nearest_in_clustered_features() -> None:
    x = clustered()
    _, exact = exact_neighbours(x, 10)
    values, listed, _ = listed_neighbours(x, 10, cell=50)
    found = (exact[:, :, None] == listed[:, None, :]).any(2).float().mean()
    assert found > 0.95
    assert_close(values, (x[:, None] * x[listed]).sum(2), atol=1e-5, rtol=0)
    assert not (listed == torch.arange(2000)[:, None]).any()


def test_each_image_looks_into_its_own_nearest_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features without clusters: most neighbours are across a border, which another image of the cell may be far from."""
    monkeypatch.setattr(neighbours, "PROBES", 6)
    x = torch.nn.functional.normalize(torch.randn(2000, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    _, exact = exact_neighbours(x, 10)
    _, listed, order = listed_neighbours(x, 10, cell=50)
    assert (exact[:, :, None] == listed[:, None, :]).any(2).float().mean() > 0.9
    assert order.sort().values.tolist() == list(range(2000))


def test_cells_with_fewer_images_than_neighbours_find_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "PROBES", 1)
    values, listed, _ = listed_neighbours(clustered()[:40], 10, cell=4)
    assert listed.shape == (40, 10)
    assert (values >= -1).any() and (values[values < -1] == -2).all()  # of weight 0 in the graph
