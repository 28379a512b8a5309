"""Which solver? Chosen by cross-validation on the labels, never on test images.

With one label per class nothing can be held out, and with fewer than ten images per class the images say little about the
classes: then the choice is a fixed one, and the reason is given.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from finessl.data.dataset import rank_in_class
from finessl.frozen.neighbours import Graph, build_graph
from finessl.frozen.solvers import Distiller, Solution, class_means, em, ensemble, propagate, refine, ridge
from finessl.runtime.callbacks import Progress, no_progress

SOLVERS = {
    "means": "class means",
    "ridge": "ridge regression",
    "propagation": "label propagation",
    "em": "EM with neighbours",
    "ensemble": "propagation, ridge and discriminants",
}
MEMBERS = ("propagation", "ridge")  # that the ensemble starts from
DEFAULT, FALLBACK = "ensemble", "ridge"
FAST = "propagation"  # where a solution is needed after every label: the ensemble takes several times as long
TRANSDUCTIVE = ("propagation", "em", "ensemble")
FOLDS = 4
STRICT = 2.0  # standard deviations by which another solver has to be better than the ensemble: less is mostly chance
CROWD = 10  # images per class below which the unlabeled images are too few to help
LARGEST = 100_000  # images that are solved together: a larger set is represented by a random sample


class Interval(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True)
class Candidate:
    """One solver on one backbone's features."""

    solver: str
    solution: Solution
    right: np.ndarray | None = None  # bool [labeled]: right when held out; None: nothing could be held out
    seconds: float = 0.0

    @property
    def held_out(self) -> float | None:
        return None if self.right is None else float(self.right.mean())

    @property
    def interval(self) -> Interval | None:
        return None if self.right is None else wilson(int(self.right.sum()), len(self.right))


@dataclass(frozen=True)
class Choice:
    candidates: list[Candidate]
    chosen: Candidate
    reason: str


def representatives(labeled: np.ndarray, most: int | None = None, seed: int = 0) -> np.ndarray:
    """Positions, in order: all images of a set of at most `most` (None: LARGEST); of a larger one the labeled images and a
    random sample of the others. The solved classifier answers the rest, so that time and memory do not grow with the set.

    labeled: bool [n].
    """
    most = LARGEST if most is None else most
    if len(labeled) <= most:
        return np.arange(len(labeled))
    others = np.flatnonzero(~labeled)
    drawn = np.random.default_rng(seed).choice(others, max(most - int(labeled.sum()), 0), replace=False)
    return np.union1d(np.flatnonzero(labeled), drawn)


