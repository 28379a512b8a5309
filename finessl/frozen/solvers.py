"""Classifiers in closed form, or nearly, on frozen features.

    means        the direction of each class's mean
    ridge        ridge regression on the labels
    propagation  labels spread over the nearest-neighbour graph of all images (Zhou et al. 2003)
    em           Gaussian classes fitted to all images, with a Laplacian term and a soft class prior (TransCLIP's form)
    ensemble     the weighted mean of propagation and ridge

All work on centred unit features: whitening and a forced class balance lose accuracy on real photos. Propagation and EM
label the whole set; a ridge regression on those soft labels (`Distiller`) answers new images without it.

Notation: x [n, d] prepared features, y [n] labels (−1: unlabeled), C classes, z [n, C] soft labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from finessl.frozen.neighbours import Graph
from finessl.models.closed_form import class_directions
from finessl.models.closed_form import ridge as solve_ridge

ALPHA = 0.95  # share of a label that comes from the neighbours
TOLERANCE, ITERATIONS = 1e-4, 50  # of conjugate gradients
SCALE = 1 / 0.07  # from cosines to logits
LIKELIHOOD = 50.0  # the log-likelihood of a feature vector is divided by it
LAPLACIAN = 3.0  # weight of the neighbours in EM
ANCHOR = 5.0  # images that the labeled mean counts as, in the mean of a class
PRIOR = 1.0  # strength of the pull of the class shares towards even ones
OUTER, INNER = 5, 2  # more change little
RIDGE = 1 / 6  # weight of ridge regression in the ensemble, per label of a class after the first; propagation has 1
BLOCK = 1 << 15  # rows per product
PART = 1 << 13  # rows of soft labels at a time: a few megabytes, which stay in the processor's cache
WIDTH = 32  # columns that conjugate gradients solve at a time: rows of two cache lines


@dataclass(frozen=True)
class Solution:
    """A linear classifier on prepared features: logits = scale · (x·weightᵀ + bias)."""

    weight: Tensor  # [C, d]
    bias: Tensor  # [C]
    scale: float = SCALE

    def logits(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.weight.T + self.bias)


def feature_centre(rows: np.ndarray | Tensor, block: int = BLOCK) -> Tensor:
    """[d]: the mean of the rows' directions."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for start in range(0, len(rows), block):
        total += F.normalize(as_tensor(rows[start : start + block]), dim=1).double().sum(0).cpu()
    return (total / max(len(rows), 1)).float()


def prepare(rows: np.ndarray | Tensor, centre: Tensor, block: int = BLOCK) -> Tensor:
    """float32 [n, d]: unit(unit(f) − centre)."""
    prepared = torch.empty(len(rows), rows.shape[1], device=centre.device)
    for start in range(0, len(rows), block):
        part = F.normalize(as_tensor(rows[start : start + block]).to(centre.device), dim=1)
        prepared[start : start + block] = F.normalize(part - centre, dim=1)
    return prepared


def as_tensor(rows: np.ndarray | Tensor) -> Tensor:
    return torch.from_numpy(np.array(rows, np.float32)) if isinstance(rows, np.ndarray) else rows.float()


# ---- from the labeled images alone ----------------------------------------------------------------------------------


def class_means(x: Tensor, y: Tensor, classes: int) -> Solution:
    """Weights: the direction of the sum of each class's labeled features."""
    known = y >= 0
    return Solution(class_directions(x[known], y[known], classes), x.new_zeros(classes))


def ridge(x: Tensor, y: Tensor, classes: int) -> Solution:
    """One-against-all least squares on the labeled images: argmin Σ shareᵢ ‖xᵢ·Wᵀ + b − targetᵢ‖² + λ‖W‖².

    The shares give every class the same weight, for any number of labels. λ is the mean squared singular value of the
    weighted, centred features.
    """
    known = y >= 0
    counts = torch.bincount(y[known], minlength=classes).clamp_min(1)
    share = 1 / counts[y[known]].double()
    share = share / share.sum()
    x, target = x[known].double(), F.one_hot(y[known], classes).double()
    middle, level = share @ x, share @ target
    root = share.sqrt()[:, None]
    a, t = root * (x - middle), root * (target - level)
    weight = solve_ridge(a, t, 1.0, relative=True)
    return Solution(weight.T.float(), (level - middle @ weight).float())


# ---- from all images ------------------------------------------------------------------------------------------------


def propagate(graph: Graph, y: Tensor, classes: int) -> Tensor:
    """z [n, C]: labels propagated over the graph, rows of sum 1 (even where no label reaches).

    Solves (I − α D^(−1/2) W D^(−1/2)) Z = Y, with each class's column of Y divided by its number of labels.
    """
    return shares(graph.by_image(solve_graph(graph, label_columns(graph.by_row(y), classes))))


def label_columns(y: Tensor, classes: int) -> Tensor:
    """Y [n, C]: one-hot rows of the labeled images, each column of sum 1."""
    known = y >= 0
    counts = torch.bincount(y[known], minlength=classes).clamp_min(1)
    columns = torch.zeros(len(y), classes, device=y.device)
    columns[known, y[known]] = 1.0 / counts[y[known]]
    return columns


def solve_graph(graph: Graph, columns: Tensor, alpha: float = ALPHA) -> Tensor:
    """(I − αS)⁻¹ · columns [n, c], in the order of the graph's rows: conjugate gradients, a few columns at a time."""
    weights = graph.normalised()
    solved = torch.empty_like(columns)
    for start in range(0, columns.shape[1], WIDTH):
        part = columns[:, start : start + WIDTH].contiguous()
        solved[:, start : start + WIDTH] = conjugate_gradients(graph, weights, part, alpha)
    return solved


