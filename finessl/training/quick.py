"""A run from frozen features, in seconds: `finessl quick DATA [--out RUN]`.

Every backbone's features are solved in a few ways (frozen/solvers.py), backbone and solver are chosen on held-out
labels (frozen/choose.py), and the result is written as a run: a frozen backbone with the solved head.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finessl.data.dataset import Dataset
from finessl.data.splits import Split
from finessl.errors import FinesslError
from finessl.frozen.choose import Candidate, Choice, Pile, better, choose_solver, representatives
from finessl.frozen.features import FrozenEncoder, encode_part
from finessl.frozen.solvers import Solution, calibrate, feature_centre, prepare
from finessl.inference.classifier import describe, write_classifier
from finessl.models.backbones import Backbone, create_backbone
from finessl.models.head_init import embed_names, read_text_features, text_weights
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.runs.inputs import make_or_load_split, open_source, write_skipped
from finessl.runtime.device import resolve_device
from finessl.runtime.files import write_arrays, write_atomically, writing
from finessl.runtime.precision import resolve_precision
from finessl.runtime.progress import Display
from finessl.training.diagnostics import MAX_ENCODED, MAX_LABELED, MAX_PREDICTED, evenly, hidden_truth
from finessl.training.results import run_meta

METHOD, ZERO_SHOT = "quick", "zero-shot"


@dataclass(frozen=True)
class Solved:
    """What one backbone's features give."""

    name: str
    weights: str | None
    backbone: Backbone
    choice: Choice
    centre: Tensor
    x: Tensor  # prepared features of the images that were solved together
    test: Tensor | None
    train_rows: np.ndarray  # float16 features of all training images
    test_rows: np.ndarray | None
    encoding: float  # seconds, and for how many images
    encoded: int
    weights_sha256: str


@dataclass(frozen=True)
class Answer:
    """The outcome of `quick`: what was tried, and what was chosen."""

    dataset: Dataset
    split: Split
    solved: list[Solved]
    chosen: Solved
    reason: str
    test_labels: np.ndarray
    notes: list[str]

    @property
    def candidate(self) -> Candidate:
        return self.chosen.choice.chosen

    def test_accuracy(self, solved: Solved, candidate: Candidate) -> float | None:
        if solved.test is None or not len(self.test_labels):
            return None
        logits = test_logits(solved, candidate)
        return float((logits.argmax(1) == self.test_labels).mean())


def quick(
    recipe: Recipe,
    out: Path | None,
    backbones: Sequence[tuple[str, str | None]],
    *,
    device: str = "auto",
    text_features: str | None = None,
    display: Display | None = None,
) -> Answer:
    """Solve, choose and, with `out`, write a run.   backbones: (name, weights file or None) to compare.   text_features:
    FILE.npy with text features of the class names, for zero-shot; None: computed by a text tower."""
    started, display = time.monotonic(), display or Display(quiet=True)
    run = None if out is None else RunDirectory(out)
    if run is not None and run.holds_work() and run.recipe().method.name != METHOD:
        raise FinesslError(f"{run.path} holds a run of another recipe; name another --out.")
    target = resolve_device(device)
    precision = resolve_precision(recipe.train.precision, target)
    dataset = open_source(recipe, display.update)
    check_labels(dataset)
    encoded = [encode(dataset, name, file, recipe, target, precision, display) for name, file in backbones]
    split = make_or_load_split(recipe, dataset, None, False)
    test_index, test_labels = split.test(dataset)
    notes: list[str] = []
    images = np.union1d(split.labeled, split.unlabeled)
    pile = images[representatives(np.isin(images, split.labeled))]
    if len(pile) < len(images):
        notes.append(
            f"{len(pile):,} of the {len(images):,} images, the labeled ones and others at random, are solved together; "
            "the classifier answers all."
        )
    solved = [solve(one, dataset, split, pile, test_index, target, text_features, notes, display) for one in encoded]
    chosen, why = choose_backbone(solved)
    answer = Answer(dataset, split, solved, chosen, f"{chosen.choice.reason}{why}", test_labels, notes)
    if run is not None:
        write_run(run, recipe, answer, target, precision, test_index, started)
    return answer


@dataclass(frozen=True)
class Encoded:
    """The images of a data set as features of one backbone."""

    name: str
    weights: str | None  # file
    backbone: Backbone
    weights_sha256: str
    rows: dict[str, np.ndarray]  # train, test: float16 [N, dim]
    seconds: float
    count: int  # images that were not in the cache