class Pile:
    """All images of a set, prepared, with what the solvers share: the graph and the factorised system."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._graph: Graph | None = None
        self._distiller: Distiller | None = None

    @property
    def linked(self) -> bool:
        """The graph is built."""
        return self._graph is not None

    @property
    def graph(self) -> Graph:
        if self._graph is None:
            self._graph = build_graph(self.x)
        return self._graph

    @property
    def distiller(self) -> Distiller:
        if self._distiller is None:
            self._distiller = Distiller(self.x)
        return self._distiller

    def solve(self, solver: str, y: Tensor, classes: int, solved: Mapping[str, Solution] | None = None) -> Solution:
        """A linear classifier from the labels y [n] (−1: unlabeled).   solved: by other solvers from the same labels, for
        the ensemble."""
        if solver == "means":
            return class_means(self.x, y, classes)
        if solver == "ridge":
            return ridge(self.x, y, classes)
        if solver == "ensemble":
            solved = solved or {name: self.solve(name, y, classes) for name in MEMBERS}
            start = ensemble(solved["propagation"], solved["ridge"], self.x, int((y >= 0).sum()) / classes)
            return refine(start, self.distiller, self.graph, y)
        soft = propagate(self.graph, y, classes) if solver == "propagation" else em(self.x, self.graph, y, classes)
        return self.distiller.fit(soft)


def choose_solver(
    pile: Pile,
    y: Tensor,
    classes: int,
    *,
    default: str = DEFAULT,
    extra: Mapping[str, tuple[Solution, np.ndarray]] | None = None,
    progress: Progress = no_progress,
) -> Choice:
    """Solve with every solver that fits the data, and choose one.

    default: DEFAULT, or FAST, which leaves the ensemble out.
    extra: classifiers that use no label (zero-shot), and which labeled images they have right.
    """
    labeled = torch.nonzero(y >= 0).flatten()
    crowded = len(pile.x) >= CROWD * classes
    names = [name for name in SOLVERS if crowded or name not in TRANSDUCTIVE]
    names = [name for name in names if name != "ensemble" or default == "ensemble"]
    folds = assign_folds(y[labeled].cpu().numpy(), classes)
    trials = [y] if folds is None else [y, *(hide(y, labeled, folds == fold) for fold in range(folds.max() + 1))]
    solved: list[dict[str, Solution]] = [{} for _ in trials]  # by solver: with all labels, and without each fold's
    seconds: dict[str, float] = {}
    candidates = []
    for number, name in enumerate(names):
        progress(f"solving: {SOLVERS[name]}", number, len(names))
        if name in TRANSDUCTIVE:
            if not pile.linked:
                progress("finding nearest neighbours", number, len(names))
            pile.graph  # noqa: B018 - shared: not part of one solver's time
        start = time.perf_counter()
        solved[0][name] = pile.solve(name, y, classes, solved[0])
        seconds[name] = time.perf_counter() - start
        if name == "ensemble":
            seconds[name] += sum(seconds[member] for member in MEMBERS)
        for rest, solutions in zip(trials[1:], solved[1:], strict=True):
            solutions[name] = pile.solve(name, rest, classes, solutions)
        trial = [solutions[name] for solutions in solved[1:]]
        right = None if folds is None else held_out(trial, pile.x[labeled], y[labeled], folds)
        candidates.append(Candidate(name, solved[0][name], right, seconds[name]))
    for name, (solution, hits) in (extra or {}).items():
        candidates.append(Candidate(name, solution, hits if folds is None else hits[folds >= 0]))
    return decide(candidates, crowded, default)


def decide(candidates: list[Candidate], crowded: bool, default: str = DEFAULT) -> Choice:
    """The default, unless another is better on the held-out labels by more than chance."""
    by_name = {candidate.solver: candidate for candidate in candidates}
    standard = by_name[default if crowded else FALLBACK]
    title = SOLVERS[standard.solver]
    why = "" if crowded else f"There are fewer than {CROWD} images per class, so the labeled images decide alone. "
    if standard.right is None:
        return Choice(candidates, standard, f"{why}No class has two labels, so nothing can be held out: {title}.")
    best = standard
    for candidate in candidates:
        strict = standard.solver == "ensemble" and candidate.solver in SOLVERS  # zero-shot may well be far better
        if candidate.right is not None and better(candidate.right, standard.right, STRICT if strict else 1.0):
            best = candidate if candidate.right.sum() > best.right.sum() else best  # type: ignore[union-attr]
    if best is standard:
        reason = f"{why}{title.capitalize()}: no other is better on the held-out labels by more than chance."
    else:
        title = SOLVERS.get(best.solver, best.solver)
        reason = f"{why}{title.capitalize()}: better on the held-out labels than {SOLVERS[standard.solver]}."
    return Choice(candidates, best, reason)


def better(right: np.ndarray, other: np.ndarray, deviations: float = 1.0) -> bool:
    """More often right, by more than this many standard deviations of the difference on the same images."""
    won, lost = int((right & ~other).sum()), int((other & ~right).sum())
    return won - lost > deviations * np.sqrt(won + lost)


def assign_folds(labels: np.ndarray, classes: int, most: int = FOLDS) -> np.ndarray | None:
    """[labeled] fold of each labeled image, −1 for the only image of a class; None when no class has two.

    Each fold holds every k-th image of each class, up to `most` folds.
    """
    counts = np.bincount(labels, minlength=classes)
    if counts.max() < 2:
        return None
    folds = int(min(most, counts[counts > 1].min()))
    return np.where(counts[labels] > 1, rank_in_class(labels) % folds, -1)


def hide(y: Tensor, labeled: Tensor, hidden: np.ndarray) -> Tensor:
    """The labels y without those of some labeled images.   labeled: their positions.   hidden: bool [labeled]."""
    rest = y.clone()
    rest[labeled[torch.from_numpy(hidden).to(y.device)]] = -1
    return rest


def held_out(solutions: Sequence[Solution], x: Tensor, y: Tensor, folds: np.ndarray) -> np.ndarray:
    """bool: is each labeled image that has a fold right when its fold's labels are hidden?

    solutions: without the labels of each fold.   x, y: features and labels of the labeled images.
    """
    right = np.zeros(len(folds), bool)
    for fold, solution in enumerate(solutions):
        mine = torch.from_numpy(folds == fold).to(y.device)
        right[folds == fold] = (solution.logits(x[mine]).argmax(1) == y[mine]).cpu().numpy()
    return right[folds >= 0]


def wilson(right: float, count: int) -> Interval:
    """95 % interval of a share (Wilson 1927); unlike the bootstrap it does not collapse when all are right."""
    z2 = 1.959964**2
    share = right / count
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = np.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return Interval(float(max(min(middle - half, share), 0.0)), float(min(max(middle + half, share), 1.0)))
