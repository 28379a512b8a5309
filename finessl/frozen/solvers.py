"""Classifiers in closed form, or nearly, on frozen features.

    means        the direction of each class's mean
    ridge        ridge regression on the labels
    propagation  labels spread over the nearest-neighbour graph of all images (Zhou et al. 2003)
    em           Gaussian classes fitted to all images, with a Laplacian term and a soft class prior (TransCLIP's form)
    ensemble     the weighted mean of propagation and ridge, then one step of EM with linear discriminant analysis

All work on centred unit features: whitening and a forced class balance lose accuracy on real photos. Propagation and EM
label the whole set; a linear classifier fitted to those soft labels (`Distiller`) answers new images without it.

Notation: x [n, d] prepared features, y [n] labels (−1: unlabeled), C classes, z [n, C] soft labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
CONFIDENCE = 0.7  # mean confidence of the ensemble before its step of EM
NEAR = 6.0  # weight of the neighbours in that step
SHRINK = 0.3  # share of the mean variance that is added to every variance within the classes
LEAST = 0.05  # of the variance of all images: classes of equal images have none within but rounding errors
DISCRIMINANTS = 2.0  # weight of discriminant analysis in the result; propagation and ridge have 1 together
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
    blocks = parts(n)
    first = start.logits(x).log_softmax(1)
    anchor, means = ANCHOR * start.weight, start.weight
    z, fixed = first.exp(), torch.empty_like(first)
    z[known] = truth
    squares = torch.stack([x[rows].square().sum(0) for rows in blocks]).sum(0)
    variance = spread(squares, z.T @ x, z.sum(0), means, n)
    for _ in range(OUTER):
        weight, bias = means / (LIKELIHOOD * variance), means.square() @ (-0.5 / (LIKELIHOOD * variance))
        for rows in blocks:
            torch.addmm(0.5 * first[rows] + bias, x[rows], weight.T, out=fixed[rows])
        z = expect(z, fixed, graph, y, LAPLACIAN)
        sums = z.T @ x
        means = F.normalize(sums + anchor, dim=1)
        variance = spread(squares, sums, z.sum(0), means, n)
    return graph.by_image(z)


def expect(z: Tensor, fixed: Tensor, graph: Graph, y: Tensor, weight: float) -> Tensor:
    """z ∝ exp(fixed + weight·(mean z of the neighbours) + log r), labeled rows as they are, in the order of the graph's rows.

    r: the class shares of z, pulled half-way to even ones. Overwrites z.
    """
    (n, classes), known, following = z.shape, y >= 0, torch.empty_like(z)
    truth = F.one_hot(y[known], classes).float()
    for _ in range(INNER):
        prior = (z.sum(0) + PRIOR * n / classes) / (n * (1 + PRIOR))
        for rows in parts(n):
            near = graph.average(z, rows).mul_(weight)
            torch.softmax(near.add_(fixed[rows]).add_(prior.log()), 1, out=following[rows])
        z, following = following, z
        z[known] = truth
    return z


def parts(n: int) -> list[slice]:
    return [slice(start, min(start + PART, n)) for start in range(0, n, PART)]


def spread(squares: Tensor, sums: Tensor, sizes: Tensor, means: Tensor, n: int) -> Tensor:
    """[d]: Σ z_ic (x_i − μ_c)² / n, by its three terms, from Σ x_i², Σ z_c x and Σ z_c."""
    return ((squares - 2 * (means * sums).sum(0) + sizes @ means.square()) / n).clamp_min(1e-8)


class Distiller:
    """Linear classifiers that give the soft labels z of all images, every image weighted equally.

    The scatter of the features is computed and factorised once; a fit then costs one product with the features.
    """

    def __init__(self, x: Tensor, penalty: float = 0.1) -> None:
        self.x, self.middle = x, x.mean(0)
        self.gram = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
        for part in x.split(BLOCK):
            a = part - self.middle
            self.gram += (a.T @ a).double()
        self.factor = torch.linalg.cholesky(shrunk(self.gram, penalty))

    def fit(self, z: Tensor) -> Solution:
        """Ridge regression."""
        weight = torch.cholesky_solve(self.cross(z), self.factor).float()
        return Solution(weight.T.contiguous(), z.mean(0) - self.middle @ weight)

    def discriminants(self, z: Tensor) -> Solution:
        """Linear discriminant analysis: the log-likelihoods of Gaussian classes with one shrunk covariance,

        W = M Σ⁻¹,  b = −½ diag(M Σ⁻¹ Mᵀ),  Σ = S + SHRINK · tr(S)/d · I
        M: class means,  S: covariance within the classes = (scatter − Σ_c n_c μ_c μ_cᵀ) / n, all centred

        The classes have even shares. The step before has estimated them already, in z.
        """
        cross = self.cross(z)
        means = cross / z.sum(0).double().clamp_min(1e-6)
        within = (self.gram - cross @ means.T) / len(z)
        least = LEAST * float(self.gram.diagonal().mean()) / len(z)
        weight = torch.linalg.solve(shrunk(within, SHRINK, least), means)
        bias = -0.5 * (means * weight).sum(0) - self.middle.double() @ weight
        return Solution(weight.T.float().contiguous(), bias.float())

    def cross(self, z: Tensor) -> Tensor:
        """Σ (x − mean)ᵀ (z − mean)   [d, C]."""
        level = z.mean(0)
        total = torch.zeros(self.x.shape[1], z.shape[1], dtype=torch.float64, device=z.device)
        for part, soft in zip(self.x.split(BLOCK), z.split(BLOCK), strict=True):
            total += ((part - self.middle).T @ (soft - level)).double()
        return total


def shrunk(scatter: Tensor, share: float, least: float = 0.0) -> Tensor:
    """A scatter matrix with a share of its mean diagonal (taken as `least` at least) added to the diagonal."""
    strength = share * scatter.diagonal().mean().clamp_min(least) + 1e-12
    return scatter + strength * torch.eye(len(scatter), device=scatter.device)


# ---- from several classifiers ---------------------------------------------------------------------------------------


def ensemble(propagated: Solution, regressed: Solution, x: Tensor, per_class: float) -> Solution:
    """The weighted mean of label propagation and ridge regression, ridge with (N − 1)/6 for N labels per class.

    Propagation's scores are first shifted to the same mean in every class: otherwise a class whose labels are central in
    the graph takes images from the others (cf. class mass normalisation, Zhu et al. 2003).
    """
    sample = some_rows(x)
    level = (sample @ propagated.weight.T + propagated.bias).mean(0)
    even = replace(propagated, bias=propagated.bias - level + level.mean())
    return weighted_mean(even, regressed, sample, RIDGE * max(per_class - 1, 0))


def refine(start: Solution, distiller: Distiller, graph: Graph, y: Tensor) -> Solution:
    """One step of EM from the classifier `start`, whose weight in the result is 1/3:

    E  z ∝ exp(s·scores + λ·(mean z of the neighbours) + log r), labeled rows fixed;  s: mean confidence 0.7
    M  linear discriminant analysis on z

    More steps lose accuracy on photos with few labels: mistakes confirm themselves. A class without a label takes no part,
    and its score is the lowest one.
    """
    there = torch.bincount(y[y >= 0], minlength=len(start.bias)) > 0
    if not bool(there.all()):
        number = torch.where(y >= 0, (there.cumsum(0) - 1)[y.clamp_min(0)], -1)
        some = refine(replace(start, weight=start.weight[there], bias=start.bias[there]), distiller, graph, number)
        weight, bias = torch.zeros_like(start.weight), torch.empty_like(start.bias)
        bias[:] = (some_rows(distiller.x) @ some.weight.T + some.bias).min()
        weight[there], bias[there] = some.weight, some.bias
        return replace(some, weight=weight, bias=bias)
    sample, labels = some_rows(distiller.x), graph.by_row(y)
    fixed = graph.by_row(calibrate(start, sample, CONFIDENCE).logits(distiller.x))
    z, known = fixed.softmax(1), labels >= 0
    z[known] = F.one_hot(labels[known], z.shape[1]).float()
    found = distiller.discriminants(graph.by_image(expect(z, fixed, graph, labels, NEAR)))
    return weighted_mean(start, found, sample, DISCRIMINANTS)


def weighted_mean(first: Solution, second: Solution, x: Tensor, share: float) -> Solution:
    """A linear classifier too: W = (W₁ + v·(s₁/s₂)·W₂) / (1 + v), and so the biases.

    v: share.   s: standard deviation of the scores over the images x and the classes, without each image's mean.
    """
    scores = (x @ one.weight.T + one.bias for one in (first, second))
    one, two = ((score - score.mean(1, keepdim=True)).std() for score in scores)
    factor = share * one / two.clamp_min(1e-12)
    weight, bias = first.weight + factor * second.weight, first.bias + factor * second.bias
    return Solution(weight / (1 + share), bias / (1 + share))


def calibrate(solution: Solution, x: Tensor, accuracy: float) -> Solution:
    """The solution with the scale at which its mean confidence on x is `accuracy`."""
    scores = replace(solution, scale=1.0).logits(x)
    low, high = np.log(0.1), np.log(1e4)
    target = min(max(accuracy, 1.05 / scores.shape[1]), 0.99)
    for _ in range(30):
        middle = (low + high) / 2
        confidence = float((np.exp(middle) * scores).softmax(1).amax(1).mean())
        low, high = (middle, high) if confidence < target else (low, middle)
    return replace(solution, scale=float(np.exp((low + high) / 2)))


def some_rows(x: Tensor) -> Tensor:
    """Every k-th row, at most PART of them."""
    return x[:: -(-len(x) // PART)]