def encode(
    dataset: Dataset,
    name: str,
    weights: str | None,
    recipe: Recipe,
    device: torch.device,
    precision: str,
    display: Display,
) -> Encoded:
    """Encode all images with one backbone; images that cannot be read are excluded from the data set."""
    backbone = create_backbone(name, weights=weights, image_size=recipe.data.image_size)
    encoder, begun = FrozenEncoder(backbone, device, precision), time.monotonic()
    parts = ("train", "test") if dataset.test is not None else ("train",)
    found = {part: encode_part(dataset, part, encoder, display.update) for part in parts}
    rows, count = {part: one.rows for part, one in found.items()}, sum(one.encoded for one in found.values())
    return Encoded(name, weights, backbone, encoder.weights, rows, time.monotonic() - begun, count)


def solve(
    encoded: Encoded, dataset: Dataset, split: Split, pile: np.ndarray, test_index: np.ndarray, device: torch.device,
    text_features: str | None, notes: list[str], display: Display,
) -> Solved:  # fmt: skip
    """Try every solver on one backbone's features of the training images `pile`. `notes` gets a sentence about what is
    left out."""
    labels = split.labels(dataset)
    y = np.full(len(pile), -1)
    known = np.isin(pile, split.labeled)
    y[known] = labels[pile[known]]
    rows, test_rows = encoded.rows["train"], encoded.rows.get("test")
    centre = feature_centre(rows[pile]).to(device)
    x = prepare(rows[pile], centre)
    test = prepare(test_rows[test_index], centre) if test_rows is not None and len(test_index) else None
    extra = {}
    try:
        zero_shot = text_solution(encoded.backbone, split.classes, text_features)
    except FinesslError as error:
        zero_shot = None
        notes.append(f"zero-shot is left out: {error}")
    if zero_shot is not None:
        labeled = prepare(rows[pile[known]], torch.zeros_like(centre.cpu()))
        extra[ZERO_SHOT] = (zero_shot, (zero_shot.logits(labeled).argmax(1).numpy() == y[known]))
    classes = len(split.classes)
    choice = choose_solver(Pile(x), torch.from_numpy(y).to(device), classes, extra=extra, progress=display.update)
    return Solved(
        encoded.name, encoded.weights, encoded.backbone, choice, centre, x, test, rows, test_rows, encoded.seconds,
        encoded.count, encoded.weights_sha256,
    )  # fmt: skip


def check_labels(dataset: Dataset) -> None:
    known = dataset.train_labels >= 0
    if not known.any() or (dataset.given is not None and not dataset.given.any()):
        raise FinesslError(
            f"{dataset.name} has no labeled image. `finessl select` names the images whose labels help most; "
            "fill in its label column and pass the file with --labels."
        )


def choose_backbone(solved: Sequence[Solved]) -> tuple[Solved, str]:
    """The first, unless another is better on the held-out labels by more than chance."""
    if len(solved) == 1:
        return solved[0], ""
    best = solved[0]
    rights = [s.choice.chosen.right for s in solved]
    if rights[0] is None:
        return best, f" Backbone {best.name}: preferred while no label can be held out."
    for other, right in zip(solved[1:], rights[1:], strict=True):
        current = best.choice.chosen.right
        if right is not None and current is not None and better(right, current):
            best = other
    others = ", ".join(f"{s.name} {100 * (s.choice.chosen.held_out or 0):.0f} %" for s in solved if s is not best)
    return (
        best,
        f" Backbone {best.name}: {100 * (best.choice.chosen.held_out or 0):.0f} % of held-out labels, {others}.",
    )


def text_solution(backbone: Backbone, classes: Sequence[str], file: str | None) -> Solution | None:
    """The zero-shot classifier from the class names' text features, where the backbone has a text tower."""
    from finessl.models.aliases import alias_of

    if alias_of(backbone.name).text is None:
        return None
    text = read_text_features(file, classes) if file else embed_names(backbone, classes, needed_by="zero-shot")
    weight = text_weights(text, backbone)
    return Solution(weight, torch.zeros(len(classes)), 100.0)


def test_logits(solved: Solved, candidate: Candidate) -> np.ndarray:
    assert solved.test is not None
    return candidate.solution.logits(solved.test).cpu().numpy()


# ---- as a run -------------------------------------------------------------------------------------------------------


