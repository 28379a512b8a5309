"""A graph of nearest neighbours: exact for small sets, by inverted lists for large ones.

Inverted lists: k-means cells, and each image is compared with the images of the cells nearest to its own cell's centre.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

NEIGHBOURS = 10
POWER = 3  # weight of an edge: max(cosine, 0)³
EXACT = 20_000  # images up to which every pair is compared
ROWS = 1024  # images compared at a time
CELL = 200  # images per cell, in the mean
PROBES = 12  # nearest cells that an image is compared with
SAMPLE = 16  # images per cell that k-means sees


@dataclass(frozen=True)
class Graph:
    """A symmetric weighted graph over n images, row by row (compressed sparse rows)."""

    offsets: Tensor  # int64 [n + 1]
    columns: Tensor  # int64 [edges]
    weights: Tensor  # float32 [edges]
    degrees: Tensor  # float32 [n], sum of each row's weights

    def __len__(self) -> int:
        return len(self.degrees)

    def multiply(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """W · values, for values [n, c]; `weights` instead of the graph's own, edge by edge."""
        weights = self.weights if weights is None else weights
        return F.embedding_bag(
            self.columns, values, self.offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )

    def average(self, values: Tensor) -> Tensor:
        """D⁻¹ W · values: the weighted mean over each image's neighbours."""
        return self.multiply(values) / self.degrees.clamp_min(1e-12)[:, None]

    def normalised(self) -> Tensor:
        """Edge weights of D^(−1/2) W D^(−1/2)."""
        scale = self.degrees.clamp_min(1e-12).rsqrt()
        rows = torch.repeat_interleave(torch.arange(len(self), device=self.columns.device), self.offsets.diff())
        return self.weights * scale[rows] * scale[self.columns]


def build_graph(x: Tensor, neighbours: int = NEIGHBOURS) -> Graph:
    """W = A + Aᵀ, where A holds max(cos, 0)³ for the nearest neighbours of each row of x (unit vectors [n, d])."""
    similarity, nearest = nearest_neighbours(x, min(neighbours, len(x) - 1))
    n, k = nearest.shape
    weights = similarity.clamp_min(0).pow(POWER)
    rows = torch.arange(n, device=x.device).repeat_interleave(k)
    columns = nearest.reshape(-1)
    keys = torch.cat([rows * n + columns, columns * n + rows])
    keys, place = torch.unique(keys, return_inverse=True)  # an edge found from both ends is one edge
    joined = torch.zeros(len(keys), device=x.device).index_add_(0, place, weights.reshape(-1).repeat(2))
    rows, columns = keys // n, keys % n
    offsets = torch.zeros(n + 1, dtype=torch.int64, device=x.device)
    offsets[1:] = torch.bincount(rows, minlength=n).cumsum(0)
    degrees = torch.zeros(n, device=x.device).index_add_(0, rows, joined)
    return Graph(offsets, columns, joined, degrees)


def nearest_neighbours(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosines and positions [n, k] of the nearest other rows of x, nearest first."""
    return exact_neighbours(x, k) if len(x) <= EXACT else listed_neighbours(x, k)


def exact_neighbours(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = []
    for start in range(0, len(x), ROWS):
        similarity = x[start : start + ROWS] @ x.T
        rows = torch.arange(len(similarity), device=x.device)
        similarity[rows, rows + start] = -2.0  # an image is no neighbour of itself
        found.append(similarity.topk(k, dim=1))
    return torch.cat([values for values, _ in found]), torch.cat([places for _, places in found])


def listed_neighbours(x: Tensor, k: int, cell: int = CELL, probes: int = PROBES) -> tuple[Tensor, Tensor]:
    """The same, among the images of the nearest cells. All images of one cell are compared with the same candidates."""
    centres = cell_centres(x, max(len(x) // cell, 1))
    of_image = torch.cat([(part @ centres.T).argmax(1) for part in x.split(1 << 14)])
    order = of_image.argsort(stable=True)
    counts = torch.bincount(of_image, minlength=len(centres))
    starts = counts.cumsum(0) - counts
    members = [order[s : s + c] for s, c in zip(starts.tolist(), counts.tolist(), strict=True)]
    near = (centres @ centres.T).topk(min(probes, len(centres)), dim=1).indices.tolist()
    values = x.new_full((len(x), k), -1.0)
    places = torch.zeros(len(x), k, dtype=torch.int64, device=x.device)
    for number, mine in enumerate(members):
        if not len(mine):
            continue
        candidates = torch.cat([members[other] for other in near[number]])
        if len(candidates) <= k:  # cells far smaller than the mean
            candidates = torch.arange(len(x), device=x.device)
        bank = x[candidates]
        for part in mine.split(ROWS):
            similarity = x[part] @ bank.T
            similarity[part[:, None] == candidates[None]] = -2.0
            top = similarity.topk(k, dim=1)
            values[part], places[part] = top.values, candidates[top.indices]
    return values, places


def cell_centres(x: Tensor, cells: int, steps: int = 6, seed: int = 0) -> Tensor:
    """Unit centres [cells, d] by spherical k-means on a sample; a cell that becomes empty keeps its centre."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(x), generator=generator)[: cells * SAMPLE].to(x.device)
    sample = x[chosen]
    centres = sample[:cells].clone()
    for _ in range(steps):
        nearest = torch.cat([(part @ centres.T).argmax(1) for part in sample.split(1 << 14)])
        sums = torch.zeros_like(centres).index_add_(0, nearest, sample)
        moved = F.normalize(sums, dim=1)
        centres = torch.where(sums.norm(dim=1, keepdim=True) > 1e-6, moved, centres)
    return centres