def conjugate_gradients(graph: Graph, weights: Tensor, columns: Tensor, alpha: float) -> Tensor:
    size = columns.norm(dim=0).clamp_min(1e-30)
    solution, residual = columns.clone(), alpha * graph.multiply(columns, weights)
    direction, energy = residual.clone(), residual.square().sum(0)
    for _ in range(ITERATIONS):
        if bool((energy.sqrt() <= TOLERANCE * size).all()):
            break
        image = graph.multiply(direction, weights).mul_(-alpha).add_(direction)
        step = energy / (direction * image).sum(0).clamp_min(1e-30)
        solution.addcmul_(direction, step)
        residual.addcmul_(image, -step)
        following = residual.square().sum(0)
        direction.mul_(following / energy.clamp_min(1e-30)).add_(residual)
        energy = following
    return solution.clamp_min_(0)  # rounding aside, a sum of non-negative terms


def shares(z: Tensor) -> Tensor:
    """Rows of sum 1, in place; even ones where a row is zero."""
    total = z.sum(1, keepdim=True)
    z.div_(total.clamp_min(1e-12))
    z[total[:, 0] <= 1e-12] = 1 / z.shape[1]
    return z


def em(x: Tensor, graph: Graph, y: Tensor, classes: int) -> Tensor:
    """z [n, C] of Gaussian classes with one shared diagonal covariance:

    E  z ∝ exp(ℓ/50 + ½ log p⁰ + λ·(mean z of the neighbours) + log r), labeled rows fixed
    M  μ_c = unit(Σ z_c x + κ μ⁰_c),  σ² = mean squared deviation,  r_c = (Σ z_c + τ n/C) / (n(1+τ))
    p⁰, μ⁰: class means of the labeled images
    """
    x, y = graph.by_row(x), graph.by_row(y)
    n, known = len(x), y >= 0
    truth, start = F.one_hot(y[known], classes).float(), class_means(x, y, classes)
    blocks = [slice(first, min(first + PART, n)) for first in range(0, n, PART)]
    first = start.logits(x).log_softmax(1)
    anchor, means = ANCHOR * start.weight, start.weight
    z, fixed, following = first.exp(), torch.empty_like(first), torch.empty_like(first)
    z[known] = truth
    squares = torch.stack([x[rows].square().sum(0) for rows in blocks]).sum(0)
    variance = spread(squares, z.T @ x, z.sum(0), means, n)
    for _ in range(OUTER):
        weight, bias = means / (LIKELIHOOD * variance), means.square() @ (-0.5 / (LIKELIHOOD * variance))
        for rows in blocks:
            torch.addmm(0.5 * first[rows] + bias, x[rows], weight.T, out=fixed[rows])
        for _ in range(INNER):
            prior = (z.sum(0) + PRIOR * n / classes) / (n * (1 + PRIOR))
            for rows in blocks:
                near = graph.average(z, rows).mul_(LAPLACIAN)
                torch.softmax(near.add_(fixed[rows]).add_(prior.log()), 1, out=following[rows])
            z, following = following, z
            z[known] = truth
        sums = z.T @ x
        means = F.normalize(sums + anchor, dim=1)
        variance = spread(squares, sums, z.sum(0), means, n)
    return graph.by_image(z)


def spread(squares: Tensor, sums: Tensor, sizes: Tensor, means: Tensor, n: int) -> Tensor:
    """[d]: Σ z_ic (x_i − μ_c)² / n, by its three terms, from Σ x_i², Σ z_c x and Σ z_c."""
    return ((squares - 2 * (means * sums).sum(0) + sizes @ means.square()) / n).clamp_min(1e-8)


class Distiller:
    """A linear classifier that gives the soft labels of all images: ridge regression, every image weighted equally.

    The system is factorised once; `fit` then costs one product with the features.
    """

    def __init__(self, x: Tensor, penalty: float = 0.1) -> None:
        self.x, self.middle = x, x.mean(0)
        gram = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
        for part in x.split(BLOCK):
            a = part - self.middle
            gram += (a.T @ a).double()
        strength = penalty * gram.diagonal().mean() + 1e-12
        self.factor = torch.linalg.cholesky(gram + strength * torch.eye(len(gram), device=x.device))

    def fit(self, z: Tensor) -> Solution:
        level = z.mean(0)
        cross = torch.zeros(self.x.shape[1], z.shape[1], dtype=torch.float64, device=z.device)
        for part, soft in zip(self.x.split(BLOCK), z.split(BLOCK), strict=True):
            cross += ((part - self.middle).T @ (soft - level)).double()
        weight = torch.cholesky_solve(cross, self.factor).float()
        return Solution(weight.T.contiguous(), level - self.middle @ weight)


# ---- from two classifiers -------------------------------------------------------------------------------------------


def ensemble(propagated: Solution, regressed: Solution, x: Tensor, per_class: float) -> Solution:
    """The weighted mean of label propagation and ridge regression, which is a linear classifier too:

    W = (W₁ + v·(s₁/s₂)·W₂) / (1 + v), and so the biases,  v = (N − 1)/6 for N labels per class
    s: standard deviation of the scores x·Wᵀ + b over images and classes

    Propagation's scores are first shifted to the same mean in every class: otherwise a class whose labels are central in
    the graph takes images from the others (cf. class mass normalisation, Zhu et al. 2003).
    """
    sample = x[:: -(-len(x) // PART)]
    first, second = (sample @ one.weight.T + one.bias for one in (propagated, regressed))
    level, share = first.mean(0), RIDGE * max(per_class - 1, 0)
    factor = share * (first - level).std() / second.std().clamp_min(1e-12)
    weight = propagated.weight + factor * regressed.weight
    bias = propagated.bias - level + level.mean() + factor * regressed.bias
    return Solution(weight / (1 + share), bias / (1 + share))