def write_run(
    run: RunDirectory,
    recipe: Recipe,
    answer: Answer,
    device: torch.device,
    precision: str,
    test_index: np.ndarray,
    started: float,
) -> None:
    """The files that `finessl train` writes, from the chosen solution."""
    solved, candidate, dataset, split = answer.chosen, answer.candidate, answer.dataset, answer.split
    backbone, target = solved.backbone, candidate.held_out
    solution = candidate.solution if target is None else calibrate(candidate.solution, solved.x, target)
    tree = recipe.tree()
    tree["model"] |= {"backbone": solved.name, "weights": solved.weights}
    tree |= {
        "tuning": {"name": "linear"},
        "head": {"name": "centred"},
        "method": {"name": METHOD, "solver": candidate.solver},
        "train": {**tree["train"], "steps": 1, "epoch_steps": 1},
    }
    described = Recipe.from_tree(tree, check=False)  # quick is no training method
    fingerprint = dataset.fingerprint()
    with run.held(described):
        if run.finished():
            if run.meta().get("data_fingerprint") != fingerprint:
                raise FinesslError(f"{run.path} holds a finished run of other data or labels; name another --out.")
            return
        with writing(run.path):
            split.save(run.split_file)
        write_skipped(run, dataset)
        centre = torch.zeros_like(solved.centre) if candidate.solver == ZERO_SHOT else solved.centre
        tensors = {
            "head.weight": solution.scale * solution.weight,
            "head.bias": solution.scale * solution.bias,
            "head.centre": centre,
        }
        about = describe(
            described, split.classes, described.head, None, weights_sha256=solved.weights_sha256,
            image_size=backbone.image_size, mean=backbone.mean, std=backbone.std,
        )  # fmt: skip
        write_classifier(run.classifier, about, tensors)
        logits = lambda rows: solution.logits(prepare(rows, centre)).cpu().numpy()  # noqa: E731
        accuracy = None
        with writing(run.path):
            if solved.test_rows is not None and len(test_index):
                answers = logits(solved.test_rows[test_index])
                accuracy = float((answers.argmax(1) == answer.test_labels).mean())
                arrays = {"logits": answers, "labels": answer.test_labels, "index": test_index}
                write_arrays(run.path / "predictions.npz", arrays)
            write_opinions(run, answer, logits)
            row = "" if accuracy is None else f'{{"kind": "test", "step": 1, "accuracy": {accuracy}}}\n'
            write_atomically(run.metrics_file, row)
        classes, dim = solution.weight.shape
        trained = classes * (dim + 1) + dim
        everything = trained + sum(p.numel() for p in backbone.encoder.parameters())
        meta = run_meta(
            described, split, len(test_index), (trained, everything), device, precision=precision, accuracy=accuracy,
            seconds=time.monotonic() - started, fingerprint=fingerprint, weights_sha256=solved.weights_sha256,
        )  # fmt: skip
        run.write_meta({**meta, "candidates": table(answer)})


def write_opinions(run: RunDirectory, answer: Answer, logits: Any) -> None:
    """unlabeled.npz and features.npz, as after training (training/diagnostics.py)."""
    split, solved = answer.split, answer.chosen
    others = np.flatnonzero(~np.isin(split.unlabeled, split.labeled))
    chosen = others[evenly(len(others), MAX_PREDICTED)]
    images = split.unlabeled[chosen]
    if len(images):
        scores = torch.from_numpy(logits(solved.train_rows[images])).softmax(1)
        confidence, label = scores.max(1)
        truth = hidden_truth(answer.dataset, split)[chosen]
        arrays = {"index": images, "label": label.numpy(), "confidence": confidence.numpy(), "truth": truth}
        write_arrays(run.path / "unlabeled.npz", arrays)
    labels = split.labels(answer.dataset)
    by_class = split.labeled[np.argsort(labels[split.labeled], kind="stable")]
    labeled, unlabeled = by_class[evenly(len(by_class), MAX_LABELED)], images[evenly(len(images), MAX_ENCODED)]
    kept = {"labeled": labeled, "labels": labels[labeled], "unlabeled": unlabeled}
    rows = {"labeled_features": solved.train_rows[labeled], "unlabeled_features": solved.train_rows[unlabeled]}
    write_arrays(run.path / "features.npz", kept | rows)


def table(answer: Answer) -> list[dict[str, Any]]:
    """Every candidate as plain values, in the order in which they were tried."""
    rows = []
    for solved in answer.solved:
        for candidate in solved.choice.candidates:
            rows.append(
                {
                    "backbone": solved.name,
                    "solver": candidate.solver,
                    "held_out": candidate.held_out,
                    "interval": candidate.interval,
                    "labels": None if candidate.right is None else len(candidate.right),
                    "test": None if candidate.solver == ZERO_SHOT else answer.test_accuracy(solved, candidate),
                    "seconds": round(candidate.seconds, 3),
                    "chosen": candidate is answer.candidate,
                }
            )
    return rows
