"""The computations of the suggestions, on features that are encoded. Each is a function of values, without state."""

from __future__ import annotations

import time

import numpy as np
import torch

from finessl.frozen.choose import CROWD, FALLBACK, FAST, TRANSDUCTIVE, Choice, Pile, choose_solver
from finessl.frozen.select import Picker, herd, uncertainty, unit
from finessl.frozen.solvers import calibrate
from finessl.studio.features import LINKED, Encoded, release
from finessl.studio.suggest import Answer

SAMPLE = 10_000  # images that the slower computations look at
CALIBRATION = 4096  # images that set the scale of probabilities


def targets(encoded: Encoded, label: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Labels of the rows as columns 0 … C − 1 (−1: none), and the class ids that have one."""
    y = label[encoded.ids]
    classes = np.unique(y[y >= 0])
    columns = np.where(y >= 0, np.searchsorted(classes, y), -1).astype(np.int64)
    return torch.from_numpy(columns), classes


def fit(
    encoded: Encoded, label: np.ndarray, solver: str | None = None, accuracy: float | None = None, actions: int = 0
) -> Answer | None:
    """None with labels of fewer than two classes.   accuracy: that confidence should match in the mean."""
    begun = time.perf_counter()
    y, classes = targets(encoded, label)
    count = len(classes)
    if count < 2:
        return None
    solver = solver or FAST
    if solver in TRANSDUCTIVE and (not encoded.linked or len(y) < CROWD * count or len(y) > LINKED):
        solver = FALLBACK
    solution = encoded.pile.solve(solver, y, count)
    if accuracy is not None:
        sample = encoded.pile.x[:: max(len(y) // CALIBRATION, 1)]
        solution = calibrate(solution, sample, accuracy)
    p = solution.logits(encoded.pile.x).softmax(1).numpy()
    return make_answer(encoded, classes, p, solver, actions, time.perf_counter() - begun)


def make_answer(
    encoded: Encoded, classes: np.ndarray, p: np.ndarray, solver: str, actions: int, seconds: float
) -> Answer:
    top = torch.from_numpy(p).topk(2, dim=1)
    best, confidence, margin = (np.full(len(encoded.place), v, t) for v, t in ((-1, "i4"), (0, "f4"), (0, "f4")))
    best[encoded.ids] = classes[top.indices[:, 0].numpy()]
    confidence[encoded.ids] = top.values[:, 0].numpy()
    margin[encoded.ids] = (top.values[:, 0] - top.values[:, 1]).numpy()
    return Answer(encoded, classes, p, best, confidence, margin, solver, actions, seconds)


def blend(answer: Answer, ids: np.ndarray, p: np.ndarray) -> Answer:
    """The mean of the answer and of a trained classifier's probabilities p [N, C] for the classes `ids` (−1: unknown).

    So suggestions have what training has learned, and still move with every label."""
    columns = [k for k, number in enumerate(ids.tolist()) if number in answer.classes]
    if not columns:
        return answer
    places = np.searchsorted(answer.classes, ids[columns])
    trained = p[answer.encoded.ids][:, columns].astype(np.float32)
    mixed = answer.p.copy()
    mixed[:, places] += trained
    mixed /= mixed.sum(1, keepdims=True)
    return make_answer(answer.encoded, answer.classes, mixed, answer.solver, answer.actions, answer.seconds)


def sample_rows(encoded: Encoded, label: np.ndarray, most: int = SAMPLE, seed: int = 0) -> np.ndarray:
    """Rows of a random sample and of all labeled images."""
    if len(encoded.ids) <= most:
        return np.arange(len(encoded.ids))
    drawn = np.random.default_rng(seed).choice(len(encoded.ids), most, replace=False)
    return np.union1d(drawn, np.flatnonzero(label[encoded.ids] >= 0))


def look_ahead(encoded: Encoded, label: np.ndarray, taken: np.ndarray, answer: Answer | None, count: int) -> np.ndarray:
    """The next images to label, best first.   taken: bool [N], images that are labeled, judged or dismissed."""
    rows = sample_rows(encoded, label)
    x = unit(encoded.rows[rows])
    release(encoded.rows)
    known = torch.from_numpy(np.flatnonzero(taken[encoded.ids[rows]]))
    weights = None
    if answer is not None and answer.encoded is encoded:
        weights = uncertainty(torch.from_numpy(answer.p[rows]))
    picker = Picker(x, known)
    herd(picker, count, weights, seed=0)
    return encoded.ids[rows[np.array(picker.chosen, np.int64)]]


def judge(encoded: Encoded, label: np.ndarray) -> Choice | None:
    y, classes = targets(encoded, label)
    if len(classes) < 2 or not (encoded.linked or len(y) > LINKED):
        return None
    rows = sample_rows(encoded, label)
    pile = encoded.pile if len(rows) == len(y) else Pile(encoded.pile.x[rows])
    return choose_solver(pile, y[rows], len(classes), default=FAST)
