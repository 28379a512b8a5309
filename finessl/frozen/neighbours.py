"""A graph of nearest neighbours: exact for small sets, by inverted lists for large ones.

Inverted lists: k-means cells, and each image is compared with the images of the cells whose centres are nearest to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

NEIGHBOURS = 10
POWER = 3  # weight of an edge: max(cosine, 0)³
MAX_EXACT = 20_000  # images up to which every pair is compared
ROWS = 1024  # images compared at a time
CELL = 200  # images per cell, in the mean
PROBES = 16  # nearest cells that an image is compared with
SAMPLE, STEPS = 16, 6  # images per cell that k-means sees, and its iterations


@dataclass(frozen=True)
class Graph:
    """A symmetric weighted graph over n images, row by row (compressed sparse rows)."""

    offsets: Tensor  # int64 [n + 1]
    columns: Tensor  # int64 [edges]
    weights: Tensor  # float32 [edges]
    degrees: Tensor  # float32 [n], sum of each row's weights
    order: Tensor | None = None  # int64 [n]: image of each row, neighbours close together in memory; None: row = image

    def __len__(self) -> int:
        return len(self.degrees)

    def multiply(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """W · values, for values [n, c] in the order of the rows; `weights` instead of the graph's own, edge by edge."""
        weights = self.weights if weights is None else weights
        return F.embedding_bag(
            self.columns, values, self.offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )

    def average(self, values: Tensor, rows: slice) -> Tensor:
        """Some rows of D⁻¹ W · values: the weighted mean over each image's neighbours, in the order of the rows."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        edges = slice(int(offsets[0]), int(offsets[-1]))
        sums = F.embedding_bag(
            self.columns[edges], values, offsets - offsets[0], mode="sum", per_sample_weights=self.weights[edges],
            include_last_offset=True,
        )  # fmt: skip
        return sums.div_(self.degrees[rows].clamp_min(1e-12)[:, None])

    def by_row(self, values: Tensor) -> Tensor:
        """Values of the images, in the order of the rows."""
        return values if self.order is None else values[self.order]

    def by_image(self, values: Tensor) -> Tensor:
        """The inverse of `by_row`."""
        if self.order is None:
            return values
        found = torch.empty_like(values)
        found[self.order] = values
        return found

    def normalised(self) -> Tensor:
        """Edge weights of D^(−1/2) W D^(−1/2)."""
        scale = self.degrees.clamp_min(1e-12).rsqrt()
        rows = torch.repeat_interleave(torch.arange(len(self), device=self.columns.device), self.offsets.diff())
        return self.weights * scale[rows] * scale[self.columns]


def build_graph(x: Tensor, neighbours: int = NEIGHBOURS) -> Graph:
    """W = A + Aᵀ, where A holds max(cos, 0)³ for the nearest neighbours of each row of x (unit vectors [n, d])."""
    similarity, nearest, order = nearest_neighbours(x, min(neighbours, len(x) - 1))
    n, k = nearest.shape
    if order is not None:  # products read the rows of neighbours: far faster where these are in the processor's cache
        rank = torch.empty_like(order)
        rank[order] = torch.arange(n, device=x.device)
        similarity, nearest = similarity[order], rank[nearest[order]]
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
    return Graph(offsets, columns, joined, degrees, order)


def nearest_neighbours(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cosines and positions [n, k] of the nearest other rows of x, nearest first; and, for a large set, an order of the rows
    in which neighbours are close together."""
    return (*exact_neighbours(x, k), None) if len(x) <= MAX_EXACT else listed_neighbours(x, k)


def exact_neighbours(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = []
    for start in range(0, len(x), ROWS):
        similarity = x[start : start + ROWS] @ x.T
        rows = torch.arange(len(similarity), device=x.device)
        similarity[rows, rows + start] = -2.0  # an image is no neighbour of itself
        found.append(similarity.topk(k, dim=1))
    return torch.cat([values for values, _ in found]), torch.cat([places for _, places in found])


def listed_neighbours(x: Tensor, k: int, cell: int = CELL) -> tuple[Tensor, Tensor, Tensor]:
    """The same, among the images of the cells nearest to each image: cell after cell, all images that look into it."""
    centres = cell_centres(x, max(len(x) // cell, 1))
    centres = centres[chain(centres)]
    n, probes = len(x), min(PROBES, len(centres))
    near = torch.cat([(part @ centres.T).topk(probes, dim=1).indices for part in x.split(1 << 14)])
    order, members = by_cell(near[:, 0], len(centres))
    _, visits = by_cell(near.flatten(), len(centres))  # image · probes + number of the probe
    place = torch.empty_like(order)  # of an image in its cell
    place[order] = torch.cat([torch.arange(len(mine), device=x.device) for mine in members])
    values = x.new_full((n * probes, k), -2.0)
    places = torch.zeros(n * probes, k, dtype=torch.int64, device=x.device)
    for mine, visiting in zip(members, visits, strict=True):
        bank, found = x[mine], min(k, len(mine))
        for part in visiting.split(ROWS) if found else ():
            images = part // probes
            similarity = x[images] @ bank.T
            own = torch.nonzero(part % probes == 0)[:, 0]  # an image is no neighbour of itself
            similarity[own, place[images[own]]] = -2.0
            top = similarity.topk(found, dim=1)
            values[part, :found], places[part, :found] = top.values, mine[top.indices]
    top = values.view(n, -1).topk(k, dim=1)
    return top.values, places.view(n, -1).gather(1, top.indices), order


def by_cell(cell: Tensor, cells: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Positions ordered by their cell, and the same cell by cell."""
    order = cell.argsort(stable=True)
    return order, order.split(torch.bincount(cell, minlength=cells).tolist())


def chain(centres: Tensor) -> Tensor:
    """An order of the cells in which neighbours are close together: sorted by their most similar of a few, then by those'
    order. Two levels suffice for the processor's cache."""
    groups = max(round(len(centres) ** 0.5), 1)
    coarse = cell_centres(centres, groups)
    along = torch.linalg.svd(coarse - coarse.mean(0), full_matrices=False)[2][0]  # the groups' main direction
    place = (coarse @ along).argsort().argsort()[(centres @ coarse.T).argmax(1)]
    return place.argsort(stable=True)


def cell_centres(x: Tensor, cells: int) -> Tensor:
    """Unit centres [cells, d] by spherical k-means on a sample; a cell that becomes empty keeps its centre."""
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: cells * SAMPLE]
    sample = x[chosen.to(x.device)]
    centres = sample[:cells].clone()
    for _ in range(STEPS):
        nearest = torch.cat([(part @ centres.T).argmax(1) for part in sample.split(1 << 14)])
        sums = torch.zeros_like(centres).index_add_(0, nearest, sample)
        moved = F.normalize(sums, dim=1)
        centres = torch.where(sums.norm(dim=1, keepdim=True) > 1e-6, moved, centres)
    return centres
