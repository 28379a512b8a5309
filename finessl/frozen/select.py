"""Which images to label next: `finessl select DATA -k 50 --out to-label.csv`.

    herding   every image of the set should have a similar one among the labeled ones (MaxHerding, Bae et al. 2024).
              Once there are labels, images of which the classifier is unsure count more (uncertainty herding).
    typical   the most typical image of each cluster, large clusters first (TypiClust, Hacohen et al. 2022)
    random    the baseline

Herding picks greedily, so the order is a ranking: any prefix of the list is a good choice of that size. In a large set it
chooses among a random sample (CANDIDATES images) and compares with another one (REFERENCE). By submodularity only few gains
are computed again at each pick. All strategies see at most LARGEST images at random, so that no cost grows with the set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from finessl.errors import FinesslError
from finessl.frozen.choose import CROWD, FALLBACK, FAST, LARGEST, Pile, representatives
from finessl.frozen.solvers import BLOCK, as_tensor, feature_centre, prepare
from finessl.runtime.callbacks import Progress, no_progress

Strategy = Literal["herding", "typical", "random"]
STRATEGIES = get_args(Strategy)

WIDTH = 1.0  # h of the kernel exp(−‖a − b‖² / h²) on unit features
REFERENCE = 10_000  # images that stand for the whole set
CANDIDATES = 20_000  # images to choose from
CHOICES = 4  # images to choose from, at least, for each image that is asked for
FRESH = 64  # candidates whose gain is computed at a time
DUPLICATE = 0.98  # cosine above which an image is a near-duplicate of one that is chosen or labeled
CLUSTERS = 500  # at most
CLOSE = 20  # neighbours whose mean distance says how typical an image is


@dataclass(frozen=True)
class Selection:
    chosen: np.ndarray  # positions, in the order in which to label them
    suggested: np.ndarray  # class of every image that was compared, by the labels so far; −1: none
    duplicates: int  # images that were passed over as near-duplicates


def select_images(
    rows: np.ndarray,
    count: int,
    *,
    usable: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    classes: int = 0,
    strategy: Strategy = "herding",
    seed: int = 0,
    device: torch.device | None = None,
    progress: Progress = no_progress,
) -> Selection:
    """The next `count` images to label.

    rows: float16 features [n, d].   usable: bool [n], not broken.   labels: [n], −1 for unlabeled images.
    """
    if strategy not in STRATEGIES:
        raise FinesslError(f"unknown strategy {strategy!r}; known: {', '.join(STRATEGIES)}.")
    usable = np.ones(len(rows), bool) if usable is None else usable
    labels = np.full(len(rows), -1) if labels is None else np.where(usable, labels, -1)
    good = np.flatnonzero(usable)
    good = good[representatives(labels[good] >= 0, max(LARGEST, CHOICES * count), seed)]
    x = unit(rows[good]).to(device or "cpu")
    y = torch.from_numpy(labels[good]).to(x.device)
    probabilities = suggest(rows[good], y, classes)
    suggested = np.full(len(rows), -1)
    if probabilities is not None:
        suggested[good] = probabilities.argmax(1).cpu().numpy()
    free = y < 0
    picker = Picker(x, torch.nonzero(~free).flatten())
    if strategy == "random":
        generator = torch.Generator().manual_seed(seed)
        picker.take(torch.randperm(len(x), generator=generator), count)
    elif strategy == "typical":
        picker.take(typical_order(x, y, count, seed), count)
    else:
        herd(picker, count, uncertainty(probabilities), seed, progress)
    return Selection(good[np.array(picker.chosen, np.int64)], suggested, picker.duplicates)


class Picker:
    """Images chosen so far; refuses those that are labeled, chosen or a near-duplicate of such an image."""

    def __init__(self, x: Tensor, labeled: Tensor) -> None:
        self.x, self.labeled = x, labeled
        self.chosen: list[int] = []
        self.duplicates = 0
        self.known = x[labeled]
        self.taken = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self.taken[labeled] = True

    def add(self, image: int) -> bool:
        if bool(self.taken[image]):
            return False
        self.taken[image] = True
        if len(self.known) and float((self.known @ self.x[image]).max()) > DUPLICATE:
            self.duplicates += 1
            return False
        self.known = torch.cat([self.known, self.x[image : image + 1]])
        self.chosen.append(image)
        return True

    def take(self, order: Tensor, count: int) -> None:
        for image in order.tolist():
            if len(self.chosen) == count:
                break
            self.add(image)


def herd(picker: Picker, count: int, weights: Tensor | None, seed: int, progress: Progress = no_progress) -> None:
    """Greedy maximisation of C(L) = Σ_j u_j max_{i ∈ L} k(x_j, x_i) over the reference images j."""
    x = picker.x
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    sample, pool = order[:REFERENCE], order[: max(CANDIDATES, CHOICES * count)].sort().values
    reference = x[sample]
    u = x.new_ones(len(sample)) if weights is None else weights[sample]
    covered = x.new_zeros(len(sample))
    for part in x[picker.labeled].split(FRESH) if len(picker.labeled) else ():
        covered = torch.maximum(covered, kernel(part, reference).amax(0))
    gains, done = x.new_empty(len(pool)), 0
    for part in pool.split(max((1 << 24) // max(len(sample), 1), 1)):  # rows of the kernel per block
        gains[done : done + len(part)] = gain(x[part], reference, covered, u)
        done += len(part)
        progress("comparing images", done, len(pool))
    gains[picker.taken[pool]] = -1.0
    fresh = torch.full((len(pool),), -1, dtype=torch.int64, device=x.device)  # pick at which a gain was computed
    while len(picker.chosen) < count:
        top = gains.topk(min(FRESH, len(gains)))
        if float(top.values[0]) < 0:
            break  # nothing is left
        if int(fresh[top.indices[0]]) != len(picker.chosen):  # gains only shrink: the first fresh one is the largest
            stale = top.indices[(fresh[top.indices] != len(picker.chosen)) & (top.values >= 0)]
            gains[stale] = gain(x[pool[stale]], reference, covered, u)
            fresh[stale] = len(picker.chosen)
            continue
        best = int(pool[top.indices[0]])
        gains[top.indices[0]] = -1.0
        if picker.add(best):
            covered = torch.maximum(covered, kernel(x[best : best + 1], reference)[0])
            progress("choosing images", len(picker.chosen), count)


def kernel(a: Tensor, b: Tensor) -> Tensor:
    """exp(−‖a − b‖² / h²) of unit vectors."""
    return (a @ b.T).sub_(1).mul_(2 / WIDTH**2).exp_()


def gain(a: Tensor, reference: Tensor, covered: Tensor, u: Tensor) -> Tensor:
    """[n]: by how much C grows with each candidate."""
    return kernel(a, reference).sub_(covered).clamp_min_(0) @ u


def suggest(rows: np.ndarray, y: Tensor, classes: int) -> Tensor | None:
    """Probabilities [n, C] from the labels so far; None with labels of fewer than two classes."""
    known = y[y >= 0]
    if classes < 2 or len(torch.unique(known)) < 2:
        return None
    x = prepare(rows, feature_centre(rows).to(y.device))
    solver = FAST if len(x) >= CROWD * classes else FALLBACK
    return Pile(x).solve(solver, y, classes).logits(x).softmax(1)


def uncertainty(probabilities: Tensor | None) -> Tensor | None:
    """1 − (p₁ − p₂): 1 where two classes are equally probable, 0 where one is certain."""
    if probabilities is None:
        return None
    best = probabilities.topk(2, dim=1).values
    return 1 - (best[:, 0] - best[:, 1])


def typical_order(x: Tensor, y: Tensor, count: int, seed: int) -> Tensor:
    """Clusters without labels first, larger ones before smaller; one image of each in turn, most typical first."""
    from sklearn.cluster import MiniBatchKMeans

    clusters = min(int((y >= 0).sum()) + count, CLUSTERS, len(x))
    rows = x.cpu().numpy()
    of_image = MiniBatchKMeans(clusters, random_state=seed, n_init=1, batch_size=4096).fit_predict(rows)
    labeled = np.bincount(of_image[(y >= 0).cpu().numpy()], minlength=clusters)
    sizes = np.bincount(of_image, minlength=clusters)
    ranked, place, turn = [], [], []
    for order, cluster in enumerate(np.lexsort((-sizes, labeled))):
        members = np.flatnonzero((of_image == cluster) & (y < 0).cpu().numpy())
        part = x[torch.from_numpy(members).to(x.device)]
        near = min(CLOSE, len(part))
        typical = (
            torch.cat([(rows @ part.T).topk(near, dim=1).values.mean(1) for rows in part.split(1024)]) if near else part
        )
        ranked.append(members[torch.argsort(-typical).cpu().numpy()] if near else members)
        place.append(np.full(len(members), order))
        turn.append(np.arange(len(members)) + labeled[cluster])
    return torch.from_numpy(np.concatenate(ranked)[np.lexsort((np.concatenate(place), np.concatenate(turn)))])


def unit(rows: np.ndarray) -> Tensor:
    """float32 unit vectors, converted in blocks."""
    found = torch.empty(rows.shape)
    for start in range(0, len(rows), BLOCK):
        found[start : start + BLOCK] = F.normalize(as_tensor(rows[start : start + BLOCK]), dim=1)
    return found
